"""Tests of comparisons: margins, locations and hints.

In addition, tolerances against the errors of float32 and of defects.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine_conformance.cases import Target
from engine_conformance.cases._expect import oracle_outputs, outputs_match
from engine_conformance.cases._ranks import InferCall, RankOutputs
from engine_conformance.compare import (
    ConformanceFailure,
    assert_bitwise,
    assert_close_per_token,
    assert_covered_once,
    assert_names,
    assert_scalar_close,
    assert_weights_close,
)
from engine_conformance.fixtures import LENGTHS, packed_documents
from engine_conformance.oracle import (
    AdamWConfig,
    AdamWState,
    Schedule,
    adamw_step,
    load_oracle,
    loss_and_grads,
    read_safetensors,
    sft,
    train_steps,
)
from engine_conformance.tolerances import (
    Tolerance,
    gradient_tolerances,
    moment_tolerance,
    tolerance,
    weight_tolerance,
)

TOL = Tolerance(atol=1e-3)
BOUNDS = [0, 3, 7, 10]


@pytest.fixture
def want() -> Tensor:
    return torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def failure(*args: Any, **kwargs: Any) -> ConformanceFailure:
    with pytest.raises(ConformanceFailure) as caught:
        assert_close_per_token("log_probs", *args, **kwargs)
    return caught.value


def test_margin_is_the_worst_error_over_its_tolerance(want: Tensor) -> None:
    got = want.clone()
    got[4] += 5e-4
    assert assert_close_per_token("log_probs", got, want, TOL) == pytest.approx(0.5)
    assert assert_close_per_token("log_probs", want, want, Tolerance()) == 0


def test_failure_says_where_and_by_how_much(want: Tensor) -> None:
    got = want.clone()
    got[5] += 0.05
    caught = failure(got, want, TOL, cu_seqlens=BOUNDS)
    assert caught.margin == pytest.approx(50)
    assert "log_probs at token 5 (document 1, position 2): got" in str(caught)
    assert "error 0.05 (50x tolerance); 1 of 10 tokens differ" in str(caught)
    keep = torch.arange(10) != 5
    assert assert_close_per_token("log_probs", got, want, TOL, keep=keep) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong(want: Tensor, bad: float) -> None:
    got = want.clone()
    got[2] = bad
    assert failure(got, want, TOL).margin == math.inf
    assert failure(got, want, Tolerance(rtol=1.0)).where == "token 2"


def test_shape_is_part_of_the_answer(want: Tensor) -> None:
    assert "shape (9,), expected (10,)" in str(failure(want[:9], want, TOL))


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (2.0, "got / want is 2 = dp size = 2"),
        (0.5, "0.5 = 1 / dp size = 1 / 2"),
        (3.0, "3 = micro-batches"),
        (-1.0, "-1 (a sign)"),
        (0.0, "nothing was added"),
        (1.37, "got / want is 1.37"),
    ],
)
def test_telltale_ratios(want: Tensor, ratio: float, text: str) -> None:
    caught = failure(want * ratio, want, TOL, factors={"dp size": 2, "micro-batches": 3})
    assert text in str(caught)
    with pytest.raises(ConformanceFailure) as scalar:
        assert_scalar_close(
            "loss", 4.0 * ratio, 4.0, TOL, factors={"dp size": 2, "micro-batches": 3}
        )
    assert text in str(scalar.value)


@pytest.mark.parametrize(
    ("ratio", "cause"),
    [
        (4.0, "= ranks: it is summed over the ranks twice"),
        (0.25, "= 1 / ranks: it is averaged over the ranks"),
        (2.0, "the norm counts what all ranks hold once a rank"),
        (0.5, "the norm is of one rank's part"),
        (6.0, "= micro-batches: each micro-batch counts as a whole batch"),
        (7.0, "got / want is 7: a whole number: something is summed 7 times"),
    ],
)
def test_a_ratio_that_a_wrong_reduction_gives_names_it(ratio: float, cause: str) -> None:
    with pytest.raises(ConformanceFailure) as caught:
        assert_scalar_close(
            "grad_norm", 3.0 * ratio, 3.0, TOL, factors={"ranks": 4, "micro-batches": 6}
        )
    assert cause in str(caught.value)


def test_a_shift_is_seen_although_it_fetches_values_of_the_next_document(want: Tensor) -> None:
    bounds = [0, 2, 4, 6, 8, 10]
    got = want.roll(-1)
    got[torch.tensor(bounds[1:]) - 1] = 7.0
    assert "one token early" in str(failure(got, want, TOL, cu_seqlens=bounds))


def test_boxes_that_overlap_name_their_holders_and_the_replica() -> None:
    counts = torch.tensor([[2, 2], [1, 0]])
    boxes = {
        "rank 0": (slice(0, 1), slice(0, 2)),
        "rank 1": (slice(0, 1), slice(0, 2)),
        "rank 2": (slice(1, 2), slice(0, 1)),
    }
    with pytest.raises(ConformanceFailure) as caught:
        assert_covered_once("shards", counts, boxes, where="a.weight")
    told = str(caught.value)
    assert "1 of 4 elements are in no box" in told
    assert "2 of 4 elements are in several boxes: of rank 0, rank 1" in told
    assert "all say replica 0" in told
    assert_covered_once("shards", torch.ones(2, 2), {}, where="a.weight")


def test_logits_that_are_not_shifted_are_named(checkpoint: Any, tmp_path: Any) -> None:
    oracle = load_oracle(checkpoint())
    call = InferCall(documents=packed_documents(0, LENGTHS["uneven"]))
    batch = call.documents
    unshifted = oracle.unshifted_log_probs(batch.input_ids, batch.cu_seqlens).float()
    shifted = oracle_outputs(oracle, call)["log_probs"].float()
    target = Target(backend="acme", root=tmp_path)

    def outputs_of(values: Tensor) -> list[RankOutputs]:
        return [RankOutputs(dp_rank=0, dp_size=1, fields={"log_probs": values})]

    with pytest.raises(ConformanceFailure, match="they are not shifted"):
        outputs_match(target, oracle, call, outputs_of(unshifted))
    with pytest.raises(ConformanceFailure) as caught:
        outputs_match(target, oracle, call, outputs_of(shifted + 0.1))
    assert "not shifted" not in str(caught.value)
    assert outputs_match(target, oracle, call, outputs_of(shifted)) < 1


def test_shifts_and_places(want: Tensor) -> None:
    assert "one token early" in str(failure(want.roll(-1), want, TOL))
    assert "one token late" in str(failure(want.roll(1), want, TOL))
    got = want.clone()
    got[torch.tensor([0, 3, 7])] = 9
    assert "only first tokens" in str(failure(got, want, TOL, cu_seqlens=BOUNDS))
    got = want.clone()
    got[4:] += 0.1 * torch.arange(6)[:, None].double().sin().sum(-1) + 0.05
    assert "documents see one another" in str(failure(got, want, TOL, cu_seqlens=BOUNDS))


def test_weights_name_element_and_update(want: Tensor) -> None:
    start = {"a.weight": torch.zeros(5, 2, dtype=torch.float64), "b.weight": torch.ones(3)}
    exact = {"a.weight": want.reshape(5, 2), "b.weight": torch.ones(3)}
    got = exact | {"a.weight": want.reshape(5, 2) / 4}
    with pytest.raises(
        ConformanceFailure, match=r"(?s)a\.weight\[\d, \d\]: got .* likely: .*0\.25 = 1 / tp"
    ) as caught:
        assert_weights_close(got, exact, TOL, start=start, factors={"tp size": 4})
    assert caught.value.margin > 100
    assert assert_weights_close(exact, exact, TOL) == 0
    with pytest.raises(
        ConformanceFailure,
        match=r"only the expected side \(the oracle.*\) has 1: \['b.weight'\]; "
        r"only the engine under test has 1: \['c.weight'\]",
    ):
        assert_weights_close({"a.weight": want, "c.weight": want}, exact, TOL)
    with pytest.raises(ConformanceFailure, match=r"names: only the engine under test has 1: \["):
        assert_names("weights", exact | {"c.weight": want}, exact)


def test_bitwise_sees_dtype_sign_of_zero_and_one_bit() -> None:
    want = {"w": torch.tensor([[1.0, 0.0]]), "s": torch.tensor(2.0)}
    assert assert_bitwise({name: t.clone() for name, t in want.items()}, want) == 0
    with pytest.raises(ConformanceFailure, match=r"dtype torch\.bfloat16, expected torch\.float32"):
        assert_bitwise(want | {"s": want["s"].bfloat16()}, want)
    with pytest.raises(ConformanceFailure, match=r"w\[0, 1\]: got -0.0, want 0.0; 1 of 2"):
        assert_bitwise(want | {"w": torch.tensor([[1.0, -0.0]])}, want)


def float32_run(
    folder: Any, batches: list[Any], lr: float
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Return weights, losses and gradient norms of transformers in float32 with PyTorch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    adamw = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    norms = []
    for batch in batches:
        adamw.zero_grad()
        total = torch.zeros(())
        for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
            ids, weight = (
                torch.as_tensor(x[start:stop]) for x in (batch.input_ids, batch.loss_weight)
            )
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            total = total - (weight[1:] * log_p.gather(-1, ids[1:, None])[:, 0]).sum()
        loss = total / batch.denominator
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
        losses.append(loss.item())
        adamw.step()
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


def test_tolerances_hold_for_float32_and_see_defects(checkpoint: Any) -> None:
    folder = checkpoint(family="qwen2")
    factors = {"dp size": 2}
    batches = [packed_documents(seed, LENGTHS["uneven"]) for seed in range(2)]
    result = train_steps(load_oracle(folder), batches, schedule=Schedule(lr=1e-3))
    weights, losses, norms = float32_run(folder, batches, lr=1e-3)
    for loss, norm, step in zip(losses, norms, result.steps, strict=True):
        assert assert_scalar_close("loss", loss, step.loss, tolerance("loss")) < 1
        assert assert_scalar_close("grad_norm", norm, step.grad_norm, tolerance("grad_norm")) < 1
        with pytest.raises(ConformanceFailure, match="2 = dp size"):
            assert_scalar_close(
                "grad_norm", 2 * norm, step.grad_norm, tolerance("grad_norm"), factors=factors
            )
    bound = weight_tolerance(result)
    assert assert_weights_close(weights, result.params, bound) < 1
    elements = torch.cat([b.flatten() for b in bound.values()])
    # Few weights are excused: those whose gradient nearly vanishes.
    assert (elements < 0.01 * result.path_length).double().mean() > 0.9
    assert (elements < 0.1 * result.path_length).double().mean() > 0.97
    slower, _, _ = float32_run(folder, batches, lr=0.9e-3)
    with pytest.raises(ConformanceFailure, match=r"got / want is 0\.9\b"):
        assert_weights_close(slower, result.params, bound, start=read_safetensors(folder))


def bfloat16_gradients(folder: Any, batch: Any) -> dict[str, Tensor]:
    """Return the gradients of transformers in bfloat16, summed over documents in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        ids, weight = (torch.as_tensor(x[start:stop]) for x in (batch.input_ids, batch.loss_weight))
        log_p = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        loss = -(weight[1:] * log_p.gather(-1, ids[1:, None])[:, 0]).sum() / batch.denominator
        loss.backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad.double() if p.grad is not None else 0
        model.zero_grad()
    return sums


