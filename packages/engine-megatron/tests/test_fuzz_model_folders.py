"""Damaged model folders, which are read or refused by a typed error."""

from __future__ import annotations

import pytest
import torch
from damaged_folders import DAMAGES, damaged, whole_folder
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from engine_api.config import ModelSource
from engine_api.errors import EngineError
from engine_api.hf_folder import WeightFiles
from engine_megatron.parallel import Layout
from engine_megatron.shape import read_hf_config, refuse_other_models, shape_of
from engine_megatron.weights import check_layout, weight_table

LAYOUT = Layout(world=1, rank=0, tensor=1, data=1, stages=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {
        name: whole_folder(tmp_path_factory.mktemp(name), name) for name in ("qwen3", "qwen3_moe")
    }


# transformers warns about the contents of a damaged file.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@fuzz()
@given(family=st.sampled_from(["qwen3", "qwen3_moe"]), damages=DAMAGES)
def test_a_damaged_folder_is_refused_by_a_typed_error_or_read(
    tmp_path_factory, whole, family, damages
):
    folder = damaged(whole[family], tmp_path_factory.getbasetemp() / "damaged", damages)
    try:
        config = read_hf_config(ModelSource(path=str(folder)), str(folder))
        refuse_other_models(config)
        shape = shape_of(config, "language_model")
        check_layout(shape, LAYOUT, 1)
        table = weight_table(shape, LAYOUT, 1, torch.float32)
        WeightFiles(str(folder)).check({weight.name: weight.shape for weight in table})
    except EngineError as error:
        refused = error
        assert refused.remedy
