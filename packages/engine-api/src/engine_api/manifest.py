"""The manifest of a checkpoint: its contents with sizes and checksums, as JSON.

Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from engine_api.codec import register
from engine_api.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointMissing
from engine_api.plugin import CONTRACT, contract_problem

MANIFEST = "manifest.json"
# File with the checksum of the manifest's bytes, in the format of sha256sum.
DIGEST = "manifest.sha256"
# The newest format that is read. A manifest has 1 where the state is portable, and earlier releases
# can read it.
FORMAT = 2
PORTABLE = "portable"
# Beginnings of the keys of weights, and of optimizer state.
WEIGHTS = ("model", "adapter")
OPTIMIZER = "optim."
_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
DTYPES = frozenset((*_FLOATS, *_INTEGERS, "bool", "complex64"))
_LARGEST = 2**63 - 1
# Most characters of a file's name, folders included.
_LONGEST = 1024
# Most bytes between two slashes; no file system accepts more.
_LONGEST_PART = 255
_HEX = re.compile(r"[0-9a-f]{64}")


@register
@dataclass(frozen=True, kw_only=True)
class Shard:
    """One box of one tensor, with the file that holds it under the tensor's key."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@register
@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the state."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    stepped: bool | None = None
    """True if the optimizer keeps state for this weight.

    None for an entry that is not a weight, and in checkpoints of releases that did not record it.
    """


@register
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``.

    The file has ``state`` only where it is not portable, and then ``format`` is 2.
    """

    step: int
    engine: str
    world_size: int
    topology: Mapping[str, int]
    tensors: Mapping[str, Entry]
    files: Mapping[str, Mapping[str, Any]]
    """Size and checksum of each file by name: ``{"bytes", "sha256"}``."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    contract: str = CONTRACT
    format: int = 1
    state: str = PORTABLE
    """Name of the state's format: portable, or an engine's own, whose tensors have no shards
    here."""

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes, without the manifest."""
        return sum(int(f["bytes"]) for f in self.files.values())

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` and its digest, the last files of a checkpoint."""
        raw = asdict(self)
        for entry in raw["tensors"].values():
            if entry["stepped"] is None:
                del entry["stepped"]
        if self.state == PORTABLE:
            del raw["state"]
        raw["format"] = 1 if self.state == PORTABLE else 2
        (folder / MANIFEST).write_text(json.dumps(raw, indent=1))
        seal(folder)


def seal(folder: Path) -> None:
    """Write the digest of ``folder``'s manifest next to it.

    ``sha256sum -c manifest.sha256`` can check it too.
    """
    (folder / DIGEST).write_bytes(_sealed((folder / MANIFEST).read_bytes()))


