"""Routers of mixtures of experts in transformers models: record, replay or balance a selection.

A router scores the experts for each token, and ``topk`` selects those that serve it. Here that
call alone is recorded, or its indices are replaced. What the family makes of the selected scores
(a softmax, a norm, a scale) stays its own code, on the scores of the current weights. A replayed
selection therefore leaves the gradient of the router as it is. (Ma et al. 2025, arXiv:2510.11370,
replay a rollout's selection in training so.)

A balance loss (``engine_api.balance``) needs the logits too. They are the input of the one softmax
or sigmoid over all experts that a router computes before it selects. A router that has none there
selects by its logits themselves, and returns them.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import inspect
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from engine_api.balance import BALANCE_LOSS, Balance
from engine_api.batch import ROUTED_EXPERTS, Batch
from engine_api.errors import BatchError, ConfigError, EngineError, UnsupportedCapability

if TYPE_CHECKING:
    import torch

__all__ = ["Routers", "Routing", "smallest_dtype"]

# Ends of the names of routers' classes in transformers.
_ROUTER = re.compile(r"(Router|Gate|Gating)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The layers, and in each of them the experts, among which a model's routers select."""

    layers: int
    """Number of decoder layers, of which some may have no experts."""

    top_k: int
    """Number of experts that serve a token in a layer."""

    experts: int
    """Number of experts in a layer."""

    routed: frozenset[int]
    """Numbers of the layers that have experts."""

    def check(self, batch: Batch) -> None:
        """Raise ``BatchError`` for a field ``routed_experts`` that is not of this model."""
        import torch

        if not batch.num_tokens:
            return
        given = batch[ROUTED_EXPERTS]
        if given.shape[1:] != (self.layers, self.top_k):
            raise BatchError(
                ROUTED_EXPERTS,
                f"shape {tuple(given.shape)}, not "
                f"[{batch.num_tokens}, {self.layers}, {self.top_k}]",
                why=f"the model has {self.layers} layers and {self.top_k} experts for each token",
                remedy="record them with the model that is trained",
            )
        here = given[:, sorted(self.routed)].long()
        ordered = here.sort(dim=-1).values
        refused = (
            (
                (here >= self.experts) | (here < -1),
                f"a number that is none of the model's {self.experts} experts",
            ),
            ((here < 0).any(-1) != (here < 0).all(-1), "some of a layer's experts, and not all"),
            ((ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0), "one expert twice in a layer"),
        )
        for wrong, what in refused:
            tokens = torch.nonzero(wrong.flatten(1).any(1))
            if len(tokens):
                at = int(tokens[0])
                raise BatchError(
                    ROUTED_EXPERTS,
                    f"expected {self.top_k} different experts or -1 in each layer, got {what}",
                    index=at,
                    why=f"the token's layers with experts have {given[at].tolist()!s:.200}",
                    remedy="look where this field is recorded; a rollout that records nothing may "
                    "give expert 0 everywhere",
                )


def smallest_dtype(experts: int) -> torch.dtype:
    """Return the smallest dtype that holds the numbers of ``experts`` experts, and -1."""
    import torch

    return torch.int8 if experts <= 128 else torch.int16


