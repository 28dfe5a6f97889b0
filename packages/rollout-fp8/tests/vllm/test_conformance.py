"""Every rollout case of the conformance suite, on vLLM's CPU build."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pictured_descriptor import NAME
from vllm_peers import DEVICE, SMALL

from engine_api.capabilities import Capability
from engine_api.registry import RolloutRegistry
from engine_conformance.cases import Case, Target, load_cases, run_case
from engine_conformance.ranks import close_pools

NGRAM = {"speculative": "ngram", "truncation": False, "deterministic": False}
PLACE = os.environ.get("ROLLOUT_TEST_TORCHVISION")
CASES = [one for one in load_cases().values() if one.profile == "rollout" and one.probes is None]
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def pictured(tmp_path: Path) -> Iterator[str]:
    """Return the name of vLLM's rollout in ranks that find torchvision."""
    if PLACE is None and importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    info = tmp_path / "pictured-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pictured\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[engine_api.rollouts]\n{NAME} = pictured_descriptor:PLUGIN\n"
    )
    added = [str(tmp_path)] if PLACE is None else [str(tmp_path), PLACE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*added, *sys.path])
        close_pools()  # ranks look for plug-ins once
        RolloutRegistry.refresh()
        yield NAME
        close_pools()
    RolloutRegistry.refresh()


def run(one: Case, dtype: str, root: Path, backend: str, **options: Any) -> None:
    target = Target(
        backend=backend,
        device=DEVICE,
        root=root,
        dtype=dtype,
        partner="fsdp2",
        rollout=True,
        options=SMALL | options,
        # A busy machine may start and warm up vLLM for minutes.
        patience=4.0,
    )
    outcome = run_case(one, target)
    assert outcome.status == "passed", outcome.message


def chosen(*, with_images: bool) -> list[object]:
    """Return cases with or without images, in their precisions, the first of which comes often.

    vLLM's rollout is given no videos.
    """
    return [
        pytest.param(
            one,
            dtype,
            id=f"{one.id}-{dtype}",
            marks=pytest.mark.nightly if dtype != one.dtypes[0] else (),
        )
        for one in CASES
        for dtype in one.dtypes
        if (Capability.VISION in one.requires) == with_images
        and Capability.VIDEO not in one.requires
    ]


@pytest.mark.parametrize(("one", "dtype"), chosen(with_images=False))
def test_case(one: Case, dtype: str, root: Path) -> None:
    run(one, dtype, root, "vllm")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kv_cache_in_flight": "keep"}, id="keep"),
        *(
            pytest.param(options, id=name, marks=pytest.mark.nightly)
            for name, options in {
                "workers": {"executor": "workers"},
                "workers-keep": {"executor": "workers", "kv_cache_in_flight": "keep"},
                "ngram": NGRAM,
                "ngram-keep": NGRAM | {"kv_cache_in_flight": "keep"},
            }.items()
        ),
    ],
)
def test_case_of_syncs_during_generation(options: dict[str, Any], root: Path) -> None:
    run(load_cases()["rollout.in_flight"], "float32", root, "vllm", **options)


@pytest.mark.parametrize(("one", "dtype"), chosen(with_images=True))
def test_case_of_images(one: Case, dtype: str, root: Path, pictured: str) -> None:
    run(one, dtype, root, pictured)
