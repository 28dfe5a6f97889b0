"""Process that ends without ``close``, as a rank does after an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_peers import DEVICE, SMALL
from waiting import DEADLINE_S

from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model

pytestmark = [pytest.mark.distributed]

SCRIPT = """
import json
import sys
import torch.distributed as dist
from engine_api.config import ModelSource
from engine_api.registry import RolloutRegistry

model, device, options = sys.argv[1:]
backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
rollout = RolloutRegistry.create(
    name="vllm",
    device=device,
    model=ModelSource(path=model),
    pad_token_id=0,
    enforce_eager=True,
    **json.loads(options),
)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rollout_that_nobody_closed_is_silent_when_the_process_ends(root: Path) -> None:
    model = rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), DEVICE, json.dumps(SMALL)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
