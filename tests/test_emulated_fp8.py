"""Emulated FP8 of tiny models, by which rollouts in FP8 are judged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from emulated_fp8 import EmulatedFp8, round_inputs
from tiny_models import documents, log_probs, oracle
from tiny_rollouts import make_served_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from zoo import NEAR_MEAN, TIMES

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def test_inputs_are_rounded_in_groups_of_a_token() -> None:
    inputs = torch.cat([torch.full((1, 128), 448.0), torch.full((1, 72), 0.3)], 1)
    inputs[0, 1] = 17.0
    inputs[0, 129] = 0.0
    rounded = round_inputs(inputs)
    # 17 lies halfway between 16 and 18, numbers of 3 bits, and the even one is 16.
    assert rounded[0, 1] == 16
    torch.testing.assert_close(rounded[0, 128:], inputs[0, 128:])


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_rounding_moves_log_probs_less_than_a_fault_does(tmp_path: Path, model_type: str) -> None:
    make_served_model(model_type, tmp_path / "model", "cuda")
    folder = str(tmp_path / "model")
    exact = oracle(folder)
    model = oracle(folder, dtype=torch.float32)
    before = {name: one.clone() for name, one in model.named_parameters()}
    rounding = EmulatedFp8(model, ARCHITECTURES[model_type])
    changed = {
        name.rpartition(".layers.")[2].partition(".")[2]
        for name, one in model.named_parameters()
        if not torch.equal(one, before[name])
    }
    assert all("proj" in name for name in changed)
    assert any("experts.gate_up_proj" in name for name in changed) == (model_type != "qwen3")
    rounded = []
    for ids in documents():
        weights_alone = log_probs(model, ids)
        with rounding:
            rounded.append(log_probs(model, ids))
        assert not torch.equal(rounded[-1], weights_alone)
    # Each of its layers' weights has its columns in another order.
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter, before[name]):
            parameter.data.copy_(parameter.data.roll(1, -1))
    with rounding:
        faulty = [log_probs(model, ids) for ids in documents()]
    exact_ones = torch.cat([log_probs(exact, ids) for ids in documents()])
    by_rounding = float((torch.cat(rounded) - exact_ones).abs().mean())
    by_fault = float((torch.cat(faulty) - exact_ones).abs().mean())
    assert by_rounding > 0.02
    # The limit of a rollout (tools/zoo.py).
    assert by_fault > TIMES["fp8"] * by_rounding + NEAR_MEAN["fp8"]
