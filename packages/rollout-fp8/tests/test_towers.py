"""Names of vision towers: of published models, and of models that transformers made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from sync_parts import InProcess, stream_of
from torch import Tensor, nn

from engine_api.errors import RolloutError
from rollout_fp8.install.session import SyncSession
from rollout_fp8.vllm.towers import add_level, find_towers

PUBLISHED = "vision_tower.vision_model.embeddings.weight"
MADE = "vision_tower.embeddings.weight"
TEXT = "language_model.model.embed.weight"


def module_of(**parts: nn.Module) -> nn.Module:
    """Return a module with these parts."""
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def part() -> nn.Module:
    return nn.Linear(8, 4, bias=False)


class Pictured(nn.Module):
    """Server with a SigLIP tower, whose loader has no parameters for names without its level."""

    def __init__(self, *, adds_level: bool) -> None:
        super().__init__()
        self.vision_tower = module_of(vision_model=module_of(embeddings=part()))
        self.language_model = module_of(model=module_of(embed=part()))
        self._towers = find_towers(self) if adds_level else frozenset[str]()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            served = add_level(name, self._towers)
            if served not in parameters:
                raise ValueError(f"There is no module or parameter named {served!r}")
            parameters[served].copy_(tensor)


@pytest.mark.parametrize("name", [PUBLISHED, MADE])
def test_a_tower_is_synced_under_the_names_of_either_folder(name: str) -> None:
    model: Any = Pictured(adds_level=True)
    weights = {name: torch.randn(4, 8), TEXT: torch.randn(4, 8)}
    result = SyncSession(InProcess([model])).run(stream_of(weights, fp8=False), 0)
    assert result.audited
    served = dict(model.named_parameters())
    assert torch.equal(served[PUBLISHED], weights[name])
    assert torch.equal(served[TEXT], weights[TEXT])


def test_without_the_level_a_tower_that_transformers_made_cannot_be_loaded() -> None:
    model: Any = Pictured(adds_level=False)
    stream = stream_of({MADE: torch.randn(4, 8), TEXT: torch.randn(4, 8)}, fp8=False)
    with pytest.raises(RolloutError, match="cannot load the trained model"):
        SyncSession(InProcess([model])).run(stream, 0)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        (f"model.{MADE}", f"model.{PUBLISHED}"),
        (f"model.{PUBLISHED}", f"model.{PUBLISHED}"),
        # The tower of another name begins alike.
        ("vision_tower_2.embeddings.weight", "vision_tower_2.embeddings.weight"),
        (TEXT, TEXT),
    ],
)
def test_only_names_in_a_tower_that_lack_the_level_get_it(name: str, served: str) -> None:
    assert add_level(name, find_towers(Pictured(adds_level=True))) == served


def test_a_vision_model_that_is_not_the_only_part_is_no_tower_of_this_kind() -> None:
    """InternVL's tower lies next to its language model."""
    assert not find_towers(module_of(vision_model=part(), language_model=part()))
    assert not find_towers(module_of(tower=module_of(vision_model=part(), projector=part())))
    # A model that is a tower alone has no name.
    assert not find_towers(module_of(vision_model=part()))