@pytest.mark.parametrize(
    "arguments", [{}, {"tied": False, "family": "llama"}, {"vocab_size": 2048}, {"num_layers": 4}]
)
def test_gradient_and_moment_tolerances_hold_for_bfloat16_and_see_defects(
    checkpoint: Any, arguments: Any
) -> None:
    folder = checkpoint(**{"tied": True} | arguments)
    oracle = load_oracle(folder)
    config = AdamWConfig(weight_decay=0.0)
    half = torch.bfloat16
    layers = oracle.config.num_layers
    for seed in range(3):
        batch = packed_documents(
            3000 + seed, LENGTHS["uneven"], vocab_size=oracle.config.vocab_size
        )
        got = bfloat16_gradients(folder, batch)
        (_, want) = loss_and_grads(oracle, batch, sft, batch.denominator)
        bounds = gradient_tolerances(want, half, layers=layers)
        assert assert_weights_close(got, want, bounds) < 0.9
        result = train_steps(oracle, [batch], optimizer=config, schedule=Schedule(lr=1e-3))
        zero = AdamWState(step=0, exp_avg=_zeros(want), exp_avg_sq=_zeros(want))
        params, state = adamw_step(oracle.params, got, zero, config, lr=1e-3)
        assert (
            assert_weights_close(
                params, result.params, weight_tolerance(result, half, layers=layers)
            )
            < 1
        )
        moments = moment_tolerance(result, half, layers=layers)
        for name in ("exp_avg", "exp_avg_sq"):
            assert (
                assert_weights_close(
                    getattr(state, name), getattr(result.optimizer, name), moments[name]
                )
                < 1
            )
        for wrong in (
            _zeros(got),
            {name: -grad for name, grad in got.items()},
            {n: 2 * g for n, g in got.items()},
        ):
            with pytest.raises(ConformanceFailure):
                assert_weights_close(wrong, want, bounds)


