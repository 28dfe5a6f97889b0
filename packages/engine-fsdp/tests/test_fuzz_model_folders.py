"""Fuzzed model folders, which the engine trains with or refuses by a typed error."""

from __future__ import annotations

import pytest
from damaged_folders import DAMAGES, damaged, whole_folder
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from engine_api import Batch, EngineConfig, EngineRegistry, ModelSource, OptimizerConfig, sft_loss
from engine_api.errors import EngineError

BATCH = Batch.pack(
    [
        {"input_ids": [1, 0, 2], "loss_weight": [0.0, 1.0, 1.0]},
        {"input_ids": [2, 1], "loss_weight": [0.0, 1.0]},
    ]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {
        name: whole_folder(tmp_path_factory.mktemp(name), name) for name in ("qwen3", "qwen3_moe")
    }


# transformers warns about the contents of a damaged file.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@fuzz(cost=4)
@given(
    family=st.sampled_from(["qwen3", "qwen3_moe"]),
    init=st.sampled_from(["pretrained", "random"]),
    damages=DAMAGES,
)
def test_a_damaged_folder_is_refused_by_a_typed_error_or_trained(
    tmp_path_factory, whole, family, init, damages
):
    folder = damaged(whole[family], tmp_path_factory.getbasetemp() / "damaged", damages)
    source = ModelSource(path=str(folder), init=init)
    config = EngineConfig(model=source, optimizer=OptimizerConfig(lr=1e-3))
    engine = EngineRegistry.create(backend="fsdp2", device="cpu", config=config)
    try:
        engine.initialize()
        assert engine.train_batch(BATCH, sft_loss).num_tokens == 5
    except EngineError as error:
        refused = error
        assert refused.remedy
    finally:
        engine.close()
