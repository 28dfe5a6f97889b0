"""Images of prompts in vLLM, compared with transformers and the engine.

``ROLLOUT_TEST_TORCHVISION`` names a folder with torchvision, where it is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pictured_models import save_pictured_model
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, tiny_pictured_model
from tiny_rollouts import NEAR
from vllm_peers import DEVICE, require_error
from zoo import NEAR_MEAN, TIMES

from engine_api.config import LoraConfig
from engine_api.errors import ConfigError, RolloutError, UnsupportedCapability
from engine_conformance.ranks import RankPool

PLACE = os.environ.get("ROLLOUT_TEST_TORCHVISION")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        PLACE is None and importlib.util.find_spec("torchvision") is None, reason="torchvision"
    ),
]
ON_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="vLLM's CPU build does not serve it")
FAMILIES = [
    pytest.param("qwen2_5_vl", {"tie_word_embeddings": True}, id="qwen2_5_vl-tied"),
    pytest.param("qwen2_vl", {}, id="qwen2_vl"),
    pytest.param("qwen2_5_vl", {}, marks=pytest.mark.nightly, id="qwen2_5_vl"),
    pytest.param("qwen3_vl", {}, id="qwen3_vl"),
    pytest.param("internvl", {}, id="internvl"),
    pytest.param("gemma3", {}, marks=ON_A_GPU, id="gemma3"),
]

# Families with linear attention, which vLLM's CPU build computes in bf16 alone.
HYBRIDS = [
    pytest.param("qwen3_5", {}, id="qwen3_5"),
    pytest.param("qwen3_5", {"tie_word_embeddings": True}, id="qwen3_5-tied"),
    pytest.param("qwen3_5_moe", {}, id="qwen3_5_moe"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Return a rank that finds torchvision, which others do not."""
    added = [] if PLACE is None else [PLACE]
    sys.path[:0] = added
    try:
        with RankPool(1, device=DEVICE) as ranks:
            yield ranks
    finally:
        for place in added:
            sys.path.remove(place)


def call(pool: RankPool, name: str, folder: Path, **arguments: Any) -> Any:
    (found,) = pool.run(f"vision_peers:{name}", deadline=280, folder=str(folder), **arguments)
    return found


def make(folder: Path, family: str, **changes: Any) -> Path:
    return save_pictured_model(folder, family, make_tokenizer(), served=True, **changes)


def make_tokenizer() -> Any:
    """Return a tokenizer of as many words as the models have tokens, but for those of images."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Gemma 3's placeholder is told from the line breaks around it.
    breaks = ["\n" * count for count in range(1, 5)]
    words = [*breaks, *(f"t{i}" for i in range(VOCABULARY - 4 - len(breaks)))]
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("pictured") / "model", "qwen2_5_vl")


@pytest.fixture(scope="module")
def found(pool: RankPool, folder: Path) -> dict[str, Any]:
    return call(pool, "behaviour", folder)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_log_probs_behind_images_are_transformers_and_the_engines_after_every_sync(
    tmp_path: Path, pool: RankPool, family: str, changes: dict[str, Any]
) -> None:
    """One sync changes the tower and its projector alone, which features kept by vLLM outlive."""
    apart = call(pool, "compare", make(tmp_path / "model", family, **changes))
    assert apart["audited"]
    assert apart["log_probs"] < NEAR
    assert apart["engine"] < NEAR
    assert apart["banned"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), HYBRIDS)
def test_in_bf16_log_probs_behind_images_and_text_are_as_near_to_float64_as_transformers(
    tmp_path: Path, pool: RankPool, family: str, changes: dict[str, Any]
) -> None:
    """One sync changes the tower alone, another one also each weight of the linear attention."""
    apart = call(pool, "compare_in_bf16", make(tmp_path / "model", family, **changes))
    for row in apart["rows"]:
        assert row["mean"] < TIMES["none"] * row["plain"] + NEAR_MEAN["none"], row
    assert apart["banned"] == 0
    # vLLM's CPU build keeps experts packed, and convolutions where the CPU computes in bf16.
    packed = DEVICE == "cpu" and ("moe" in family or torch.cpu._is_avx512_bf16_supported())
    assert packed or apart["audited"]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["vision_tower.", "vision_tower.vision_model."])
def test_a_siglip_tower_is_synced_under_the_names_of_either_folder(
    tmp_path: Path, pool: RankPool, start: str
) -> None:
    """vLLM has the latter alone, and transformers writes the former for a model that it makes."""
    folder = make(tmp_path / "model", "gemma3")
    weights = load_file(folder / "model.safetensors")
    level = "vision_tower.vision_model."
    assert not any(name.startswith(level) for name in weights)
    renamed = {name.replace("vision_tower.", start, 1): one for name, one in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert call(pool, "sync_audited", folder)


@pytest.mark.slow
def test_nothing_of_a_closed_rollout_is_left_and_another_begins(
    pool: RankPool, folder: Path
) -> None:
    """vLLM 0.26 keeps a model with a tower in a table and in caches of its methods."""
    call(pool, "one_after_another", folder)


@pytest.mark.slow
def test_no_completion_has_a_token_of_an_image_or_a_video(found: dict[str, Any]) -> None:
    """Nearly each token is as likely as any other at a temperature of 50."""
    tokens = {token for one in found["flat"] for token in one.tokens}
    assert not tokens & set(found["special"])
    assert len(tokens) > 50
    assert not {*found["greedy at images"][0].tokens} & set(found["special"])


def test_a_prompt_without_images_is_completed_as_in_a_batch_of_text(found: dict[str, Any]) -> None:
    among = [one.tokens for one in found["mixed"] if one.prompt_index in (1, 3)]
    assert [one.tokens for one in found["text"]] == among


def test_the_images_decide_about_the_completion_and_its_draw(found: dict[str, Any]) -> None:
    first, second = found["pictures"][:2], found["pictures"][2:]
    assert [one.log_probs for one in first] != [one.log_probs for one in second]
    assert [one.tokens for one in found["second"]] == [one.tokens for one in second]


def test_images_that_are_not_those_of_their_prompt_are_refused_and_it_goes_on(
    found: dict[str, Any],
) -> None:
    require_error(found["errors"]["none"], RolloutError, "prompt 0 has 0 images of 0 features")
    require_error(found["errors"]["few"], RolloutError, "expected images for 4 prompts")
    require_error(found["errors"]["cut"], RolloutError, "prompt 0 has 2 images of 5 features")
    assert [one.tokens for one in found["after"]] == [one.tokens for one in found["mixed"]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_in_fp8_vllm_quantizes_the_language_model_and_leaves_the_tower(
    tmp_path: Path, pool: RankPool, family: str
) -> None:
    """FP8 itself needs a GPU: the layers are those that vLLM's configuration names."""
    layers = call(pool, "quantized_layers", make(tmp_path / "model", family))
    tower = {quantized for name, quantized in layers.items() if name.startswith("visual.")}
    rest = {quantized for name, quantized in layers.items() if not name.startswith("visual.")}
    assert (tower, rest) == ({False}, {True})


