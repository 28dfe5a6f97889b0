"""The host's work of a sync counts every tensor."""

from __future__ import annotations

from benchmarks.sync_host import measure


def test_a_sync_of_one_layer_prepares_every_tensor() -> None:
    """Experts and attention have scales; norms, the router, embeddings and the head have none."""
    row = measure(layers=1, repeats=1)
    quantized, plain = 128 * 3 + 4, 2 + 2 + 1 + 1 + 2
    assert row["tensors"] == 2 * quantized + plain
    assert 0 < row["least_ms"] <= row["median_ms"]
