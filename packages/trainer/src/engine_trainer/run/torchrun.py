"""What a rank has to do with torchrun, its launcher: it ends with it, and speaks once."""

from __future__ import annotations

import hashlib
import os
import socket

from engine_api.parent_watchdog import end_with_parent

_CONNECT_S = 10.0
_SAY_S = 5.0


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


def is_first_to_say(text: str) -> bool:
    """Return whether no other rank has asked this for ``text`` before, since torchrun's last start.

    The ranks count in the store of their rendezvous. Without a store, each rank is the first.
    """
    from engine_api.stores import reach_store

    digest = hashlib.sha256(text.encode()).hexdigest()
    key = f"engine_trainer/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{digest}"
    size = int(os.environ["WORLD_SIZE"])
    try:
        store = reach_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, _SAY_S)
        return store.add(key, 1) == 1
    except RuntimeError:
        return True
