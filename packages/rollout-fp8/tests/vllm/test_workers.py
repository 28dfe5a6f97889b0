"""Workers of one replica on several ranks: an error on one of them is every rank's, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_conformance.ranks import get_pool

pytestmark = [pytest.mark.distributed]


def test_a_worker_that_fails_leaves_no_other_rank_waiting(tmp_path: Path) -> None:
    (first, taken), (second, as_many) = get_pool(2, device="cpu").run(
        "worker_peers:fails_on_one", deadline=60, folder=str(tmp_path)
    )
    assert second == ["own: learn", "own: sync", "own: bucket"]
    assert first == ["other: {1: 'learn'}", "other: {1: 'sync'}", "other: {1: 'bucket'}"]
    assert taken == as_many > 1
