"""Choices in place of ``auto``, by device, engine and memory. On a CPU they change nothing."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from engine_api.capabilities import Capability
from engine_api.config import EngineConfig, Memory, ModelSource, Parallelism, Precision
from engine_api.errors import ConfigError
from engine_api.hf_layers import EXPERT_KEYS
from engine_api.plugin import CONTRACT, EnginePlugin
from engine_trainer.config import (
    DPOConfig,
    KTOConfig,
    RewardModelConfig,
    RLConfig,
    RolloutSection,
    SFTConfig,
)
from engine_trainer.config.loading import flatten, from_tree, to_plain
from engine_trainer.config.sections import token_budget
from engine_trainer.placement import memory
from engine_trainer.placement.activations import Decoder
from engine_trainer.placement.automatic import (
    check_kept,
    fill_earlier,
    keep,
    list_automatic,
    settle,
)
from engine_trainer.placement.memory import GIB, FreeMemory
from engine_trainer.placement.replica import why_unfit
from engine_trainer.rollouts.plugin import PLUGIN as LOCAL
from engine_trainer.run.checkpoints import compare, list_defaults
from engine_trainer.utils.hf_models import text_config

# Qwen3-0.6B.
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
MIXTURE = SMALL | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
FSDP = frozenset(
    {
        Capability.BF16,
        Capability.COMPILE,
        Capability.RECOMPUTE,
        Capability.EXPORT_SHARDS,
        Capability.PARAMETER_GROUPS,
    }
)
KEEPS = frozenset({"kept_activations"})
DPO = {"data": {"source": "pairs.jsonl"}, "run": {"output_dir": "out", "steps": 1}}
RL = DPO | {"reward": {"name": "math"}}
# As those of rollout-fp8, but for the servers' own options.
SERVERS = {
    "vllm": EnginePlugin(
        name="vllm",
        contract=CONTRACT,
        rows=(),
        capabilities=frozenset({Capability.LORA, Capability.ROUTER_REPLAY}),
    ),
    "sglang": EnginePlugin(name="sglang", contract=CONTRACT, rows=()),
}


@pytest.fixture(autouse=True)
def parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "count_parameters", lambda source, trunk=False: 596_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


class Launcher:
    """A machine with ranks of one device, on which some servers can be used."""

    def __init__(
        self,
        device: str,
        *,
        free: float = 140 * GIB,
        ranks: int = 1,
        servers: tuple[str, ...] = ("vllm",),
        lacks: frozenset[Capability] = frozenset(),
        others: dict[str, frozenset[Capability]] | None = None,
        options: frozenset[str] = KEEPS,
    ) -> None:
        self.device = device
        self.measured = 0
        self.free = [FreeMemory(device=f"gpu{n}", free=int(free)) for n in range(ranks)]
        self.rollouts = {"local": LOCAL} | {name: SERVERS[name] for name in servers}
        self.capabilities = {"fsdp2": FSDP - lacks} | (others or {})
        self.options = {"fsdp2": options}

    def resolve(self, section: Any, other: Any = None) -> tuple[str, frozenset[Capability]]:
        return self.device, self.capabilities[section.backend]

    def list_options(self, section: Any) -> frozenset[str]:
        return self.options.get(section.backend, frozenset())

    def free_memory(self, device: str) -> list[FreeMemory]:
        self.measured += 1
        return self.free

    def probe_rollout(self, section: Any, device: str) -> list[str]:
        plugin = self.rollouts.get(section.name.removesuffix("-server"))
        if plugin is None:
            return ["", f"rollout {section.name!r} is not installed"]
        return [why_unfit(section, plugin)]


def configure(cls: Any, folder: Path, tree: dict[str, Any], **engine: Any) -> Any:
    return from_tree(cls, {**tree, "engine": {"model": {"path": str(folder)}, **engine}})


def choose(config: Any, launcher: Any) -> tuple[Any, dict[str, Any]]:
    settled, choices = settle(config, launcher)
    return settled, {one.key: one.value for one in choices}


@pytest.mark.parametrize(
    ("advantage", "section", "key"),
    [
        ("gae", "critic", "algorithm.critic"),
        ("grpo", "teacher.engine", "algorithm.teacher.engine"),
    ],
)
def test_the_model_of_another_engine_is_named_by_its_own_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, advantage: str, section: str, key: str
) -> None:
    (empty := folder / "empty").mkdir()
    algorithm: dict[str, Any] = {"model": {"path": str(empty)}}
    for name in reversed(section.split(".")):
        algorithm = {name: algorithm}
    tree = RL | {"algorithm": {"advantage": advantage, **algorithm}}
    config = configure(RLConfig, folder, tree)
    with pytest.raises(ConfigError) as caught:
        settle(config, Launcher("cuda"))
    assert caught.value.field == f"{key}.model.path"

    def count(source: Any, trunk: bool = False) -> int:
        del trunk
        return len(text_config(source).to_dict())

    monkeypatch.setattr(memory, "count_parameters", count)
    policy = config.engine.build(seed=0, total_steps=1)
    with pytest.raises(ConfigError) as caught:
        memory.engines_bytes(config, policy, "cuda")
    assert caught.value.field == f"{key}.model.path"


def test_a_cpu_computes_what_it_did_before_there_were_choices(folder: Path) -> None:
    launcher = Launcher("cpu")
    settled, _ = choose(configure(RLConfig, folder, RL), launcher)
    built = settled.engine.build(seed=0, total_steps=1)
    assert built == EngineConfig(
        model=built.model,
        optimizer=built.optimizer,
        schedule=built.schedule,
        precision=Precision(master="float32", compute="float32", reduce="float32"),
        memory=Memory(logit_chunk=4096, recompute="none", compile=False),
    )
    assert settled.rollout.name == "local"
    assert settled.algorithm.correction.weight == "none"
    assert launcher.measured == 0


def test_every_choice_is_explicit_and_stands_with_its_reason_in_one_line(folder: Path) -> None:
    settled, choices = settle(configure(RLConfig, folder, RL), Launcher("cuda"))
    assert [str(one) for one in choices] == [
        "rollout.name=vllm (installed, and supports cuda)",
        "engine.precision.compute=bfloat16 (on cuda)",
        "engine.memory.compile=true (the engine declares it, on cuda)",
        "engine.memory.logit_chunk=3328 (logits of 0.94 GiB)",
        "engine.memory.recompute=none (needs 35.9 GiB without it, 126.0 GiB are usable)",
        "engine.memory.kept_activations=0.0 (nothing is recomputed)",
        "engine.optimizer.decay=all (weight_decay is 0)",
    ]
    assert settled.algorithm.correction.weight == "token"
    assert "auto" not in json.dumps(to_plain(settled)["engine"]["memory"])
    # The file of the run says what ran, and a second reading chooses nothing.
    again, choices = settle(from_tree(RLConfig, to_plain(settled)), Launcher("cuda"))
    assert (again, choices) == (settled, [])


def test_an_explicit_value_is_never_changed(folder: Path) -> None:
    given = {
        "precision": {"compute": "float32"},
        "memory": {
            "compile": False,
            "recompute": "full",
            "kept_activations": 0.0,
            "logit_chunk": 17,
        },
        "optimizer": {"decay": "all"},
    }
    config = configure(RLConfig, folder, RL | {"rollout": {"name": "local"}}, **given)
    launcher = Launcher("cuda")
    settled, choices = choose(config, launcher)
    assert (settled, choices) == (config, {})
    assert launcher.measured == 0


@pytest.mark.parametrize(
    ("free", "tokens", "want"), [(140, 16384, "none"), (30, 16384, "full"), (30, 4096, "none")]
)
def test_activations_are_recomputed_where_they_do_not_fit(
    folder: Path, free: int, tokens: int, want: str
) -> None:
    config = configure(SFTConfig, folder, DPO, memory={"max_tokens": tokens})
    _, choices = choose(config, Launcher("cuda", free=free * GIB))
    assert choices["engine.memory.recompute"] == want


# 35.9 GiB are needed without recomputation and 16.5 with it, of nine tenths of what is free. The
# results of linear layers take 10.5 GiB.
@pytest.mark.parametrize(
    ("free", "want"),
    [(17, 0.0), (18, 0.0), (19, 0.05), (20, 0.1), (21, 0.2), (24, 0.45), (39, 0.95), (40, 0.0)],
)
def test_a_share_of_what_is_recomputed_is_kept_where_it_fits(
    folder: Path, free: int, want: float
) -> None:
    settled, choices = choose(configure(SFTConfig, folder, DPO), Launcher("cuda", free=free * GIB))
    assert choices["engine.memory.kept_activations"] == want
    assert settled.engine.memory.recompute == ("none" if free == 40 else "full")
    options = settled.engine.build(seed=0, total_steps=1).options
    assert options == ({"kept_activations": want} if want else None)


def test_the_share_stands_with_its_reason(folder: Path) -> None:
    _, choices = settle(configure(SFTConfig, folder, DPO), Launcher("cuda", free=24 * GIB))
    said = "engine.memory.kept_activations=0.45 (needs 21.2 GiB with it, 21.6 GiB are usable)"
    assert said in map(str, choices)


@pytest.mark.parametrize(
    ("engine", "launched", "why"),
    [
        ({"memory": {"recompute": "full"}}, {}, "recompute is given"),
        ({"memory": {"compile": False}}, {}, "blocks are not compiled"),
        ({"options": {"kept_activations": 0.2}}, {}, "options.kept_activations is given"),
        ({}, {"options": frozenset()}, "the engine has no option kept_activations"),
        ({}, {"lacks": frozenset({Capability.RECOMPUTE})}, "nothing is recomputed"),
        ({"optimizer": None}, {}, "nothing is recomputed"),
        ({"lora": {"rank": 8, "dropout": 0.1}}, {"free": 12 * GIB}, "adapters with dropout"),
    ],
    ids=str,
)
def test_no_share_is_chosen_where_none_could_be_kept(
    folder: Path, engine: dict[str, Any], launched: dict[str, Any], why: str
) -> None:
    launcher = Launcher("cuda", **{"free": 30 * GIB} | launched)
    _, choices = settle(configure(SFTConfig, folder, DPO, **engine), launcher)
    (found,) = (one for one in choices if one.key == "engine.memory.kept_activations")
    assert (found.value, found.why) == (0.0, why)


def test_no_share_is_chosen_beside_a_server_that_stays_awake(folder: Path) -> None:
    tree = RL | {"rollout": {"name": "vllm", "sleep": False}}
    settled, choices = choose(configure(RLConfig, folder, tree), Launcher("cuda"))
    assert settled.engine.memory.recompute == "full"
    assert choices["engine.memory.kept_activations"] == 0.0


@pytest.mark.parametrize(
    "more",
    [
        MIXTURE,
        {"layer_types": ["linear_attention"] * 28},
        {"attn_logit_softcapping": 50.0},
        {"global_head_dim": 512},
    ],
    ids=["experts", "states", "cap", "wide"],
)
def test_no_share_is_chosen_for_blocks_that_recompute_as_a_whole(
    folder: Path, more: dict[str, Any]
) -> None:
    config = configure(SFTConfig, folder, DPO, memory={"compile": True})
    (folder / "config.json").write_text(json.dumps(SMALL | more))
    settled, choices = choose(config, Launcher("cuda", free=26 * GIB))
    assert settled.engine.memory.recompute == "full"
    assert choices["engine.memory.kept_activations"] == 0.0


def test_a_share_that_is_given_has_blocks_recomputed(folder: Path) -> None:
    config = configure(SFTConfig, folder, DPO, memory={"kept_activations": 0.3})
    settled, choices = choose(config, Launcher("cuda"))
    assert choices["engine.memory.recompute"] == "full"
    assert settled.engine.build(seed=0, total_steps=1).options == {"kept_activations": 0.3}
    # Without updates there is nothing to keep.
    inferring = replace(settled.engine, optimizer=None)
    assert inferring.build(seed=0, total_steps=1).options is None


@pytest.mark.parametrize(
    ("engine", "device", "said"),
    [
        (
            {"kept_activations": 0.3, "compile": False},
            "cuda",
            "expected 0 with recompute: full",
        ),
        ({"kept_activations": 0.3}, "cpu", "expected 0 with recompute: none and compile: false"),
        ({"kept_activations": 1.0}, "cuda", "expected a share from 0 to below 1, got 1"),
        ({"kept_activations": -0.5}, "cuda", "expected a share from 0 to below 1, got -0.5"),
    ],
)
def test_a_share_that_nothing_would_keep_is_refused(
    folder: Path, engine: dict[str, Any], device: str, said: str
) -> None:
    config = configure(SFTConfig, folder, DPO, memory=engine)
    settled, _ = settle(config, Launcher(device))
    with pytest.raises(ConfigError, match=said) as caught:
        settled.engine.build(seed=0, total_steps=1)
    assert caught.value.field == "engine.memory.kept_activations"


def test_a_share_for_an_engine_without_the_option_is_refused(folder: Path) -> None:
    config = configure(SFTConfig, folder, DPO, memory={"kept_activations": 0.3})
    with pytest.raises(ConfigError, match=r"expected 0 with engine 'fsdp2', got 0\.3") as caught:
        settle(config, Launcher("cuda", options=frozenset()))
    assert caught.value.field == "engine.memory.kept_activations"


def test_a_share_goes_on_in_a_run_that_continues(folder: Path) -> None:
    critic = {"algorithm": {"advantage": "gae", "critic": {}}, "rollout": {"name": "local"}}
    for cls, tree in ((SFTConfig, DPO), (RLConfig, RL | critic)):
        config = configure(cls, folder, tree)
        first, choices = settle(config, Launcher("cuda", free=36 * GIB))
        shares = [one.value for one in choices if one.key.endswith("kept_activations")]
        assert len(shares) == (1 if cls is SFTConfig else 2)
        assert all(shares)
        kept, _ = keep(config, fill_earlier(flatten(to_plain(first))), "step-000007")
        assert settle(kept, Launcher("cuda")) == (first, [])


@pytest.mark.parametrize(
    "override", [{"recompute": "none"}, {"recompute": "full"}, {"compile": False}], ids=str
)
def test_a_share_ends_with_what_it_was_chosen_for(folder: Path, override: dict[str, Any]) -> None:
    first, _ = settle(configure(SFTConfig, folder, DPO), Launcher("cuda", free=24 * GIB))
    assert first.engine.memory.kept_activations > 0
    config = configure(SFTConfig, folder, DPO, memory=override)
    kept, _ = keep(config, flatten(to_plain(first)), "step-000007")
    settled, _ = settle(kept, Launcher("cuda", free=24 * GIB))
    assert settled.engine.memory.kept_activations == 0.0
    assert settled.engine.build(seed=0, total_steps=1).options is None


def test_a_share_that_is_given_stays_where_other_values_are_chosen(folder: Path) -> None:
    given = {"kept_activations": 0.3, "max_tokens": "auto"}
    settled, _ = settle(configure(SFTConfig, folder, DPO, memory=given), Launcher("cuda"))
    assert settled.engine.memory.kept_activations == 0.3
    tree = RL | {"algorithm": {"advantage": "gae", "critic": {"memory": {"logit_chunk": 256}}}}
    config = configure(RLConfig, folder, tree, memory={"kept_activations": 0.3})
    settled, _ = settle(config, Launcher("cuda"))
    assert settled.engine.memory.kept_activations == 0.3


def test_a_run_from_before_there_were_shares_keeps_none(folder: Path) -> None:
    config = configure(SFTConfig, folder, DPO)
    first, _ = settle(config, Launcher("cuda", free=30 * GIB))
    before = flatten(to_plain(first))
    del before["engine.memory.kept_activations"]
    kept, _ = keep(config, fill_earlier(before), "step-000007")
    assert kept.engine.memory.recompute == "full"
    assert kept.engine.memory.kept_activations == 0.0


@pytest.mark.parametrize(
    ("cls", "free", "longest", "recompute", "want"),
    [
        # 16,384 tokens need 35.9 GiB, 32,768 need 57.0 and 8,192 need 25.4.
        (SFTConfig, 140, None, "auto", (32768, "none")),
        (SFTConfig, 45, None, "auto", (16384, "none")),
        (SFTConfig, 30, 8192, "auto", (8192, "none")),
        # Documents of more than 8,192 tokens may come.
        (SFTConfig, 30, None, "auto", (16384, "full")),
        (SFTConfig, 30, 8193, "auto", (16384, "full")),
        (DPOConfig, 30, 8192, "auto", (8192, "none")),
        # A score stands at the end of a document.
        (RewardModelConfig, 30, 8192, "auto", (16384, "full")),
        (RewardModelConfig, 30, 8191, "auto", (8192, "none")),
        # With the 256 tokens of a completion.
        (RLConfig, 30, 8000, "auto", (16384, "full")),
        (RLConfig, 30, 7936, "auto", (8192, "none")),
        # Where all is recomputed, much fits; where nothing is, as little as possible is tried.
        (SFTConfig, 30, 512, "full", (32768, "full")),
        (SFTConfig, 12, 512, "none", (4096, "none")),
        (SFTConfig, 140, 50000, "auto", (50000, "none")),
        (SFTConfig, 45, 20000, "auto", (20000, "full")),
        (SFTConfig, 60, 20000, "none", (20000, "none")),
    ],
)
def test_a_micro_batch_is_as_large_as_fits_without_recomputation(
    folder: Path, cls: Any, free: int, longest: int | None, recompute: str, want: tuple[int, str]
) -> None:
    tree = RL | {"rollout": {"name": "local"}} if cls is RLConfig else DPO
    tree = tree | {"data": DPO["data"] | {"max_length": longest}}
    kind = {"model_type": "value_model"} if cls is RewardModelConfig else {}
    chosen = {"max_tokens": "auto", "recompute": recompute}
    config = configure(cls, folder, tree, memory=chosen, **kind)
    settled, choices = choose(config, Launcher("cuda", free=free * GIB))
    assert (settled.engine.memory.max_tokens, settled.engine.memory.recompute) == want
    assert choices["engine.memory.max_tokens"] == want[0]
    assert sorted(choices) == sorted(list_automatic(config))


def test_an_engine_without_recomputation_has_the_smallest_micro_batches(folder: Path) -> None:
    tree = DPO | {"data": DPO["data"] | {"max_length": 512}}
    config = configure(SFTConfig, folder, tree, memory={"max_tokens": "auto"})
    lacking = Launcher("cuda", free=12 * GIB, lacks=frozenset({Capability.RECOMPUTE}))
    _, choices = choose(config, lacking)
    assert choices["engine.memory.max_tokens"] == 4096


def test_a_teacher_with_prompts_of_its_own_has_room_for_them(folder: Path) -> None:
    teacher = {"engine": {"model": {"path": str(folder)}}}
    tree = RL | {"rollout": {"name": "local"}, "data": DPO["data"] | {"max_length": 512}}
    for algorithm, want in (({}, 4096), ({"teacher": teacher}, 16384)):
        config = configure(
            RLConfig, folder, tree | {"algorithm": algorithm}, memory={"max_tokens": "auto"}
        )
        _, choices = choose(config, Launcher("cuda", free=23.5 * GIB))
        assert choices["engine.memory.max_tokens"] == want


def test_a_configuration_that_nothing_was_chosen_for_says_auto(folder: Path) -> None:
    config = configure(SFTConfig, folder, DPO, memory={"max_tokens": "auto"})
    assert to_plain(config)["engine"]["memory"]["max_tokens"] == "auto"
    assert from_tree(SFTConfig, to_plain(config)) == config


def test_a_kept_micro_batch_that_longer_documents_do_not_fit_is_refused(folder: Path) -> None:
    def limited(longest: int | None) -> Any:
        tree = DPO | {"data": DPO["data"] | {"max_length": longest}}
        return configure(SFTConfig, folder, tree, memory={"max_tokens": "auto"})

    launcher = Launcher("cuda", free=30 * GIB)
    first, _ = settle(limited(512), launcher)
    assert first.engine.memory.max_tokens == 8192
    before = flatten(to_plain(first))
    for longest in (512, 8192):
        check_kept(*keep(limited(longest), before, "step-000007"), launcher)
    for longest in (8193, None):
        with pytest.raises(ConfigError, match=r"8192 \(as in step-000007\) is too small") as caught:
            check_kept(*keep(limited(longest), before, "step-000007"), launcher)
        assert caught.value.field == "engine.memory.max_tokens"
        assert f"set engine.memory.max_tokens={longest or 16384}" in caught.value.remedy


def test_documents_that_auto_makes_room_for_are_not_too_long_before_it_is_settled(
    folder: Path,
) -> None:
    for given, longest, budget in (
        ("auto", 20000, None),
        ("auto", None, 16384),
        (512, 20000, 512),
    ):
        tree = DPO | {"data": DPO["data"] | {"max_length": longest}}
        config = configure(SFTConfig, folder, tree, memory={"max_tokens": given})
        assert token_budget(config.engine.memory, config.data.max_length) == budget
        settled, _ = choose(config, Launcher("cpu"))
        assert settled.engine.memory.max_tokens >= (budget or longest or 0)


@pytest.mark.parametrize(
    ("device", "tree", "engine"),
    [
        ("cpu", DPO, {}),
        ("cuda", DPO, {"optimizer": None}),
        ("cuda", RL | {"rollout": {"name": "vllm", "sleep": False}}, {}),
    ],
)
def test_a_micro_batch_is_of_the_usual_size_where_nothing_is_estimated(
    folder: Path, device: str, tree: dict[str, Any], engine: dict[str, Any]
) -> None:
    cls = RLConfig if "reward" in tree else SFTConfig
    config = configure(cls, folder, tree, memory={"max_tokens": "auto"}, **engine)
    settled, choices = choose(config, Launcher(device))
    assert settled.engine.memory.max_tokens == 16384
    assert choices["engine.memory.max_tokens"] == 16384


@pytest.mark.parametrize(
    ("cls", "section"), [(DPOConfig, "dpo"), (KTOConfig, "kto")], ids=["dpo", "kto"]
)
def test_a_reference_on_an_engine_of_its_own_counts(folder: Path, cls: Any, section: str) -> None:
    """Between the bytes of the policy alone and those of both, which are 2.2 GiB more."""
    chosen = {}
    for reference in ("precomputed", "engine"):
        config = configure(cls, folder, DPO | {section: {"reference": reference}})
        _, choices = choose(config, Launcher("cuda", free=41 * GIB))
        chosen[reference] = choices["engine.memory.recompute"]
    assert chosen == {"precomputed": "none", "engine": "full"}


def test_ranks_on_one_device_share_its_memory(folder: Path) -> None:
    launcher = Launcher("cuda", ranks=2, free=60 * GIB)
    launcher.free = [replace(one, device="gpu0") for one in launcher.free]
    _, choices = choose(configure(SFTConfig, folder, DPO), launcher)
    assert choices["engine.memory.recompute"] == "full"


@pytest.mark.parametrize(
    ("lacks", "key", "want"),
    [
        (Capability.BF16, "engine.precision.compute", "float32"),
        (Capability.COMPILE, "engine.memory.compile", False),
        (Capability.RECOMPUTE, "engine.memory.recompute", "none"),
        (Capability.EXPORT_SHARDS, "rollout.name", "local"),
    ],
)
def test_nothing_is_chosen_that_the_engine_does_not_declare(
    folder: Path, lacks: Capability, key: str, want: Any
) -> None:
    launcher = Launcher("cuda", free=20 * GIB, lacks=frozenset({lacks}))
    _, choices = choose(configure(RLConfig, folder, RL), launcher)
    assert choices[key] == want


@pytest.mark.parametrize(
    "engine",
    [
        {"parallelism": {"tp": 2}},
        {"memory": {"offload_params": True}},
        {"optimizer": None},
    ],
)
def test_blocks_that_no_compilation_was_measured_for_are_not_compiled(
    folder: Path, engine: dict[str, Any]
) -> None:
    _, choices = choose(configure(SFTConfig, folder, DPO, **engine), Launcher("cuda"))
    assert choices["engine.memory.compile"] is False


@pytest.mark.parametrize("engine", [{}, {"optimizer": None}], ids=["trains", "only infers"])
def test_products_in_float8_are_compiled_for(folder: Path, engine: dict[str, Any]) -> None:
    launcher = Launcher("cuda")
    launcher.capabilities["fsdp2"] |= {Capability.FP8}
    given = {"precision": {"compute": "float8"}} | engine
    settled, choices = choose(configure(SFTConfig, folder, DPO, **given), launcher)
    assert choices["engine.memory.compile"] is True
    assert settled.engine.precision.compute == "float8"


def test_a_mixture_is_not_compiled(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    _, choices = choose(configure(SFTConfig, folder, DPO), Launcher("cuda"))
    assert choices["engine.memory.compile"] is False


def test_an_npu_computes_in_bfloat16_and_is_not_compiled_for(folder: Path) -> None:
    _, choices = choose(configure(SFTConfig, folder, DPO), Launcher("npu"))
    assert choices["engine.precision.compute"] == "bfloat16"
    assert choices["engine.memory.compile"] is False


@pytest.mark.parametrize(
    ("servers", "rollout", "want"),
    [
        (("vllm", "sglang"), {}, "vllm"),
        (("sglang",), {}, "sglang"),
        ((), {}, "local"),
        (("vllm",), {"device": "cpu"}, "local"),
    ],
)
def test_the_first_server_that_can_be_used_generates(
    folder: Path, servers: tuple[str, ...], rollout: dict[str, Any], want: str
) -> None:
    config = configure(RLConfig, folder, RL | {"rollout": rollout})
    settled, choices = settle(config, Launcher("cuda", servers=servers))
    assert settled.rollout.name == want
    if not servers:
        assert "not vllm: rollout 'vllm' is not installed" in choices[0].why


def test_a_run_that_generates_nothing_chooses_no_rollout(folder: Path) -> None:
    for cls in (SFTConfig, DPOConfig):
        _, choices = choose(configure(cls, folder, DPO), Launcher("cuda"))
        assert "rollout.name" not in choices


def test_a_server_that_stays_awake_has_the_rest_of_the_memory(folder: Path) -> None:
    config = configure(RLConfig, folder, RL | {"rollout": {"sleep": False}})
    _, choices = choose(config, Launcher("cuda"))
    assert choices["engine.memory.recompute"] == "full"


def test_a_critic_on_another_engine_has_choices_of_its_own(folder: Path) -> None:
    algorithm = {"advantage": "gae", "critic": {"backend": "megatron"}}
    others = {"megatron": frozenset({Capability.BF16, Capability.RECOMPUTE})}
    config = configure(RLConfig, folder, RL | {"algorithm": algorithm})
    settled, choices = choose(config, Launcher("cuda", others=others))
    assert choices["engine.memory.compile"] is True
    assert choices["algorithm.critic.memory.compile"] is False
    critic = settled.algorithm.critic.engine(settled.engine)
    assert critic.memory.compile is False
    assert critic.precision.compute == "bfloat16"


def test_a_teacher_on_another_engine_has_choices_of_its_own(folder: Path) -> None:
    teacher = {"engine": {"model": {"path": str(folder)}, "backend": "megatron"}}
    others = {"megatron": frozenset({Capability.RECOMPUTE})}
    config = configure(RLConfig, folder, RL | {"algorithm": {"teacher": teacher}})
    settled, choices = choose(config, Launcher("cuda", others=others))
    assert choices["engine.precision.compute"] == "bfloat16"
    assert choices["algorithm.teacher.engine.precision.compute"] == "float32"
    # It only infers.
    assert choices["algorithm.teacher.engine.memory.compile"] is False
    assert choices["algorithm.teacher.engine.memory.recompute"] == "none"
    own = to_plain(settled)["algorithm"]["teacher"]["engine"]
    assert "auto" not in json.dumps([own["precision"], own["memory"]])
    engine = settled.algorithm.teacher.engine.engine(settled.engine)
    assert engine.precision.compute == "float32"
    _, again = settle(settled, Launcher("cuda", others=others))
    assert again == []


ADAPTER = {"lora": "adapter"}


@pytest.mark.parametrize(
    ("rollout", "servers", "device", "want", "why"),
    [
        ({"routed_experts": "replay"}, ("vllm", "sglang"), "cuda", "vllm", "installed"),
        ({"routed_experts": "replay"}, ("sglang",), "cuda", "local", "it records no experts"),
        (ADAPTER, ("vllm", "sglang"), "cuda", "vllm", "installed"),
        (
            ADAPTER,
            ("sglang",),
            "cuda",
            None,
            "not sglang: it serves no adapters (rollout.lora); not local: it",
        ),
        (ADAPTER, ("vllm",), "cpu", "vllm", "not local: it serves no adapters"),
        ({"quantization": "fp8"}, ("sglang",), "cuda", "sglang", "not vllm: rollout 'vllm' is not"),
        ({"quantization": "fp8"}, (), "cuda", None, "not local: it does not serve fp8"),
        ({"quantization": "fp8"}, ("vllm",), "cpu", "vllm", "not local: it does not serve fp8"),
        ({"options": {"url": "http://a:1"}}, ("vllm",), "cuda", "vllm-server", "installed"),
        ({"options": {"url": "http://a:1"}}, (), "cuda", None, "not local: it has no option url"),
        ({"options": {"max_model_len": 9}}, (), "cuda", None, "local: it has no option max_model"),
        ({"options": {"dtype": "float16"}}, (), "cuda", "local", "not vllm"),
    ],
)
def test_a_rollout_is_chosen_that_does_what_is_asked(
    folder: Path, rollout: dict, servers: tuple[str, ...], device: str, want: str | None, why: str
) -> None:
    lora = {"lora": {"rank": 2, "alpha": 4}} if rollout == ADAPTER else {}
    config = configure(RLConfig, folder, RL | {"rollout": rollout}, **lora)
    launcher = Launcher(device, servers=servers)
    if want is None:
        with pytest.raises(ConfigError, match=r"rollout\.name: auto found no rollout") as caught:
            settle(config, launcher)
        assert why in caught.value.why
        return
    settled, choices = settle(config, launcher)
    assert settled.rollout.name == want
    assert why in choices[0].why


def test_the_options_of_a_server_are_those_of_its_descriptor() -> None:
    plugin = pytest.importorskip("rollout_fp8.plugin", reason="the servers' descriptors")
    given = {"max_model_len": 9, "executor": "workers", "dtype": "float16"}
    for name, descriptor, want in (
        ("vllm", plugin.VLLM, ""),
        ("sglang", plugin.SGLANG, "it has no option executor (rollout.options)"),
    ):
        assert why_unfit(RolloutSection(name=name, options=given), descriptor) == want


COMPANIONS = RL | {
    "algorithm": {"advantage": "gae", "critic": {"backend": "megatron"}},
    "rollout": {"routed_experts": "off"},
}


def test_a_run_that_continues_keeps_what_was_chosen(folder: Path) -> None:
    others = {"megatron": frozenset({Capability.BF16, Capability.RECOMPUTE})}
    config = configure(RLConfig, folder, COMPANIONS)
    first, choices = settle(config, Launcher("cuda", others=others))
    before = flatten(to_plain(first))
    # Less memory, and no server any more.
    later = Launcher("cuda", others=others, free=20 * GIB, servers=())
    assert settle(config, later)[0] != first

    again, kept = keep(config, before, "step-000007")
    assert again == first
    assert {one.key: one.value for one in kept} == {one.key: one.value for one in choices}
    assert str(kept[0]) == "rollout.name=vllm (as in step-000007)"
    assert settle(again, later) == (first, [])
    # An explicit value is the user's.
    given = configure(RLConfig, folder, COMPANIONS, memory={"recompute": "full"})
    assert keep(given, before, "there")[0].engine.memory.recompute == "full"
    assert keep(config, {}, "")[1] == []


def test_what_decays_depends_on_the_engine(folder: Path) -> None:
    decays = {"weight_decay": 0.1}
    config = configure(RLConfig, folder, RL, optimizer=decays)
    assert choose(config, Launcher("cuda"))[1]["engine.optimizer.decay"] == "matrices"
    others = Launcher("cuda", lacks=frozenset({Capability.PARAMETER_GROUPS}))
    assert choose(config, others)[1]["engine.optimizer.decay"] == "all"


def test_a_run_from_before_there_were_groups_goes_on_without_them(folder: Path) -> None:
    config = configure(RLConfig, folder, COMPANIONS, optimizer={"weight_decay": 0.1})
    others = {"megatron": FSDP}
    first, _ = settle(config, Launcher("cuda", others=others))
    before = flatten(to_plain(first))
    assert before.pop("engine.optimizer.decay") == "matrices"
    before.pop("algorithm.critic.optimizer.decay")
    again, kept = keep(config, fill_earlier(before), "step-000007")
    assert again.engine.optimizer is not None
    assert again.engine.optimizer.decay == "all"
    assert "engine.optimizer.decay=all (as in step-000007)" in [str(one) for one in kept]
    again, _ = settle(again, Launcher("cuda", others=others))
    now = flatten(to_plain(again))
    assert compare(fill_earlier(before), now, "there", list_defaults(config)) == []
    assert fill_earlier({}) == {}


@pytest.mark.parametrize(
    ("lacks", "servers", "key", "remedy"),
    [
        (Capability.COMPILE, ("vllm",), "engine.memory.compile", "engine.memory.compile=false"),
        (Capability.BF16, ("vllm",), "engine.precision.compute", "compute=float32"),
        (None, (), "rollout.name", "set rollout.name"),
    ],
)
def test_an_earlier_choice_that_is_no_longer_possible_is_refused_by_name(
    folder: Path, lacks: Capability | None, servers: tuple[str, ...], key: str, remedy: str
) -> None:
    config = configure(RLConfig, folder, RL)
    first, _ = settle(config, Launcher("cuda"))
    again, kept = keep(config, flatten(to_plain(first)), "step-000007")
    check_kept(again, kept, Launcher("cuda"))
    launcher = Launcher("cuda", servers=servers, lacks=frozenset({lacks} if lacks else ()))
    with pytest.raises(ConfigError, match=r"\(as in step-000007\)") as caught:
        check_kept(again, kept, launcher)
    assert caught.value.field == key
    assert remedy in caught.value.remedy


def test_the_keys_that_are_chosen_are_known_before(folder: Path) -> None:
    teacher = {"engine": {"model": {"path": str(folder)}, "backend": "megatron"}}
    others = {"megatron": FSDP}
    for tree in (COMPANIONS, RL | {"algorithm": {"teacher": teacher}}, RL | {"rollout": ADAPTER}):
        config = configure(RLConfig, folder, tree, lora={"rank": 2, "alpha": 4})
        _, choices = choose(config, Launcher("cuda", others=others))
        assert sorted(choices) == sorted(list_automatic(config))


def test_where_the_memory_is_unknown_the_line_says_why(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 9}))
    _, choices = settle(configure(SFTConfig, folder, DPO), Launcher("cuda"))
    (recompute,) = [one for one in choices if one.key == "engine.memory.recompute"]
    assert recompute.value == "none"
    assert recompute.why.startswith("unknown whether it fits: the configuration of a gpt2 has no")
    assert "intermediate_size" in recompute.why


def test_a_correction_of_overlap_is_decided_with_the_rollout(folder: Path) -> None:
    tree = RL | {
        "launcher": "ray",
        "ray": {"rollouts": 1},
        "overlap": {"mode": "one_step_off"},
    }
    config = configure(RLConfig, folder, tree)
    settled, _ = settle(config, Launcher("cuda"))
    assert settled.algorithm.correction.weight == "token"
    with pytest.raises(ConfigError, match="needs a correction"):
        settle(config, Launcher("cpu"))


def test_every_field_of_a_section_reaches_the_engine(folder: Path) -> None:
    config = configure(SFTConfig, folder, DPO, memory={"share_prefixes": True, "max_tokens": 5})
    built = config.engine.build(seed=0, total_steps=1)
    # The share is an option of the engine.
    shared = {one.name for one in fields(config.engine.memory)} - {"kept_activations"}
    assert shared == {f.name for f in fields(Memory)}
    assert (built.memory.share_prefixes, built.memory.max_tokens) == (True, 5)


def test_an_engine_takes_no_section_that_nothing_was_chosen_for(folder: Path) -> None:
    section = configure(SFTConfig, folder, DPO).engine
    parts = {"precision": section.precision, "memory": section.memory}
    for name, key in {"precision": "precision.compute", "memory": "memory.recompute"}.items():
        with pytest.raises(ConfigError, match=key):
            EngineConfig(model=section.model, **{name: parts[name]})
    explicit = replace(section.memory, recompute="none", logit_chunk=4096)
    with pytest.raises(ConfigError, match=r"memory\.compile: expected true or false, got 'auto'"):
        EngineConfig(model=section.model, memory=explicit)


def kept(family: str, dtype: torch.dtype, layers: int, **sizes: Any) -> tuple[int, Any]:
    """Return the bytes that autograd keeps of 64 tokens beside the weights, and the sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=layers,
        **sizes,
    )
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").model
    weights = {one.untyped_storage().data_ptr() for one in lm.parameters()}
    found: dict[int, int] = {}
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        # The result lives until the bytes are counted.
        result = lm(input_ids=torch.arange(64)[None], use_cache=False)
        count = sum(found.values())
    del result
    return count, config


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {}),
        ("llama", {}),
        (
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_of_a_block_is_what_autograd_keeps_of_it(
    family: str, sizes: dict[str, int], dtype: torch.dtype
) -> None:
    less, _ = kept(family, dtype, 1, **sizes)
    more, config = kept(family, dtype, 3, **sizes)
    measured = (more - less) / 2 / 64
    decoder = Decoder.of(config)
    assert decoder is not None
    estimate = decoder.kept_by_block(dtype.itemsize)
    # Never less than what is kept, and not much more.
    assert 0.8 * estimate <= measured <= estimate


# Peaks of training on an H200 in docs/benchmarks.md, in GiB: one GPU, compiled, nothing recomputed.
MEASURED = [
    (1024, 3072, 0.596e9, 8192, 19.7),
    (1024, 3072, 0.596e9, 16384, 29.4),
    (1024, 3072, 0.596e9, 32768, 48.9),
    (2048, 6144, 1.72e9, 8192, 38.9),
    (2048, 6144, 1.72e9, 32768, 85.4),
]


@pytest.mark.parametrize(("hidden", "inner", "parameters", "tokens", "peak"), MEASURED)
def test_the_estimate_of_a_run_is_above_its_measured_peak_and_near_it(
    hidden: int, inner: int, parameters: float, tokens: int, peak: float
) -> None:
    sizes = SMALL | {"hidden_size": hidden, "intermediate_size": inner}
    decoder = Decoder.of(SimpleNamespace(**sizes, to_dict=lambda: sizes))
    assert decoder is not None
    built = EngineConfig(
        model=ModelSource(path="none"),
        precision=Precision(compute="bfloat16"),
        memory=Memory(max_tokens=tokens, compile=True),
    )
    need = 16 * parameters + decoder.gathered(built) + decoder.micro_batch(built, recompute=False)
    assert peak <= need / GIB <= 1.4 * peak


def test_a_rank_gathers_no_experts_but_its_own() -> None:
    sizes = {key: value for key, value in MIXTURE.items() if key != "model_type"}
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    assert experts
    decoder = Decoder.of(config)
    assert decoder is not None
    alone, spread = (
        decoder.gathered(
            EngineConfig(
                model=ModelSource(path="none"),
                precision=Precision(compute="bfloat16"),
                parallelism=Parallelism(ep=ep),
            )
        )
        for ep in (1, 4)
    )
    # Copies of two blocks in bfloat16, and a gradient of all blocks in float32.
    assert alone - spread == pytest.approx(0.75 * experts * (2 * 2 / decoder.shape.layers + 4))


def test_experts_count_whichever_key_a_family_has_for_their_number() -> None:
    rest = {key: value for key, value in MIXTURE.items() if key != "num_experts"}
    shapes = set()
    for key in EXPERT_KEYS:
        sizes = rest | {key: 8}
        decoder = Decoder.of(SimpleNamespace(**sizes, to_dict=lambda sizes=sizes: sizes))
        assert decoder is not None
        shapes.add(decoder.shape)
    assert [shape.experts for shape in shapes] == [8]


def test_a_model_of_other_sizes_has_no_estimate() -> None:
    text = SimpleNamespace(model_type="odd", to_dict=dict)
    assert Decoder.of(text) is None
