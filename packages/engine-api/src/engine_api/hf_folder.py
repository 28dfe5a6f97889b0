"""Folders in Hugging Face's format: a model's source, and the folder that it is saved to."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_api.checkpoint import require_room
from engine_api.comm import Comm, together
from engine_api.config import ModelSource
from engine_api.errors import CheckpointWriteError, ConfigError
from engine_api.folders import give_common_mode, real, replace_folder, restore
from engine_api.hf_mtp import MtpHead, drop_counts, find_mtp_head
from engine_api.manifest import is_inside
from engine_api.weights import WeightExport

if TYPE_CHECKING:
    import torch

log = logging.getLogger("engine_api")

INDEX = "model.safetensors.index.json"
# Patterns of the names that save_hf gives to files of weights.
WEIGHT_FILES = ("model*.safetensors*",)
# Names of floating-point dtypes in safetensors' files.
_FLOATING = ("F64", "F32", "F16", "BF16")
# The value head, which the folder of a language model lacks: an engine draws it.
_VALUE_HEAD = "score."
_FILE_BYTES = 4 << 30
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "generation_config.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def fetch(model: ModelSource) -> str:
    """Return the local folder of the model, downloading a hub id.

    Weights are downloaded only for ``init: pretrained``, code only with ``trust_remote_code``.
    Raises ``ConfigError`` if there is no such folder or model.
    """
    if Path(model.path).is_dir():
        if model.revision is not None:
            raise ConfigError(
                "model.revision",
                f"{model.revision!r} given, but model.path is a folder here",
                remedy="leave it out, or give a hub id",
            )
        return model.path
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    if model.init == "pretrained":
        patterns.append("*.safetensors")
    if model.trust_remote_code:
        patterns.append("*.py")
    try:
        return str(snapshot_download(model.path, revision=model.revision, allow_patterns=patterns))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ConfigError(
            "model.path",
            f"{model.path!r} is neither a folder here nor a model that can be downloaded",
            why=str(error).splitlines()[0],
            remedy="give a folder with config.json, or a hub id",
        ) from error


def read_saved_tensors(path: str) -> WeightFiles | None:
    """Return the weights of a folder on this machine, or None for a hub id or a folder without any.

    Raises ``ConfigError`` for files that cannot be read.
    """
    folder = Path(path)
    if not (folder / INDEX).is_file() and not any(folder.glob("*.safetensors")):
        return None
    return WeightFiles(path)


def read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor by name from the folder's index, or None without an index.

    Raises ``ConfigError`` for an index that cannot be read, or that names a file outside the
    folder.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        files = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            "model.path", f"{path} cannot be read", why=str(error), remedy="fetch it again"
        ) from error
    if not isinstance(files, dict):
        raise ConfigError(
            "model.path",
            f"{path}: expected a mapping as weight_map, got {type(files).__name__}",
            remedy="fetch it again",
        )
    for tensor, name in files.items():  # pyright: ignore[reportUnknownVariableType]
        if not (isinstance(name, str) and is_inside(name)):
            raise ConfigError(
                "model.path",
                f"{path}: expected the name of a file in this folder for {tensor}, got {name!r}",
                why="a file elsewhere would be read in its place",
                remedy="fetch the model again from a source that you trust",
            )
    return files  # pyright: ignore[reportUnknownVariableType] - checked above


class WeightFiles:
    """The weights in a model's folder, by their names.

    The files are those that the folder's index names, or without an index all of its safetensors
    files. They are opened, which reads their headers. Weights are read one box at a time, so no
    rank holds the whole model.

    Raises:
        ConfigError: the folder has no weights, or a file cannot be read.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.handles: dict[str, Any] = {}
        """The open file of each weight."""
        self.mtp = MtpHead(folder=self.folder, names=())
        """The head that predicts further tokens, which ``check`` finds."""
        # Weights whose files the index names and the folder lacks, with the files. They matter
        # only to an engine that needs them.
        self._absent: dict[str, Path] = {}
        index = read_index(self.folder)
        for path in _weight_files(self.folder, index):
            if index is not None and not path.exists():
                names = [name for name, file in index.items() if self.folder / file == path]
                self._absent |= dict.fromkeys(names, path)
                continue
            handle = _open(path)
            self.handles |= dict.fromkeys(handle.keys(), handle)

    def __contains__(self, name: object) -> bool:
        return name in self.handles

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the stored shape of a weight that the files have."""
        return tuple(self.handles[name].get_slice(name).get_shape())

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the files hold the weights of ``shapes``, without reading any.

        A value head may be missing. A warning names weights that are neither in ``shapes`` nor of
        a head that predicts further tokens.

        Raises:
            ConfigError: a weight is missing, or is stored in another shape or quantized, or a file
                of such a head is missing.
        """
        missing = [name for name in shapes if name not in self and not name.startswith(_VALUE_HEAD)]
        if missing and self._absent:
            path = next(iter(self._absent.values()))
            raise _unreadable(path, "the index names it, and it is not there")
        if missing:
            raise ConfigError(
                "model.path",
                f"{self.folder} lacks {len(missing)} tensors: {_first_of(missing, 3)}",
                remedy="use the folder that save_pretrained wrote for this config.json",
            )
        for name, shape in shapes.items():
            if name in self:
                self._check_one(name, shape)
        stored = [*self.handles, *self._absent]
        self.mtp = find_mtp_head(self.folder, _read_config(self.folder), stored, shapes)
        if lost := [name for name in self.mtp.names if name not in self]:
            raise ConfigError(
                "model.path",
                f"{self._absent[lost[0]]} cannot be read",
                why=f"the index says that it holds {len(lost)} weights of the MTP head, which "
                "save_hf writes as they are; it is not there",
                remedy="fetch the file again, or take its weights out of the index",
            )
        if unused := sorted(set(self.handles) - set(shapes) - set(self.mtp.names)):
            log.warning(
                "%s: %d tensors are not used: %s", self.folder, len(unused), _first_of(unused, 4)
            )

    def _check_one(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self.handles[name].get_slice(name)
        found = tuple(stored.get_shape())
        # Quantized weights may be packed into another shape, so their dtype is looked at first.
        if stored.get_dtype() not in _FLOATING:
            raise ConfigError(
                "model.path",
                f"{name} is stored as {stored.get_dtype()}",
                why="this engine reads floating-point weights as they are, not quantized ones",
                remedy="use the model's bf16, fp16 or fp32 files",
            )
        if found != shape:
            raise ConfigError(
                "model.path",
                f"{name} is {found}, config.json says {shape}",
                remedy="use files and config.json of the same model",
            )

    def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """Return a box of a weight that ``check`` has accepted, in the stored dtype."""
        result: torch.Tensor = self.handles[name].get_slice(name)[box]
        return result


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json, or nothing where there is none."""
    file = folder / "config.json"
    content: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return content


def _first_of(names: list[str], count: int) -> str:
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")


def _weight_files(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    """Return the files of the weights, or raise ``ConfigError`` for a folder without any."""
    if index is not None:
        return sorted({folder / name for name in index.values()})
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        raise ConfigError(
            "model.path",
            f"{folder} holds no weights (*.safetensors)",
            why=f"{pickled[0]} is a pickle, which is never read" if pickled else "",
            remedy="convert it with transformers' save_pretrained, or set model.init: random",
        )
    return files


def _open(path: Path) -> Any:
    """Open a safetensors file, or raise ``ConfigError``."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error) or type(error).__name__) from error


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "model.path", f"{path} cannot be read", why=why, remedy="fetch the file again"
    )


