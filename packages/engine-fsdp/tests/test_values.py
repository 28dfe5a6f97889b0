"""Value models: a head that a language model gets, and adapters."""

from __future__ import annotations

from pathlib import Path

from value_checks import check_adapters, check_new_head


def test_a_language_model_gets_a_head_that_transformers_reads(tmp_path: Path) -> None:
    check_new_head("fsdp2", tmp_path)


def test_adapters_are_in_the_values_and_in_the_saved_folder(tmp_path: Path) -> None:
    check_adapters("fsdp2", tmp_path)
