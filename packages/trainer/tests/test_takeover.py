"""Runs that change engine and layout between checkpoints and end like an unchanged run."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from layout import ROOT
from safetensors.torch import load_file

from engine_api.comm import SingleComm
from engine_api.devices import SIMULATED_CUDA
from engine_api.errors import ConfigError
from engine_api.manifest import read_manifest
from engine_conformance.cases._state import read_state
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_conformance.ranks import RankPool
from engine_trainer.config import RLConfig
from engine_trainer.config.loading import load_config
from engine_trainer.placement.spmd import Spmd
from engine_trainer.rl.loop import train_rl
from engine_trainer.telemetry.logs import read_metrics

STEPS = 8
NEAR = 2e-4  # of a tensor's largest element
FSDP = ["engine.backend=fsdp2"]
TP, PP = "engine.parallelism.tp=2", "engine.parallelism.pp=2"
MEGATRON = ["engine.backend=megatron"]
# The module of the library that an engine wraps, by backend. An absent one is not compared.
LIBRARIES = {
    "megatron": "megatron",
    "veomni": "veomni",
    "torchtitan": "torchtitan",
    "automodel": "nemo_automodel",
}
# Overrides of a backend's run on two ranks.
DIVIDED = {
    "megatron": [TP],
    "veomni": ["engine.parallelism.ulysses=2"],
    "torchtitan": [TP],
    "automodel": [TP],
}
# Whose figures say where the trainer stands: they must be the same, not nearly so.
EXACT = ("step", "train/lr", "train/epoch", "train/tokens", "train/learned_tokens", "train/skipped")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
if not importlib.util.find_spec("megatron"):
    pytest.skip("megatron-core is an extra", allow_module_level=True)

Launch = Callable[..., None]
Pools = Callable[[int], RankPool]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
RECIPES = ROOT / "recipes"
# What makes a recipe small enough for a CPU, whichever engine runs it.
SMALL = {
    "sft/gsm8k.yaml": [
        "batch_size=4",
        "eval.every=1",
        "eval.max_problems=4",
        "rollout.max_new_tokens=6",
    ],
    "rl/gsm8k_grpo.yaml": [
        "algorithm.prompts_per_step=4",
        "rollout.n=4",
        "rollout.max_new_tokens=6",
        "eval.every=1",
        "eval.max_problems=4",
        "reward.name=vowels",
        "reward.workers=0",
        "reward.timeout_s=null",
    ],
    "quickstart/rl.yaml": [
        "data.source=null",
        "data.reasoning_gym.skip=0",
        "data.reasoning_gym.size=16",
        "data.reasoning_gym.heldout_size=4",
        "algorithm.prompts_per_step=4",
        "rollout.n=4",
        "rollout.max_new_tokens=6",
        "eval.source=null",
        "eval.every=1",
        "reward={name: vowels, workers: 0, timeout_s: null}",
    ],
}
CLOCKS = re.compile(r"time$|time/|perf/|sync/.*_s$")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pools]:
    """As many ranks as are asked for, where CUDA is simulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIMULATED_CUDA, "1")
        pools: dict[int, RankPool] = {}
        yield lambda world: pools.setdefault(world, RankPool(world, deadline=280.0))
        for one in pools.values():
            one.close()


@pytest.fixture
def launch(pool: Pools) -> Launch:
    """Runs the trainer."""

    def run(kind: str, file: Path, world: int, *overrides: str) -> None:
        pool(world).run("takeover_ranks:run", kind=kind, file=str(file), overrides=list(overrides))

    return run


@pytest.fixture
def file(sft_file: Path, model_folder: Path) -> Path:
    """Return an SFT configuration whose model two tensor-parallel ranks or two stages can divide.

    Its schedule does not end with a part of the run.
    """
    config = yaml.safe_load(sft_file.read_text())
    config["engine"] |= {
        "device": "cpu",
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-5},
        "schedule": {"name": "cosine", "warmup_steps": 2, "total_steps": STEPS},
    }
    config["engine"]["model"]["init"] = "random"
    (model_folder / "config.json").write_text(
        json.dumps(json.loads((model_folder / "config.json").read_text()) | SHAPE)
    )
    sft_file.write_text(yaml.safe_dump(config))
    return sft_file


