"""Checks of a loss or an advantage on drawn numbers: sums, packing, masked tokens, gradients.

``engine_trainer.testing`` raises what they find in an author's test. A run makes those of
``quick=True`` with a loss that is not built in, before it loads a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine_api.arguments import check_loss_output
from engine_api.batch import Batch
from engine_api.errors import EngineError, kind_of
from engine_api.results import LossOutput, TokenOutputs
from engine_trainer.algorithms.inputs import Completions, CreditTokens, PolicyTokens
from engine_trainer.extensions.traits import AdvantageTraits, LossTraits

Loss = Callable[[PolicyTokens], LossOutput]
Document = dict[str, torch.Tensor]
STEP = 1e-6
"""Step of the central differences, whose error is about its square."""
DIFFERENCES = 1e-5
"""Largest deviation of a gradient from the differences, relative to the largest gradient."""
ROUNDING = 1e-9
"""Largest deviation of two sums over the same tokens in float64, relative to the larger."""
VERSION = 4
DENOMINATOR = 7.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a function, with the parts of an error."""

    what: str
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  why: {self.why}"] * bool(self.why)
        lines += [f"  to do: {self.remedy}"] * bool(self.remedy)
        return "\n".join(lines)


class _Failed(Exception):
    """An evaluation that gave no sum, with its finding."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(finding.what)


def loss_findings(
    loss: Loss, traits: LossTraits, *, seed: int = 0, quick: bool = False
) -> Iterator[Finding]:
    """Yield what is wrong with a policy loss, the most telling finding first.

    Args:
        loss: function of the tokens alone; its options are bound.
        traits: what the loss says about itself.
        seed: of the drawn numbers.
        quick: leave out what a deviation of does not make a run wrong for sure: the gradient
            against differences.
    """
    documents = _draw(traits, seed)
    checks = [_sums, _weights, _masked, _dtypes]
    if not quick:
        checks += [_claims, _gradient]
    for check in checks:
        try:
            yield from check(loss, traits, documents)
        except _Failed as failed:
            yield failed.finding
            return


# --- evaluation -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Result:
    loss: torch.Tensor
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    """``[T]`` by log-probs, and by the entropy where the loss reads it."""


def _draw(traits: LossTraits, seed: int) -> list[Document]:
    """Draw documents with prompts and a tool's tokens, one of them without any token that counts.

    Ratios lie on both sides of usual bounds. All numbers are float64.
    """
    dice = torch.Generator().manual_seed(seed)

    def draw(count: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(count, generator=dice, dtype=torch.float64) * scale

    documents: list[Document] = []
    for number, length in enumerate((7, 4, 9, 5, 6)):
        mask = torch.ones(length, dtype=torch.float64)
        mask[: 1 + number % 2] = 0.0
        # The turn of a tool.
        if length > 6:
            mask[length // 2] = 0.0
        if number == 3:
            mask.zero_()
        log_probs = -draw(length).abs() - 0.3
        one = draw(1).expand(length).clone()
        document = {
            "log_probs": log_probs,
            "entropy": draw(length).abs() + 0.1,
            "old_log_probs": log_probs + draw(length, 0.3),
            "rollout_log_probs": log_probs + draw(length, 0.3),
            "ref_log_probs": log_probs + draw(length, 0.5),
            "advantages": one if traits.whole_sequences else one + draw(length, 0.5),
            "loss_weight": mask * (0.5 + draw(1).abs()),
            "weight_versions": torch.arange(length) % (VERSION + 1),
        }
        documents.append(document)
    return documents


def _batch(documents: Sequence[Document]) -> tuple[Batch, dict[str, torch.Tensor]]:
    """Return packed documents and the engine's outputs for them."""
    ends = torch.tensor([0, *(len(d["log_probs"]) for d in documents)]).cumsum(0)
    columns = {name: torch.cat([d[name] for d in documents]) for name in documents[0]}
    outputs = {name: columns.pop(name) for name in ("log_probs", "entropy")}
    batch = Batch(input_ids=torch.zeros(int(ends[-1]), dtype=torch.int64), cu_seqlens=ends)
    # Not checked, because masked tokens may hold NaN here as they may in a run.
    return batch.with_computed(**columns), outputs


