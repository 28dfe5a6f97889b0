"""Every family against transformers in float64, one document at a time, whole and sharded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from config_changes import LLAMA3, YARN, change_keys
from family_checks import Expected, compare, drawn_experts, expected, score, write
from family_ranks import infer
from tiny_models import WINDOW, documents, log_probs, oracle
from torch import Tensor, nn

from engine_api.config import LoraConfig
from engine_api.weights import assemble
from engine_conformance.ranks import RankPool
from engine_megatron.shape import FAMILIES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LATENT = {"head_dim": 8, "num_key_value_heads": 4}
FACTORS = {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "attention_multiplier": 0.2}
# No scores are dropped in training.
WHOLE = {"attention_dropout": 0.0, "residual_dropout": 0.0}

ALONE: dict[str, int] = {}
SPLIT = {"sequence_parallel": True}
DENSE = [({"tp": 2}, {}), ({"tp": 2}, SPLIT), ({"pp": 2}, {}), ({"cp": 2}, {}), (ALONE, {})]
EXPERTS = [({"tp": 2}, SPLIT), ({"ep": 2}, {}), ({"pp": 2}, {}), ({"cp": 2}, {}), (ALONE, {})]
# Experts with biases are whole.
BIASED = [
    ({"tp": 2}, SPLIT | {"expert_tensor_parallel": 1}),
    ({"tp": 2, "ep": 2}, SPLIT | {"expert_tensor_parallel": 1}),
    *EXPERTS[1:],
]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A tiny model: its type in transformers, and the keys that differ from the tiny ones.

    Attributes:
        layouts: parallelism and options to compute it with.
        now: number of the layout that is computed in CI, or None for `nox -s nightly` alone.
        adapted: whether adapters are computed in CI, too, in that layout.
    """

    family: str
    keys: dict[str, Any] = field(default_factory=dict)
    layouts: list[tuple[dict[str, int], dict[str, Any]]] = field(default_factory=lambda: DENSE)
    now: int | None = None
    adapted: bool = False


