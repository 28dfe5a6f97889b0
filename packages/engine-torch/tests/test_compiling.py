"""The arguments that blocks are compiled with, and what torch says of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from engine_torch import compiling
from engine_torch.compiling import compile_blocks


class Compiled(torch.nn.Module):
    """A block that keeps the arguments of its compilation."""

    def compile(self, **given: Any) -> None:
        """Keep the arguments."""
        self.given = given


@pytest.mark.parametrize(
    ("rounds_casts", "mode", "options"),
    [
        (True, "default", {"emulate_precision_casts": True}),
        (True, "reduce-overhead", {"emulate_precision_casts": True, "triton.cudagraphs": True}),
        (False, "default", {}),
        (False, "reduce-overhead", {"triton.cudagraphs": True}),
    ],
)
def test_scales_by_row_are_compiled_with_their_rounding(
    rounds_casts: bool, mode: str, options: dict[str, bool]
) -> None:
    block = Compiled()
    compile_blocks([block], mode, rounds_casts=rounds_casts)
    assert block.given == {"options": options}


def test_only_torchs_request_about_checkpoints_is_dropped() -> None:
    asked = "\nDetected that context_fn is passed to torch.utils.checkpoint under torch.compile.\n"
    for text, passes in ((asked, False), ("another warning", True)):
        record = logging.LogRecord("torch", logging.WARNING, "", 0, text, None, None)
        assert compiling._is_not_request(record) == passes
