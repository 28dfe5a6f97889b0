"""Every rollout case of the conformance suite, on vLLM's CPU build."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_peers import DEVICE, SMALL

from engine_conformance.cases import Case, Target, load_cases, run_case

CASES = [one for one in load_cases().values() if one.profile == "rollout"]
pytestmark = [pytest.mark.distributed, pytest.mark.turn]


@pytest.mark.parametrize(
    ("one", "dtype"),
    [
        pytest.param(
            one,
            dtype,
            id=f"{one.id}-{dtype}",
            marks=pytest.mark.nightly if dtype != one.dtypes[0] else (),
        )
        for one in CASES
        for dtype in one.dtypes
    ],
)
def test_case(one: Case, dtype: str, root: Path) -> None:
    target = Target(
        backend="vllm",
        device=DEVICE,
        root=root,
        dtype=dtype,
        partner="fsdp2",
        rollout=True,
        options=SMALL,
    )
    outcome = run_case(one, target)
    assert outcome.status == "passed", outcome.message