MODELS = {
    "llama": Model(
        family="llama",
        keys={"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
        now=0,
        adapted=True,
    ),
    "llama, biased MLP": Model(
        family="llama",
        keys={
            "mlp_bias": True,
            "rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0},
        },
    ),
    "cwm": Model(family="cwm"),
    "seed_oss": Model(family="seed_oss", keys=WHOLE | {"attention_out_bias": True}),
    "ministral": Model(
        family="ministral", keys={"layer_types": ["sliding_attention", "full_attention"] * 2}
    ),
    "mistral": Model(family="mistral"),
    "granite": Model(family="granite", keys=FACTORS | {"attention_bias": True, "mlp_bias": True}),
    "granite_swa": Model(
        family="granite_swa",
        keys=FACTORS | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        now=1,
    ),
    "qwen2": Model(
        family="qwen2",
        keys={"use_sliding_window": True, "max_window_layers": 1, "rope_parameters": YARN}
        | {"sliding_window": WINDOW},
        now=3,
    ),
    "qwen3": Model(family="qwen3", keys={"attention_bias": True}),
    "mixtral": Model(family="mixtral", layouts=EXPERTS),
    "qwen2_moe": Model(
        family="qwen2_moe",
        keys={"use_sliding_window": True, "sliding_window": WINDOW, "mlp_only_layers": [2]},
        layouts=EXPERTS,
        now=0,
        adapted=True,
    ),
    "qwen3_moe": Model(
        family="qwen3_moe", keys={"decoder_sparse_step": 2, "norm_topk_prob": True}, layouts=EXPERTS
    ),
    "gpt_oss": Model(family="gpt_oss", layouts=BIASED, now=0),
    "dots1": Model(
        family="dots1", keys={"norm_topk_prob": True, "max_window_layers": 2}, layouts=EXPERTS
    ),
    "glm4_moe": Model(
        family="glm4_moe",
        keys={"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
        layouts=EXPERTS,
        now=2,
    ),
    "deepseek_v3": Model(
        family="deepseek_v3",
        keys=LATENT
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 8},
        layouts=EXPERTS,
        now=0,
        adapted=True,
    ),
    "moonlight": Model(
        family="deepseek_v3",
        keys=LATENT | {"q_lora_rank": None, "rms_norm_eps": 1e-2, "n_shared_experts": 2},
        layouts=EXPERTS,
    ),
    # Without experts tensor parallelism needs no sequence parallelism.
    "dense latent attention": Model(
        family="deepseek_v3", keys=LATENT | {"first_k_dense_replace": 4}, layouts=DENSE[:1]
    ),
}


def _runs(*, adapted: bool = False) -> list[Any]:
    """Return a parameter for each model and layout."""
    return [
        pytest.param(
            name,
            *layout,
            marks=()
            if number == model.now and (model.adapted or not adapted)
            else pytest.mark.nightly,
            id=f"{name}-{'-'.join(f'{key}{value}' for key, value in layout[0].items()) or 'alone'}"
            + ("-sp" if layout[1] else ""),
        )
        for name, model in MODELS.items()
        for number, layout in enumerate(model.layouts)
    ]


def _write(folder: Path, model: Model) -> str:
    return write(folder, model.family, model.keys)


def _expected(folder: Path, model: Model, *, replays: bool = False) -> Expected:
    return expected(folder, model.family, model.keys, replays=replays)


@pytest.fixture(scope="module")
def ids() -> list[list[int]]:
    return [one.tolist() for one in documents()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """Return the function that writes and computes a model once."""
    return cache(lambda name: _expected(tmp_path_factory.mktemp("model") / "model", MODELS[name]))


@pytest.mark.parametrize(("name", "parallelism", "options"), _runs())
def test_a_family_is_computed_as_in_transformers(
    request: pytest.FixtureRequest,
    written: Callable[[str], Expected],
    ids: list[list[int]],
    name: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
) -> None:
    want = written(name)
    ranks: RankPool = request.getfixturevalue("pool" if parallelism else "one")
    results = ranks.run(
        "family_ranks:compute",
        path=want.path,
        parallelism=parallelism,
        options=options,
        documents=ids,
    )
    compare(results, want, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "deepseek_v3" else pytest.mark.nightly)
        for name, model in MODELS.items()
        if model.layouts in (EXPERTS, BIASED)
    ],
)
def test_replayed_experts_are_computed_as_in_transformers(
    pool: RankPool, tmp_path: Path, ids: list[list[int]], name: str
) -> None:
    """The router's gradient is among those that are compared."""
    model = MODELS[name]
    want = _expected(tmp_path / "model", model, replays=True)
    parallelism, options = model.layouts[0]
    results = pool.run(
        "family_ranks:compute",
        path=want.path,
        parallelism=parallelism,
        options=options,
        documents=ids,
        experts=drawn_experts(want.path),
        router_replay=True,
    )
    compare(results, want, name)


LORA = LoraConfig(rank=3, alpha=4.5)


class Adapted(nn.Module):
    """A linear layer with an adapter, ``W x + alpha / rank · B A x``."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(a.double())
        self.b = nn.Parameter(b.double())

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = x @ self.a.T
        result: Tensor = self.base(x) + LORA.alpha / LORA.rank * (low @ self.b.T)
        return result


def adapted_oracle(path: str, adapter: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Return transformers' model in float64 with adapters, and their parameters by PEFT's names.

    Each linear layer but the head must have one in ``adapter``.
    """
    model = oracle(path)
    own: dict[str, Tensor] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            a, b = (f"base_model.model.{name}.lora_{part}.weight" for part in "AB")
            adapted = Adapted(module, adapter[a], adapter[b])
            model.set_submodule(name, adapted)
            own |= {a: adapted.a, b: adapted.b}
    assert set(adapter) == set(own)
    return model, own