def checkpoint(folder: Path, part: str = "") -> Path:
    return folder / "checkpoints" / part / (folder / "checkpoints" / "latest").read_text().strip()


def assert_same_state(got: Path, want: Path) -> None:
    """Compare weights, both moments and step counts, and the loop's state exactly.

    Tensors are compared relative to their largest element.
    """
    left, right = read_state(got), read_state(want)
    assert set(left) == set(right)
    assert any(key.endswith(".exp_avg_sq") for key in left)
    for key, whole in right.items():
        bound = 0.0 if key.endswith(".step") else NEAR * float(whole.abs().max())
        assert float((left[key] - whole).abs().max()) <= bound, key
    assert read_manifest(got).step == read_manifest(want).step
    assert read_manifest(got).extra["loop"] == read_manifest(want).extra["loop"]


@pytest.mark.nightly
def test_sft_goes_from_fsdp_through_megatrons_layouts_and_back(
    file: Path, tmp_path: Path, launch: Launch
) -> None:
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    launch("sft", file, 2, f"run.output_dir={alone}", f"run.steps={STEPS}", *FSDP)
    parts = [
        (2, FSDP),
        (2, [*MEGATRON, TP]),
        (2, [*MEGATRON, PP]),
        (4, [*MEGATRON, TP, PP]),
        (2, FSDP),
    ]
    ends = [2, 3, 5, 6, STEPS]
    for end, (world, overrides) in zip(ends, parts, strict=True):
        launch(
            "sft",
            file,
            world,
            f"run.output_dir={moved}",
            f"run.steps={end}",
            "run.keep=0",
            *overrides,
        )
    left, right = (read_metrics(folder / "metrics.jsonl") for folder in (moved, alone))
    assert [[row.get(key) for key in EXACT] for row in left] == [
        [row.get(key) for key in EXACT] for row in right
    ]
    for row, other in zip(left[1:], right[1:], strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert row[key] == pytest.approx(other[key], rel=1e-4), f"{key} of step {row['step']}"
    assert right[-1]["train/loss"] < 0.9 * right[1]["train/loss"], (
        "it learns, so that a lost moment shows"
    )
    assert_same_state(checkpoint(moved), checkpoint(alone))
    weights, others = (load_file(folder / "hf" / "model.safetensors") for folder in (moved, alone))
    assert set(weights) == set(others)
    for name, whole in others.items():
        assert float((weights[name] - whole).abs().max()) <= NEAR * float(whole.abs().max()), name
    writers = [
        json.loads(path.read_text())["engine"]
        for path in sorted(moved.glob("checkpoints/*/manifest.json"))
    ]
    assert writers == ["engine-fsdp", *["engine-megatron"] * 3, "engine-fsdp"]


@pytest.fixture
def overrides(model_folder: Path, tmp_path: Path) -> list[str]:
    """Return overrides for a model with weights and for problems in GSM8K's layout.

    A run takes two steps in float32, so that figures can be compared.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**json.loads((model_folder / "config.json").read_text()) | SHAPE)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(model_folder)
    for name in ("train", "test"):
        rows = [
            {"question": f"{name}: {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
            for n in range(12)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"engine.model.path={model_folder}",
        f"data.source={tmp_path}",
        f"eval.source={tmp_path}",
        "engine.device=cpu",
        "engine.precision.compute=float32",
        "engine.optimizer.lr=1e-3",
        "engine.optimizer.eps=1e-5",
        "run.epochs=null",
        "run.steps=2",
        "run.progress=false",
        "run.tensorboard=false",
        "run.report=false",
    ]


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("recipe", SMALL)
def test_a_recipe_gives_the_same_figures_with_another_backend(
    recipe: str,
    backend: str,
    overrides: list[str],
    tmp_path: Path,
    launch: Launch,
) -> None:
    """Compare fsdp2 with another engine, chosen by ``engine.backend`` alone, and with its layout.

    The figures are all metrics of two steps: of RL also the rollout's log-probs against the
    engine's.
    """
    pytest.importorskip(LIBRARIES[backend])
    kind = "sft" if recipe.startswith("sft/") else "rl"
    given = [*overrides, *SMALL[recipe]]
    other = [f"engine.backend={backend}"]
    rows: dict[str, list[dict[str, float]]] = {}
    for name, world, engine in (
        ("fsdp2", 1, FSDP),
        ("one rank", 1, other),
        ("two ranks", 2, [*other, *DIVIDED[backend]]),
    ):
        launch(kind, RECIPES / recipe, world, f"run.output_dir={tmp_path / name}", *given, *engine)
        found = read_metrics(tmp_path / name / "metrics.jsonl")
        rows[name] = [
            {key: value for key, value in row.items() if not CLOCKS.match(key)} for row in found
        ]
    assert any(row.get("train/grad_norm", 0.0) > 0 for row in rows["fsdp2"]), (
        "there is something to learn"
    )
    for name in ("one rank", "two ranks"):
        assert [set(row) for row in rows[name]] == [set(row) for row in rows["fsdp2"]]
        for row, want in zip(rows[name], rows["fsdp2"], strict=True):
            assert row == pytest.approx(want, rel=1e-3, abs=1e-4), f"{name}, step {row['step']}"


@pytest.mark.nightly
def test_rl_goes_to_another_engine_and_back_on_more_ranks_with_another_rollout(
    overrides: list[str], tmp_path: Path, launch: Launch
) -> None:
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    recipe = RECIPES / "rl/gsm8k_grpo.yaml"
    given = [*overrides, *SMALL["rl/gsm8k_grpo.yaml"], "algorithm.correction.weight=token"]
    launch("rl", recipe, 1, *given, f"run.output_dir={alone}", "run.steps=6", *FSDP)
    parts = [(2, 1, FSDP), (4, 1, MEGATRON), (6, 2, FSDP)]
    for end, world, engine in parts:
        launch("rl", recipe, world, *given, f"run.output_dir={moved}", f"run.steps={end}", *engine)

    rows, others = (
        [
            {key: value for key, value in row.items() if not CLOCKS.match(key)}
            for row in read_metrics(folder / "metrics.jsonl")
        ]
        for folder in (moved, alone)
    )
    assert [row["step"] for row in rows] == list(range(7))
    for row, want in zip(rows, others, strict=True):
        # A rank of two has half of the completions, and no other figure counts ranks.
        assert row == pytest.approx(want, rel=2e-3, abs=2e-4), f"step {row['step']}"
    assert_same_state(checkpoint(moved), checkpoint(alone))

    coarse = "rollout.options={dtype: bfloat16}"
    launch("rl", recipe, 1, *given, f"run.output_dir={moved}", "run.steps=7", *MEGATRON, coarse)

    last = read_metrics(moved / "metrics.jsonl")[-1]
    assert last["step"] == 7
    assert last["mismatch/kl_k3"] > 100 * abs(rows[-1]["mismatch/kl_k3"]), (
        "the new rollout rounds, and the figures of the correction show it"
    )
    assert last["train/grad_norm"] > 0


def value_folder(tmp_path: Path) -> Path:
    """A value model of the policy's shape, with a head that is not small."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    config = AutoConfig.from_pretrained(tmp_path / "model", num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path / "values")
    return tmp_path / "values"


PPO = [
    "algorithm.advantage=gae",
    "algorithm.lam=0.9",
    "algorithm.mini_batches=2",
    "eval=null",
    "algorithm.critic={backend: fsdp2, optimizer: {lr: 1.0e-3, eps: 1.0e-5}, epochs: 2}",
]
ON_MEGATRON = ["algorithm.critic.backend=megatron", "algorithm.critic.parallelism={tp: 2}"]
WHOLE = ["algorithm.critic.parallelism={tp: 1}"]


@pytest.mark.parametrize(
    ("policy", "critic"),
    [([*MEGATRON, TP], WHOLE), ([*MEGATRON, PP], WHOLE), (FSDP, ON_MEGATRON)],
    ids=["tp", "pp", "critic"],
)
def test_a_policy_and_a_critic_of_different_data_parallel_sizes_and_engines_agree_with_one_rank(
    policy: list[str], critic: list[str], overrides: list[str], tmp_path: Path, launch: Launch
) -> None:
    """Compare one data-parallel rank with two; with stages, the last one knows the loss."""
    # Engines initialize a new head differently, so the critic starts from a folder with a head.
    values = f"algorithm.critic.model={{path: {value_folder(tmp_path)}}}"
    given = [*overrides, *SMALL["rl/gsm8k_grpo.yaml"], *PPO, values]
    recipe, rows = RECIPES / "rl/gsm8k_grpo.yaml", {}
    for name, world, engines in (("one", 1, FSDP), ("two", 2, [*policy, *critic])):
        launch("rl", recipe, world, f"run.output_dir={tmp_path / name}", *given, *engines)
        found = read_metrics(tmp_path / name / "metrics.jsonl")
        rows[name] = [
            {key: value for key, value in row.items() if not CLOCKS.match(key)} for row in found
        ]
    assert all(row["critic/updates"] == 4 and row["critic/grad_norm"] > 0 for row in rows["one"])
    for row, want in zip(rows["two"], rows["one"], strict=True):
        assert row == pytest.approx(want, rel=1e-3, abs=1e-4), f"step {row['step']}"
    for part in ("", "critic"):
        left, right = (read_state(checkpoint(tmp_path / name, part)) for name in ("two", "one"))
        assert set(left) == set(right)
        for key, whole in right.items():
            assert float((left[key] - whole).abs().max()) <= 2e-3 * float(whole.abs().max()), key


def test_two_megatron_engines_of_different_sizes_are_refused_before_anything_is_loaded(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIMULATED_CUDA, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    # There is no other rank.
    monkeypatch.setattr(
        "engine_trainer.placement.spmd.connect_ranks", lambda timeout_s: SingleComm()
    )
    monkeypatch.setattr(Spmd, "engines", lambda *_: pytest.fail("an engine was made"))
    given = [
        *overrides,
        *SMALL["rl/gsm8k_grpo.yaml"],
        *PPO,
        *MEGATRON,
        *ON_MEGATRON,
        "reward.name=exact",
    ]
    with pytest.raises(ConfigError, match="data-parallel ranks alone, got tp 2") as caught:
        train_rl(load_config(RLConfig, RECIPES / "rl/gsm8k_grpo.yaml", given))
    assert caught.value.field == "algorithm.critic.parallelism"


# Layouts of two ranks from which weights are sent, by backend.
SYNCED: dict[str, dict[str, list[dict[str, int]]]] = {
    "megatron": {"dense": [{"pp": 2}, {"tp": 2}], "experts": [{"pp": 2}, {"ep": 2}]},
    "veomni": {"dense": [{}], "experts": [{}]},
    "torchtitan": {"dense": [{}, {"tp": 2}], "experts": [{}, {"ep": 2}]},
    "automodel": {"dense": [{}, {"tp": 2}], "experts": [{}, {"ep": 2}]},
}


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("backend", SYNCED)
def test_a_sync_sends_the_same_bits_from_every_engine_and_layout(
    backend: str, experts: int, quantization: str, tmp_path: Path, pool: Pools
) -> None:
    pytest.importorskip("rollout_fp8")
    pytest.importorskip(LIBRARIES[backend])
    # In two parts, queries and MLP are whole blocks of 128 rows, keys and values are not.
    moe = (
        {"family": "qwen3_moe", "num_experts": experts, "moe_intermediate_size": 128}
        if experts
        else {}
    )
    model = write_checkpoint(
        tmp_path / "model",
        TinyModel(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            **moe,
        ),
    )
    given = {"path": str(model), "quantization": quantization}
    want = pool(2).run("takeover_ranks:wire", backend="fsdp2", layout={}, **given)[0]
    assert quantization == "none" or any(
        dtype == "torch.float8_e4m3fn" for dtype, _ in want.values()
    )
    for layout in SYNCED[backend]["experts" if experts else "dense"]:
        got = pool(2).run("takeover_ranks:wire", backend=backend, layout=layout, **given)[0]
        assert set(got) == set(want)
        assert {name: dtype for name, (dtype, _) in got.items()} == {
            name: dtype for name, (dtype, _) in want.items()
        }
        assert not [name for name in want if not torch.equal(got[name][1], want[name][1])], layout
