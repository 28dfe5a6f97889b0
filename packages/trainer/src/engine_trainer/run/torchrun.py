"""Functions that tie a rank to torchrun: its end, and one report of an error for all ranks."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from typing import Any

from engine_api.parent_watchdog import end_with_parent

_CONNECT_S = 10.0
# Seconds that the store, and the rank that failed by itself, have to answer.
_SAY_S = 5.0
_LOOK_S = 0.05


def end_with_torchrun() -> None:
    """End this process when the torchrun that started it ends.

    Without torchrun it does nothing.

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


def is_news(text: str, *, reported_elsewhere: bool) -> bool:
    """Return whether no other rank says ``text`` to the same terminal or log file.

    The ranks find out in the store of their rendezvous. Where it cannot be reached, the text is
    news.

    Args:
        text: the error of this rank.
        reported_elsewhere: True if the error repeats that of a rank which reports it itself.
    """
    from engine_api.stores import reach_store

    at = os.fstat(2)  # standard error
    place = f"{socket.gethostname()}/{at.st_dev}:{at.st_ino}"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"engine_trainer/said/{start}/{place}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        size = int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = reach_store(host, port, size, _SAY_S)
        if not reported_elsewhere:
            store.set(f"{key}/cause", "")
        elif _is_set(store, f"{key}/cause"):
            return False
        return store.add(f"{key}/{digest}", 1) == 1
    except (KeyError, RuntimeError):
        return True


def _is_set(store: Any, key: str) -> bool:
    """Return whether a key is set within some seconds."""
    end = time.monotonic() + _SAY_S
    while time.monotonic() < end:
        if store.check([key]):
            return True
        time.sleep(_LOOK_S)
    return False
