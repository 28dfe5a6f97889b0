"""Experts that vLLM reports, compared with those that transformers' routers select."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_peers import DEVICE

from engine_api.errors import UnsupportedCapability
from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import get_pool

pytestmark = [pytest.mark.distributed]


def model(root: Path, family: str) -> str:
    target = Target(backend="vllm", device=DEVICE, root=root, rollout=True)
    return str(rollout_model(target, family=family))


@pytest.mark.skipif(DEVICE == "cpu", reason="vLLM's CPU build records no experts")
@pytest.mark.parametrize("executor", ["in_process", "workers"])
def test_recorded_experts_are_those_that_the_routers_select(root: Path, executor: str) -> None:
    ((first, again, want),) = get_pool(1, device=DEVICE).run(
        "vllm_peers:recorded", deadline=280, model=model(root, "qwen3_moe"), executor=executor
    )
    for c, cached, experts in zip(first, again, want, strict=True):
        assert c.routed_experts.shape == experts.shape
        assert (c.routed_experts[-1] == -1).all()
        # The order in which an expert's output is added is the server's own.
        ours, theirs = (one[:-1].long().sort(-1).values for one in (c.routed_experts, experts))
        assert torch.equal(ours, theirs)
        assert cached.tokens == c.tokens
        assert torch.equal(cached.routed_experts[:-1].long().sort(-1).values, ours)


@pytest.mark.skipif(DEVICE != "cpu", reason="vLLM records experts there")
def test_a_device_on_which_vllm_records_no_experts_is_refused(root: Path) -> None:
    (error,) = get_pool(1, device=DEVICE).run(
        "vllm_peers:refused", deadline=280, model=model(root, "qwen3_moe"), routed_experts=True
    )
    assert isinstance(error, UnsupportedCapability)
    assert error.capability == "router_replay"
    assert "needs Triton" in str(error)


def test_a_model_without_experts_is_refused_before_vllm_starts(root: Path) -> None:
    (error,) = get_pool(1, device=DEVICE).run(
        "vllm_peers:refused", deadline=280, model=model(root, "qwen3"), routed_experts=True
    )
    assert isinstance(error, UnsupportedCapability)
    assert error.capability == "router_replay"
    assert "names no experts" in str(error)
