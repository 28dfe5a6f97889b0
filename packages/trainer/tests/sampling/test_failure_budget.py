"""Failures, which are counted over the whole run.

A run that is resumed ends where an uninterrupted run does.
"""

from __future__ import annotations

import pytest
from rl_runs import configure, rows_of, tree

from engine_api.errors import EngineError
from engine_trainer.agent import AgentError
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.config.sections import AgentSection, RewardSection
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import RewardError, Score, register
from engine_trainer.rl.learner import Learner
from engine_trainer.rl.loop import train_rl
from engine_trainer.sampling.failure_budget import Failures
from engine_trainer.sft import train_sft

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

MOST = 30
FAILS = """
async def some(episode):
    turn = await episode.generate(max_new_tokens=2)
    if episode.prompt.text.startswith("1"):
        raise KeyError("boom")
    return episode.end()
"""


def ends(model, out, **sections) -> EngineError:
    with pytest.raises((RewardError, AgentError)) as caught:
        train_rl(configure(model, out, **sections))
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raises", "nan", "agent"])
def test_a_resumed_run_ends_at_the_failure_at_which_one_left_alone_does(
    sums_model, tmp_path, monkeypatch, kind
):
    def fickle(sample):
        wrong = sample.prompt.startswith("1")
        return {}["boom"] if wrong and kind == "raises" else float("nan") if wrong else 1.0

    register("fickle")(lambda: fickle)
    (tmp_path / "own.py").write_text(FAILS)
    sections = {
        "run": {"steps": 10, "save_every": 2},
        "reward": {"name": "fickle", "max_failures": MOST},
        "eval": {"source": str(sums_model / "test.jsonl"), "every": 1},
    }
    if kind == "agent":
        own = {"function": f"{tmp_path}/own.py:some", "max_failures": MOST}
        sections = {**sections, "reward": {"name": "sevens"}, "agent": own}
    whole = ends(sums_model, tmp_path / "alone", **sections)
    rows = rows_of(tmp_path / "alone")
    last = rows[-1]["step"]
    assert 3 <= last < 10, "the bound is meant to be met in the middle"
    killed_in_step(last, monkeypatch)
    with pytest.raises(OSError, match="killed"):
        train_rl(configure(sums_model, tmp_path / "parts", **sections))
    resumed = ends(sums_model, tmp_path / "parts", **sections)
    assert type(resumed) is type(whole)
    for error in (whole, resumed):
        assert f": {MOST + 1}" in str(error)
        assert "boom" in str(error) or kind == "nan"
    assert rows_of(tmp_path / "parts") == rows


def killed_in_step(step: int, monkeypatch) -> None:
    """Kill the run once, after the step's completions were scored."""
    calls = iter(range(1, 1000))
    real = Learner.learn

    def learn(self, groups, *others):
        if next(calls) == step:
            raise OSError("killed")
        return real(self, groups, *others)

    monkeypatch.setattr(Learner, "learn", learn)


def test_evaluations_of_sft_count_over_a_resume_too(sums_model, tmp_path):
    def fickle(sample):
        return float("nan") if sample.prompt.startswith("1") else 1.0

    register("fickle")(lambda: fickle)
    here = tree(sums_model, tmp_path / "out")
    del here["algorithm"]
    here["data"]["columns"] = {"response": "answer"}
    here |= {
        "batch_size": 8,
        "eval": {"source": str(sums_model / "train.jsonl")},
        "reward": {"name": "fickle", "max_failures": 20, "workers": 0, "timeout_s": None},
    }
    train_sft(from_tree(SFTConfig, here | {"run": {**here["run"], "steps": 1}}))  # two evaluations
    each = rows_of(tmp_path / "out")[0]["eval/failures"]
    assert 20 / 3 < each <= 10
    with pytest.raises(RewardError, match="failed calls: 21"):
        train_sft(from_tree(SFTConfig, here))


def group(*answers: ScoredCompletion) -> Group:
    return Group(
        prompt=Prompt(tokens=[6], rendered="6", text="6", answer=None), completions=list(answers)
    )


def failed(*names: str, problem: str = "") -> ScoredCompletion:
    score = Score(
        total=0.0,
        parts={},
        correct=False,
        failed=names,
        problems=tuple(f"{name} raised" for name in names),
    )
    return ScoredCompletion(
        tokens=[5], log_probs=[-1.0], text="7", finished=True, score=score, problem=problem
    )


def test_the_bound_is_of_all_replicas_and_of_what_was_before():
    section = (
        RewardSection(name="a", max_failures=3),
        AgentSection(function="own.py:f", max_failures=1),
    )
    failures = Failures(*section)
    failures.count([group(failed("a", "b"), failed()), group(failed("b", problem="it raised"))])
    assert failures.state == {"rewards": 3, "agents": 1}
    for one, said in (
        (failed("b"), "b raised; failed calls: 4"),
        (failed(problem="again"), "again; failed trajectories: 2"),
    ):
        resumed = Failures(*section)
        resumed.restore(failures.state)
        resumed.count([group(failed())])
        with pytest.raises((RewardError, AgentError), match=said):
            resumed.count([group(one)])
    old = Failures(*section)
    old.restore({})
    assert old.state == {"rewards": 0, "agents": 0}
