"""What a rank owes its launcher: to end with it."""

from __future__ import annotations

import os
import socket

from engine_api.parent_watchdog import end_with_parent

_CONNECT_S = 10.0


def end_with_torchrun() -> None:
    """End this process with the torchrun that started it; do nothing where none did.

    torchrun ends its ranks when it ends, unless it is killed. Ranks that outlived it would hold the run's folder, and go
    on beside the run that is started in its place.

    Raises ``SystemExit`` where torchrun has gone already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    # It may have been killed before the line above: then nobody listens where the ranks meet.
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(place, timeout=_CONNECT_S).close()
    except ConnectionRefusedError as error:
        raise SystemExit(
            f"torchrun, which started this rank, has ended: nobody listens at {place[0]}:{place[1]}"
        ) from error
    except OSError:
        # Not an answer: the rendezvous has a deadline of its own, and says more.
        return
