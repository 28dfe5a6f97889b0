"""Losses over pairs of a chosen and a rejected document, for DPO and reward models.

A pair's loss is a function f of two numbers, which are sums over the tokens of its documents: of
log-probs (DPO), or of the values at the last tokens (a reward model). Its gradient is ``f'_chosen ∇
sum_chosen + f'_rejected ∇ sum_rejected``. So with the slopes f' taken at the present weights the
training pass is a *linear* sum over tokens (``LinearLoss``): the two documents of a pair need not
be in one micro-batch, nor on one rank, the head may form its gradients in the forward pass, and the
gradient is that of f itself. The price is one more forward pass per step, for the sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.functional import logsigmoid

from engine_api.batch import Batch
from engine_api.errors import ConfigError, kind_of
from engine_api.losses import where_counted
from engine_api.results import LossOutput, TokenOutputs
from engine_trainer.extensions.built_in import PAIR_LOSSES
from engine_trainer.extensions.registry import FunctionRegistry

Output = Literal["log_probs", "values"]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Preference pairs, as a loss of pairs gets them.

    All tensors are ``[N]`` float64, one number for each pair.

    Attributes:
        chosen, rejected: log-prob of each response, summed over its tokens, or the score of a
            reward model; with a gradient.
        ref_chosen, ref_rejected: log-probs of the reference model; 0 for a loss without one.
        chosen_tokens, rejected_tokens: tokens of each response, at least 1.
        margin: distance that the data asks for between the scores of a reward model; 0 without.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    margin: torch.Tensor

    @property
    def log_ratios(self) -> torch.Tensor:
        """h, ``log π / ref`` of the chosen response less that of the rejected one, in nats."""
        return (self.chosen - self.ref_chosen) - (self.rejected - self.ref_rejected)

    @property
    def chosen_mean(self) -> torch.Tensor:
        """The mean log-prob of a token of the chosen response."""
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> torch.Tensor:
        """The mean log-prob of a token of the rejected response."""
        return self.rejected / self.rejected_tokens


@dataclass(frozen=True, kw_only=True)
class PairObjective:
    """A loss of pairs, its slopes, and the rewards that metrics show.

    Attributes:
        function: the loss of each pair, ``Pairs`` → ``[N]``.
        name: its name in errors.
        beta: factor of the rewards.
        per_token: rewards are means over a response's tokens.
        sft: coefficient α of the chosen response's own loss, -α log π(chosen) / its tokens (RPO,
            arXiv:2404.19733, eq. 1); 0 is none.
    """

    function: Callable[[Pairs], torch.Tensor]
    name: str
    beta: float = 1.0
    per_token: bool = False
    sft: float = 0.0

    @staticmethod
    def named(
        name: str, beta: float, options: Mapping[str, Any] | None = None, sft: float = 0.0
    ) -> PairObjective:
        """Return the objective of a built-in loss, an entry point, or ``file.py:function``.

        ``beta`` is an option of a loss that has a parameter of this name.
        """
        keys = {"beta": beta} if PAIR_LOSSES.reads(name, "beta") else {}
        return PairObjective(
            function=functools.partial(PAIR_LOSSES.function(name), **keys, **(options or {})),
            name=name,
            beta=beta,
            per_token=PAIR_LOSSES.traits(name).per_token,
            sft=sft,
        )

    def __call__(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss of each pair and its derivatives by ``chosen`` and by ``rejected``.

        All are ``[N]`` float64. Raises ``ConfigError`` for a loss that returns no number a pair.
        """
        with torch.enable_grad():
            leaves = replace(
                pairs,
                chosen=pairs.chosen.detach().requires_grad_(),
                rejected=pairs.rejected.detach().requires_grad_(),
            )
            loss = check_losses(
                PAIR_LOSSES,
                self.name,
                self.function(leaves),
                pairs.chosen.shape,
                remedy="compute it from pairs.chosen and pairs.rejected, element by element",
            )
            if self.sft:
                loss = loss - self.sft * leaves.chosen_mean
            chosen, rejected = torch.autograd.grad(
                loss.sum(), (leaves.chosen, leaves.rejected), materialize_grads=True
            )
        return loss.detach(), chosen, rejected

    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards of the chosen and rejected responses, for metrics: ``[N]`` each."""
        chosen = pairs.chosen - pairs.ref_chosen
        rejected = pairs.rejected - pairs.ref_rejected
        if self.per_token:
            chosen = chosen / pairs.chosen_tokens
            rejected = rejected / pairs.rejected_tokens
        return self.beta * chosen, self.beta * rejected


def check_losses(
    registry: FunctionRegistry[Any], name: str, losses: object, shape: torch.Size, *, remedy: str
) -> torch.Tensor:
    """Return the losses that a function of preferences has made, one for each pair or row.

    Args:
        registry: the functions of this kind, for the error.
        name: name of the function.
        losses: its result.
        shape: shape of its arguments, ``[N]``.
        remedy: advice to the author.

    Raises ``ConfigError`` unless they are ``[N]`` float64 with a gradient.
    """
    got = kind_of(losses)
    if isinstance(losses, torch.Tensor):
        if losses.shape == shape and losses.dtype == torch.float64 and losses.requires_grad:
            return losses
        gradient = "" if losses.requires_grad else ", without a gradient"
        got = f"one of {losses.dtype} with the shape {tuple(losses.shape)}{gradient}"
    raise ConfigError(
        registry.key,
        f"expected {name} to return a float64 tensor with the shape {tuple(shape)} and a "
        f"gradient, got {got}",
        why=f"it returns the loss of each of its {registry.argument}, neither a sum nor a mean",
        remedy=remedy,
    )


def pair_loss(
    margin: torch.Tensor, beta: float, name: str = "sigmoid"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each pair and its derivative by the margin h.

    Args:
        margin: ``[N]`` h. For DPO ``(log π(chosen) - log ref(chosen)) - (log π(rejected) - log
            ref(rejected))``, nats.
        beta: β > 0, nats⁻¹.
        name: a loss that is a function of h.

    Returns:
        Loss and slope, both ``[N]`` float64.

    Raises:
        ConfigError: for an unknown name.
    """
    h = margin.double()
    none, one = torch.zeros_like(h), torch.ones_like(h)
    pairs = Pairs(
        chosen=h,
        rejected=none,
        ref_chosen=none,
        ref_rejected=none,
        chosen_tokens=one,
        rejected_tokens=one,
        margin=none,
    )
    loss, slope, _ = PairObjective.named(name, beta)(pairs)
    return loss, slope


