"""Where a server's weights are: what counts as moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from rollout_fp8.install.places import Places


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))


def watched() -> tuple[nn.Sequential, Places]:
    model = nn.Sequential(layer(), layer())
    return model, Places(model, dict(model.named_parameters()))


def replace_data(model: nn.Sequential) -> None:
    model[0][1].bias.data = model[0][1].bias.data.clone()


def transpose(model: nn.Sequential) -> None:
    model[0][0].weight.data = model[0][0].weight.data.t()


def replace_the_parameter(model: nn.Sequential) -> None:
    model[0][1].bias = nn.Parameter(model[0][1].bias.detach().clone())


def replace_the_module(model: nn.Sequential) -> None:
    model[1] = layer()


def remove_a_parameter(model: nn.Sequential) -> None:
    del model[0][1].bias


def name_it_otherwise(model: nn.Sequential) -> None:
    model[0][1].shift = model[0][1].bias
    model[0][1].bias = None


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (replace_data, ["0.1.bias"]),
        (transpose, ["0.0.weight"]),
        (replace_the_parameter, ["0.1.bias"]),
        (replace_the_module, ["1.0.weight", "1.1.weight", "1.1.bias"]),
        (remove_a_parameter, ["0.1.bias"]),
        (name_it_otherwise, ["0.1.bias"]),
    ],
)
def test_what_is_no_longer_where_it_was_is_named_at_each_look(
    change: Callable[[nn.Sequential], None], moved: list[str]
) -> None:
    model, places = watched()
    assert places.moved() == []
    kept = dict(model.named_parameters())  # or the new memory may be the old one
    change(model)
    assert places.moved() == moved
    assert places.moved() == moved
    assert kept


def wrap(model: nn.Sequential) -> None:
    model[1] = nn.Sequential(*model[1])


def renew(model: nn.Sequential) -> None:
    model[0][1].bias = nn.Parameter(model[0][1].bias.detach())


@pytest.mark.parametrize("change", [wrap, renew])
def test_another_object_in_the_same_memory_has_not_moved(
    change: Callable[[nn.Sequential], None],
) -> None:
    model, places = watched()
    change(model)
    assert places.moved() == []
    replace_data(model)
    assert places.moved() == ["0.1.bias"]


def test_the_modules_are_walked_once_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, places = watched()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("walked again")

    monkeypatch.setattr(nn.Module, "named_modules", refuse)
    assert places.moved() == []


def test_parameters_that_are_not_looked_after_may_move() -> None:
    model = nn.Sequential(layer(), layer())
    places = Places(model, {"0.0.weight": model[0][0].weight})
    replace_data(model)
    assert places.moved() == []
