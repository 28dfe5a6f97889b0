"""The store at which sender and receivers of a broadcast meet: what is said where it is not reached."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from test_plan import rows, source

from rollout_fp8.plan import make_plan
from rollout_fp8.transports.channel import PeerError
from rollout_fp8.transports.collective import CollectiveIncoming, CollectiveOutgoing

CPU = torch.device("cpu")


class Told:
    """A channel at whose other end a sender says where to join."""

    def __init__(self, port: int) -> None:
        self.port = port

    def receive(self, tag: str) -> tuple[Any, ...]:
        assert tag == "join"
        return "127.0.0.1", self.port, 1, 2


def test_a_store_that_a_receiver_does_not_reach_is_named_with_what_to_look_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nobody listens there any more
    plan = make_plan([source("w", rows((128, 128), 1))], dtype=torch.bfloat16, bucket_bytes=1 << 20).wire
    channel: Any = Told(port)
    with pytest.raises(PeerError, match=rf"cannot join .*127\.0\.0\.1:{port}[^$]*to do: .*reach"):
        CollectiveIncoming(plan, CPU, timeout_s=1.0).open(channel)


def test_a_store_that_cannot_be_opened_is_named_with_what_to_look_at() -> None:
    with pytest.raises(PeerError, match=r"cannot open .*no-such-host\.invalid[^$]*to do: .*address of this host"):
        CollectiveOutgoing(CPU, "no-such-host.invalid", timeout_s=1.0).open([])
