"""Every route of a pipeline's messages is connected when the engine is made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine_torchtitan.parallel import connect_stages, list_routes
from engine_torchtitan.pipeline import list_work


class Stage:
    """A stage's place in a pipeline of one rank each. Groups are named by their routes."""

    pp_group = "all"

    def __init__(self, stage: int, pp: int) -> None:
        self.stage = stage
        self.pp = pp
        self.message_groups = {route: route for route in list_routes(pp)}

    def rank_of(self, stage: int) -> int:
        """Return the stage, which is the rank."""
        return stage


def derive_routes(stages: int) -> set[tuple[int, int]]:
    """Return the sender and the receiver of each message of a step."""
    found: set[tuple[int, int]] = set()
    for stage in range(stages):
        for kind, _ in list_work(stage, stages, 2 * stages):
            if kind == "forward" and stage < stages - 1:
                found.add((stage, stage + 1))
            if kind == "backward" and stage:
                found.add((stage, stage - 1))
    # A weight that both ends hold.
    return found | {(0, stages - 1), (stages - 1, 0)}


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_each_route_is_taken_once_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    broadcasts: list[tuple[str, int]] = []
    for stage in range(stages):

        def send(_: torch.Tensor, to: int, group: tuple[int, int], stage: int = stage) -> None:
            assert group == (stage, to), "each route has a group of its own"
            sent[group] += 1

        def receive(
            _: torch.Tensor, sender: int, group: tuple[int, int], stage: int = stage
        ) -> None:
            assert group == (sender, stage), "each route has a group of its own"
            received[group] += 1

        def broadcast(_: torch.Tensor, source: int, group: str) -> None:
            broadcasts.append((group, source))

        monkeypatch.setattr(dist, "send", send)
        monkeypatch.setattr(dist, "recv", receive)
        monkeypatch.setattr(dist, "broadcast", broadcast)
        place: Any = Stage(stage, stages)
        connect_stages(place, torch.device("cpu"))
    assert set(sent) == derive_routes(stages)
    assert sent == received
    assert set(sent.values()) == {1}
    assert broadcasts == [("all", stages - 1)] * stages


def test_one_stage_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "send", None)
    monkeypatch.setattr(dist, "broadcast", None)
    place: Any = Stage(0, 1)
    assert not place.message_groups
    connect_stages(place, torch.device("cpu"))