def _tokens(
    documents: Sequence[Document],
    traits: LossTraits,
    *,
    gradient: bool = True,
    denominator: float = DENOMINATOR,
) -> tuple[PolicyTokens, dict[str, torch.Tensor]]:
    """Return the tokens that a loss gets, and the leaves that it is differentiated by."""
    batch, outputs = _batch(documents)
    if "entropy" not in traits.needs:
        del outputs["entropy"]
    leaves = {n: value.clone().requires_grad_(gradient) for n, value in outputs.items()}
    tokens = PolicyTokens.of(
        TokenOutputs(**leaves),
        batch,
        needs=tuple(name for name in traits.needs if name != "entropy"),
        denominator=denominator,
        version=VERSION,
    )
    if "ref_log_probs" not in traits.needs:
        tokens = replace(tokens, ref_log_probs=None)
    return tokens, leaves


def _call(loss: Loss, tokens: PolicyTokens) -> LossOutput:
    """Return the loss's output.

    Raises ``_Failed`` if the loss raises, or returns no sum.
    """
    try:
        result = loss(tokens)
    # An author's function may raise anything.
    except Exception as error:
        absent = [n for n in ("ref_log_probs", "entropy") if getattr(tokens, n) is None]
        raise _Failed(
            Finding(
                what=f"the loss raised {type(error).__name__}: {error}",
                why=f"{' and '.join(absent)} are None unless the loss asks for them"
                if absent and "NoneType" in str(error)
                else "",
                remedy="correct it; it is called with PolicyTokens, and an input that may be None "
                'is asked for with @policy_loss(needs=("ref_log_probs",))',
            )
        ) from error
    try:
        check_loss_output(result)
    except EngineError as error:
        raise _Failed(
            Finding(
                what=f"the loss returned no sum: {error.what}",
                why=error.why,
                remedy="return LossOutput(loss=(tokens.weight * x).sum(), metrics={name: sum, …})",
            )
        ) from error
    return result


