"""The random-number generators of a process: Python's, NumPy's, torch's and the device's.

Their state as JSON has one key per generator: ``python``, ``numpy``, ``torch``, and the device's
name where the device has a generator of its own.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import base64
import hashlib
import math
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from engine_api.devices import device_of
from engine_api.errors import CheckpointCorrupt

if TYPE_CHECKING:
    import torch

# Number of words of a Mersenne Twister, whose position is in 0 … 624.
_TWISTER_WORDS = 624


def seed_all(seed: int, *, rank: int = 0) -> None:
    """Seed every generator of this process, on every device.

    Args:
        seed: the seed of the run.
        rank: a number that differs between ranks that must draw different numbers. Seeds and ranks
            do not add up: rank 1 of seed 0 draws other numbers than rank 0 of seed 1.
    """
    import numpy as np
    import torch

    random.seed(_derive(seed, rank, "python"))
    np.random.seed(_derive(seed, rank, "numpy") % 2**32)  # noqa: NPY002 - user code draws from the global one
    # It also seeds the generators of all devices.
    torch.manual_seed(_derive(seed, rank, "torch"))


def _derive(seed: int, rank: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{rank}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def capture(device_type: str) -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy, torch and the current device as JSON."""
    import numpy as np
    import torch

    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - user code draws from the global one
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), *rest],
        "torch": _encode(torch.get_rng_state()),
    }
    own = device_of(device_type).rng_state()
    return state if own is None else state | {device_type: _encode(own)}


def check(state: object, device_type: str, *, where: str = "") -> None:
    """Raise ``CheckpointCorrupt`` unless `restore` can restore ``state``.

    No generator is changed.

    Args:
        state: content of a file that should be a state which `capture` returned.
        device_type: the argument of `restore`.
        where: the file, for the error.
    """
    if not isinstance(state, Mapping):
        raise _corrupt(
            "the state of the generators", f"expected a mapping, got {_kind(state)}", where
        )
    found = cast("Mapping[str, Any]", state)
    for name, try_out in _TRIALS.items():
        _try(name, try_out, found, where)
    if device_type in found:
        _try(device_type, lambda own: _try_device(own, device_type), found, where)


def restore(state: Mapping[str, Any], device_type: str) -> None:
    """Restore the generators to a state that `capture` returned.

    It cannot fail for a state that `check` accepts. The device's own generator is left as it is if
    the state was captured on a different kind of device.
    """
    import numpy as np
    import torch

    random.setstate(_python_state(state["python"]))
    np.random.set_state(_numpy_state(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(_decode(state["torch"]))
    if device_type in state:
        device_of(device_type).set_rng_state(_decode(state[device_type]))


# --- for each generator: its state from JSON, and a trial on an unused generator -----------------


def _python_state(value: Any) -> tuple[Any, ...]:
    version, words, gauss = value
    _require_number_or_none(gauss)
    return version, tuple(words), gauss


def _try_python(value: Any) -> None:
    random.Random().setstate(_python_state(value))


def _numpy_state(value: Any) -> tuple[Any, ...]:
    import numpy as np

    name, keys, position, has_gauss, cached = value
    # NumPy would read outside its memory at any other position.
    if type(position) is not int or not 0 <= position <= _TWISTER_WORDS:
        raise ValueError(f"expected a position in 0 … {_TWISTER_WORDS}, got {position!r}")
    if type(has_gauss) is not int or has_gauss not in (0, 1):
        raise ValueError(f"expected 0 or 1 for the kept normal number, got {has_gauss!r}")
    _require_number_or_none(cached)
    if any(type(key) is not int for key in keys):
        raise ValueError("expected integers for its words")
    return name, np.array(keys, dtype=np.uint32), position, has_gauss, cached


def _try_numpy(value: Any) -> None:
    import numpy as np

    np.random.RandomState().set_state(_numpy_state(value))


def _try_torch(value: Any) -> None:
    import torch

    torch.Generator().set_state(_decode(value))


def _try_device(value: Any, device_type: str) -> None:
    # A device's generator may be reachable only through torch's module of the device. So the live
    # one takes the state, and is then restored.
    device = device_of(device_type)
    before = device.rng_state()
    wanted = _decode(value)
    if before is None:
        return
    if wanted.numel() != before.numel():
        raise ValueError(f"expected {before.numel()} bytes, got {wanted.numel()}")
    try:
        device.set_rng_state(wanted)
    finally:
        device.set_rng_state(before)


_TRIALS: dict[str, Callable[[Any], None]] = {
    "python": _try_python,
    "numpy": _try_numpy,
    "torch": _try_torch,
}


def _try(name: str, try_out: Callable[[Any], None], state: Mapping[str, Any], where: str) -> None:
    if name not in state:
        raise _corrupt(f"the state of the generator {name!r}", "is missing", where)
    try:
        try_out(state[name])
    # Each library refuses a state by errors of its own.
    except Exception as error:
        raise _corrupt(
            f"the state of the generator {name!r}", str(error) or type(error).__name__, where
        ) from error


def _corrupt(what: str, why: str, where: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{what} cannot be restored", where=where, why=why, remedy="use an earlier checkpoint"
    )


def _require_number_or_none(value: object) -> None:
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):  # type: ignore[arg-type]
        raise ValueError(f"expected a finite number for the kept normal number, got {value!r}")


def _kind(value: object) -> str:
    return type(value).__name__


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
