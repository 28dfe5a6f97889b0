"""Where a server's weights are: what counts as moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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


def rename_it(model: nn.Sequential) -> None:
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
        (rename_it, ["0.1.bias"]),
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


class Hidden(nn.Module):
    """A module that lists another one's parameters as its own, without having it as a part."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of = (model,)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._of[0].named_parameters(*args, **kwargs)


@pytest.mark.parametrize("change", [replace_data, replace_the_parameter])
def test_parameters_that_are_found_in_no_module_are_watched_too(
    change: Callable[[nn.Sequential], None],
) -> None:
    model = nn.Sequential(layer(), layer())
    places = Places(Hidden(model), dict(model.named_parameters()))
    assert places.moved() == []
    kept = dict(model.named_parameters())
    change(model)
    assert places.moved() == ["0.1.bias"]
    assert kept


def test_registries_that_are_replaced_as_a_whole_are_looked_up_anew() -> None:
    model, places = watched()
    vars(model[0][1])["_parameters"] = dict(layer()[1].named_parameters())
    assert places.moved() == ["0.1.weight", "0.1.bias"]


def test_parameters_that_are_not_watched_may_move() -> None:
    model = nn.Sequential(layer(), layer())
    places = Places(model, {"0.0.weight": model[0][0].weight})
    replace_data(model)
    assert places.moved() == []