def save_hf(
    export: WeightExport,
    directory: Path,
    *,
    comm: Comm,
    source: str,
    hf_config: Any,
    mtp: MtpHead | None,
) -> None:
    """Write the model on rank 0 while all ranks exhaust ``export``.

    Files have at most 4 GiB (or one tensor). They are written under ``.partial``, and are on the
    disk before that folder takes the final name: a kill leaves the former model or the new one,
    complete. Files of the former folder that are not weights, and are not written again, are kept.

    A head that predicts further tokens is written bit for bit as its folder has it. Only an
    embedding or output head in it that is a copy of the model's there gets the model's new values.

    Args:
        export: the export of all ranks together, from ``Engine.get_per_tensor_param``.
        directory: the final name.
        comm: all ranks that iterate ``export``.
        source: the folder that the model came from; its tokenizer's files are copied.
        hf_config: transformers' configuration of the model.
        mtp: the head that predicts further tokens (``WeightFiles.mtp``), or None for a model whose
            weights come from no file.

    Raises:
        CheckpointWriteError: on rank 0 (``RankFailure`` on the other ranks) if the model could not
            be written; ``directory`` is as it was.
        ConfigError: the same for a head whose folder no longer has it.
    """
    place = real(directory)
    writer = _Writer(place.with_name(place.name + ".partial"), mtp) if comm.rank == 0 else None
    if writer is not None:
        writer.attempt(writer.open_head)
    for name, tensor in export:
        if writer is not None:
            writer.attempt(partial(writer.add, name, tensor))
    if writer is not None:
        writer.attempt(writer.add_head)
    together(
        comm, lambda: _finish(writer, directory, source, hf_config) if writer is not None else None
    )


