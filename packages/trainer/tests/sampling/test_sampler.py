from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine_api.comm import SingleComm
from engine_api.config import LoraConfig, ModelSource
from engine_api.errors import ConfigError, RolloutError
from engine_api.plugin import EnginePlugin
from engine_api.registry import EngineRegistry, RolloutRegistry
from engine_api.results import Topology
from engine_api.rollout import SamplingParams, SyncResult
from engine_trainer.config.sections import EngineSection, RewardSection, RolloutSection
from engine_trainer.data import Prompt
from engine_trainer.placement.groups import by_replica
from engine_trainer.placement.replica import Replica, RolloutSpec, served_adapter
from engine_trainer.placement.spmd import SpmdEngines, SpmdRollouts
from engine_trainer.rollouts.sampling import uniforms
from engine_trainer.sampling.failure_budget import Failures
from engine_trainer.sampling.sampler import Sampler, _sync_figures
from engine_trainer.telemetry.logs import Timers


class Stream:
    """Three tensors, and how many of them were taken."""

    def __init__(self):
        self.left = ["a", "b", "c"]

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0), None


class FakeExporter:
    def __init__(self):
        self.streams, self.closed = [], 0

    def export(self, engine):
        self.streams.append(Stream())
        return self.streams[-1]

    def close(self):
        self.closed += 1


class FakeRollout:
    weight_version = -1

    def __init__(self, fails_after=None):
        self.calls, self.fails_after = [], fails_after

    def wake_up(self, weights=True, kv_cache=True):
        self.calls.append(("wake", weights, kv_cache))

    def sleep(self, weights=True, kv_cache=True):
        self.calls.append(("sleep", weights, kv_cache))

    def update_weights(self, export, version):
        self.calls.append(("update", version))
        for count, _ in enumerate(export, 1):
            if count == self.fails_after:
                raise RolloutError("broken in the middle", where="here", remedy="none")
        return SyncResult(
            version=version,
            num_tensors=3,
            num_bytes=12,
            num_quantized=2,
            audited=True,
            seconds={"install": 0.5, "audit": 0.25},
        )

    def close(self):
        self.calls.append(("close",))


class FakeScorer:
    def close(self):
        pass


class FakeTokenizer:
    stop_token_ids = ()


def sampler(rollout, **section) -> Sampler:
    policy = SpmdEngines(
        SimpleNamespace(weight_version=7, topology=Topology(), to=moves.append), SingleComm(), "cpu"
    )
    replica = Replica(rollout, FakeScorer(), FakeTokenizer(), Timers())
    return Sampler(
        rollouts=SpmdRollouts(replica, FakeExporter(), policy),
        policy=policy,
        comm=SingleComm(),
        timers=Timers(),
        section=RolloutSection(**section),
        tokenizer=FakeTokenizer(),
        failures=NONE,
    )


moves = []
NONE = Failures(RewardSection(name="math"), None)


def test_weights_wake_first_and_caches_after_the_sync():
    one = sampler(rollout := FakeRollout())
    with one.serving():
        assert rollout.calls == [("wake", True, False), ("update", 7), ("wake", False, True)]
    assert rollout.calls[3:] == [("sleep", True, True)]
    one.close()
    assert rollout.calls[4:] == [("close",)]
    assert one.rollouts.exporter.closed == 1


def test_a_rollout_that_is_not_to_sleep_is_only_updated():
    one = sampler(rollout := FakeRollout(), sleep=False)
    for _ in range(2):
        with one.serving():
            pass
    assert rollout.calls == [("update", 7), ("update", 7)]
    assert len(one.rollouts.exporter.streams) == 2


def test_the_engine_gives_way_between_sync_and_caches():
    one = sampler(rollout := FakeRollout(), offload_engine=True)
    moves.clear()
    one.policy.offload = lambda: rollout.calls.append(("away",))
    with one.serving():
        assert rollout.calls == [
            ("wake", True, False),
            ("update", 7),
            ("away",),
            ("wake", False, True),
        ]
        assert moves == []
    assert rollout.calls[4:] == [("sleep", True, True)]
    assert moves == ["cpu"]  # where this engine computes


def test_a_sync_that_fails_in_the_middle_still_reads_the_export_to_its_end():
    one = sampler(FakeRollout(fails_after=1))
    with pytest.raises(RolloutError, match="in the middle"), one.serving():
        raise AssertionError("it must not be served")
    assert one.rollouts.exporter.streams[0].left == []


def test_every_rank_has_a_replica_however_the_engine_divides_its_work():
    shared = Topology(rank=1, world_size=2, dp_rank=0, dp_size=1, is_primary=False, sizes={"tp": 2})
    policy = SpmdEngines(SimpleNamespace(topology=shared), SingleComm(), "cpu")
    found = SpmdRollouts(
        Replica(FakeRollout(), FakeScorer(), FakeTokenizer(), Timers()), FakeExporter(), policy
    )
    assert (policy.dp_size, found.size, found.local_replicas) == (1, 2, (1,))


def test_the_figures_of_a_sync_are_the_slowest_ranks():
    fast = SyncResult(
        version=1,
        num_tensors=3,
        num_bytes=12,
        num_quantized=2,
        seconds={"gather": 1.0, "install": 2.0},
        audited=True,
    )
    slow = SyncResult(
        version=1,
        num_tensors=3,
        num_bytes=12,
        num_quantized=2,
        seconds={"gather": 3.0},
        audited=False,
    )
    assert _sync_figures([fast, slow]) == {
        "sync/gather_s": 3.0,
        "sync/install_s": 2.0,
        "sync/bytes": 12,
        "sync/tensors": 3,
        "sync/quantized": 2,
        "sync/audited": 0,
    }
    assert _sync_figures([fast])["sync/audited"] == 1
    assert _sync_figures([replace(fast, wire_bytes=16)])["sync/wire_bytes"] == 16


