"""Errors on one data-parallel rank end the step on all ranks.

No rank waits for one that has ended.
"""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from engine_api.errors import BatchError, RankFailure
from engine_api.results import TokenOutputs
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import from_tree
from engine_trainer.data import Prompt
from engine_trainer.placement.replica import Group, ScoredCompletion
from engine_trainer.rewards import RewardError, Score, register
from engine_trainer.rl.learner import Learner
from engine_trainer.run.checkpoints import Checkpoints
from engine_trainer.telemetry.logs import Timers

TIMEOUT_S = 3.0


class Threads:
    """Ranks as threads."""

    def __init__(self, world_size: int) -> None:
        self.rows: list = [None] * world_size
        self.barrier = threading.Barrier(world_size)

    def of(self, rank: int) -> SimpleNamespace:
        def all_gather(value):
            self.rows[rank] = value
            self.barrier.wait(TIMEOUT_S)
            rows = list(self.rows)
            self.barrier.wait(TIMEOUT_S)
            return rows

        return SimpleNamespace(rank=rank, world_size=len(self.rows), all_gather=all_gather)


class Engines:
    """An engine whose every number is ``value`` on this rank; nothing may be trained on."""

    weight_version, dp_size = 0, 2

    def __init__(self, comm, value: float) -> None:
        self.comm, self.value, self.local_dp_ranks = comm, value, (comm.rank,)

    def infer(self, shards, **_):
        self.comm.all_gather(None)  # collective
        (shard,) = shards
        numbers = torch.full((shard.num_tokens,), self.value)
        return [TokenOutputs(log_probs=numbers, values=numbers)]

    def gather(self, rows):
        return self.comm.all_gather(rows[0])

    def train(self, *_, **__):
        self.comm.all_gather(None)  # where the others would wait for ever
        raise AssertionError("trained on what is not finite")


def groups(log_prob: float) -> list[Group]:
    """Two prompts of two answers; ``log_prob`` is the rollout's of one of them."""

    def one(reward: float, value: float) -> ScoredCompletion:
        return ScoredCompletion(
            tokens=[5, 1],
            log_probs=[-1.0, value],
            text="",
            finished=True,
            weight_versions=[0, 0],
            score=Score(total=reward, parts={}, correct=False),
        )

    prompt = Prompt(tokens=[6, 2], rendered="", text="", answer=None)
    return [
        Group(prompt=prompt, completions=[one(0.0, -1.0), one(1.0, v)]) for v in (log_prob, -1.0)
    ]


KL = {"coefficient": 0.1, "where": "reward"}
WRONG = {
    "rollout": ("rollout_log_probs", {}),
    "policy": ("old_log_probs", {"mini_batches": 2}),
    "reference": ("ref_log_probs", {"kl": KL}),
    "critic": ("values", {"advantage": "gae", "critic": {}}),
}


@pytest.mark.parametrize("who", WRONG)
def test_a_number_that_is_not_finite_on_one_rank_ends_all_with_its_name(tmp_path, who):
    field, algorithm = WRONG[who]
    config = from_tree(
        RLConfig,
        {
            "engine": {"model": {"path": "m"}},
            "data": {"source": "d"},
            "run": {"output_dir": str(tmp_path), "steps": 1},
            "reward": {"name": "exact"},
            "rollout": {"n": 2},
            "algorithm": algorithm,
        },
    )
    world, ended = Threads(2), {}

    def rank(number: int) -> None:
        comm = world.of(number)

        def engines(name: str) -> Engines:
            return Engines(comm, math.nan if who == name and number == 1 else -1.0)

        others = iter([engines("reference" if "kl" in algorithm else "critic")])
        launcher = SimpleNamespace(
            engines=lambda *_: next(others), resolve=lambda _: ("cpu", frozenset())
        )
        built = config.engine.build(seed=0, total_steps=1)
        run = SimpleNamespace(
            policy=engines("policy"),
            timers=Timers(),
            comm=comm,
            config=config,
            engine_config=built,
            device="cpu",
            companions={},
            total_steps=1,
            launcher=launcher,
        )
        try:
            Learner(run, config).learn(groups(math.nan if who == "rollout" else -1.0))
        except Exception as error:  # noqa: BLE001 - what it is, is the test
            ended[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = {type(ended[number]) for number in range(2)}
    assert kinds == {BatchError, RankFailure}, ended
    assert all(
        field in str(error) and "nan is not finite" in str(error) for error in ended.values()
    )


@pytest.mark.parametrize(
    ("engine", "overrides", "ahead"),
    [
        ({}, {}, False),
        ({"lora": {"dropout": 0.1}}, {}, True),
        ({"lora": {}}, {}, False),
        ({}, {"attention_dropout": 0.1}, True),
    ],
)
def test_with_dropout_the_log_probs_that_correct_are_inferences(
    sums_model, tmp_path, engine, overrides, ahead
):
    model = {"path": str(sums_model), "config_overrides": overrides}
    config = from_tree(
        RLConfig,
        {
            "engine": {"model": model, **engine},
            "data": {"source": "d"},
            "run": {"output_dir": str(tmp_path), "steps": 1},
            "reward": {"name": "exact"},
            "rollout": {"n": 2},
            "algorithm": {"correction": {"weight": "token"}},
        },
    )
    run = SimpleNamespace(policy=None, timers=Timers(), comm=None)
    assert Learner(run, config)._engine_knows is ahead


def test_a_save_that_stands_on_one_rank_alone_is_waited_for_later(tmp_path):
    """Ranks that wait for it agree on the removal of old ones: all of them do, or none."""
    world, called = Threads(2), {0: 0, 1: 0}

    def rank(number: int) -> None:
        def result():
            called[number] += 1

        handle = SimpleNamespace(done=lambda: number == 0, result=result)
        policy = SimpleNamespace(save_checkpoint=lambda *_, **__: handle)
        Checkpoints(tmp_path, keep=1).save(policy, world.of(number), 1, {}, {})

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert called == {0: 0, 1: 0}


def test_what_generates_beside_the_loop_is_closed_after_an_error(sums_model, tmp_path, monkeypatch):
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from engine_trainer.rl.loop import train_rl
    from engine_trainer.rl.sources import Synchronous

    closed: set[int] = set()
    monkeypatch.setattr(Synchronous, "close", lambda self: closed.add(id(self)))
    register("broken")(lambda: lambda sample: 1 / 0)
    config = from_tree(
        RLConfig,
        {
            "engine": {"model": {"path": str(sums_model)}, "device": "cpu"},
            "data": {"source": str(sums_model / "train.jsonl")},
            "run": {
                "output_dir": str(tmp_path / "out"),
                "steps": 1,
                "progress": False,
                "report": False,
                "tensorboard": False,
            },
            "reward": {"name": "broken", "workers": 0, "timeout_s": None},
            "rollout": {"n": 2, "max_new_tokens": 4},
            "algorithm": {"prompts_per_step": 4},
        },
    )
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        train_rl(config)
    assert len(closed) == 1