def _evaluate(
    loss: Loss,
    traits: LossTraits,
    documents: Sequence[Document],
    denominator: float = DENOMINATOR,
) -> _Result:
    given, leaves = _tokens(documents, traits, denominator=denominator)
    result = _call(loss, given)
    found = torch.autograd.grad(
        result.loss.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return _Result(
        loss=result.loss.detach().reshape(()),
        metrics={
            name: float(torch.as_tensor(value).detach()) for name, value in result.metrics.items()
        },
        gradients=dict(zip(leaves, found, strict=True)),
    )


def _differ(a: torch.Tensor | float, b: torch.Tensor | float, tolerance: float) -> bool:
    """Return whether two numbers or tensors differ, or are not finite."""
    one = torch.as_tensor(a, dtype=torch.float64)
    other = torch.as_tensor(b, dtype=torch.float64)
    if one.shape != other.shape or not bool(one.isfinite().all() and other.isfinite().all()):
        return True
    scale = max(1.0, float(one.abs().max()) if one.numel() else 0.0)
    return bool(((one - other).abs() > tolerance * scale).any())


# --- what is checked ------------------------------------------------------------------------------

SUM = (
    "return (tokens.weight * x).sum(); the trainer divides once, by the denominator of all ranks, "
    "and algorithm.aggregation says what a token weighs"
)


def _sums(loss: Loss, traits: LossTraits, documents: list[Document]) -> Iterator[Finding]:
    """Yield findings about sums over documents."""
    whole = _evaluate(loss, traits, documents)
    if not bool(whole.loss.isfinite()):
        yield Finding(
            what=f"the loss of finite numbers is {float(whole.loss)}",
            why="one of the documents has no token that counts, as a completion of which all "
            "tokens were rejected",
            remedy="clamp the counts that it divides by: counts.clamp(min=1.0)",
        )
        return
    twice = _evaluate(loss, traits, [*documents, *documents])
    if not _differ(whole.loss, twice.loss, ROUNDING) and float(whole.loss) != 0:
        yield Finding(
            what=f"the loss is a mean: it is {float(whole.loss):.6g} for a batch, and the same "
            "for the batch twice over",
            why="the sum over micro-batches and ranks would then depend on how documents fall on "
            "them",
            remedy=SUM,
        )
        return
    parts = [_evaluate(loss, traits, [document]) for document in documents]
    total = sum(part.loss for part in parts)
    if _differ(whole.loss, total, ROUNDING):
        yield Finding(
            what=f"the loss is no sum over documents: {float(whole.loss):.6g} for all of them "
            f"together, {float(total):.6g} as the sum over each alone",
            why="micro-batches and ranks divide a batch between documents; "
            f"the batch twice over gives {float(twice.loss / whole.loss):.6g} times the loss",
            remedy=SUM,
        )
        return
    for name, gradient in whole.gradients.items():
        if _differ(gradient, torch.cat([part.gradients[name] for part in parts]), ROUNDING):
            yield Finding(
                what=f"the gradient by {name} depends on the documents beside a document",
                remedy="use no statistics over the batch: they are those of a micro-batch",
            )
            return
    for name, value in whole.metrics.items():
        if _differ(value, sum(part.metrics.get(name, 0.0) for part in parts), ROUNDING):
            yield Finding(
                what=f"the metric {name!r} is no sum over documents: {value:.6g} for all of them "
                f"together, {sum(p.metrics.get(name, 0.0) for p in parts):.6g} as the sum over "
                "each alone",
                remedy="return a sum over tokens; the trainer divides it by their number",
            )
            return
    order = [2, 0, 4, 1, 3]
    moved = _evaluate(loss, traits, [documents[i] for i in order])
    if _differ(moved.loss, whole.loss, ROUNDING):
        yield Finding(
            what=f"the loss depends on the order of documents: {float(whole.loss):.6g} and "
            f"{float(moved.loss):.6g}",
            remedy="read tokens.cu_seqlens for where documents begin, and nothing from positions "
            "in the batch",
        )
        return
    again = _evaluate(loss, traits, documents, denominator=2 * DENOMINATOR)
    if not _differ(2 * again.loss, whole.loss, ROUNDING):
        yield Finding(
            what="the loss is divided by tokens.denominator",
            why="the trainer divides the sum by it",
            remedy=SUM,
        )


def _weights(loss: Loss, traits: LossTraits, documents: list[Document]) -> Iterator[Finding]:
    """Yield findings about the weights of tokens."""
    whole = _evaluate(loss, traits, documents)
    heavy = [{**d, "loss_weight": 2 * d["loss_weight"]} for d in documents]
    double = _evaluate(loss, traits, heavy)
    if _differ(double.loss, 2 * whole.loss, ROUNDING):
        yield Finding(
            what=f"tokens of twice the weight give {float(double.loss / whole.loss):.6g} times "
            "the loss, expected 2",
            why="algorithm.aggregation and algorithm.correction are factors in tokens.weight",
            remedy=SUM,
        )
    if not any(bool(g.any()) for g in whole.gradients.values()):
        yield Finding(
            what="the loss has no gradient by any log-prob",
            why="every token's derivative is 0",
            remedy="compute it from tokens.log_probs, without detach() on the way",
        )


def _masked(loss: Loss, traits: LossTraits, documents: list[Document]) -> Iterator[Finding]:
    """Yield findings about tokens that carry no loss."""
    whole = _evaluate(loss, traits, documents)
    # A longer prompt, as that of the same completion in a longer conversation.
    longer = [{name: torch.cat([v[:1], v[:1], v]) for name, v in d.items()} for d in documents]
    more = _evaluate(loss, traits, longer)
    if _differ(more.loss, whole.loss, ROUNDING):
        yield Finding(
            what=f"two more tokens in each prompt change the loss from {float(whole.loss):.6g} to "
            f"{float(more.loss):.6g}",
            why="tokens without loss are 0 in all tensors, not absent: exp(0) is 1, and len() "
            "counts them",
            remedy="multiply by tokens.weight before summing, and count with tokens.mask",
        )
        return
    for name, value in whole.metrics.items():
        if _differ(value, more.metrics.get(name, 0.0), ROUNDING):
            yield Finding(
                what=f"two more tokens in each prompt change the metric {name!r} from "
                f"{value:.6g} to {more.metrics.get(name, 0.0):.6g}",
                remedy="multiply by tokens.mask before summing",
            )
            return
    for name in (n for n in documents[0] if n not in ("loss_weight", "weight_versions")):
        poisoned = [
            {**d, name: d[name].masked_fill(d["loss_weight"] <= 0, torch.nan)} for d in documents
        ]
        found = _evaluate(loss, traits, poisoned)
        same = not _differ(found.loss, whole.loss, 0.0) and not any(
            _differ(found.gradients[n], g, 0.0) for n, g in whole.gradients.items()
        )
        if not same:
            yield Finding(
                what=f"NaN as {name} of a token without loss changes the loss",
                remedy="read the tensors of PolicyTokens only, which are 0 there",
            )
            return


def _dtypes(loss: Loss, traits: LossTraits, documents: list[Document]) -> Iterator[Finding]:
    """Yield findings about dtypes, and about a function that changes its inputs."""
    for dtype in (torch.float64, torch.float32):
        cast = [
            {n: v.to(dtype) if v.is_floating_point() else v for n, v in d.items()}
            for d in documents
        ]
        tokens, _ = _tokens(cast, traits)
        inputs = {
            name: value
            for name in vars(tokens)
            if isinstance(value := getattr(tokens, name), torch.Tensor)
        }
        before = {name: value.detach().clone() for name, value in inputs.items()}
        first = _call(loss, tokens)
        if first.loss.dtype != dtype:
            yield Finding(
                what=f"the loss of {dtype} log-probs is {first.loss.dtype}",
                remedy="make tensors with the dtype and the device of tokens.log_probs: "
                "tokens.log_probs.new_zeros(…)",
            )
            return
        changed = [n for n, v in inputs.items() if not torch.equal(v.detach(), before[n])]
        if changed:
            yield Finding(
                what=f"the loss changes tokens.{changed[0]} in place",
                remedy="compute a new tensor; the trainer and other losses read this one",
            )
            return
        if float(_call(loss, tokens).loss.detach()) != float(first.loss.detach()):
            yield Finding(
                what="the loss of the same tokens differs from call to call",
                why="a run that is resumed, and ranks, must compute the same",
                remedy="draw no random numbers, and keep nothing between calls",
            )
            return


def _claims(loss: Loss, traits: LossTraits, documents: list[Document]) -> Iterator[Finding]:
    """Yield findings about what the loss says about itself."""
    if not traits.only_advantages:
        return
    none = [{**d, "advantages": torch.zeros_like(d["advantages"])} for d in documents]
    found = _evaluate(loss, traits, none)
    if any(bool(g.any()) for g in found.gradients.values()):
        yield Finding(
            what="tokens whose advantage is 0 have a gradient, although only_advantages=True",
            why="the trainer leaves out completions without an advantage then",
            remedy="take only_advantages=True out of @policy_loss",
        )


def _gradient(loss: Loss, traits: LossTraits, documents: list[Document]) -> Iterator[Finding]:
    """Yield findings about the gradient against central differences.

    What the loss takes out of the graph (``detach``, ``torch.no_grad``, ``item``) is held at its
    value, so that a gradient that is stopped on purpose is no difference.
    """
    tokens, leaves = _tokens(documents, traits)
    recorder = _Recorder()
    with recorder, _noted_functions():
        result = _call(loss, tokens)
    given = torch.autograd.grad(
        result.loss.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    scale = max(1.0, *(float(g.abs().max()) for g in given))
    for (name, leaf), gradient in zip(leaves.items(), given, strict=True):
        for t in tokens.mask.nonzero()[:, 0].tolist():
            ends: list[float] = []
            for step in (STEP, -STEP):
                moved, others = _tokens(documents, traits, gradient=False)
                value = others[name].clone()
                value[t] = leaf.detach()[t] + step
                kept = torch.where(tokens.mask, value, 0.0)
                with _Replayer(recorder.tape), _noted_functions():
                    ends.append(float(loss(replace(moved, **{name: kept})).loss))
            difference = (ends[0] - ends[1]) / (2 * STEP)
            if not abs(difference - float(gradient[t])) <= DIFFERENCES * scale:
                yield Finding(
                    what=f"the gradient by {name}[{t}] is {float(gradient[t]):.6g}, and the "
                    f"difference quotient {difference:.6g}",
                    why="numbers that the loss detaches are held constant in both",
                    remedy="correct the backward of its autograd.Function, or take numbers out of "
                    "the graph with .detach() where that is meant",
                )
                return


class _Recorder(TorchFunctionMode):
    """Keeps, in their order, the results that leave the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _leaves(func):
            self.tape.append(result)
        return result


class _Replayer(TorchFunctionMode):
    """Returns the kept results in place of those that leave the graph."""

    def __init__(self, tape: Sequence[Any]) -> None:
        super().__init__()
        self._rest = iter(tape)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return next(self._rest, result) if _leaves(func) else result


_LEAVING = frozenset({"detach", "item", "tolist", "__float__", "__int__", "__bool__"})
# The number of calls of an ``autograd.Function`` that are under way. Its forward computes without
# gradients, and its results are in the graph all the same.
_inside = 0


def _leaves(function: Any) -> bool:
    if _inside:
        return False
    name = getattr(function, "__name__", "")
    data = name == "__get__" and getattr(function, "__self__", None) is torch.Tensor.data
    return name in _LEAVING or data or not torch.is_grad_enabled()


@contextmanager
def _noted_functions() -> Iterator[None]:
    """Count the calls of an ``autograd.Function`` that are under way."""
    apply = torch.autograd.Function.__dict__["apply"]

    def counted(cls: type, *args: Any, **kwargs: Any) -> Any:
        global _inside  # noqa: PLW0603 - calls nest, and the modes have no other way to know
        _inside += 1
        try:
            return apply.__get__(None, cls)(*args, **kwargs)
        finally:
            _inside -= 1

    torch.autograd.Function.apply = classmethod(counted)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # pyright: ignore[reportAttributeAccessIssue]


# --- advantages -----------------------------------------------------------------------------------


def advantage_findings(
    function: Callable[..., Any], traits: AdvantageTraits, *, seed: int = 0
) -> Iterator[Finding]:
    """Yield what is wrong with an advantage, the most telling finding first.

    Args:
        function: function of ``Completions`` or ``CreditTokens`` alone; its options are bound.
        traits: what the advantage says about itself.
        seed: of the drawn numbers.
    """
    check = _completion_level if traits.level == "completion" else _token_level
    try:
        yield from check(function, traits, seed)
    except _Failed as failed:
        yield failed.finding


def _completion_level(
    function: Callable[..., Any], traits: AdvantageTraits, seed: int
) -> Iterator[Finding]:
    del traits
    dice = torch.Generator().manual_seed(seed)
    parts = {
        name: torch.randn(5, 4, generator=dice, dtype=torch.float64) for name in ("first", "second")
    }
    # One group whose completions are equal.
    parts = {n: torch.cat([v[:4], v[4:, :1].expand(1, 4)]) for n, v in parts.items()}
    weights = {"first": 1.0, "second": 0.5}

    def completions(rows: Sequence[int], columns: Sequence[int]) -> Completions:
        chosen = {n: v[list(rows)][:, list(columns)] for n, v in parts.items()}
        total = sum(weights[n] * v for n, v in chosen.items())
        assert isinstance(total, torch.Tensor)
        lengths = 1 + torch.arange(20).view(5, 4)[list(rows)][:, list(columns)]
        return Completions(rewards=total, parts=chosen, weights=weights, lengths=lengths)

    whole = _advantages(function, completions(range(5), range(4)), torch.Size((5, 4)))
    rows, columns = [3, 0, 4, 1, 2], [2, 0, 3, 1]
    moved = _advantages(function, completions(rows, range(4)), whole.shape)
    if _differ(moved, whole[rows], 1e-6):
        yield Finding(
            what="the advantages depend on the order of the groups",
            remedy="compute each row from its own rewards, or from sums over all rows",
        )
    moved = _advantages(function, completions(range(5), columns), whole.shape)
    if _differ(moved, whole[:, columns], 1e-6):
        yield Finding(
            what="the advantages depend on the order of a group's completions",
            remedy="completions of a prompt have no order",
        )


def _token_level(
    function: Callable[..., Any], traits: AdvantageTraits, seed: int
) -> Iterator[Finding]:
    dice = torch.Generator().manual_seed(seed)
    documents: list[Document] = []
    for number, length in enumerate((6, 4, 8, 5)):
        mask = torch.ones(length)
        mask[:1] = 0.0
        if length > 7:
            mask[length // 2] = 0.0
        numbers = torch.randn(3, length, generator=dice, dtype=torch.float64)
        documents.append(
            {
                "rewards": numbers[0] * mask,
                "values": numbers[1].float() * mask,
                "old_log_probs": (-numbers[2].abs()).float() * mask,
                "mask": mask,
                "group": torch.tensor(number // 2),
            }
        )

    def compute(chosen: Sequence[Document]) -> list[tuple[torch.Tensor, ...]]:
        tokens = _credit(chosen, traits)
        shape = tokens.mask.shape
        result = _called(function, tokens)
        if not traits.critic:
            results = (_result(result, shape, tokens.mask),)
        elif isinstance(result, tuple) and len(result) == 2:
            results = tuple(_result(part, shape, tokens.mask) for part in result)
        else:
            raise _Failed(
                Finding(
                    what=f"expected a tuple of advantages and the critic's targets, "
                    f"got {kind_of(result)}",
                    why="the advantage says critic=True",
                    remedy="return (advantages, targets)",
                )
            )
        lengths = [len(d["mask"]) for d in chosen]
        return list(zip(*(r.split(lengths) for r in results), strict=True))

    whole = compute(documents)
    order = [2, 3, 0, 1] if traits.level == "step" else [2, 0, 3, 1]
    if any(
        _differ(a, b, 1e-6)
        for at, row in zip(order, compute([documents[i] for i in order]), strict=True)
        for a, b in zip(row, whole[at], strict=True)
    ):
        yield Finding(
            what="the advantages depend on the order of the documents",
            remedy="read tokens.cu_seqlens for where documents begin",
        )
    if traits.level == "step":
        return
    for number, document in enumerate(documents):
        (alone,) = compute([document])
        if any(_differ(a, b, 1e-6) for a, b in zip(alone, whole[number], strict=True)):
            yield Finding(
                what="the advantages of a document depend on the documents beside it",
                why="at level 'token' a function gets those of one rank, in any division",
                remedy='use @advantage(level="step"), or compute each document from its own tokens',
            )
            return


def _credit(documents: Sequence[Document], traits: AdvantageTraits) -> CreditTokens:
    ends = torch.tensor([0, *(len(d["mask"]) for d in documents)]).cumsum(0)

    def pack(name: str) -> torch.Tensor:
        return torch.cat([d[name] for d in documents])

    return CreditTokens(
        rewards=pack("rewards"),
        mask=pack("mask"),
        cu_seqlens=ends,
        group=torch.stack([d["group"] for d in documents]),
        values=pack("values") if traits.critic else None,
        old_log_probs=pack("old_log_probs") if "old_log_probs" in traits.needs else None,
    )


def _called(function: Callable[..., Any], inputs: Completions | CreditTokens) -> Any:
    try:
        return function(inputs)
    # An author's function may raise anything.
    except Exception as error:
        raise _Failed(
            Finding(
                what=f"the advantage raised {type(error).__name__}: {error}",
                why=f"it was called with {type(inputs).__name__}",
                remedy="correct it; @advantage(level=…) says which of Completions and "
                "CreditTokens it takes, and needs=… which inputs may not be None",
            )
        ) from error


def _advantages(
    function: Callable[..., Any], completions: Completions, shape: torch.Size
) -> torch.Tensor:
    return _result(_called(function, completions), shape, torch.ones(shape))


def _result(result: object, shape: torch.Size, mask: torch.Tensor) -> torch.Tensor:
    """Return the advantages of tokens that count, and 0 elsewhere, or raise ``_Failed``."""
    got = kind_of(result)
    if isinstance(result, torch.Tensor):
        if result.shape == shape and result.is_floating_point():
            counted = result.detach().where(mask > 0, 0.0)
            if bool(counted.isfinite().all()):
                return counted
            got = "numbers that are not finite"
        else:
            got = f"one of {result.dtype} with the shape {tuple(result.shape)}"
    raise _Failed(
        Finding(
            what=f"expected a floating tensor of finite numbers with the shape {tuple(shape)}, "
            f"got {got}",
            why="one of the groups has equal rewards",
            remedy="return one number for each completion (level='completion') or each token; "
            "add a small number to what it divides by",
        )
    )