@pytest.mark.parametrize(
    ("engine", "rollout", "said"),
    [
        ("1.0", {"lora"}, "written for contract 1.0"),
        ("1.1", set(), "serves no adapters"),
        ("1.1", {"lora"}, ""),
    ],
)
def test_an_adapter_goes_only_where_engine_and_rollout_can(monkeypatch, engine, rollout, said):
    plugins = {
        EngineRegistry: EnginePlugin(name="e", contract=engine, rows=()),
        RolloutRegistry: EnginePlugin(
            name="r", contract="1.0", rows=(), capabilities=frozenset(rollout)
        ),
    }
    for registry, plugin in plugins.items():
        found = SimpleNamespace(plugin=plugin)
        monkeypatch.setattr(registry, "resolve", staticmethod(lambda found=found, **_: found))
    given = EngineSection(model=ModelSource(path=""), lora=LoraConfig(rank=4))

    def spec(**section):
        return RolloutSpec(
            section=RolloutSection(**section),
            reward=RewardSection(name=""),
            tokenizer=FakeTokenizer(),
            engine=given,
            engine_config=given.build(seed=0, total_steps=1),
            engine_device="cpu",
        )

    assert served_adapter(spec()) == {}
    if not said:
        assert served_adapter(spec(lora="adapter")) == {"lora": given.lora}
        return
    with pytest.raises(ConfigError, match=said) as caught:
        served_adapter(spec(lora="adapter"))
    assert caught.value.field == "rollout.lora"
    assert "merged" in caught.value.remedy


def test_the_exporter_is_told_what_the_rollout_is_told(sums_model, tmp_path, monkeypatch):
    """Also in the row: what `local` says of its sync."""
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from engine_trainer.config import RLConfig
    from engine_trainer.config.loading import from_tree
    from engine_trainer.rewards import register
    from engine_trainer.rl.loop import train_rl

    told, real = [], RolloutRegistry.create_exporter

    def create(**arguments):
        told.append(arguments)
        return real(**arguments)

    monkeypatch.setattr(RolloutRegistry, "create_exporter", staticmethod(create))
    register("length")(lambda: lambda s: float(len(s.completion)))
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
            "reward": {"name": "length", "workers": 0, "timeout_s": None},
            "rollout": {
                "n": 2,
                "max_new_tokens": 4,
                "sleep": False,
                "options": {"dtype": "bfloat16"},
            },
            "algorithm": {"prompts_per_step": 4},
        },
    )
    train_rl(config)
    (arguments,) = told
    assert arguments["model"].path == str(sums_model)
    assert {k: arguments[k] for k in ("name", "device", "dtype", "quantization")} == {
        "name": "local",
        "device": "cpu",
        "dtype": "bfloat16",
        "quantization": "none",
    }
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert row["sync/install_s"] > 0
    # 2 layers of 11 tensors, the embedding (tied) and the last norm; two bytes a number
    from safetensors.torch import load_file

    whole = load_file(sums_model / "model.safetensors")
    assert row["sync/tensors"] == len(whole) == 24
    assert row["sync/bytes"] == 2 * sum(v.numel() for v in whole.values())
    assert row["sync/quantized"] == row["sync/audited"] == 0


def prompt(*tokens: int) -> Prompt:
    return Prompt(tokens=list(tokens), rendered="", text="", answer=None)


# At the end of an epoch some prompts come twice.
PROMPTS = [prompt(1), prompt(2), prompt(1), prompt(3), prompt(2), prompt(1)]


class Replicas:
    """Answers that are the random numbers which ``local`` would draw them with."""

    def __init__(self, size: int) -> None:
        self.size, self.local_replicas = size, range(size)

    def generate_and_score(self, shares, sampling):
        return [
            uniforms([p.tokens for p in share], sampling).tolist() if share else []
            for share in shares
        ]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_equal_prompts_have_other_random_numbers_however_many_replicas_there_are(size):
    section = RolloutSection(max_new_tokens=4)
    one = Sampler(
        rollouts=Replicas(size),
        policy=None,
        comm=SingleComm(),
        timers=Timers(),
        section=section,
        failures=NONE,
        tokenizer=FakeTokenizer(),
    )
    groups = one.sample(PROMPTS, n=1, temperature=1.0, seed=5)
    drawn = [g.completions for g in groups]
    alone = uniforms(
        [p.tokens for p in PROMPTS], SamplingParams(n=1, max_new_tokens=4, seed=5)
    ).tolist()
    assert drawn == alone
    assert len({tuple(numbers) for numbers in drawn}) == len(PROMPTS)


def test_prompts_that_differ_go_to_the_replicas_by_turns():
    assert by_replica([prompt(i) for i in range(5)], 2) == [[0, 2, 4], [1, 3]]
    assert by_replica(PROMPTS, 2) == [[0, 2, 3, 5], [1, 4]]


def test_a_rollout_that_cannot_sleep_is_an_error_on_every_rank():
    one, met = sampler(rollout := FakeRollout()), []

    def broken() -> None:
        raise RolloutError("it does not sleep", where="here", remedy="none")

    rollout.sleep = broken
    one.rollouts.policy.comm = SimpleNamespace(
        rank=0, all_gather=lambda value: met.append(value) or [value]
    )
    with pytest.raises(RolloutError, match="does not sleep"):
        one.rollouts.sleep()
    assert "it does not sleep" in met[0][0]