def _sealed(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def weight_of(key: str) -> str | None:
    """Return the name of the weight whose value has this key, or None for optimizer state."""
    kind, _, name = key.partition(".")
    return name if kind in WEIGHTS else None


def field_of(key: str) -> tuple[str, str] | None:
    """Return weight and field of a key of optimizer state, or None for other keys."""
    if not key.startswith(OPTIMIZER):
        return None
    name, _, kept = key.removeprefix(OPTIMIZER).rpartition(".")
    return name, kept


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of ``folder``: its digest, and every type and range in it.

    Raises:
        CheckpointMissing: there is no manifest.
        CheckpointCorrupt: it cannot be read, was altered, or has impossible values.
        CheckpointMismatch: it has a newer format or contract.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointMissing(
            "no checkpoint here",
            where=str(folder),
            why=_describe_contents(folder),
            remedy="name a folder that holds manifest.json, or one with a `latest`",
        )
    try:
        data = path.read_bytes()
        raw = json.loads(data)
        version = _integer(_member(raw, "format", "the manifest"), "format", least=1)
        contract = _text(_member(raw, "contract", "the manifest"), "contract")
    # A ValueError means invalid JSON or UTF-8, or that `format` or `contract` is missing or wrong.
    except (OSError, ValueError, RecursionError) as error:
        raise _corrupt("the manifest cannot be read", path, str(error)) from error
    # A newer release may seal its manifests differently, so the version is checked first.
    problem = contract_problem(contract)
    if version > FORMAT or problem:
        raise CheckpointMismatch(
            "the checkpoint is newer than this engine-api",
            where=str(path),
            why=problem or f"format {version}, this one reads up to {FORMAT}",
            remedy="upgrade engine-api",
        )
    sealed = _check_seal(folder, data)
    try:
        manifest = _parse(raw)
    except ValueError as error:
        raise _corrupt(
            "the manifest lacks parts, or has impossible values", path, str(error)
        ) from error
    if not sealed and any(entry.stepped is not None for entry in manifest.tensors.values()):
        raise _corrupt(
            f"{DIGEST} is missing", path, "the release that wrote this manifest wrote one"
        )
    return manifest


def _check_seal(folder: Path, data: bytes) -> bool:
    """Compare the manifest with its digest, and return whether there is a digest.

    Earlier releases wrote none.
    """
    path = folder / DIGEST
    if not path.exists():
        return False
    try:
        same = path.read_bytes() == _sealed(data)
    except OSError as error:
        raise _corrupt(f"{DIGEST} cannot be read", path, str(error)) from error
    if not same:
        raise _corrupt(
            f"the manifest and {DIGEST} differ",
            path,
            "one of them was altered since they were written",
        )
    return True


def _corrupt(what: str, path: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(what, where=str(path), why=why, remedy="use an earlier checkpoint")


# --- types and ranges; each function raises ``ValueError`` that names the place ------------------


def _parse(raw: dict[str, Any]) -> Manifest:
    known = set(Manifest.__dataclass_fields__)
    if unknown := sorted(set(raw) - known):
        raise ValueError(f"unknown parts: {', '.join(unknown[:3])}")
    files = {
        name: _file(name, value) for name, value in _mapping(_part(raw, "files"), "files").items()
    }
    tensors = _mapping(_part(raw, "tensors"), "tensors")
    topology = _mapping(_part(raw, "topology"), "topology")
    manifest = Manifest(
        step=_integer(_part(raw, "step"), "step"),
        engine=_text(_part(raw, "engine"), "engine"),
        world_size=_integer(_part(raw, "world_size"), "world_size", least=1),
        topology={
            name: _integer(size, f"topology.{name}", least=1) for name, size in topology.items()
        },
        tensors={key: _entry(key, value, files) for key, value in tensors.items()},
        files=files,
        extra=_mapping(raw.get("extra", {}), "extra"),
        contract=raw["contract"],
        format=raw["format"],
        state=_text(raw.get("state", PORTABLE), "state"),
    )
    if (manifest.state == PORTABLE) != (manifest.format == 1):
        raise ValueError(f"format {manifest.format} with the state {manifest.state!r}")
    return manifest


def _part(raw: Mapping[str, Any], name: str) -> Any:
    return _member(raw, name, "the manifest")


def _member(raw: Any, name: str, at: str) -> Any:
    if name not in _mapping(raw, at):
        raise ValueError(f"{at} has no {name!r}")
    return raw[name]


def _entry(key: str, raw: Any, files: Mapping[str, Any]) -> Entry:
    at = f"tensors[{key!r}]"
    dtype = _text(_member(raw, "dtype", at), f"{at}.dtype")
    if dtype not in DTYPES:
        raise ValueError(f"{at}.dtype: {dtype!r} is not a dtype")
    shape = _sizes(_member(raw, "shape", at), f"{at}.shape")
    stepped = raw.get("stepped")
    if stepped is not None and not isinstance(stepped, bool):
        raise _unexpected(f"{at}.stepped", "true or false", stepped)
    shards = _list(_member(raw, "shards", at), f"{at}.shards")
    boxes = tuple(
        _shard(shard, f"{at}.shards[{i}]", shape, files) for i, shard in enumerate(shards)
    )
    return Entry(dtype=dtype, shape=shape, shards=boxes, stepped=stepped)


def _shard(raw: Any, at: str, whole: tuple[int, ...], files: Mapping[str, Any]) -> Shard:
    file = _text(_member(raw, "file", at), f"{at}.file")
    if file not in files:
        raise ValueError(f"{at}.file: {file!r} is not listed in files")
    offset = _sizes(_member(raw, "offset", at), f"{at}.offset")
    shape = _sizes(_member(raw, "shape", at), f"{at}.shape")
    inside = len(offset) == len(shape) == len(whole)
    if not inside or any(a + n > size for a, n, size in zip(offset, shape, whole, strict=True)):
        raise ValueError(f"{at}: {list(shape)} at {list(offset)} is not a box in {list(whole)}")
    return Shard(file=file, offset=offset, shape=shape)


def _file(name: str, raw: Any) -> dict[str, Any]:
    at = f"files[{name!r}]"
    if not is_inside(name):
        raise ValueError(f"{at}: expected a relative name inside the checkpoint's folder")
    size = _integer(_member(raw, "bytes", at), f"{at}.bytes")
    digest = _text(_member(raw, "sha256", at), f"{at}.sha256")
    if not _HEX.fullmatch(digest):
        raise ValueError(f"{at}.sha256: expected 64 hexadecimal digits, got {digest[:80]!r}")
    return {"bytes": size, "sha256": digest}


def is_inside(name: str) -> bool:
    """Return whether ``name`` is a plain relative path that stays inside its folder."""
    path = PurePosixPath(name)
    # isprintable also excludes surrogates.
    plain = name.isprintable() and "\\" not in name and path.as_posix() == name
    if not plain or path.is_absolute() or ".." in path.parts or name == ".":
        return False
    return len(name) <= _LONGEST and all(len(part.encode()) <= _LONGEST_PART for part in path.parts)


def _integer(value: Any, at: str, *, least: int = 0) -> int:
    # isinstance would accept a bool as an int.
    if type(value) is not int or not least <= value <= _LARGEST:
        raise _unexpected(at, f"an integer of at least {least}", value)
    return value


def _sizes(value: Any, at: str) -> tuple[int, ...]:
    return tuple(_integer(size, at) for size in _list(value, at))


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise _unexpected(at, "a string", value)
    return value


def _mapping(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unexpected(at, "a mapping", value)
    return value  # pyright: ignore[reportUnknownVariableType] - JSON's keys are strings


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise _unexpected(at, "a list", value)
    return value  # pyright: ignore[reportUnknownVariableType]


def _unexpected(at: str, kind: str, value: Any) -> ValueError:
    return ValueError(f"{at}: expected {kind}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _describe_contents(folder: Path) -> str:
    if not folder.exists():
        return "the folder does not exist"
    if not folder.is_dir():
        return "it is a file"
    names = sorted(p.name for p in folder.iterdir())[:8]
    return f"the folder holds {', '.join(names)}" if names else "the folder is empty"


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and checksum of a file as ``{"bytes", "sha256"}``."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def verify_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ``CheckpointCorrupt`` when a file is missing or differs from its fingerprint."""
    for name, want in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointCorrupt(
                "a file is missing", where=str(path), remedy="use an earlier checkpoint"
            )
        size = path.stat().st_size
        if size != want["bytes"]:
            raise _corrupt(
                f"{size} bytes, the manifest says {want['bytes']}", path, "truncated or altered"
            )
        try:
            found = fingerprint(path)
        except OSError as error:
            raise _corrupt("a file cannot be read", path, str(error)) from error
        if found["sha256"] != want["sha256"]:
            raise _corrupt("the checksum differs", path, "altered since it was written")
