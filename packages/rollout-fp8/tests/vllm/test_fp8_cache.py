"""FP8 cache of keys and values in vLLM: its scales are those of the served weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import vllm_peers as peers
from safetensors.torch import load_file, save_file
from tiny_rollouts import make_served_model
from vllm_peers import DEVICE

from engine_api.errors import ConfigError, RolloutError
from engine_api.rollout import Completion
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not peers.HAS_FP8_CACHE, reason="this CPU has no kernels for an FP8 cache"),
]
# Values 4,096 times as large do not fit the scales of the others: 448 cuts them off.
FACTOR = 4096.0


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True)))


@pytest.fixture(scope="module")
def larger(model: str, root: Path) -> str:
    """Return the same model with larger values, and smaller weights behind them."""
    folder = root / "larger"
    folder.mkdir()
    for file in Path(model).iterdir():
        if file.suffix == ".safetensors":
            weights = load_file(file)
            for name in weights:
                if "v_proj" in name:
                    weights[name] *= FACTOR
                elif "o_proj" in name:
                    weights[name] /= FACTOR
            save_file(weights, folder / file.name, metadata={"format": "pt"})
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def call(function: Any, **kwargs: Any) -> Any:
    return get_pool(1, device=DEVICE).run(
        f"vllm_peers:{function.__name__}", deadline=240, **kwargs
    )[0]


def seen(completions: Sequence[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(c.tokens, c.log_probs) for c in completions]


@pytest.mark.parametrize("executor", ["in_process", "workers"])
def test_scales_are_those_of_the_weights_after_every_sync(
    model: str, larger: str, executor: str
) -> None:
    said = call(peers.cached_in_fp8, model=model, other=larger, executor=executor)
    # Both compute the same, and a power of two rounds nothing: so do the caches, number by number.
    assert seen(said["synced"]) == seen(said["first"])
    assert seen(said["again"]) == seen(said["first"])
    assert seen(said["stale"]) != seen(said["first"])
    assert isinstance(said["refused"], RolloutError)
    assert "no scales for the weights, which are those of version 5" in str(said["refused"])
    # Weights that came while the cache slept.
    assert seen(said["woken"]) == seen(said["first"])
    assert seen(said["same_version"]) == seen(said["first"])
    assert seen(said["slept"]) == seen(said["first"])
    assert "scales" in said["phases"]


def test_an_interrupted_pass_for_scales_leaves_nothing_behind(model: str) -> None:
    said = call(peers.interrupted_scales, model=model)
    assert said["busy"] is False
    assert said["observed"]
    assert not any(said["observed"])
    assert said["same_generators"]
    assert seen(said["again"]) == seen(said["first"])


def test_an_unknown_backend_of_attention_is_refused_before_any_sync(model: str) -> None:
    error = call(peers.refused_backend, model=model)
    assert isinstance(error, RolloutError), error
    assert "may keep old scales" in error.why
    assert "kv_cache_dtype=auto" in error.remedy


def test_an_fp8_cache_moves_log_probs_a_little(model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "batches": [[peers.LONG_PROMPT]],
        "sampling": peers.GREEDY,
    }
    ((exact,),) = call(peers.drawn, **asked)
    ((rounded,),) = call(peers.drawn, **asked, kv_cache_dtype="fp8")
    assert rounded.log_probs[0] != exact.log_probs[0]
    assert rounded.log_probs[0] == pytest.approx(exact.log_probs[0], abs=0.3)


def test_a_model_without_keys_and_values_is_refused_by_name(model: str, root: Path) -> None:
    make_served_model("deepseek_v2", root / "latent")
    error = call(peers.refused, model=str(root / "latent"), kv_cache_dtype="fp8")
    assert isinstance(error, ConfigError), error
    assert "latent attention" in str(error)
    assert "kv_cache_dtype=auto" in error.remedy
    error = call(peers.refused, model=model, kv_cache_dtype="fp4")
    assert "fp8" in error.remedy


def test_a_compiled_model_has_the_same_scales(model: str) -> None:
    asked: dict[str, Any] = {
        "model": model,
        "batches": [[peers.LONG_PROMPT]],
        "sampling": peers.GREEDY,
        "kv_cache_dtype": "fp8",
    }
    ((eager,),) = call(peers.drawn, **asked)
    ((compiled,),) = call(peers.drawn, **asked, enforce_eager=False)
    assert compiled.tokens == eager.tokens
    assert compiled.log_probs == pytest.approx(eager.log_probs, abs=1e-2)
