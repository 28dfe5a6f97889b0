"""Heads that predict further tokens (MTP), which are kept as the model's folder has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_folders import HEAD, assert_kept, write_folder

from engine_api import LoraConfig
from engine_conformance.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LORA = LoraConfig(rank=2, alpha=4.0)
SPLIT = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("family", "parallelism", "config"),
    [
        ("deepseek_v3", {}, {}),
        ("glm4_moe", {}, {"lora": LORA}),
        ("deepseek_v3", {"pp": 2}, {}),
        ("glm4_moe", {"tp": 2}, {"options": SPLIT, "dtype": torch.bfloat16}),
        ("deepseek_v3", {"ep": 2}, {"lora": LORA}),
    ],
    ids=["alone", "adapted", "stages", "split", "experts adapted"],
)
def test_the_head_is_written_as_it_is_and_again_after_a_resume(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    family: str,
    parallelism: dict[str, int],
    config: dict[str, Any],
) -> None:
    written = write_folder(tmp_path / "model", family)
    ranks: RankPool = request.getfixturevalue("pool" if parallelism else "one")
    exported, *_ = ranks.run(
        "mtp_ranks:train_and_save",
        path=str(written.folder),
        backend="megatron",
        scratch=str(tmp_path),
        parallelism=parallelism,
        **config,
    )
    for name in ("saved", "resumed"):
        assert_kept(tmp_path / name, written, exported)


def test_a_head_whose_file_is_missing_is_refused_on_every_rank(
    pool: RankPool, tmp_path: Path
) -> None:
    written = write_folder(tmp_path / "model", "deepseek_v3")
    (written.folder / HEAD).unlink()
    for error in pool.run("mtp_ranks:refuse", path=str(written.folder), backend="megatron"):
        assert HEAD in error
        assert f"{len(written.head)} weights of the MTP head" in error
