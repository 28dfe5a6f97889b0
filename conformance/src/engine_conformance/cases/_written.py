"""Reading of a folder that ``save_hf`` wrote, whose faults are the engine's."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_conformance.cases._case import must
from engine_conformance.compare import ConformanceFailure
from engine_conformance.oracle import OracleModel, load_oracle, read_safetensors

__all__ = ["written_model", "written_weights"]


def written_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a written folder by name.

    Raises:
        ConformanceFailure: if they cannot be read, or a file does not state its tensors' format.
    """
    with _reading(folder):
        tensors = read_safetensors(folder)
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
            problem = f"the metadata are {about}, without a format 'pt'"
            must(about.get("format") == "pt", "save_hf", problem, where=path.name)
    return tensors


def written_model(folder: Path) -> OracleModel:
    """Return the oracle of a written folder.

    Raises:
        ConformanceFailure: if it cannot be read.
    """
    with _reading(folder):
        return load_oracle(folder)


@contextmanager
def _reading(folder: Path) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        problem = f"the folder cannot be read: {error}"
        raise ConformanceFailure("save_hf", problem, where=folder.name) from error
