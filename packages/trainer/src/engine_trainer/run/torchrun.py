"""The end of a rank together with torchrun, its launcher."""

from __future__ import annotations

import os
import socket

from engine_api.parent_watchdog import end_with_parent

_CONNECT_S = 10.0


def end_with_torchrun() -> None:
    """End this process when the torchrun that started it ends; do nothing without torchrun.

    torchrun ends its ranks when it ends, unless it is killed. Ranks that outlived it would hold
    the run's folder, and continue in addition to the run that is started in its place.

    Raises ``SystemExit`` where torchrun has ended already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    # torchrun may have been killed before the line above. Then the connection to the address of
    # the rendezvous is refused.
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(place, timeout=_CONNECT_S).close()
    except ConnectionRefusedError as error:
        raise SystemExit(
            f"torchrun, which started this rank, has ended: {place[0]}:{place[1]} refuses "
            "connections"
        ) from error
    except OSError:
        # This does not show that torchrun has ended. The rendezvous has its own deadline, and a
        # more detailed error.
        return
