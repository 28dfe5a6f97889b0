"""The benchmark of images, at a tiny shape on the CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.vision import main


def test_all_rows_are_printed_and_the_rollout_computes_what_the_engine_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Distances of log-probs are those of float32."""
    sizes = "--documents 4 --document 24 --patches 4 --new 4 --steps 1 --warmup 0"
    main(f"--device cpu --shape tiny --server local {sizes}".split())
    rows = {row["row"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [*rows] == ["text model", "text", "mixed", "rollout", "ratios"]
    assert rows["mixed"]["images"] == 2
    assert rows["mixed"]["patches"] == 32
    assert rows["text"]["images"] == 0
    assert rows["rollout"]["max_images"] < 1e-4
    assert rows["rollout"]["max_text"] < 1e-4
