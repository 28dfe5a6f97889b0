"""Models that vLLM has no class of its own for, served with transformers' class in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import SERVED_SIZES, tiny_model
from tiny_rollouts import NEAR, make_served_model
from vllm_peers import DEVICE, require_error

from engine_api.errors import ConfigError, RolloutError
from engine_conformance.ranks import RankPool, get_pool

# The weights are engine-fsdp's on the CPU, and so is the server.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(DEVICE != "cpu", reason="compares vLLM's CPU build"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("backend") / "model", "starcoder2")


def write(folder: Path, model_type: str, **changes: Any) -> str:
    tiny_model(model_type, sizes=SERVED_SIZES, **changes).save_pretrained(folder)
    return str(folder)


def call(name: str, **arguments: Any) -> Any:
    (found,) = get_pool(1, device=DEVICE).run(f"backend_peers:{name}", deadline=280, **arguments)
    return found


@pytest.mark.slow
def test_the_engines_model_of_the_class_stays_as_it_was(folder: str) -> None:
    found = call("compare_engine", folder=folder)
    assert found["classes"] == []
    assert found["log_probs"] == 0.0
    assert found["later"] == 0.0
    # vLLM's own are new.
    assert set(found["attention"]) <= {"vllm", "vllm_mla"}
    before, after = found["config"]
    assert before == after != "vllm"


@pytest.mark.slow
def test_compilation_is_refused(folder: str) -> None:
    error = call("refuse", folder=folder, enforce_eager=False)
    require_error(error, ConfigError, "rollout.options.enforce_eager", "Starcoder2ForCausalLM")
    assert "change that class for the whole process" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [True, False])
def test_a_version_that_changes_classes_in_another_way_is_refused(
    folder: str, missing: bool
) -> None:
    error = call("refuse_other_version", folder=folder, missing=missing)
    require_error(error, RolloutError, "unknown way", "_decorate_cls_for_torch_compile")


@pytest.mark.slow
def test_a_class_that_is_changed_all_the_same_is_named(folder: str) -> None:
    # This process has the changed class until its end.
    with RankPool(1, device=DEVICE) as pool:
        (error,) = pool.run("backend_peers:refuse_changed_class", deadline=280, folder=folder)
    require_error(error, RolloutError, "changed for the whole process", "Starcoder2Model")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mask": 0}, "masks"),
        ({"s_aux": 0}, "sinks"),
        ({"sliding_window": None}, "windows of SimpleNamespace are None in transformers, and 16"),
        ({"softcap": 30.0}, "caps of scores"),
        ({"heads": 4}, "keys of SimpleNamespace are 32 in transformers, and 16"),
        ({"shape": (2, 16)}, "sizes of heads of SimpleNamespace are 16 in transformers, and 8"),
        ({"is_causal": False}, "causal scores of SimpleNamespace are False in transformers"),
        ({"scaling": None}, "scales of scores of SimpleNamespace are 0.353553 in transformers"),
    ],
)
def test_attention_that_vllm_would_compute_differently_is_refused(
    given: dict[str, Any], words: str
) -> None:
    for in_module in (True, False):
        assert words in call("attend", given=given, in_module=in_module)
        assert call("attend", given={}, in_module=in_module) is None


def test_a_scale_that_vllm_gives_its_layer_in_no_call_is_refused() -> None:
    given = {"scaling": 0.5}
    words = "scales of scores of SimpleNamespace are 0.5 in transformers, and 1.0"
    assert words in call("attend", given=given, in_module=True)
    # Before 0.32 vLLM gives it the scale of each call.
    assert call("attend", given=given, in_module=False) is None


@pytest.mark.parametrize(
    ("text", "served", "words"),
    [
        ({"final_logit_softcapping": 30.0}, {}, "capped at [30.0] in transformers, and at None"),
        ({}, {"cap": 30.0}, "capped at None in transformers, and at 30.0"),
        ({"logits_scaling": 8.0}, {}, "multiplied by 0.125 in transformers, and by 1.0"),
        ({"logit_scale": 2.0}, {"scale": 4.0}, "multiplied by 2.0 in transformers, and by 4.0"),
        ({}, {"attends": False}, "layers [0]"),
    ],
)
def test_a_part_of_the_model_that_vllm_passes_over_is_found(
    text: dict[str, Any], served: dict[str, Any], words: str
) -> None:
    (found,) = call("find_faults", text=text, **served)
    assert words in found


def test_heads_that_vllm_computes_are_no_fault() -> None:
    assert call("find_faults", text={}) == []
    caps = {"final_logit_softcapping": 30.0, "logit_scale": None}
    assert call("find_faults", text=caps, cap=30.0) == []
    assert call("find_faults", text={"logits_scaling": 8.0}, scale=0.125) == []


@pytest.mark.slow
def test_frequencies_that_transformers_changes_with_the_longest_sequence_are_refused(
    tmp_path: Path,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    written = write(
        tmp_path / "model", "starcoder2", rope_parameters=rope, max_position_embeddings=128
    )
    error = call("refuse", folder=written, max_model_len=256)
    require_error(error, RolloutError, "has a table of 128 positions for 256")
    assert error.remedy == "rollout.options.max_model_len of at most 128"
    assert call("refuse", folder=written, max_model_len=128) is None


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["jetmoe", "moshi"])
def test_a_family_that_the_backend_does_not_serve_rightly_is_refused_by_name(
    tmp_path: Path, model_type: str
) -> None:
    make_served_model(model_type, tmp_path / "model")
    error = call("refuse", folder=str(tmp_path / "model"))
    require_error(error, RolloutError, "no class of its own", "ForCausalLM", "rollout.name=local")


@pytest.mark.slow
def test_two_ranks_that_share_a_server_are_near_the_engine(folder: str) -> None:
    rows = get_pool(2, device=DEVICE).run(
        "backend_peers:compare_shared", deadline=280, folder=folder
    )
    for audited, apart in rows:
        assert audited
        assert apart < NEAR


def test_workers_which_compare_no_attention_are_refused(folder: str) -> None:
    error = call("refuse", folder=folder, executor="workers")
    require_error(error, ConfigError, "rollout.options.executor", "Starcoder2ForCausalLM")


@pytest.mark.slow
def test_a_class_that_was_not_compared_on_two_ranks_is_refused(tmp_path: Path) -> None:
    written = write(tmp_path / "model", "olmo2")
    for error in get_pool(2, device=DEVICE).run(
        "backend_peers:refuse", deadline=280, folder=written, tensor_parallel_size=2
    ):
        name = "rollout.options.tensor_parallel_size"
        require_error(error, ConfigError, name, "Olmo2ForCausalLM")


@pytest.mark.slow
def test_an_adapter_is_served_as_the_engine_has_it(tmp_path: Path) -> None:
    # It has the names of layers that the adapter is for.
    make_served_model("smollm3", tmp_path / "model")
    ((found, _),) = get_pool(1, device=DEVICE).run(
        "adapter_peers:on_ranks", deadline=280, model=str(tmp_path / "model")
    )
    assert found.sync.audited
    for completion, told in zip(found.drawn, found.told, strict=True):
        assert completion.log_probs == pytest.approx(told, abs=NEAR)


@pytest.mark.slow
def test_an_fp8_cache_is_refused_before_vllm_starts(folder: str) -> None:
    error = call("refuse", folder=folder, kv_cache_dtype="fp8")
    require_error(error, ConfigError, "rollout.options.kv_cache_dtype", "got fp8")
