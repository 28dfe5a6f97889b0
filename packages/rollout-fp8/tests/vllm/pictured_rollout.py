"""vLLM's rollout where torchvision may be a build that fails beside a torch for CPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import vision_peers  # noqa: F401 - it imports torchvision, whichever build it is
from vllm.model_executor.models import registry

from rollout_fp8.vllm.rollout import VllmRollout


class PicturedVllm(VllmRollout):
    """vLLM's rollout, which asks about a model's class in this process.

    A process of its own would import torchvision as it is.
    """

    def __init__(self, **arguments: Any) -> None:
        with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
            super().__init__(**arguments)