# --- the built-in losses --------------------------------------------------------------------------


def sigmoid(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return -log σ(β h) (DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    With ε = ``label_smoothing``, the chance that a label is wrong, -(1 - ε) log σ(β h) - ε log
    σ(-β h) (conservative DPO, Mitchell 2023; arXiv:2403.00409, eq. 10).
    """
    z = beta * pairs.log_ratios
    if not label_smoothing:
        return _nll(z)
    _check_smoothing(label_smoothing)
    return (1 - label_smoothing) * _nll(z) + label_smoothing * _nll(-z)


def robust(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> torch.Tensor:
    """Return the loss of sigmoid without the bias of labels that are wrong with the chance ε.

    Robust DPO (arXiv:2403.00409, eq. 12): ((1 - ε) l(h) - ε l(-h)) / (1 - 2 ε), l = -log σ(β ·).
    """
    _check_smoothing(label_smoothing)
    z = beta * pairs.log_ratios
    clean, flipped = _nll(z), _nll(-z)
    return ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def hinge(pairs: Pairs, *, beta: float = 0.1) -> torch.Tensor:
    """Return max(0, 1 - β h) (SLiC's with a reference, arXiv:2309.06657)."""
    rest = 1 - beta * pairs.log_ratios
    # A number that is not finite stays one: no loss is not to be taken for none.
    return rest.masked_fill(rest <= 0, 0.0)


def ipo(pairs: Pairs, *, beta: float = 0.1, per_token: bool = False) -> torch.Tensor:
    """Return (h - 1 / (2 β))² (Azar et al. 2023, arXiv:2310.12036, eq. 17, τ = β).

    ``per_token`` takes the mean over a response's tokens in h, as TRL does.
    """
    margin = _mean_log_ratios(pairs) if per_token else pairs.log_ratios
    return (margin - 1 / (2 * beta)).square()


def sigmoid_norm(pairs: Pairs, *, beta: float = 0.1) -> torch.Tensor:
    """Return -log σ(β h) with the mean over a response's tokens in h.

    Length-normalized DPO (Lambert et al. 2024, arXiv:2411.15124, section 5.1.2).
    """
    return _nll(beta * _mean_log_ratios(pairs))


def simpo(pairs: Pairs, *, beta: float = 0.1, gamma: float = 0.5) -> torch.Tensor:
    """Return -log σ(β mean log π(chosen) - β mean log π(rejected) - γ), without a reference.

    SimPO (arXiv:2405.14734, eq. 6). The paper's β are 2 to 10, with γ / β from 0.1 to 0.8.
    """
    return _nll(beta * (pairs.chosen_mean - pairs.rejected_mean) - gamma)


def orpo(pairs: Pairs, *, beta: float = 0.1) -> torch.Tensor:
    """Return -mean log π(chosen) - β log σ(log odds(chosen) / odds(rejected)), without a reference.

    ORPO (arXiv:2403.07691, eq. 6 and 7; β is the paper's λ): odds = P / (1 - P), where log P is the
    mean log-prob of a response's tokens.
    """
    chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -chosen + beta * _nll(odds)


def bradley_terry(pairs: Pairs, *, center: float = 0.0) -> torch.Tensor:
    """Return -log σ(r(chosen) - r(rejected) - m), the loss of a reward model.

    Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1. m is the pair's margin
    (Llama 2, arXiv:2307.09288, eq. 2). With ``center`` c, c (r(chosen) + r(rejected))² is added,
    which keeps the mean score at 0 (arXiv:2312.09244, eq. 2).
    """
    loss = _nll(pairs.log_ratios - pairs.margin)
    return loss + center * (pairs.chosen + pairs.rejected).square() if center else loss


def _mean_log_ratios(pairs: Pairs) -> torch.Tensor:
    chosen = (pairs.chosen - pairs.ref_chosen) / pairs.chosen_tokens
    return chosen - (pairs.rejected - pairs.ref_rejected) / pairs.rejected_tokens


def _nll(z: torch.Tensor) -> torch.Tensor:
    """Return -log σ(z)."""
    return _NegativeLogSigmoid.apply(z)  # pyright: ignore[reportReturnType]


class _NegativeLogSigmoid(torch.autograd.Function):
    """-log σ(z) with the derivative -σ(-z) to the last bit."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z)
        return -logsigmoid(z)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (z,) = ctx.saved_tensors
        return gradients[0] * -(-z).sigmoid()


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x < 0, where the nearer of two formulas is exact.

    A mean log-prob that rounds to 0 counts as that of the number before it.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    small = (-x.where(near, -1.0).expm1()).log()
    return small.where(near, (-x.where(~near, -1.0).exp()).log1p())


def _check_smoothing(value: float) -> None:
    if not 0 <= value < 0.5:
        raise ConfigError(
            "dpo.loss_options.label_smoothing",
            f"expected a number in [0, 0.5), got {value}",
            why="it is the chance that a label is wrong; from 0.5 on the labels say nothing",
            remedy="give a number in [0, 0.5)",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLoss:
    """The sum ``Σ_t coefficient_t x_t`` of the log-probs or the values x.

    The batch's field ``coefficient`` carries the slopes. ``loss_weight`` says which tokens carry
    loss at all, and is not a factor.
    """

    output: Output = "log_probs"

    @property
    def needs(self) -> tuple[str, ...]:
        """The outputs that the engine must compute."""
        return (self.output,)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        """Return the sum, without metrics, because those of the pairs are known beforehand."""
        given = outputs.log_probs if self.output == "log_probs" else outputs.values
        assert given is not None
        weight = batch.loss_weight
        terms = where_counted(batch["coefficient"], weight) * where_counted(given, weight)
        return LossOutput(loss=terms.sum())

    def coefficients(self, batch: Batch) -> torch.Tensor | None:
        """Return the derivative by each log-prob, which is known beforehand: ``[T]``."""
        if self.output != "log_probs":
            return None
        return where_counted(batch["coefficient"], batch.loss_weight)
