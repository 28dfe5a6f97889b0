"""Installation of a weight export into a Hugging Face model, exactly or not at all."""

from __future__ import annotations

from typing import Any

import torch

from engine_api.config import near_matches
from engine_api.errors import RolloutError
from engine_api.hf_names import SavedTensors, pieces_of, saved_buffers
from engine_api.weights import WeightExport

WHERE = "rollout 'local', weight sync"


class WeightTable:
    """The destination of each tensor of an export.

    It maps a Hugging Face name to a view of the model's own memory, saved buffers included.

    Args:
        model: the transformers model.
        folder: the tensors of the model's folder, whose names the export has, or None.
    """

    def __init__(self, model: Any, folder: SavedTensors | None = None) -> None:
        memory = {**dict(model.named_parameters()), **saved_buffers(model)}
        self._views: dict[str, torch.Tensor] = {}
        for name, pieces in pieces_of(model, folder).items():
            for piece in pieces:
                self._views[piece.name] = piece.view(memory[name].data)

    def install(self, export: WeightExport) -> None:
        """Copy every tensor of ``export``, converted to the model's dtype.

        The export is read to its end even when it does not fit, because other ranks gather along
        with it.

        Raises ``RolloutError`` that lists names that are missing, unknown, given twice or of a
        wrong shape.
        """
        seen: set[str] = set()
        problems: list[str] = []
        for name, tensor in export:
            problem = self._problem(name, tensor, seen)
            seen.add(name)
            if problem is None:
                self._views[name].copy_(tensor)
            else:
                problems.append(problem)
        problems += [f"{name}: missing" for name in self._views if name not in seen]
        if problems:
            raise _error(problems)

    @property
    def num_tensors(self) -> int:
        """The number of tensors of a whole export."""
        return len(self._views)

    @property
    def num_bytes(self) -> int:
        """The bytes of a whole export, in the model's dtype."""
        return sum(view.nbytes for view in self._views.values())

    def _problem(self, name: str, tensor: torch.Tensor, seen: set[str]) -> str | None:
        if name not in self._views:
            return f"{name}: the model has no such weight ({near_matches(name, list(self._views))})"
        if name in seen:
            return f"{name}: given twice"
        if not tensor.is_floating_point():
            return f"{name}: expected a floating dtype, got {tensor.dtype}"
        wanted = list(self._views[name].shape)
        given = list(tensor.shape)
        if wanted != given:
            return f"{name}: expected shape {wanted}, got {given}"
        return None


def _error(problems: list[str], shown: int = 8) -> RolloutError:
    more = f"\n       and {len(problems) - shown} more" if len(problems) > shown else ""
    return RolloutError(
        f"{len(problems)} weight(s) do not fit",
        where=WHERE,
        why="\n       ".join(problems[:shown]) + more,
        remedy="give engine and rollout the same model; nothing is generated until a whole "
        "export fits",
    )
