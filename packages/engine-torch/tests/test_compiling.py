"""The arguments that blocks are compiled with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
