"""The case `rollout.in_flight`: it passes right rollouts, and finds each wrong one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_api.registry import RolloutRegistry
from engine_conformance.cases import Target, load_cases, run_case
from engine_conformance.ranks import close_pools
from engine_conformance.results import Outcome

RIGHT = ("InFlight", "Keeps")
_NOT_REFUSED = "nothing was raised, RolloutError expected"
# The other classes of in_flight_rollouts_with_defects.py, and words of the failure.
WRONG = {
    "KeepsFirstVersion": "the sync let it finish, or its version stayed",
    "WritesLastVersion": "none of up to 200 tokens was paused by a sync in 3 tries",
    "NamesVersionEarly": "log_probs (a sync during generations, generation 0",
    "NamesVersionLate": "log_probs (a sync during generations, generation 0",
    "GeneratesAtHalf": "log_probs (a sync during generations, generation 0",
    "ServesHalf": "log_probs (a sync during generations, generation 0",
    "KeepsInSilence": "over old keys and values explain the tokens after the sync",
    "RecomputesInSilence": "the new weights alone explain the tokens after the sync",
    "RecomputesTokensAlone": "old keys and values of the prompt explain the tokens after the sync",
    "SharesOldPrefixes": "old keys and values of the prompt explain the tokens after the sync",
    "LeavesOldPrefixesToNew": "submitted after it: the new weights over old keys and values",
    "KeepsBegunPrompts": "old keys and values of the prompt explain the tokens after the sync",
    "LetsFinish": "[[200, 0], [200, 0], [200, 0], [200, 0]]",
    "FinishesInside": "the sync let it finish, or its version stayed",
    "BeginsAgain": "[[0, 200], [0, 200], [0, 200], [0, 200]]",
    "GoesOnAfterFailure": f"(missing), generation 0: {_NOT_REFUSED}",
    "LosesRunningAlone": f"(missing), generation 2: {_NOT_REFUSED}",
    "LosesForOwnErrorsAlone": f"(raises), generation 0: {_NOT_REFUSED}",
    "EndsWithTokens": f"(missing), generation 0: {_NOT_REFUSED}",
    "EndsWithOwnError": "(missing), generation 0: RolloutError expected, got:",
    "OpensAfterFailure": f"(missing), submitted after it: {_NOT_REFUSED}",
    "BreaksAfterFailure": "after a sync that fails during generations (missing)",
    "AbortsLate": "aborted during a sync, generation 0: ",
    "ForgetsAborts": "aborted during a sync, generation 0: ",
    "AbortsRunningAlone": "aborted during a sync, generation 2: ",
    "NamesAbortsLength": "'length', not 'abort'",
    "SleepsWhileRunning": f"generations, sleep: {_NOT_REFUSED}",
    "WakesWhileRunning": f"generations, wake_up: {_NOT_REFUSED}",
    "TellsNoPause": "paused is 0.0",
    "TellsNoMode": "None, expected one of recompute, keep",
    "CountsPrompts": "tokens_generated at a sync during generations: it grew by ",
    "CountsAtTheEnd": "those of unfinished ones are missing",
    "AuditsWhenIdle": "audited at a sync during generations: False",
    "SpoilsWithoutArgument": "after a refused sync",
    "RefusesItsDeclaration": "is declared, and refused without any option",
}
# It is a module of its own, because a descriptor imports no torch.
DESCRIPTOR = f"""
from engine_api.plugin import CONTRACT, EnginePlugin, Row

MODULE = "in_flight_rollouts_with_defects"
PLUGIN = EnginePlugin(
    name="in-flight",
    contract=CONTRACT,
    rows=tuple(
        Row(backends=(one,), devices=("cpu",), target=f"{{MODULE}}:{{one}}")
        for one in {[*RIGHT, *WRONG]}
    ),
    in_flight=True,
)
"""
pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the models.

    The rollouts are found as an installed plug-in is, in the ranks too.
    """
    site = tmp_path_factory.mktemp("site")
    info = site / "in_flight_rollouts-0.dist-info"
    info.mkdir()
    (site / "in_flight_descriptor.py").write_text(DESCRIPTOR)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: in-flight-rollouts\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[engine_api.rollouts]\nin-flight = in_flight_descriptor:PLUGIN\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site), *sys.path])
        close_pools()  # ranks look for plug-ins once
        RolloutRegistry.refresh()
        yield tmp_path_factory.mktemp("conformance")
        close_pools()
    RolloutRegistry.refresh()


def outcome_of(name: str, root: Path, **options: object) -> Outcome:
    target = Target(backend=name, root=root, rollout=True, options=options)
    return run_case(load_cases()["rollout.in_flight"], target)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_rollout_passes(name: str, root: Path) -> None:
    outcome = outcome_of(name, root)
    assert outcome.status == "passed", outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_defect_is_found(name: str, root: Path) -> None:
    outcome = outcome_of(name, root)
    assert outcome.status == "failed", outcome.message
    # It fails for its defect, not for one of its own code.
    assert WRONG[name] in outcome.message, outcome.message


def test_a_rollout_that_does_not_declare_it_is_not_asked(root: Path) -> None:
    outcome = outcome_of("local", root)
    assert (outcome.status, outcome.message) == ("not-run", "not declared: in_flight")


def test_options_that_exclude_it_may_be_refused_by_its_name(root: Path) -> None:
    outcome = outcome_of("InFlight", root, routed_experts=True)
    assert outcome.status == "refused", outcome.message
    assert "in_flight" in outcome.message
