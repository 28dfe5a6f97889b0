"""AdamW, schedules, losses and training steps against PyTorch in float64 and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine_conformance.fixtures import LENGTHS, PackedDocuments, packed_documents, write_adapter
from engine_conformance.oracle import (
    AdamWConfig,
    OracleModel,
    Schedule,
    adamw_step,
    load_oracle,
    loss_and_grads,
    sft,
    spread,
    spreads,
    train_steps,
)
from engine_conformance.oracle.adamw import zero_state
from engine_conformance.oracle.losses import (
    kl_terms,
    ppo_loss,
    ppo_terms,
    sft_loss,
    value_loss,
    weighted_sum,
)

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("max_norm", [None, 1.0, 1e6])
@pytest.mark.parametrize("spare_norms", [False, True])
def test_training_equals_torch_adamw(
    checkpoint: Any, max_norm: float | None, spare_norms: bool
) -> None:
    oracle = load_oracle(checkpoint(family="qwen3"))
    batches = [packed_documents(seed, LENGTHS["uneven"]) for seed in range(3)]
    config = AdamWConfig(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=max_norm)
    if spare_norms:
        config = AdamWConfig(
            weight_decay=0.1, max_grad_norm=max_norm, decays=lambda _, p: p.ndim >= 2
        )
    result = train_steps(oracle, batches, optimizer=config, schedule=Schedule(lr=1e-2))

    leaves = oracle.copy(requires_grad=True)
    decayed = [p for p in leaves.params.values() if config.decays("", p)]
    spared = [p for p in leaves.params.values() if not config.decays("", p)]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=0.1)
    for batch, step in zip(batches, result.steps, strict=True):
        adamw.zero_grad()
        loss = sft(leaves, batch, batch.denominator)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves.params.values(), max_norm or math.inf)
        adamw.step()
        assert step.loss == pytest.approx(loss.item(), rel=1e-12)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    for name, param in leaves.params.items():
        torch.testing.assert_close(result.params[name], param.detach(), **TIGHT)
        torch.testing.assert_close(
            result.optimizer.exp_avg_sq[name], adamw.state[param]["exp_avg_sq"], **TIGHT
        )
    assert result.optimizer.step == 3


def test_training_does_not_depend_on_the_split(checkpoint: Any) -> None:
    oracle = load_oracle(checkpoint(family="qwen3_moe"))
    batch = packed_documents(0, LENGTHS["uneven"])
    loss, grads = loss_and_grads(oracle, batch, sft, batch.denominator)
    parts = [loss_and_grads(oracle, part, sft, batch.denominator) for part in batch.split(3)]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), grad, **TIGHT)


def test_continuing_equals_one_run(checkpoint: Any) -> None:
    oracle = load_oracle(checkpoint(family="llama", tied=True))
    batches = [packed_documents(seed, LENGTHS["equal"]) for seed in range(4)]
    schedule = Schedule(kind="cosine", lr=1e-2, warmup_steps=2, total_steps=4)
    whole = train_steps(oracle, batches, schedule=schedule)
    half = train_steps(oracle, batches[:2], schedule=schedule)
    rest = train_steps(oracle, batches[2:], schedule=schedule, start=half)
    assert whole.steps == half.steps + rest.steps
    assert all(torch.equal(param, rest.params[name]) for name, param in whole.params.items())
    assert whole.path_length == pytest.approx(0.005 + 0.01 + 0.01 + 0.005)


def test_adapter_training_leaves_the_base(checkpoint: Any, tmp_path: Any) -> None:
    folder = checkpoint(family="qwen3")
    oracle = load_oracle(folder, adapter=write_adapter(tmp_path, folder))
    result = train_steps(oracle, [packed_documents(0, LENGTHS["equal"])])
    assert result.params.keys() == oracle.trainable.keys()
    assert all(
        not torch.equal(param, oracle.trainable[name]) for name, param in result.params.items()
    )
    assert all(
        torch.equal(param, oracle.params[name]) for name, param in result.oracle.params.items()
    )


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_equal_torch(kind: Any, warmup: int) -> None:
    total = 12
    lr = 0.5
    ratio = 0.1
    schedule = Schedule(kind=kind, lr=lr, warmup_steps=warmup, total_steps=total, min_ratio=ratio)
    adamw = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = torch.optim.lr_scheduler
    steps = total - warmup
    after = {
        "constant": lambda: scheduler.ConstantLR(adamw, factor=1.0),
        "linear": lambda: scheduler.LinearLR(adamw, 1.0, ratio, total_iters=steps),
        "cosine": lambda: scheduler.CosineAnnealingLR(adamw, steps, eta_min=ratio * lr),
    }[kind]()
    rates = [lr * (k + 1) / warmup for k in range(warmup)]
    for _ in range(steps + 1):
        rates.append(after.get_last_lr()[0])
        adamw.step()
        after.step()
    assert [schedule.at(k) for k in range(total + 1)] == pytest.approx(rates, rel=1e-12)
    assert schedule.at(100) == pytest.approx(lr if kind == "constant" else ratio * lr)


def test_schedule_refuses_no_room_to_decay() -> None:
    with pytest.raises(ValueError, match="total_steps 3 must exceed 3"):
        Schedule(kind="linear", warmup_steps=3, total_steps=3)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sft_loss_equals_cross_entropy() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    target = torch.tensor([1, 2, 3, 4, 5])
    weight = vector(0, 1, 0.5, 1, 1)
    per_token = functional.cross_entropy(logits, target, reduction="none")
    log_probs = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    got = sft_loss(log_probs, loss_weight=weight, denominator=3.5)
    torch.testing.assert_close(got, (per_token * weight).sum() / 3.5)


def test_ppo_terms_by_hand() -> None:
    ratio = vector(1.1, 1.5, 0.5, 1.5, 0.5, 5.0)
    advantage = vector(2.0, 2.0, 2.0, -2.0, -2.0, -2.0)
    got = ppo_terms(
        ratio.log(), torch.zeros(6), advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    # inside; clipped above; not clipped below; not clipped above; clipped below; dual-clipped
    torch.testing.assert_close(got, vector(-2.2, -2.56, -1.0, 3.0, 1.6, 6.0))


def test_value_loss_by_hand() -> None:
    values = vector(1.0, 1.0, 1.0)
    old = vector(0.9, 0.5, 0.5)
    returns = vector(2.0, 1.1, 0.0)
    weight = vector(1, 1, 2)
    got = value_loss(values, old_values=old, returns=returns, loss_weight=weight, denominator=4.0)
    # unclipped 1.0; clipped to 0.7, which is worse: 0.16; clipped to 0.7, which is better: 1.0
    assert got.item() == pytest.approx((0.5 * 1.0 + 0.5 * 0.16 + 2 * 0.5 * 1.0) / 4)
    bare = value_loss(
        values, old_values=old, returns=returns, loss_weight=weight, denominator=4.0, clip=None
    )
    assert bare.item() == pytest.approx((0.5 * 1.0 + 0.5 * 0.01 + 2 * 0.5 * 1.0) / 4)


def test_kl_estimators_are_unbiased_or_near() -> None:
    p, q = torch.randn(2, 9, dtype=torch.float64).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_terms(p, q, kind)).sum(), kl)
    assert (kl_terms(p, q, "k3") >= 0).all()
    torch.testing.assert_close(kl_terms(p, q, "k2"), (p - q).square() / 2)


def test_masked_tokens_do_not_enter() -> None:
    log_probs = vector(math.nan, -1.0, math.inf)
    assert sft_loss(log_probs, loss_weight=[0, 1, 0], denominator=1.0).item() == 1.0
    with pytest.raises(ValueError, match=r"denominator 0\.0 must be positive"):
        weighted_sum(log_probs, [0, 0, 0], 0.0)


def test_ppo_loss_on_policy_is_minus_the_mean_advantage(checkpoint: Any) -> None:
    oracle = load_oracle(checkpoint())
    batch = packed_documents(0, LENGTHS["uneven"])
    log_probs = oracle.token_outputs(batch.input_ids, batch.cu_seqlens).log_probs
    got = ppo_loss(
        log_probs,
        old_log_probs=log_probs,
        advantages=batch.advantages,
        loss_weight=batch.loss_weight,
        denominator=batch.denominator,
    )
    want = -(batch.loss_weight.astype(float) * batch.advantages).sum() / batch.denominator
    assert got.item() == pytest.approx(want, rel=1e-12)


def test_a_bias_of_one_element_has_the_spread_of_its_weight_where_tokens_cancel() -> None:
    squares = {
        "score.weight": torch.tensor([[4.0, 16.0]]),
        "score.bias": torch.tensor([1e-6]),
        "layer.bias": torch.tensor([1e-6, 4e-6]),
        "layer.weight": torch.tensor([[4.0, 16.0]]),
    }

    found = spreads(squares)

    assert found["score.bias"].tolist() == [4.0]
    assert torch.equal(found["layer.bias"], spread(squares["layer.bias"]))
    assert torch.equal(found["score.weight"], spread(squares["score.weight"]))


def test_an_error_of_a_gradient_stays_in_the_first_moment(checkpoint: Any) -> None:
    oracle = load_oracle(checkpoint())
    config = AdamWConfig(weight_decay=0.0)
    batches = [packed_documents(seed, (6, 5)) for seed in range(3)]
    result = train_steps(oracle, batches, optimizer=config)
    name = "model.layers.1.mlp.down_proj.weight"
    generator = torch.Generator().manual_seed(0)
    spreads = []
    state = zero_state(oracle.params)
    model = oracle
    for batch in batches:
        grads = loss_and_grads(model, batch, sft, batch.denominator)[1]
        params, state = adamw_step(model.params, grads, state, config, lr=1e-3)
        model = replace(model, params=params)
        size = spread(grads[name].square())
        spreads.append((grads[name][:4, :4], size[:4, :4]))

    # Moments with errors over the second moments without them, to first order.
    moved = []
    for _ in range(2000):
        off, second, weight = (torch.zeros(4, 4, dtype=torch.float64) for _ in range(3))
        for step, (grad, size) in enumerate(spreads, 1):
            error = size * torch.randn(4, 4, generator=generator, dtype=torch.float64)
            off = 0.9 * off + 0.1 * error
            second = 0.999 * second + 0.001 * grad.square()
            root = (second / (1 - 0.999**step)).sqrt() + config.eps
            weight = weight + 1e-3 * off / (1 - 0.9**step) / root
        moved.append(weight)

    assert torch.allclose(torch.stack(moved).std(0), result.sensitivity[name][:4, :4], rtol=0.1)


def test_a_bias_whose_gradient_cancels_is_moved_by_rounding(checkpoint: Any) -> None:
    oracle = load_oracle(checkpoint(family="phi", tied=False))
    name = "model.layers.0.self_attn.k_proj.bias"
    batch = packed_documents(0, LENGTHS["uneven"])

    def cancel(model: OracleModel, batch: PackedDocuments, denominator: float) -> Tensor:
        # Half of a head is not rotated, where the gradient is zero or 1e-20, as rounding decides.
        bias = model.params[name].clone()
        bias[8] = bias[8].detach()
        return sft(replace(model, params={**model.params, name: bias}), batch, denominator)

    result = train_steps(oracle, [batch], cancel)

    assert result.optimizer.exp_avg_sq[name][8] == 0
    assert result.sensitivity[name][8] > 100 * result.sensitivity[name].median()
    embedding = "model.embed_tokens.weight"
    absent = sorted(set(range(len(result.params[embedding]))) - set(batch.input_ids.tolist()))
    assert not result.sensitivity[embedding][absent].any(), "an absent token has no rounding error"
