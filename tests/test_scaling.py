"""The calculation of docs/scaling.md, compared with measurements and with results by hand.

It is also compared with the trainer's own count of FLOP.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
from layout import ROOT

from engine_trainer.scaling import H200, SHAPES, Job, Shape, phases, step_of
from engine_trainer.scaling.__main__ import main
from engine_trainer.scaling.phases import Lengths
from engine_trainer.telemetry.throughput import Throughput

TOLERANCE = 0.25
"""Relative error that each measured row may have, as docs/scaling.md says."""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("scaling")


def test_it_agrees_with_every_measured_row(tool) -> None:
    rows = tool.measured()
    kinds = [what.partition(",")[0] for what, _, _ in rows]
    least = {"update": 8, "sync": 7, "generate": 2, "generate in a step of RL": 5}
    assert all(kinds.count(kind) >= count for kind, count in least.items())
    far = [(what, seen, said) for what, seen, said in rows if abs(said / seen - 1) > TOLERANCE]
    assert not far


def test_the_shapes_have_the_parameters_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    shapes = importlib.import_module("benchmarks.shapes")
    for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"):
        whole = sum(math.prod(shape) for _, shape in shapes.tensors(name))
        assert Shape.from_config(name, shapes.config(name)) == SHAPES[name]
        assert SHAPES[name].parameters == pytest.approx(whole, rel=1e-3)  # norms are left out
    assert SHAPES["qwen3-32b"].parameters == pytest.approx(32.8e9, rel=0.01)
    assert SHAPES["qwen3-30b-a3b"].active + SHAPES["qwen3-30b-a3b"].embedding == pytest.approx(
        3.3e9, rel=0.03
    )


def test_the_flop_are_the_trainers() -> None:
    shape = SHAPES["qwen3-1.7b"]
    counted = Throughput(
        parameters=shape.active, attention=shape.layers * shape.heads * shape.head_dim, peak=None
    )
    assert shape.train_flop(4096) * 4096 == pytest.approx(counted.flop([4096]), rel=1e-12)


ONE = Shape(
    name="one",
    layers=1,
    hidden=100,
    heads=10,
    kv_heads=5,
    head_dim=10,
    inner=200,
    vocabulary=1000,
    tied=True,
)


def test_a_shape_by_hand() -> None:
    # q and o have 2·100·100, k and v 2·100·50, the MLP 3·100·200, and the tied head counts once.
    assert ONE.parameters == ONE.active == 20_000 + 10_000 + 60_000 + 100_000
    assert ONE.kv_bytes == 2 * 2 * 50
    assert ONE.forward_flop(7) == 2 * 190_000 + 4 * 100 * 7


def test_a_decoding_by_hand() -> None:
    """Two sequences of one length: each step reads weights, and on average half the KV."""
    lengths = Lengths(prompt=0, mean=64, longest=64)
    found = phases.generate(ONE, H200, lengths, sequences=2, tensor_parallel=1)
    read = 4.8e12 * 0.8
    assert found.parts["HBM (weights)"] == pytest.approx(64 * 380_000 / read)
    assert found.parts["HBM (keys, values)"] == pytest.approx(2 * 200 * 64 * 32 / read)
    assert found.parts["host"] == pytest.approx(64 * 0.0025)
    assert found.seconds == pytest.approx(sum(found.parts.values()))


def test_spread_lengths_keep_their_mean() -> None:
    for mean in (50, 75, 100):
        lengths = Lengths(prompt=0, mean=mean, longest=100)
        assert sum(lengths.alive(t + 0.5) for t in range(100)) == pytest.approx(mean, rel=1e-6)


def test_an_update_by_hand() -> None:
    """16 GPUs are two copies of a node's shards.

    Gradients cross the network, eight shards at a time.
    """
    shape = SHAPES["qwen3-8b"]
    found = phases.update(shape, H200, gpus=16, tokens=16 * 65536, length=4096, micro_batch=32768)
    assert found.parts["computing"] == pytest.approx(
        65536 * shape.train_flop(4096) / (989.5e12 * 0.52)
    )
    assert found.parts["network"] == pytest.approx(2 * 4 * shape.parameters / 8 / 2 / 30e9)
    assert found.parts["host"] == pytest.approx(2 * 0.025)
    assert found.bottleneck == "computing"
    thin = phases.update(shape, H200, gpus=16, tokens=16 * 512, length=512, micro_batch=32768)
    # Gathering takes longer than computing.
    assert thin.parts["NVLink"] == pytest.approx(8 * shape.parameters * 7 / 8 / 270e9)


def test_what_does_not_fit_and_what_needs_several_gpus() -> None:
    job = Job(lengths=Lengths(prompt=512, mean=1024, longest=2048))
    assert not step_of(SHAPES["qwen3-8b"], 1, job).fits  # 131 GB of states
    assert step_of(SHAPES["qwen3-8b"], 2, job).fits
    assert step_of(SHAPES["qwen3-32b"], 64, job).shard_group == 8
    assert step_of(SHAPES["qwen3-32b"], 64, job).tensor_parallel == 2
    big = Shape(
        name="70b",
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        inner=28672,
        vocabulary=128256,
        tied=False,
    )
    assert step_of(big, 64, job).shard_group == 16
    assert "network" in step_of(big, 64, job).phases["sync"].parts


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_more_gpus_are_never_slower_and_longer_answers_never_faster(name: str) -> None:
    def seconds(gpus: int, response: int) -> float:
        return step_of(
            SHAPES[name],
            gpus,
            Job(lengths=Lengths(prompt=512, mean=response / 2, longest=response)),
        ).seconds

    times = [seconds(8 * 4**i, 8192) for i in range(6)]
    assert times == sorted(times, reverse=True)
    times = [seconds(64, 1024 * 2**i) for i in range(6)]
    assert times == sorted(times)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--model", "qwen3-32b", "--gpus", "4,64", "--response", "2048"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["4", "does", "not", "fit"]
    assert lines[3].endswith("update: computing")
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["--model", str(tmp_path), "--gpus", "1"]) == 0
    assert main(["--model", "qwen3-7b"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["--mean", "1", "--response", "100"]) == 2