def _zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def test_an_absent_tokens_embedding_may_only_decay(checkpoint: Any) -> None:
    oracle = load_oracle(checkpoint())
    batch = packed_documents(0, (4, 4))
    result = train_steps(oracle, [batch], optimizer=AdamWConfig(weight_decay=0.0))
    absent = sorted(set(range(256)) - set(batch.input_ids.tolist()))
    name = "model.embed_tokens.weight"
    assert torch.equal(result.params[name][absent], oracle.params[name][absent])
    assert weight_tolerance(result)[name][absent].max() < 1.3e-3 * result.path_length


def test_table_is_what_its_docstring_says() -> None:
    names = ("log_probs", "values", "router_logits", "loss")
    got = [tolerance(name, torch.float32).atol for name in names]
    assert got == pytest.approx([8.6e-5, 2.2e-5, 4.3e-5, 4.3e-5], rel=0.05)
    half = [tolerance(name, torch.bfloat16).atol for name in names]
    assert half == pytest.approx([0.5, 0.13, 0.25, 0.25], rel=0.05)
    assert tolerance("grad_norm").rtol == pytest.approx(1.1e-5, rel=0.05)
    assert tolerance("grad_norm", torch.bfloat16).rtol == pytest.approx(0.063, rel=0.05)
    assert tolerance("export") == Tolerance()
    assert tolerance("log_probs", layers=8).atol == pytest.approx(2 * tolerance("log_probs").atol)