@pytest.mark.parametrize(("name", "parallelism", "options"), _runs(adapted=True))
def test_adapters_on_every_linear_layer_of_a_family_are_exact(
    request: pytest.FixtureRequest,
    written: Callable[[str], Expected],
    ids: list[list[int]],
    name: str,
    parallelism: dict[str, int],
    options: dict[str, Any],
) -> None:
    """The gradients of the second step are those of A, too: B was zero before the first."""
    want = written(name)
    ranks: RankPool = request.getfixturevalue("pool" if parallelism else "one")
    results = ranks.run(
        "family_ranks:adapt",
        path=want.path,
        parallelism=parallelism,
        options=options,
        documents=ids,
        lora=LORA,
    )
    first = results[0]
    for before, after in pairwise(first["adapters"]):
        model, parameters = adapted_oracle(want.path, before)
        exact = [score(model, torch.tensor(one), sum(map(len, ids)) - len(ids)) for one in ids]
        norm = float(torch.stack([one.grad.norm() for one in parameters.values()]).norm())
        for key, parameter in parameters.items():
            apart = (before[key].double() - after[key].double() - parameter.grad).norm()
            size = max(float(parameter.grad.norm()), 1e-3 * norm)
            assert float(apart) < 1e-3 * size, f"gradient of {key}: {apart / size:.1e}"
    scale = LORA.alpha / LORA.rank
    trained = first["adapters"][1]
    for result in results:
        for one, step in zip(result["adapters"], first["adapters"], strict=True):
            assert_same(one, step, "adapter")
        assert_same(result["base"], want.saved, "base")
        assert_close(result["off"], want.log_probs)
        assert_close(result["on"], exact)
        for key, tensor in result["merged"].items():
            stem = f"base_model.model.{key.removesuffix('.weight')}"
            exact_weight = want.saved[key].double()
            if f"{stem}.lora_A.weight" in trained:
                a, b = (trained[f"{stem}.lora_{part}.weight"].double() for part in "AB")
                exact_weight = exact_weight + scale * (b @ a)
            torch.testing.assert_close(tensor.double(), exact_weight, atol=1e-6, rtol=1e-6)
    for parts in zip(*(result["shards"] for result in results), strict=True):
        whole = assemble([(part, spec) for _, part, spec in parts])
        torch.testing.assert_close(whole, first["merged"][parts[0][0]], atol=1e-6, rtol=1e-6)


def assert_close(got: dict[int, Tensor], want: list[Tensor]) -> None:
    """Compare log-probs by document."""
    for number, outputs in got.items():
        torch.testing.assert_close(outputs.double(), want[number], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    "name", ["gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.nightly)]
)
def test_a_training_goes_on_in_another_engine_layout_and_format(
    pool: RankPool, tmp_path: Path, ids: list[list[int]], name: str
) -> None:
    """Experts that are saved as one tensor, and biases that are saved and not trained."""
    path = _write(tmp_path / "model", MODELS[name])
    for found in pool.run(
        "family_ranks:pass_on", path=path, documents=[*ids, ids[0]], scratch=str(tmp_path)
    ):
        for same in ("one elsewhere", "one again"):
            assert_same(found[same], found["one"], same)
        assert_same(found["two again"], found["two"], "two again")
        assert_same(found["two in stages"], found["two elsewhere"], "two in stages")
        for key, tensor in found["two"].items():
            torch.testing.assert_close(
                tensor,
                found["two elsewhere"][key],
                atol=2e-4,
                rtol=1e-3,
                msg=lambda m, k=key: k + m,
            )


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], about: str) -> None:
    """Compare weights bit for bit."""
    assert set(got) == set(want)
    changed = [name for name, tensor in got.items() if not torch.equal(tensor, want[name])]
    assert not changed, f"{about}: {changed[:3]}"


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_of_a_configuration_is_followed_or_refused(
    tmp_path: Path, ids: list[list[int]], family: str
) -> None:
    base = next(model for model in MODELS.values() if model.family == family)
    wrong: list[str] = []
    for number, (key, value) in enumerate(change_keys(family, base.keys)):
        folder = tmp_path / str(number)
        try:
            path = _write(folder, Model(family=family, keys=base.keys | {key: value}))
            exact = oracle(path)
            want = torch.cat([log_probs(exact, torch.tensor(one)) for one in ids])
        # transformers refuses some values, each in its own way.
        except Exception:  # noqa: BLE001
            continue
        try:
            refused, got = infer(path, ids)
        except Exception as error:  # noqa: BLE001 - it is a result
            wrong.append(f"{key}={value!r}: {type(error).__name__}: {error}")
            continue
        if got is not None and not float((got.double() - want).abs().max()) < 1e-4:
            wrong.append(f"{key}={value!r}")
        print(family, key, value, refused or "right")
        shutil.rmtree(folder)
    assert not wrong