class Routers:
    """The routers of a transformers model, whose selections can be recorded, replayed or balanced.

    Args:
        lm: a transformers model on any device. The forward passes of its routers are replaced by
            ones that do the same, unless ``replay``, ``record`` or ``balance`` is in use.
        where: name of the engine or rollout in errors.
        balanced: true for routers that are to be balanced, whose logits must be known.

    Raises:
        UnsupportedCapability: the model has no experts, or routers whose selection is not known.
        ConfigError: the same, for routers that are to be balanced.
    """

    def __init__(self, lm: Any, *, where: str, balanced: bool = False) -> None:
        refuse = _refuse_balance if balanced else _refuse_replay
        text = lm.config.get_text_config()
        found: dict[int, tuple[str, Any, tuple[int, int]]] = {}
        for name, module in lm.named_modules():
            layer = _LAYER.search(f"{name}.")
            if layer is None or not _ROUTER.search(type(module).__name__):
                continue
            kind = _probe(module, int(text.hidden_size))
            index = int(layer[1])
            if kind is None or index in found:
                what = f"{type(module).__name__} selects experts in a way that is not known"
                raise refuse(lm, where, what)
            if balanced and not _knows_logits(module, int(text.hidden_size), kind):
                what = f"{type(module).__name__} has logits that are not known"
                raise refuse(lm, where, what)
            found[index] = (name, module, kind)
        kinds = {kind for _, _, kind in found.values()}
        if not kinds:
            raise refuse(lm, where, "no router of experts was found in it")
        if len(kinds) > 1:
            raise refuse(lm, where, "its layers have different numbers of experts")
        ((experts, top_k),) = kinds
        self.routing = Routing(
            layers=int(text.num_hidden_layers),
            top_k=top_k,
            experts=experts,
            routed=frozenset(found),
        )
        self._replayed: torch.Tensor | None = None
        self._recorded: dict[int, torch.Tensor] | None = None
        self._balance: Balance | None = None
        for layer, (_, module, _) in found.items():
            # An instance's own forward, because FSDP replaces the classes of some modules.
            module.forward = self._wrap(layer, module.forward)

    def replay(self, experts: torch.Tensor | None) -> None:
        """Let the next forward passes, and their recomputation, use these experts.

        Args:
            experts: ``[N, L, k]`` integers on the model's device, by token of a forward pass in the
                order in which a router sees them; -1 leaves a token its own experts. None leaves
                all of them theirs.
        """
        self._replayed = experts

    def balance(self, balance: Balance | None) -> None:
        """Let the next forward passes, and their recomputation, add this loss, or none."""
        self._balance = balance

    @contextmanager
    def record(self) -> Generator[dict[int, torch.Tensor]]:
        """Yield the experts ``[N, k]`` int64 of the last forward pass in the block, by layer."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _wrap(self, layer: int, forward: Any) -> Any:
        import torch

        # torch.compile does not trace a mode that is entered inside of a block.
        @torch.compiler.disable
        def routed(*args: Any, **options: Any) -> Any:
            if self._replayed is None and self._recorded is None and self._balance is None:
                return forward(*args, **options)
            given = None if self._replayed is None else self._replayed[:, layer]
            selection = _make_selection(self.routing.experts, self.routing.top_k, given)
            with selection:
                result = forward(*args, **options)
            if self._recorded is not None:
                self._recorded[layer] = selection.indices
            if self._balance is not None:
                result = _add_balance(self._balance, layer, selection, result)
            return result

        return routed


def _add_balance(balance: Balance, layer: int, selection: Any, result: Any) -> Any:
    """Return a router's result, in whose backward pass the balance loss has its own."""
    import torch

    found = _find_logits(selection, result)
    assert found is not None, "the router was asked for its logits when the model was built"
    logits, sigmoid = found
    served = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, selection.indices, True)
    outputs = list(result)
    floats = [i for i, one in enumerate(outputs) if one.is_floating_point()]
    added = balance.add(layer, logits, served, [outputs[i] for i in floats], sigmoid=sigmoid)
    for i, tensor in zip(floats, added, strict=True):
        outputs[i] = tensor
    return tuple(outputs)


def _find_logits(selection: Any, result: Any) -> tuple[torch.Tensor, bool] | None:
    """Return the logits of a router that ran in a selection, and true for sigmoids, or None.

    ``result`` is the router's own.
    """
    if not selection.tables or not isinstance(result, tuple):
        return None
    # Each is the input of a softmax or sigmoid, and true for sigmoids.
    before: list[tuple[torch.Tensor, bool]] = selection.scored_before
    after: list[tuple[torch.Tensor, bool]] = selection.scored_after
    table: torch.Tensor = selection.tables[-1]
    whole = [call for call in before if call[0].shape == table.shape]
    if whole:
        return whole[0] if len(whole) == 1 else None
    is_returned = any(one is table for one in cast("tuple[Any, ...]", result))
    return (table, after[0][1]) if is_returned and len(after) == 1 else None


def _scoring_functions() -> dict[Any, bool]:
    """Return the functions that make scores of logits, with true for sigmoids."""
    import torch

    softmax = (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax)
    sigmoid = (torch.sigmoid, torch.Tensor.sigmoid, torch.nn.functional.sigmoid)
    return dict.fromkeys(softmax, False) | dict.fromkeys(sigmoid, True)


