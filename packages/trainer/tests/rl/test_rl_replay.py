"""Steps of RL whose engine replays the rollout's experts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import rl_runs
import torch
import yaml
from rank_runs import run_on_two_ranks
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine_api.batch import ROUTED_EXPERTS
from engine_api.capabilities import Capability
from engine_api.errors import ConfigError, RolloutError, UnsupportedCapability
from engine_api.registry import RolloutRegistry
from engine_trainer.cli import main
from engine_trainer.errors import DataError
from engine_trainer.rl.learner import Learner
from engine_trainer.rl.loop import train_rl
from engine_trainer.rl.recorded import read_recorded_run, read_step
from engine_trainer.rl.replay import check_replay
from engine_trainer.rollouts.local import LocalRollout
from engine_trainer.run.reference import Reference
from engine_trainer.telemetry.rollouts import EXPERTS, read_rollouts

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
# Torch 2.13 renames a collective under FSDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

NOISE = 0.3


class NoisyRouters(LocalRollout):
    """A rollout whose routers are a little off, so that some tokens have other experts."""

    def update_weights(self, export, version):
        generator = torch.Generator().manual_seed(0)

        def noisy():
            for name, tensor in export:
                off = torch.randn(tensor.shape, generator=generator) * NOISE * tensor.std()
                yield name, tensor + off if name.endswith("mlp.gate.weight") else tensor

        return super().update_weights(noisy(), version)


class Silent(LocalRollout):
    """A rollout that is asked to record, and does not."""

    def __init__(self, *, routed_experts, **arguments):
        del routed_experts
        super().__init__(**arguments)


@pytest.fixture(autouse=True)
def own_rollouts():
    capabilities = frozenset({Capability.ROUTER_REPLAY})
    for backend, cls in {"noisy": NoisyRouters, "silent": Silent}.items():
        RolloutRegistry.register(backend=backend, device="cpu", capabilities=capabilities)(cls)
    yield
    for backend in ("noisy", "silent"):
        RolloutRegistry.unregister(backend)


@pytest.fixture(scope="module")
def mixture(sums_model, tmp_path_factory):
    """A folder with a mixture of eight experts whose routers choose clearly."""
    folder = tmp_path_factory.mktemp("mixture")
    AutoTokenizer.from_pretrained(sums_model).save_pretrained(folder)
    (folder / "train.jsonl").write_text((sums_model / "train.jsonl").read_text())
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def run(folder, out, name, routed_experts, more=(), **algorithm):
    """Run one step and return its row of metrics.

    ``more`` are values of the run.
    """
    config = rl_runs.configure(
        folder,
        out,
        rollout={
            "name": name,
            "n": 4,
            "max_new_tokens": 4,
            "batch_size": 64,
            "routed_experts": routed_experts,
        },
        run={
            "output_dir": str(out),
            "steps": 1,
            "seed": 3,
            "progress": False,
            "report": False,
            "tensorboard": False,
        }
        | dict(more),
        algorithm={"prompts_per_step": 8, "mini_batches": 2, "kl": {"coefficient": 0.1}}
        | {"correction": {"weight": "none"}}
        | algorithm,
    )
    train_rl(config)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return rows[-1]


def test_replayed_experts_are_those_of_the_rollout_in_old_log_probs_and_in_updates(
    mixture, tmp_path, monkeypatch
):
    """The routers are off by three tenths: replay leaves of it what the experts' weights are off.

    The reference selects its own experts, and receives none.
    """
    asked = []
    plain = Reference.log_probs
    monkeypatch.setattr(
        Reference,
        "log_probs",
        lambda self, shards, temperature: (
            asked.append([ROUTED_EXPERTS in s.fields for s in shards])
            or plain(self, shards, temperature)
        ),
    )
    off = run(mixture, tmp_path / "off", "noisy", False)
    replayed = run(mixture, tmp_path / "replay", "noisy", "replay")
    assert asked == [[False], [True]]
    # The completions are the same ones.
    assert replayed["train/reward"] == off["train/reward"]
    assert replayed["mismatch/kl_k3"] < 0.3 * off["mismatch/kl_k3"]
    assert "rollout/replayed" not in off
    # All but the last token of each completion.
    assert 0.8 < replayed["rollout/replayed"] < 1
    assert replayed["train/grad_norm"] != off["train/grad_norm"]


RECORDED = {"steps": 2, "rollouts": "all", "save_every": 1, "keep": 0, "save_hf": False}


def result_of(out, step):
    return json.loads((out / "replay" / f"step-{step:06d}" / "replay.json").read_text())


@pytest.mark.slow
def test_a_recorded_step_with_the_experts_of_its_rollout_is_made_again_bit_for_bit(
    mixture, tmp_path, monkeypatch, capsys
):
    """Without the experts the step is another one, or is refused with what to do."""
    learned = []
    learn = Learner.learn

    def note(self, groups, keep=()):
        learned.append(groups)
        return learn(self, groups, keep)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", note)
        run(mixture, out, "noisy", "replay", RECORDED)
    for step, groups in enumerate(learned, 1):
        for group, known in zip(read_step(out, step).groups, groups, strict=True):
            for one, other in zip(group.completions, known.completions, strict=True):
                assert one.routed_experts.dtype == other.routed_experts.dtype
                assert torch.equal(one.routed_experts, other.routed_experts)
    # Nothing that reads the files for other purposes meets the experts.
    file = out / "rollouts" / "step-000002.parquet"
    assert EXPERTS in pq.read_schema(file).names
    assert EXPERTS not in read_rollouts(file).column_names

    assert main(["replay", str(out), "--step", "2"]) == 0
    assert "bit for bit, weights and optimizer included" in capsys.readouterr().out
    assert (result_of(out, 2)["same_bits"], result_of(out, 2)["surroundings"]) == (True, {})
    main(["replay", str(out), "--step", "2", "rollout.routed_experts=off"])
    assert not result_of(out, 2)["same_bits"]

    # The oracle and the engine take the experts, too: with the routers' own both would be wrong.
    main(["explain", str(out), "--step", "2"])
    told = capsys.readouterr().out
    assert "the experts of each token are those that the rollout recorded" in told
    assert "engine: right" in told
    assert "fsdp2 now: right" in told
    assert "layers: right" in told
    main(["explain", str(out), "--step", "2", "rollout.routed_experts=off"])
    assert "engine: WRONG" in capsys.readouterr().out

    bare = tmp_path / "bare"
    run(mixture, bare, "noisy", "replay", RECORDED | {"record_experts": False, "steps": 1})
    with pytest.raises(DataError, match="expected the experts") as caught:
        read_recorded_run(bare, 1)
    assert "run.record_experts: true" in caught.value.remedy
    assert main(["replay", str(bare), "--step", "1", "rollout.routed_experts=off"]) == 1
    main(["explain", str(bare), "--step", "1", "--no-live"])
    assert "did not record them: here the routers choose" in capsys.readouterr().out
    few = tmp_path / "few"
    run(mixture, few, "noisy", "replay", {"rollouts": 4})
    assert read_step(few, 1).groups[0].completions[0].routed_experts is None


@pytest.mark.nightly
@pytest.mark.distributed
def test_on_two_ranks_the_step_with_its_experts_is_that_of_two_ranks(mixture, tmp_path):
    config = rl_runs.tree(
        mixture,
        tmp_path / "run",
        run=RECORDED,
        rollout={"routed_experts": "replay"},
        algorithm={"prompts_per_step": 4, "mini_batches": 2},
    )
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(config))
    commands = [["rl", str(tmp_path / "rl.yaml")], ["replay", str(tmp_path / "run"), "--step", "2"]]
    said = run_on_two_ranks(tmp_path, commands, before=rl_runs.SEVENS)
    result = result_of(tmp_path / "run", 2)
    assert (result["same_bits"], result["surroundings"]) == (True, {}), said
    assert main(["replay", str(tmp_path / "run"), "--step", "2"]) == 0, "other ranks"
    alone = result_of(tmp_path / "run", 2)
    assert alone["surroundings"]["ranks"] == ["2", "1"]
    assert max(one["largest"] for one in alone["tokens"]) <= 1e-4


def test_a_rollout_that_records_nothing_ends_the_run(mixture, tmp_path):
    with pytest.raises(RolloutError, match="no experts were recorded") as caught:
        run(mixture, tmp_path / "run", "silent", "replay")
    assert "routed_experts=off" in caught.value.remedy


@pytest.mark.parametrize(
    ("rollout", "engine", "named"),
    [("local", (), "fsdp2"), ("sglang", (Capability.ROUTER_REPLAY,), "rollout 'sglang'")],
)
def test_an_engine_or_a_rollout_without_replay_is_refused_before_anything_is_loaded(
    tmp_path, rollout, engine, named
):
    folder = tmp_path / "nothing-here"
    config = rl_runs.configure(
        folder, tmp_path / "run", rollout={"name": rollout, "routed_experts": "replay"}
    )
    launcher = SimpleNamespace(resolve=lambda section: ("cpu", frozenset(engine)))
    with pytest.raises(UnsupportedCapability, match=named) as caught:
        check_replay(config, launcher)
    assert caught.value.capability == "router_replay"
    assert "rollout.routed_experts=off" in caught.value.remedy


def test_a_prompt_that_is_computed_once_has_no_replayed_experts(tmp_path):
    with pytest.raises(ConfigError) as caught:
        rl_runs.configure(
            tmp_path / "nothing-here",
            tmp_path / "run",
            engine={"memory": {"share_prefixes": True}},
            rollout={"routed_experts": "replay"},
        )
    assert caught.value.field == "engine.memory.share_prefixes"
    assert "rollout.routed_experts: off" in caught.value.remedy
