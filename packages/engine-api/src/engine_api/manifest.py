"""The manifest of a checkpoint: what it holds, with sizes and checksums. JSON, nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_api.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointMissing
from engine_api.plugin import CONTRACT, contract_problem

MANIFEST = "manifest.json"
FORMAT = 2  # the newest that is read; 1 where the state is portable, which earlier releases read
PORTABLE = "portable"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One box of one tensor, and the file that holds it (under the tensor's key)."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the state."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What stands in ``manifest.json``; ``state`` only where it is not portable, with ``format`` 2."""

    step: int
    engine: str
    world_size: int
    topology: Mapping[str, int]
    tensors: Mapping[str, Entry]
    files: Mapping[str, Mapping[str, Any]]  # name -> {"bytes", "sha256"}
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    contract: str = CONTRACT
    format: int = 1
    state: str = PORTABLE  # or the name of an engine's own format, whose tensors have no shards here

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(int(f["bytes"]) for f in self.files.values())

    def write(self, folder: Path) -> None:
        """Write ``manifest.json``, the last file of a checkpoint."""
        raw = asdict(self)
        if self.state == PORTABLE:
            del raw["state"]
        (folder / MANIFEST).write_text(json.dumps(raw | {"format": 1 if self.state == PORTABLE else 2}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of ``folder``.

    Raises:
        CheckpointMissing: there is none.
        CheckpointCorrupt: it cannot be read.
        CheckpointMismatch: it was written by a newer format or contract.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointMissing("no checkpoint here", where=str(folder), why=_what_is_there(folder),
                                remedy="name a folder that holds manifest.json, or one with a `latest`")  # fmt: skip
    try:
        raw = json.loads(path.read_text())
        version, contract = int(raw["format"]), str(raw["contract"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt("the manifest cannot be read", where=str(path), why=str(error),
                                remedy="use an earlier checkpoint") from error  # fmt: skip
    problem = contract_problem(contract)
    if version > FORMAT or problem:
        raise CheckpointMismatch("the checkpoint is newer than this engine-api", where=str(path),
                                 why=problem or f"format {version}, this one reads up to {FORMAT}",
                                 remedy="upgrade engine-api")  # fmt: skip
    return _parse(raw, path)


def _parse(raw: dict[str, Any], path: Path) -> Manifest:
    try:
        tensors = {key: _entry(value) for key, value in raw.pop("tensors").items()}
        return Manifest(tensors=tensors, **raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt("the manifest lacks parts", where=str(path), why=repr(error),
                                remedy="use an earlier checkpoint") from error  # fmt: skip


def _entry(raw: dict[str, Any]) -> Entry:
    shards = tuple(Shard(file=s["file"], offset=tuple(s["offset"]), shape=tuple(s["shape"])) for s in raw["shards"])
    return Entry(dtype=raw["dtype"], shape=tuple(raw["shape"]), shards=shards)


def _what_is_there(folder: Path) -> str:
    if not folder.exists():
        return "the folder does not exist"
    if not folder.is_dir():
        return "it is a file"
    names = sorted(p.name for p in folder.iterdir())[:8]
    return f"the folder holds {', '.join(names)}" if names else "the folder is empty"


def fingerprint(path: Path) -> dict[str, Any]:
    """``{"bytes", "sha256"}`` of a file."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def verify_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ``CheckpointCorrupt`` when a file is missing or differs from its fingerprint."""
    for name, want in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointCorrupt("a file is missing", where=str(path), remedy="use an earlier checkpoint")
        size = path.stat().st_size
        if size != want["bytes"]:
            raise CheckpointCorrupt(f"{size} bytes, the manifest says {want['bytes']}", where=str(path),
                                    why="truncated or altered", remedy="use an earlier checkpoint")  # fmt: skip
        if fingerprint(path)["sha256"] != want["sha256"]:
            raise CheckpointCorrupt("the checksum differs", where=str(path), why="altered since it was written",
                                    remedy="use an earlier checkpoint")  # fmt: skip
