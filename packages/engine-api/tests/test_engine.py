"""Tests of ``BaseEngine`` on a bigram model: states, sums, skips, checkpoints."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from engine_api import Batch, CheckpointConfig, LossOutput, ScheduleConfig, sft_loss
from engine_api.errors import (
    BatchError,
    CheckpointMissing,
    CheckpointWriteError,
    ConfigError,
    EngineStateError,
    RankFailure,
    UnsupportedCapability,
)

LENGTHS = [7, 3, 5, 2, 6, 4]


def weights(engine):
    return engine.weight.detach().clone(), engine.momentum.clone()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_states(make_engine, make_batch, tmp_path):
    engine = make_engine()
    with pytest.raises(EngineStateError, match="initialize was called while the engine is ready"):
        engine.initialize()
    with pytest.raises(EngineStateError, match="without a gradient"):
        engine.optimizer_step()
    engine.close()
    engine.close()
    assert engine.released == 1
    batch = make_batch([3])
    for call in (
        lambda: engine.train_batch(batch, sft_loss),
        lambda: engine.infer_batch(batch),
        engine.optimizer_step,
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.load_checkpoint(tmp_path),
    ):
        with pytest.raises(EngineStateError, match="closed"):
            call()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_weights_that_an_optimizer_left_half_updated_are_neither_saved_nor_used(
    make_engine, make_batch, tmp_path, monkeypatch, error
):
    engine = make_engine()
    batch = make_batch([3])

    def fail(_):
        with torch.no_grad():
            engine.weight.view(-1)[0] += 1.0
        raise error

    monkeypatch.setattr(engine, "_apply_optimizer", fail)
    with pytest.raises(type(error)):
        engine.train_batch(batch, sft_loss)
    for call in (
        lambda: engine.train_batch(batch, sft_loss),
        lambda: engine.infer_batch(batch),
        lambda: engine.save_checkpoint(tmp_path / "step"),
    ):
        with pytest.raises(EngineStateError, match="failed in its optimizer's step"):
            call()
    engine.close()
    assert engine.released == 1


def test_an_engine_that_trains_seeds_its_process(make_engine):
    def drawn(**config):
        engine = make_engine(**config)
        draws = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002 - what user code draws from
        engine.close()
        return draws

    first = drawn(seed=1)
    assert drawn(seed=1) == first
    assert not set(drawn(seed=2)) & set(first)
    random.seed(5)
    before = random.getstate()
    # It stands for a reference model, created while another engine trains.
    make_engine(seed=1, optimizer=None).close()
    assert random.getstate() == before


def test_loss_and_gradient_are_sums_over_a_denominator(make_engine, make_batch):
    batch = make_batch(LENGTHS)
    engine = make_engine()
    log_probs = engine.infer_batch(batch).log_probs
    mean = float(-(log_probs * batch.loss_weight).sum() / batch.loss_weight.sum())
    first = engine.train_batch(batch, sft_loss)
    assert first.loss == pytest.approx(mean)
    assert first.denominator == float(batch.loss_weight.sum())
    assert first.metrics["tokens"] == 21.0
    assert (first.weight_version, first.skipped, first.num_tokens) == (1, None, 27)
    double = make_engine().train_batch(batch, sft_loss, denominator=2 * first.denominator)
    assert (double.loss, double.grad_norm) == pytest.approx((mean / 2, first.grad_norm / 2))


@pytest.mark.parametrize("max_tokens", [7, 11, 64])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_update_does_not_depend_on_ranks_or_micro_batches(
    make_engine, make_batch, ranks, count, max_tokens
):
    batch = make_batch(LENGTHS)
    reference = make_engine()
    expected = [reference.train_batch(batch, sft_loss) for _ in range(2)][-1]

    def work(comm):
        engine = make_engine(comm=comm, max_tokens=max_tokens)
        own = batch.select([i for i in range(len(LENGTHS)) if i % count == comm.rank])
        return [engine.train_batch(own, sft_loss) for _ in range(2)][-1], weights(engine)

    for output, (weight, _) in ranks(count, work):
        assert (output.loss, output.grad_norm) == pytest.approx(
            (expected.loss, expected.grad_norm), rel=1e-5
        )
        assert output.metrics["tokens"] == 21.0
        torch.testing.assert_close(weight, reference.weight.detach())


def test_gradients_add_up_over_calls(make_engine, make_batch):
    batch = make_batch(LENGTHS)
    whole, halves = make_engine(), make_engine()
    expected = whole.train_batch(batch, sft_loss)
    for documents in ([0, 1, 2], [3, 4, 5]):
        halves.forward_backward(batch.select(documents), sft_loss, denominator=expected.denominator)
    assert halves.optimizer_step().grad_norm == pytest.approx(expected.grad_norm)
    torch.testing.assert_close(halves.weight, whole.weight)


def test_a_rank_without_documents_takes_part(make_engine, make_batch, ranks):
    def work(comm):
        engine = make_engine(comm=comm)
        batch = make_batch([5]) if comm.rank == 0 else Batch.pack([])
        return engine.train_batch(batch, sft_loss), weights(engine)

    (first, left), (second, right) = ranks(2, work)
    assert first == second
    assert same(left, right)


def test_a_batch_without_loss_changes_nothing_and_says_so(make_engine, make_batch):
    engine = make_engine()
    before = weights(engine)
    output = engine.train_batch(make_batch([4, 3], weight=0.0), sft_loss)
    assert (output.skipped, output.loss, output.grad_norm) == ("no token carries loss", 0.0, 0.0)
    assert output.weight_version == 0
    assert same(before, weights(engine))
    assert engine.train_batch(make_batch([4]), sft_loss).weight_version == 1


def test_no_documents_anywhere_is_no_step_even_with_a_denominator(make_engine):
    engine = make_engine()
    before = weights(engine)
    out = engine.train_batch(Batch.pack([]), sft_loss, denominator=4.0)
    assert (out.skipped, out.weight_version) == ("no token carries loss", 0)
    assert same(before, weights(engine))


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf")])
def test_what_is_not_finite_skips_the_step(make_engine, make_batch, value, text):
    def loss(outputs, batch):
        return LossOutput(loss=(outputs.log_probs * value).sum())

    engine = make_engine()
    before = weights(engine)
    output = engine.train_batch(make_batch([4]), loss)
    assert output.skipped is not None
    assert text in output.skipped or "nan" in output.skipped
    assert engine.weight_version == 0
    assert same(before, weights(engine))
    assert engine.train_batch(make_batch([4]), sft_loss).skipped is None


def test_a_loss_that_is_not_finite_skips_even_with_a_finite_gradient(make_engine, make_batch):
    def loss(outputs, batch):
        return LossOutput(loss=outputs.log_probs.sum() + float("inf"))

    assert make_engine().train_batch(make_batch([4]), loss).skipped == "loss is inf"


def test_an_exception_in_a_loss_leaves_the_engine_usable(make_engine, make_batch):
    def loss(outputs, batch):
        raise ZeroDivisionError

    engine, clean = make_engine(), make_engine()
    with pytest.raises(ZeroDivisionError):
        engine.train_batch(make_batch([4]), loss)
    assert engine.train_batch(make_batch([4]), sft_loss) == clean.train_batch(
        make_batch([4]), sft_loss
    )


def test_inference_is_pure_and_in_the_callers_order(make_engine, make_batch):
    engine, batch = make_engine(max_tokens=7), make_batch(LENGTHS)
    before = weights(engine)
    outputs = engine.infer_batch(batch, entropy=True)
    assert engine.forwards
    assert not outputs.log_probs.requires_grad
    assert same(before, weights(engine))
    for document, (low, high) in enumerate(
        zip(batch.boundaries, batch.boundaries[1:], strict=False)
    ):
        alone = engine.infer_batch(batch.select([document]), entropy=True)
        torch.testing.assert_close(outputs.log_probs[low:high], alone.log_probs)
        torch.testing.assert_close(outputs.entropy[low:high], alone.entropy)
        assert outputs.log_probs[low] == 0


def test_schedule_follows_applied_steps(make_engine, make_batch):
    engine = make_engine(schedule=ScheduleConfig(name="linear", warmup_steps=2, total_steps=4))
    rates = [engine.train_batch(make_batch([4]), sft_loss).lr]
    # This step is skipped and does not count.
    rates.append(engine.train_batch(make_batch([4], weight=0.0), sft_loss).lr)
    rates += [engine.train_batch(make_batch([4]), sft_loss).lr for _ in range(3)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.05])


def test_bad_calls_are_refused_and_leave_the_engine_usable(make_engine, make_batch):
    engine = make_engine(max_tokens=5)
    for arguments in ({"denominator": 0.0}, {"denominator": float("nan")}, {"temperature": 0.0}):
        with pytest.raises(ConfigError):
            engine.train_batch(make_batch([4]), sft_loss, **arguments)
    with pytest.raises(BatchError, match="the budget is 5"):
        engine.train_batch(make_batch([6]), sft_loss)
    with pytest.raises(UnsupportedCapability, match="lora"):
        engine.infer_batch(make_batch([4]), adapter=False)
    with pytest.raises(EngineStateError, match="inference only"):
        make_engine(optimizer=None).train_batch(make_batch([4]), sft_loss)
    assert engine.train_batch(make_batch([4]), sft_loss).weight_version == 1


def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all(make_engine, make_batch, ranks):
    def work(comm):
        engine = make_engine(comm=comm)
        with pytest.raises((ConfigError, RankFailure)) as caught:
            engine.train_batch(
                make_batch([4]), sft_loss, denominator="1" if comm.rank == 1 else None
            )
        return type(caught.value), engine.train_batch(make_batch([4]), sft_loss).weight_version

    assert ranks(2, work) == [(RankFailure, 1), (ConfigError, 1)]


def test_a_refused_step_leaves_the_gradients_of_earlier_calls(make_engine, make_batch):
    engine, other = make_engine(), make_engine()
    for each in (engine, other):
        each.forward_backward(make_batch([4]), sft_loss)
    with pytest.raises(ConfigError, match="expected a positive number"):
        engine.train_batch(make_batch([5]), sft_loss, temperature=[])
    assert engine.optimizer_step() == other.optimizer_step()


def test_a_metric_that_is_no_number_leaves_no_gradient_for_the_next_step(make_engine, make_batch):
    def loss(outputs, batch):
        return LossOutput(loss=outputs.log_probs.sum(), metrics={"words": "many"})

    engine = make_engine()
    with pytest.raises(ConfigError, match=r"loss\.metrics\.words"):
        engine.forward_backward(make_batch([4]), loss)
    with pytest.raises(EngineStateError, match="without a gradient"):
        engine.optimizer_step()


@pytest.mark.parametrize("place", ["_clip_gradients", "_sum_over_data_parallel"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_call_that_ends_after_its_backward_leaves_no_gradient_for_the_next_step(
    make_engine, make_batch, monkeypatch, place, error
):
    engine, other = make_engine(), make_engine()

    def fail(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine, place, fail)
        with pytest.raises(type(error)):
            engine.train_batch(make_batch([4], seed=1), sft_loss)
    for one in (engine, other):
        one.forward_backward(make_batch([5], seed=2), sft_loss)
        one.optimizer_step()
    assert same(weights(engine), weights(other))


def test_a_loss_that_needs_what_there_is_not_is_refused_before_any_forward(make_engine, make_batch):
    def about_values(outputs, batch):
        raise AssertionError

    about_values.needs = ("values",)
    engine = make_engine()
    for call in (engine.train_batch, engine.forward_backward):
        with pytest.raises(ConfigError, match="gives no 'values'"):
            call(make_batch([4]), about_values)
    assert not engine.forwards
    assert engine.train_batch(make_batch([4]), sft_loss).weight_version == 1


def test_undeclared_configuration_is_refused_when_constructed(make_engine):
    with pytest.raises(UnsupportedCapability, match="async-checkpoint"):
        make_engine(checkpoint=CheckpointConfig(async_save=True))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_from_a_checkpoint(make_engine, make_batch, tmp_path, asynchronous):
    parts = {
        "checkpoint": CheckpointConfig(async_save=asynchronous),
        "capabilities": ["async-checkpoint"],
    }
    engine, batch = make_engine(**parts), make_batch(LENGTHS)
    engine.train_batch(batch, sft_loss)
    handle = engine.save_checkpoint(tmp_path / "step-1", extra={"epoch": 1})
    # An asynchronous save must not see this step.
    after = engine.train_batch(batch, sft_loss)
    assert handle.result().step == 1
    other = make_engine(seed=3, **parts)
    info = other.load_checkpoint(tmp_path)
    assert (info.step, info.extra, info.path.name) == (1, {"epoch": 1}, "step-1")
    assert (other.weight_version, other.restored) == (1, 0)
    assert other.train_batch(batch, sft_loss) == after
    assert same(weights(engine), weights(other))
    engine.close()


def test_a_checkpoint_moves_between_world_sizes(make_engine, make_batch, ranks, tmp_path):
    def save(comm):
        engine = make_engine(comm=comm)
        engine.train_batch(make_batch([5 + comm.rank]), sft_loss)
        engine.save_checkpoint(tmp_path / "x")
        return weights(engine)

    before = ranks(3, save)[0]
    engine = make_engine(seed=9)
    engine.load_checkpoint(tmp_path / "x")
    assert same(before, weights(engine))
    # The world size differs, so no saved generators belong to this rank.
    assert not hasattr(engine, "restored")


def test_a_failed_load_changes_nothing(make_engine, make_batch, tmp_path):
    engine = make_engine()
    engine.train_batch(make_batch([4]), sft_loss)
    before = weights(engine)
    with pytest.raises(CheckpointMissing):
        engine.load_checkpoint(tmp_path / "none")
    assert same(before, weights(engine))
    assert engine.weight_version == 1


def test_an_asynchronous_save_writes_the_extra_of_the_call(make_engine, make_batch, tmp_path):
    engine = make_engine(
        checkpoint=CheckpointConfig(async_save=True), capabilities=["async-checkpoint"]
    )
    engine.train_batch(make_batch(LENGTHS), sft_loss)
    position = {"epoch": 1, "seen": [3]}
    free = threading.Event()
    # The writer has one thread: until it is free, nothing is written.
    engine._writer.submit(free.wait)

    handle = engine.save_checkpoint(tmp_path / "step-1", extra={"data": position})
    position["epoch"] = 2
    position["seen"].append(4)
    free.set()

    assert handle.result().extra == {"data": {"epoch": 1, "seen": [3]}}
    assert engine.load_checkpoint(tmp_path).extra == {"data": {"epoch": 1, "seen": [3]}}


def test_a_failed_asynchronous_save_is_never_swallowed(make_engine, make_batch, tmp_path):
    engine = make_engine(
        checkpoint=CheckpointConfig(async_save=True), capabilities=["async-checkpoint"]
    )
    (tmp_path / "taken").mkdir()
    engine.save_checkpoint(tmp_path / "taken")
    with pytest.raises(CheckpointWriteError):
        engine.close()
    assert engine.released == 1
    engine.close()