class _Head:
    """A head that predicts further tokens, open in its folder for a save."""

    def __init__(self, mtp: MtpHead) -> None:
        self._files = files = WeightFiles(str(mtp.folder))
        if lost := [name for name in mtp.names if name not in files]:
            raise ConfigError(
                "model.path", f"{_first_of(lost, 3)} not there", remedy="put the folder back"
            )
        self.copies: dict[str, list[str]] = {}
        """Names in the head of the copies of each weight of the model."""
        for name, originals in mtp.originals.items():
            same = [one for one in originals if _is_copy(files, name, one)]
            if same:
                self.copies.setdefault(same[0], []).append(name)
        self.count = len(mtp.names)
        followers = {name for names in self.copies.values() for name in names}
        self._own = [name for name in mtp.names if name not in followers]

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the weights that are no copies, as they are stored."""
        for name in self._own:
            yield name, self._files.handles[name].get_tensor(name)

    def describe(self) -> str:
        """Return what the log says."""
        copies = self.count - len(self._own)
        follow = f"; {copies} of them are copies of the model's weights and follow these"
        return f"kept {self.count} weights of the MTP head, which are not trained" + (
            follow if copies else ""
        )


def _is_copy(files: WeightFiles, name: str, original: str) -> bool:
    """Return whether two stored weights are the same, bit for bit."""
    import torch

    if original not in files or files.shape_of(name) != files.shape_of(original):
        return False
    left, right = (files.handles[one].get_tensor(one) for one in (name, original))
    same = torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    return left.dtype == right.dtype and same


class _Writer:
    """A writer that collects tensors into numbered files."""

    failure: Exception | None = None

    def __init__(self, directory: Path, mtp: MtpHead | None) -> None:
        self.directory = directory
        self.files: list[list[str]] = []
        self.pending: dict[str, torch.Tensor] = {}
        self.size = 0
        self.total = 0
        self.dtype = "float32"
        self.head: _Head | None = None
        self._mtp = mtp

    def attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the work, unless an earlier part failed, and keep its error for the end.

        The other ranks wait in the next gather until then.
        """
        from safetensors import SafetensorError

        if self.failure is None:
            try:
                work()
            except (OSError, SafetensorError, ConfigError) as error:
                self.failure = error

    def open_head(self) -> None:
        """Open the head that predicts further tokens, if the model's folder has one.

        Raises ``ConfigError`` if the folder no longer has it.
        """
        if self._mtp is not None and self._mtp.names:
            try:
                self.head = _Head(self._mtp)
            except ConfigError as error:
                raise ConfigError(
                    "model.path",
                    f"{self._mtp.folder} no longer holds all {len(self._mtp.names)} weights of "
                    "the MTP head, which save_hf writes as they are",
                    why=str(error).splitlines()[0],
                    remedy="put the folder back and save again; a checkpoint needs no such folder",
                ) from error

    def add_head(self) -> None:
        """Keep the weights of the head that ``add`` has not kept, and say so in the log."""
        if self.head is not None:
            for name, tensor in self.head.read():
                self.keep(name, tensor)
            log.info("%s", self.head.describe())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a CPU copy of a tensor, whose dtype is the model's, for its copies as well."""
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        copies = [] if self.head is None else self.head.copies.get(name, [])
        for one in (name, *copies):
            self.keep(one, tensor)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a CPU copy of a tensor, and write a file when it is full."""
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.size + size > _FILE_BYTES:
            self.flush()
        self.pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.size += size
        self.total += size

    def flush(self) -> None:
        """Write the pending tensors under a provisional name."""
        from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

        if not self.files:
            # A killed save may have left an unfinished folder.
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
        self.files.append(list(self.pending))
        require_room(self.directory, self.size)
        file = self.directory / f"part-{len(self.files):05d}.safetensors"
        save_file(self.pending, file, metadata={"format": "pt"})
        give_common_mode(file)
        self.pending = {}
        self.size = 0

    def close(self) -> None:
        """Rename the files to their final names and write the index."""
        self.flush()
        count = len(self.files)
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self.files, start=1):
            if count == 1:
                final = "model.safetensors"
            else:
                final = f"model-{index:05d}-of-{count:05d}.safetensors"
            (self.directory / f"part-{index:05d}.safetensors").rename(self.directory / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            content = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.directory / INDEX).write_text(json.dumps(content, indent=1))


def _finish(writer: _Writer, directory: Path, source: str, hf_config: Any) -> None:
    from safetensors import SafetensorError

    try:
        if writer.failure is not None:
            raise writer.failure
        restore(directory)
        writer.close()
        _describe(writer, directory, source, hf_config)
        replace_folder(writer.directory, directory, stale=WEIGHT_FILES)
    except (OSError, SafetensorError) as error:
        raise unwritable(directory, error) from error
    finally:
        shutil.rmtree(writer.directory, ignore_errors=True)


def unwritable(directory: Path, error: Exception) -> CheckpointWriteError:
    """Return the error for a model that could not be written to ``directory``."""
    return CheckpointWriteError(
        "the model could not be written",
        where=str(directory),
        why=str(error),
        remedy="free disk space, or check path and permissions",
    )


def _describe(writer: _Writer, directory: Path, source: str, hf_config: Any) -> None:
    """Write the configuration, and the tokenizer's files that ``directory`` does not have."""
    content = hf_config.to_dict() | {"dtype": writer.dtype}
    # Keys that begin with _ belong to this process. An engine's attention function, for example, is
    # unknown to a process that loads the folder.
    content = {k: v for k, v in content.items() if not k.startswith("_")}
    if writer.head is None:
        # transformers writes a number of layers that the folder would have to have.
        drop_counts(content)
    (writer.directory / "config.json").write_text(
        json.dumps(content, indent=2, sort_keys=True, default=str)
    )
    copy_companions(Path(source), writer.directory, former=directory)


def copy_companions(source: Path, directory: Path, *, former: Path) -> None:
    """Copy the tokenizer's files of a model to ``directory``, except those that ``former`` has.

    ``former`` is the folder that ``directory`` replaces, which keeps its own files.
    """
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if not (former / file.name).exists():
                # Not the mode of the source: the cache of a hub may be private.
                shutil.copyfile(file, directory / file.name)
