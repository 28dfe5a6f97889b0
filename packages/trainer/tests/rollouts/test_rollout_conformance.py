"""Every rollout case of the conformance suite on ``local``.

Each of some rollouts with a defect must be found by a case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_api.registry import RolloutRegistry
from engine_conformance.cases import Case, Target, load_cases, run_case
from engine_conformance.ranks import close_pools

# Each class of rollouts_with_defects.py, and the case that must find it.
FOUND_BY = {
    "KeepsOldTensor": "rollout.sync",
    "KeepsOldVersion": "rollout.sync",
    "HoldsReferences": "rollout.sync",
    "ServesOldPrefixes": "rollout.sync",
    "KeepsPrefixesOverNaps": "rollout.sleep",
    "TakesStaleVersions": "rollout.stale_sync",
    "IgnoresNames": "rollout.failed_sync",
    "ForgetsTemperature": "rollout.log_probs",
    "Renormalizes": "rollout.truncation",
    "DrawsAtOne": "rollout.sampling",
    "KeepsCacheScales": "rollout.scales",
    "TrustsProposals": "rollout.repeats",
}
# It is a module of its own, because a descriptor imports no torch.
DESCRIPTOR = f"""
from engine_api.plugin import CONTRACT, EnginePlugin, Row

def row(name):
    return Row(backends=(name,), devices=("cpu",), target=f"rollouts_with_defects:{{name}}")

ROWS = tuple(map(row, {list(FOUND_BY)}))
PLUGIN = EnginePlugin(name="with-defects", contract=CONTRACT, rows=ROWS)
"""
CASES = [one for one in load_cases().values() if one.profile == "rollout"]
pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the models.

    The rollouts with defects are found as an installed plug-in is, in the ranks too.
    """
    site = tmp_path_factory.mktemp("site")
    info = site / "rollouts_with_defects-0.dist-info"
    info.mkdir()
    (site / "defects_descriptor.py").write_text(DESCRIPTOR)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rollouts-with-defects\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[engine_api.rollouts]\nwith-defects = defects_descriptor:PLUGIN\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site), *sys.path])
        close_pools()  # ranks look for plug-ins once
        RolloutRegistry.refresh()
        yield tmp_path_factory.mktemp("conformance")
        close_pools()
    RolloutRegistry.refresh()


def rollout(name: str, root: Path, dtype: str = "float32") -> Target:
    return Target(backend=name, root=root, dtype=dtype, partner="fsdp2", rollout=True)


@pytest.mark.parametrize(
    ("one", "dtype"),
    [pytest.param(one, dtype, id=f"{one.id}-{dtype}") for one in CASES for dtype in one.dtypes],
)
def test_case(one: Case, dtype: str, root: Path) -> None:
    outcome = run_case(one, rollout("local", root, dtype))
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_defect_is_found(name: str, root: Path) -> None:
    outcome = run_case(load_cases()[FOUND_BY[name]], rollout(name, root))
    assert outcome.status == "failed", outcome.message
