"""Agreement of the engine's ranks before they make replicas."""

from __future__ import annotations

import pytest

from engine_api.errors import ConfigError
from rollout_fp8 import ranks


@pytest.mark.parametrize(
    ("device", "size", "world"), [("cuda", 1, 4), ("cuda", 4, 1), ("cpu", 2, 2)]
)
def test_replicas_with_devices_of_their_own_are_made(
    monkeypatch: pytest.MonkeyPatch, device: str, size: int, world: int
) -> None:
    monkeypatch.setattr(ranks, "world_size", lambda: world)
    ranks.require_own_devices(device, size)


def test_replicas_that_would_take_the_next_ranks_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match="2, for the replica of each of 2 ranks") as caught:
        ranks.require_own_devices("cuda", 2)
    assert "in_process" in caught.value.remedy