def _make_selection(experts: int, top_k: int, given: torch.Tensor | None) -> Any:
    """Return the context in which ``topk`` selects the experts ``given`` ``[N, k]``, or its own."""
    import torch
    from torch.overrides import TorchFunctionMode

    scoring = _scoring_functions()

    class Selection(TorchFunctionMode):
        indices: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            # The scores that the experts were selected by, once they are.
            self.tables: list[torch.Tensor] = []
            self.scored_before: list[tuple[torch.Tensor, bool]] = []
            self.scored_after: list[tuple[torch.Tensor, bool]] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in scoring:
                calls = self.scored_after if self.tables else self.scored_before
                calls.append((args[0] if args else kwargs["input"], scoring[func]))
            if func not in (torch.topk, torch.Tensor.topk):
                return result
            scores = args[0] if args else kwargs["input"]
            if scores.dim() != 2 or scores.shape[-1] != experts:
                return result
            if result.indices.shape[-1] != top_k:
                return result
            self.tables.append(scores)
            self.indices = result.indices
            if given is None:
                return result
            self.indices = torch.where(given < 0, result.indices, given.to(result.indices.dtype))
            return torch.return_types.topk((scores.gather(-1, self.indices), self.indices))

    return Selection()


def _probe(module: Any, hidden_size: int) -> tuple[int, int] | None:
    """Return the numbers of all experts and of a token's experts of a router, or None.

    The router runs on two tokens of zeros. It selects among the experts where it calls ``topk`` on
    a table of tokens; a call before that selects groups of experts, which are fewer.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    seen: list[tuple[int, int]] = []

    class Probe(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.topk, torch.Tensor.topk):
                scores = args[0] if args else kwargs["input"]
                if scores.dim() == 2 and scores.shape[0] == 2:
                    seen.append((int(scores.shape[-1]), int(result.indices.shape[-1])))
            return result

    for arguments in _arguments_of(module, hidden_size):
        seen.clear()
        if _try_forward(module, arguments, Probe()) is None:
            continue
        most = max(seen, default=(0, 0))
        if most[0] and seen.count(most) == 1:
            return most
    return None


def _knows_logits(module: Any, hidden_size: int, kind: tuple[int, int]) -> bool:
    """Return whether a router of so many experts, and experts of a token, has known logits."""
    for arguments in _arguments_of(module, hidden_size):
        selection = _make_selection(*kind, None)
        result = _try_forward(module, arguments, selection)
        if result is not None:
            return _find_logits(selection, result) is not None
    return False


def _arguments_of(module: Any, hidden_size: int) -> list[tuple[Any, ...]]:
    """Return the arguments of a router's forward pass on two tokens of zeros, in two forms."""
    import torch

    weight = next(module.parameters(), None)
    if weight is None:
        return []
    hidden = torch.zeros(2, hidden_size, dtype=weight.dtype, device=weight.device)
    # Some families keep a bias of the scores outside of the router, and pass it on.
    parameters = list(inspect.signature(module.forward).parameters.values())
    needed = [one for one in parameters[1:] if one.default is one.empty]
    bias = torch.zeros(weight.shape[0], device=weight.device)
    # Some take the tokens as a list, and some as a batch of sequences.
    return [(tokens, *([bias] * len(needed))) for tokens in (hidden, hidden[None])]


def _try_forward(module: Any, arguments: tuple[Any, ...], context: Any) -> Any:
    """Return the result of a router's forward pass in a context, or None where it fails."""
    import torch

    try:
        with torch.no_grad(), context:
            return module(*arguments)
    # The family's own code may take other arguments, and fail in any way with these.
    except Exception:  # noqa: BLE001
        return None


def _refuse_balance(lm: Any, where: str, why: str) -> EngineError:
    return ConfigError(
        f"options.{BALANCE_LOSS}",
        f"expected 0 for {where} with {type(lm).__name__}, whose experts cannot be balanced",
        why=why,
        remedy=f"set options.{BALANCE_LOSS}: 0, or give a mixture of experts that can be balanced",
    )


def _refuse_replay(lm: Any, where: str, why: str) -> EngineError:
    return UnsupportedCapability(
        "router_replay",
        where=f"{where} with {type(lm).__name__}",
        why=why,
        remedy="set rollout.routed_experts: off (router_replay: false for the engine)",
    )
