"""FP8 over a rollout's own wire, to replicas in other processes than the engine.

They get the bits of colocated replicas, in a quarter of the bytes.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path

import pytest
from ray_runs import local_cluster, on_ray, reshaped, result_of

ray = pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytest.importorskip("rollout_fp8", reason="the wire")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

import fp8_rollouts  # noqa: E402, F401 - behind importorskip; registers

from engine_trainer.placement.ray.calls import WorkerLost  # noqa: E402
from engine_trainer.rl.on_ray import train_on_ray  # noqa: E402

# Two ranks hold whole blocks of every weight but k_proj and v_proj, which are gathered first.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def model(sums_model, tmp_path_factory) -> Path:
    """Return the model of the sums, as wide as a few blocks."""
    return reshaped(sums_model, tmp_path_factory.mktemp("wide") / "model", **WIDE)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    """Return the file of faults, empty."""
    return tmp_path_factory.mktemp("faults") / "plan.json"


@pytest.fixture(scope="module", autouse=True)
def cluster(plan):
    with local_cluster(4, plan):
        yield


def run(model: Path, out: Path, *, name: str = "fp8", **section):
    """Run two steps and return the folder."""
    config = on_ray(
        model,
        out,
        rollout={"name": name, "quantization": "fp8"},
        run={"steps": 2},
        ray={"imports": ["ray_faults", "fp8_rollouts"], **section},
    )
    train_on_ray(config)
    return out


@pytest.fixture(scope="module")
def beside(model, tmp_path_factory):
    """Return the folder of a run with colocated replicas.

    Each is made once.
    """
    return cache(
        lambda engines: run(model, tmp_path_factory.mktemp("beside") / "out", engines=engines)
    )


@pytest.fixture(scope="module")
def apart(model, tmp_path_factory):
    """Return the folder of the same run with replicas in processes of their own."""

    def made(engines: int, rollouts: int) -> Path:
        return run(
            model, tmp_path_factory.mktemp("apart") / "out", engines=engines, rollouts=rollouts
        )

    return cache(made)


def wire_bytes(out: Path) -> float:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return rows[-1].get("sync/wire_bytes", 0.0)


@pytest.mark.parametrize(
    ("engines", "rollouts"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.nightly)]
)
def test_apart_it_ends_as_beside_the_engine_bit_for_bit(beside, apart, caplog, engines, rollouts):
    caplog.set_level(logging.INFO, logger="engine_trainer")
    out = apart(engines, rollouts)
    assert "over the rollout's own wire" in caplog.text
    assert result_of(out) == result_of(beside(engines))
    last = result_of(out)[1][-1]
    assert (last["sync/quantized"], last["sync/audited"]) == (14, 1)
    # The served weights, and in the buckets the padding between pieces.
    assert last["sync/bytes"] <= wire_bytes(out) < 1.05 * last["sync/bytes"]
    assert wire_bytes(beside(engines)) == 0


def test_a_rollout_without_a_wire_is_sent_whole_tensors_in_four_times_the_bytes(
    model, tmp_path, beside, apart, caplog
):
    caplog.set_level(logging.INFO, logger="engine_trainer")
    whole = run(model, tmp_path / "whole", name="fp8-whole", engines=1, rollouts=1)
    assert "as whole tensors: rollout 'fp8-whole' has no wire of its own" in caplog.text
    assert result_of(whole) == result_of(beside(1))
    assert 0.25 < wire_bytes(apart(1, 1)) / wire_bytes(whole) < 0.27


def fault(worker: str, method: str, nth: int, do: str = "kill") -> dict:
    return {"worker": worker, "method": method, "nth": nth, "when": "before", "do": do}


@pytest.mark.nightly
def test_killed_in_the_middle_of_a_sync_it_ends_as_one_left_alone(model, tmp_path, plan, beside):
    """Kill the engine in the first sync, a replica there, and the other replica in the second.

    A sync has five buckets.
    """
    plan.write_text(
        json.dumps(
            [
                fault("engine-0", "put", 2),
                fault("rollout-0", "take", 3),
                fault("rollout-1", "take", 8),
            ]
        )
    )
    out = run(model, tmp_path / "out", rollouts=2, restarts=3)
    assert json.loads(plan.read_text()) == []
    assert result_of(out) == result_of(beside(2))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "faults",
    [
        [fault("rollout-0", "take", 3), fault("rollout-1", "take", 8)],
        [fault("rollout-0", "receive", 1), fault("rollout-1", "receive", 3)],
    ],
    ids=["in the middle", "before it connects"],
)
def test_an_elastic_run_repeats_a_sync_without_the_replica_that_was_killed(
    model, tmp_path, plan, beside, caplog, faults
):
    plan.write_text(json.dumps(faults))
    out = run(model, tmp_path / "out", rollouts=2, elastic=True)
    assert json.loads(plan.read_text()) == []
    assert "restarting from the last checkpoint" not in caplog.text
    assert result_of(out) == result_of(beside(2))
    assert result_of(out)[1][-1]["sync/audited"] == 1


@pytest.mark.nightly
def test_an_elastic_run_replaces_a_replica_that_hangs_in_a_sync(
    model, tmp_path, plan, beside, caplog
):
    plan.write_text(json.dumps([fault("rollout-0", "take", 2, "hang")]))
    out = run(
        model, tmp_path / "out", rollouts=2, elastic=True, timeout_s=240.0, start_timeout_s=300.0
    )
    assert "rollout-0 is lost, and another one is started" in caplog.text
    assert "restarting from the last checkpoint" not in caplog.text
    assert result_of(out) == result_of(beside(2))


@pytest.mark.nightly
def test_a_replica_that_hangs_in_a_sync_is_lost_within_the_deadline(model, tmp_path, plan):
    plan.write_text(json.dumps([fault("rollout-0", "take", 2, "hang")]))
    with pytest.raises(WorkerLost, match=r"(?s)rollout-0 \(receive\).*no response within 240 s"):
        run(model, tmp_path / "out", rollouts=2, restarts=0, timeout_s=240.0, start_timeout_s=300.0)
