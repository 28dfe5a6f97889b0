"""Sync of engine-fsdp's shards, on one rank and two, into vLLM, compared with a fresh server."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_peers import DEVICE

from engine_conformance.cases import Target
from engine_conformance.cases._served import rollout_model
from engine_conformance.ranks import RankPool, get_pool

pytestmark = [pytest.mark.distributed]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "dtype"), [(1, "bfloat16"), (2, "bfloat16"), (2, "float32")])
def test_shards_of_a_trained_engine_are_served_as_a_fresh_server_serves_them(
    root: Path, tmp_path: Path, world: int, dtype: str
) -> None:
    model = str(rollout_model(Target(backend="vllm", device=DEVICE, root=root, rollout=True)))
    folder = tmp_path / "trained"
    rows = get_pool(world, device=DEVICE).run(
        "vllm_peers:trained", deadline=280, model=model, folder=str(folder), dtype=dtype
    )
    with RankPool(1, device=DEVICE) as pool:
        ((fresh,),) = pool.run(
            "fresh_peers:fresh_tokens", deadline=280, models=[(str(folder), dtype)]
        )
    for greedy, said, drawn, told in rows:
        assert greedy == fresh
        assert [one.version for one in said] == [1, 2]
        assert all(one.audited and one.num_tensors == said[0].num_tensors for one in said)
        # In bf16 the conformance profile compares them, with tolerances by the count of roundings.
        if dtype == "float32":
            for got, want in zip(drawn, told, strict=True):
                assert got == pytest.approx(want, abs=1e-5)
