"""The page that tools/zoo.py writes from results of GPUs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import zoo
from tiny_rollouts import keep_larger

MEASURED = {
    "vllm": "0.26.0",
    "transformers": "5.17.0",
    "torch": "2.11.0+cu130",
    "gpu": "NVIDIA H200",
    "date": "2026-11-27",
}
RIGHT = {
    "status": "right",
    "log_probs": 0.02,
    "greedy": 0.0,
    "mean": 0.004,
    "plain": 0.003,
    "audited": False,
    "served_as": "Qwen3MoeForCausalLM",
}
TAKEN = {zoo.LAYOUTS[0]: {"status": "right"}}


def test_rollouts_on_a_gpu_have_a_column_of_each_precision_with_versions_and_date() -> None:
    refused = {"status": "refused", "why": "vLLM did not start: no such class"}
    record = {
        zoo.SEEN: {"none": MEASURED, "fp8": MEASURED | {"date": "2026-11-28"}},
        "types": {
            "qwen3_moe": TAKEN | {zoo.SEEN: {"none": RIGHT, "fp8": RIGHT | {"audited": True}}},
            "afmoe": TAKEN | {zoo.SEEN: {"none": refused}},
            "llama": TAKEN,
            "mamba3": {zoo.LAYOUTS[0]: {"status": "refused"}},
        },
    }
    introduction, rows = zoo._vllm_on_gpu(record)
    seen = "\nas seen on one NVIDIA H200, vLLM 0.26.0"
    assert f"bf16: 2 of 3 types tried, 1 right, 1 refused,{seen}" in introduction
    assert f"2026-11-27;\nFP8: 1 of 3 types tried, 1 right,{seen}" in introduction
    assert "| `qwen3_moe` | right, 4e-03 (3e-03), not every tensor audited |" in rows
    assert "| right, 4e-03 (3e-03) |" in rows
    assert "| `afmoe` | refused: vLLM did not start: no such class |" in rows
    assert "llama" not in rows


def test_types_that_were_refused_alone_are_not_counted_as_served() -> None:
    rows = {"afmoe": {"fp8": {"status": "refused"}}, "mamba2": {"fp8": {"status": "unmade"}}}
    counted = "2 of 3 types tried, none right, 1 refused, 1 without a tiny model"
    assert zoo._count_seen(rows, "fp8", 3) == counted


@pytest.mark.parametrize(
    ("change", "expected"), [({}, ["llama"]), ({"torch": "2.12.0"}, ["afmoe", "llama", "qwen3"])]
)
def test_a_measurement_on_a_gpu_goes_on_with_the_types_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], expected: list[str]
) -> None:
    """A row of other versions is measured again."""
    record = tmp_path / "zoo.json"
    versions = {
        "vllm": "0.26.0",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "gpu": "NVIDIA H200",
    }
    types = {
        "afmoe": TAKEN | {zoo.SEEN: {"none": RIGHT}},
        "llama": TAKEN | {zoo.SEEN: {"fp8": RIGHT}},
        "qwen3": TAKEN | {zoo.SEEN: {"none": RIGHT}},
        "mamba3": {zoo.LAYOUTS[0]: {"status": "refused"}},
    }
    record.write_text(json.dumps({zoo.SEEN: {"none": versions | change}, "types": types}))
    monkeypatch.setattr(zoo, "RECORD", record)
    monkeypatch.setattr(zoo, "_version_of_vllm", lambda _: "0.26.0")
    monkeypatch.setattr(zoo, "_name_of_gpu", lambda: "NVIDIA H200")
    measured: list[str] = []

    def measure(model_type: str, *_: str) -> dict[str, Any]:
        measured.append(model_type)
        return RIGHT

    monkeypatch.setattr(zoo, "_measure_alone", measure)
    arguments = argparse.Namespace(types=[], quantization="none", device="cuda", lanes=2)
    assert zoo._measure_rollouts_on_gpu(arguments) == 0
    after = json.loads(record.read_text())
    assert after[zoo.SEEN]["none"].items() >= versions.items()
    assert after["types"]["llama"][zoo.SEEN] == {"fp8": RIGHT, "none": RIGHT}
    assert sorted(measured) == expected


def test_a_page_without_results_of_a_gpu_has_no_section_of_them() -> None:
    assert zoo._vllm_on_gpu({"types": {"llama": {}}}) == []


def test_a_difference_that_is_no_number_is_not_forgotten_for_a_later_one() -> None:
    found = {"log_probs": 0.0, "engine": 0.0}
    keep_larger(found, {"log_probs": math.nan, "engine": 2e-6})
    keep_larger(found, {"log_probs": 1e-6, "engine": 1e-6})
    assert found == {"log_probs": math.inf, "engine": 2e-6}