def test_other_ids_than_those_of_the_prompt_are_an_error_that_names_the_first(
    found: dict[str, Any],
) -> None:
    require_error(found["other ids"], RolloutError, "at place 0 of a prompt", "rollout.name=local")


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="the loop's engine is on the CPU here")
def test_the_loop_trains_on_what_vllm_generates_behind_images(
    tmp_path: Path, pool: RankPool
) -> None:
    """The log-probs of the step are those of the rollout: the engine has the same pixels."""
    rows = call(pool, "train", make(tmp_path / "model", "qwen2_5_vl"))
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/rms"] < NEAR
        # Three completions of three images.
        assert row["train/images"] == 9
        assert row["sync/audited"] == 1
    assert rows[0]["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"truncation": False}, "rollout.options.truncation"),
        ({"lora": LoraConfig(rank=2)}, "rollout.lora"),
    ],
)
def test_an_option_that_does_not_go_with_a_tower_is_refused(
    pool: RankPool, folder: Path, arguments: dict[str, Any], key: str
) -> None:
    error = call(pool, "refused", folder, **arguments)
    require_error(error, ConfigError, key, "for a model with a vision tower")


def test_the_language_model_of_a_tied_model_is_served_tied_on_cuda(pool: RankPool) -> None:
    own = {"rope_theta": 1e5}
    (tied,) = pool.run("vision_peers:overrides_of", device="cuda", tied=True)
    assert tied == {"text_config": {**own, "tie_word_embeddings": True}}
    (untied,) = pool.run("vision_peers:overrides_of", device="cuda", tied=False)
    assert untied == {"text_config": own}
    # Its CPU build reloads a tied head only as a weight of its own.
    (on_cpu,) = pool.run("vision_peers:overrides_of", device="cpu", tied=True)
    assert on_cpu == {"text_config": own, "tie_word_embeddings": False}


def test_without_torchvision_the_remedy_is_to_install_it(pool: RankPool, folder: Path) -> None:
    error = call(pool, "refused_without_torchvision", folder)
    require_error(error, RolloutError, "torchvision", "--torch-backend cpu")


@pytest.mark.slow
def test_a_folder_without_a_processor_is_refused_with_the_files_to_copy(
    tmp_path: Path, pool: RankPool
) -> None:
    place = make(tmp_path / "model", "qwen2_5_vl")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (place / name).unlink(missing_ok=True)
    require_error(call(pool, "refused", place), RolloutError, "preprocessor_config.json")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_positions_that_vllm_would_not_interleave_are_refused(
    tmp_path: Path, pool: RankPool, family: str
) -> None:
    place = make(tmp_path / "model", family)
    config = json.loads((place / "config.json").read_text())
    del config["text_config"]["rope_parameters"]["mrope_interleaved"]
    (place / "config.json").write_text(json.dumps(config))
    require_error(
        call(pool, "refused", place), ConfigError, "mrope_interleaved", "engine.model.path"
    )


def test_a_family_whose_tower_no_test_has_compared_is_refused_by_name(
    tmp_path: Path, pool: RankPool
) -> None:
    from transformers import LlavaConfig

    LlavaConfig().save_pretrained(tmp_path / "model")
    error = call(pool, "refused", tmp_path / "model")
    require_error(error, UnsupportedCapability, "llava", "no test has compared its tower")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        pytest.param(
            "gemma3",
            "attend in both directions",
            marks=pytest.mark.skipif(DEVICE != "cpu", reason="refused on a CPU alone"),
        ),
        ("qwen3_vl_moe", "vLLM cannot load its experts again"),
    ],
)
def test_a_family_that_vllm_does_not_serve_rightly_is_refused_by_name(
    tmp_path: Path, pool: RankPool, family: str, reason: str
) -> None:
    tiny_pictured_model(family).config.save_pretrained(tmp_path / "model")
    error = call(pool, "refused", tmp_path / "model")
    require_error(error, RolloutError, f"no rollout of a {family}", reason, "rollout.name=local")
