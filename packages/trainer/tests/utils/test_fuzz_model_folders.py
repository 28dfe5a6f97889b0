"""Fuzz tests of model folders.

``local`` and the readers of a folder's tokenizer and configuration accept it or refuse it with a
typed error.
"""

from __future__ import annotations

import pytest
from damaged_folders import DAMAGES, damaged, whole_folder
from fuzzing import fuzz
from hypothesis import given

from engine_api.config import ModelSource
from engine_api.errors import EngineError
from engine_api.registry import RolloutRegistry
from engine_trainer.config.sections import DataSection
from engine_trainer.data import positions_of
from engine_trainer.data.chat import load_tokenizer
from engine_trainer.utils.hf_models import random_rates


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokenizer_of):
    folder = whole_folder(tmp_path_factory.mktemp("whole"), "qwen3")
    tokenizer_of().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers, about what it finds in a damaged file
@fuzz(cost=2)
@given(damages=DAMAGES)
def test_a_damaged_folder_is_refused_by_a_typed_error_or_taken(tmp_path_factory, whole, damages):
    source = ModelSource(
        path=str(damaged(whole, tmp_path_factory.getbasetemp() / "damaged", damages))
    )
    for call in (
        lambda: RolloutRegistry.create(
            name="local", device="cpu", model=source, pad_token_id=0
        ).close(),
        lambda: positions_of(source),
        lambda: random_rates(source),
        lambda: load_tokenizer(DataSection(source="unread", train_on="last"), source),
    ):
        try:
            call()
        except EngineError as error:
            refused = error
            assert refused.what
