"""Model folders, and the names of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_api.hf_folder import fetch
from engine_api.registry import EngineRegistry


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert fetch(ModelSource(path=str(tmp_path))) == str(tmp_path)


def test_a_model_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch(ModelSource(path="no such model/at all/anywhere"))
    assert caught.value.field == "model.path"


def test_the_older_name_means_the_same_engine() -> None:
    rows = [EngineRegistry.resolve(backend=name, device="cpu").row for name in ("fsdp", "fsdp2")]
    assert rows[0] == rows[1]
