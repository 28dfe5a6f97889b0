"""Weights that an export must hold: Hugging Face names and shapes, from the configuration alone."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_api.config import ModelSource, near_matches
from engine_api.errors import RolloutError
from engine_api.hf_folder import read_saved_tensors
from engine_api.hf_names import Piece, pieces_of
from engine_api.hf_vision import find_auto_class
from engine_api.weights import WeightExport
from rollout_fp8.model import config_of
from rollout_fp8.wire.format import SCALE_SUFFIX, WirePlan, WireTensor

WHERE = "weight sync"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Names and shapes of a model's weights.

    Attributes:
        shapes: shapes by name, with a tied parameter once.
        aliases: other names of tied parameters, and the name in ``shapes`` of each.
    """

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]

    @classmethod
    def read(cls, source: ModelSource) -> Expected:
        """Return the weights of a model's folder or hub id, without reading one or using memory."""
        config = config_of(source)
        with torch.device("meta"):
            model = find_auto_class(config).from_config(
                config, trust_remote_code=source.trust_remote_code
            )
        found = pieces_of(model, read_saved_tensors(source.path))
        shapes = {piece.name: piece.shape for pieces in found.values() for piece in pieces}
        return cls(shapes=shapes, aliases=_aliases(model, found))

    def checked(self, export: WeightExport) -> Iterator[tuple[str, Tensor]]:
        """Yield the export's tensors, and check that they are the model's and nothing else.

        Raises:
            RolloutError: at the end of the export: names that are missing, unknown, given twice or
                of a wrong shape.
        """
        seen: set[str] = set()
        problems: list[str] = []
        for name, tensor in export:
            problem = f"{name}: given twice" if name in seen else self._problem(name, tensor)
            seen.add(name)
            if problem is None:
                yield name, tensor
            else:
                problems.append(problem)
        self._refuse(problems, seen)

    def check(self, plan: WirePlan) -> None:
        """Raise ``RolloutError`` that lists names that are missing, unknown or of a wrong shape."""
        weights = {
            name: tensor for name, tensor in plan.tensors.items() if not name.endswith(SCALE_SUFFIX)
        }
        problems = [self._problem(name, tensor) for name, tensor in weights.items()]
        self._refuse([problem for problem in problems if problem is not None], weights)

    def _problem(self, name: str, tensor: Tensor | WireTensor) -> str | None:
        if name not in self.shapes:
            return f"{name}: the model has no such weight ({near_matches(name, list(self.shapes))})"
        if not tensor.dtype.is_floating_point:
            return f"{name}: expected a floating dtype, got {tensor.dtype}"
        wanted = self.shapes[name]
        given = tuple(tensor.shape)
        if wanted == given:
            return None
        return f"{name}: expected shape {list(wanted)}, got {list(given)}"

    def _refuse(self, problems: Sequence[str], seen: Container[str]) -> None:
        problems = problems or [f"{name}: missing" for name in self.shapes if name not in seen]
        if problems:
            shown = list(problems[:8])
            if len(problems) > 8:
                shown.append(f"and {len(problems) - 8} more")
            raise RolloutError(
                f"{len(problems)} weight(s) do not fit",
                where=WHERE,
                why="\n       ".join(shown),
                remedy="give engine and rollout the same model; "
                "nothing is generated until a whole export fits",
            )


def _aliases(model: torch.nn.Module, pieces: Mapping[str, Sequence[Piece]]) -> dict[str, str]:
    """Return the second names of tied parameters, and the saved name of each."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {
        name: pieces[first[id(parameter)]][0].name
        for name, parameter in every
        if first[id(parameter)] != name
    }
