"""Every rollout case of the conformance suite on ``local``, which takes no weights in flight.

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
from engine_conformance.results import BAD

# Each class of rollouts_with_defects.py, and the case that must find it.
OF_TEXT = {
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
_NOT_REFUSED = "nothing was raised, RolloutError expected"
# Those of pictured_rollouts_with_defects.py that declare `vision`, with words of the failure.
OF_IMAGES = {
    "DropsImages": ("rollout.images", "no images explain them"),
    "ExchangesImages": ("rollout.images", "the images of prompt 5 explain them"),
    "ShiftsImages": ("rollout.images", "its images in another order explain them"),
    "TakesNeighbours": ("rollout.images", "the images of prompt 5 explain them"),
    "KnowsImagesByIds": ("rollout.images", "the images of prompt 1 explain them"),
    "CompletesPlaceholders": ("rollout.images", "log_probs (a mixture"),
    "PositionsOfText": ("rollout.images", "log_probs (a mixture"),
    "ForgetsSeed": ("rollout.images", "the same seed drew others behind the same images"),
    "DrawsImageTokens": ("rollout.image_tokens", "has tokens of an image or a video: [60]"),
    "DrawsVideoTokens": ("rollout.image_tokens", "has tokens of an image or a video: [61]"),
    "RenormalizesOverAllowed": ("rollout.image_tokens", "log_probs (flat"),
    "KeepsTower": ("rollout.image_sync", "log_probs (sync 2, write_other_tower"),
    "KeepsFeatures": ("rollout.image_sync", "log_probs (sync 2, write_other_tower"),
    "PassesOverTower": ("rollout.image_sync", f"the tower, missing: {_NOT_REFUSED}"),
    "CountsTextAlone": ("rollout.image_sync", "are counted, the export has"),
    "TakesMoreImages": ("rollout.bad_images", f"two images for one place: {_NOT_REFUSED}"),
    "TakesFewerImages": ("rollout.bad_images", f"a place without an image: {_NOT_REFUSED}"),
    "TakesTooManyEntries": ("rollout.bad_images", f"images for more prompts: {_NOT_REFUSED}"),
    "TakesImagesWithoutTower": ("rollout.bad_images", f"without a tower: {_NOT_REFUSED}"),
    "CountsPlaceholders": ("rollout.bad_images", f"too long: {_NOT_REFUSED}"),
    "RaisesOwnErrors": ("rollout.bad_images", "RolloutError expected, got:"),
    "GoesOnBehindTheVideo": ("rollout.videos", "log_probs (a mixture"),
    "ForgetsSeconds": ("rollout.videos", "log_probs (a mixture"),
}
# Those of the same file that do not declare it.
UNDECLARED = {
    "DropsUndeclaredImages": ("rollout.undeclared_images", "images was silently accepted"),
    "NamesNoCapability": ("rollout.undeclared_images", "UnsupportedCapability of vision expected"),
}
# Those of the same file that declare `vision` and not `video`.
WITHOUT_VIDEO = {
    "TakesUndeclaredVideos": ("rollout.undeclared_videos", "a video was silently accepted"),
    "NamesVision": ("rollout.undeclared_videos", "UnsupportedCapability of video expected"),
}
RIGHT, RIGHT_ABOUT_IMAGES = "TakesTextAlone", "TakesImagesAlone"
FOUND_BY = {name: (case, "") for name, case in OF_TEXT.items()} | OF_IMAGES
FOUND_BY |= UNDECLARED | WITHOUT_VIDEO
# It is a module of its own, because a descriptor imports no torch.
DESCRIPTOR = f"""
from engine_api.capabilities import Capability
from engine_api.plugin import CONTRACT, EnginePlugin, Row

def plugin(name, module, classes, *capabilities):
    rows = tuple(
        Row(backends=(one,), devices=("cpu",), target=f"{{module}}:{{one}}") for one in classes
    )
    return EnginePlugin(
        name=name, contract=CONTRACT, rows=rows, capabilities=frozenset(capabilities)
    )

PICTURED = "pictured_rollouts_with_defects"
OF_TEXT = plugin("of-text", "rollouts_with_defects", {list(OF_TEXT)})
OF_IMAGES = plugin("of-images", PICTURED, {list(OF_IMAGES)}, Capability.VISION, Capability.VIDEO)
UNDECLARED = plugin("undeclared", PICTURED, {[*UNDECLARED, RIGHT]})
NAMES = {[*WITHOUT_VIDEO, RIGHT_ABOUT_IMAGES]}
WITHOUT_VIDEO = plugin("without-video", PICTURED, NAMES, Capability.VISION)
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
        "[engine_api.rollouts]\n"
        "of-text = defects_descriptor:OF_TEXT\n"
        "of-images = defects_descriptor:OF_IMAGES\n"
        "undeclared = defects_descriptor:UNDECLARED\n"
        "without-video = defects_descriptor:WITHOUT_VIDEO\n"
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "dtype"),
    [
        pytest.param(one, dtype, id=f"{one.id}-{dtype}")
        for one in CASES
        for dtype in one.dtypes
        if one.probes is None and not one.in_flight
    ],
)
def test_case(one: Case, dtype: str, root: Path) -> None:
    outcome = run_case(one, rollout("local", root, dtype))
    assert outcome.status == "passed", outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND_BY)
def test_a_defect_is_found(name: str, root: Path) -> None:
    case, words = FOUND_BY[name]
    outcome = run_case(load_cases()[case], rollout(name, root))
    assert outcome.status in BAD, outcome.message
    # It fails for its defect, not for one of its own code.
    assert words in outcome.message, outcome.message


def test_a_rollout_without_images_that_completes_text_is_right_beside_a_tower(root: Path) -> None:
    """It takes no argument for images, so that none is left out in silence."""
    for one in (load_cases()["rollout.undeclared_images"], load_cases()["rollout.signatures"]):
        outcome = run_case(one, rollout(RIGHT, root))
        assert outcome.status in ("passed", "refused"), outcome.message


@pytest.mark.slow
def test_a_rollout_that_refuses_videos_by_their_name_is_right(root: Path) -> None:
    one = load_cases()["rollout.undeclared_videos"]
    outcome = run_case(one, rollout(RIGHT_ABOUT_IMAGES, root))
    assert outcome.status == "refused", outcome.message
