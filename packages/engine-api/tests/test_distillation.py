"""Distillation: its arguments and their refusals, fields with rows, and a bigram's divergence."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import one_hot

from engine_api import Batch, Memory
from engine_api.distillation import (
    OutputHead,
    Teaching,
    check_head,
    check_taught,
    teaching_of,
)
from engine_api.errors import (
    BatchError,
    ConfigError,
    EngineStateError,
    UnsupportedCapability,
)
from engine_api.results import LossOutput, TokenOutputs

VOCABULARY = 11  # of the bigram engine


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def with_fields(**fields: torch.Tensor) -> Batch:
    """A document of three tokens, with fields."""
    return Batch(input_ids=torch.tensor([1, 2, 3]), cu_seqlens=torch.tensor([0, 3]), fields=fields)


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        ({"vocabulary": 0}, "vocabulary", "expected an integer of at least 1, got 0"),
        ({"vocabulary": 3.5}, "vocabulary", "expected an integer of at least 1, got 3.5"),
        ({"divergence": "reverse-kl"}, "divergence", r"(?s)unknown divergence.*reverse_kl"),
        ({"beta": 0.0}, "beta", r"inside \(0, 1\), got 0.0"),
        ({"beta": 1.0}, "beta", "forward_kl or reverse_kl for the ends"),
    ],
)
def test_a_teaching_outside_its_ranges_is_refused(given, field, text):
    with pytest.raises(ConfigError, match=text) as caught:
        Teaching(**{"vocabulary": 8} | given)
    assert caught.value.field == f"loss.teaching.{field}"
    assert caught.value.remedy


def test_a_loss_that_does_not_say_what_it_compares_with_is_refused():
    def loss(outputs, batch):
        raise AssertionError

    for wrong in (None, {"vocabulary": 8}):
        loss.teaching = wrong
        with pytest.raises(ConfigError, match="expected a Teaching, got") as caught:
            teaching_of(loss)
        assert "Teaching(vocabulary=...)" in caught.value.remedy
    loss.teaching = Teaching(vocabulary=8, top=True)
    assert teaching_of(loss).fields == ("teacher_top_ids", "teacher_top_log_probs")
    assert Teaching(vocabulary=8).fields == ("teacher_states",)


@pytest.mark.parametrize(
    ("head", "field", "text"),
    [
        ("head", "head", "expected an OutputHead or None, got"),
        (OutputHead(weight=rows(8)), "head.weight", r"\[V, d\], got \(8,\)"),
        (OutputHead(weight=[[1.0]]), "head.weight", r"\[V, d\], got .*list"),
        (OutputHead(weight=rows(8, 4), bias=rows(4)), "head.bias", r"\[8\], got \(4,\)"),
    ],
)
def test_a_head_whose_parts_do_not_fit_is_refused(head, field, text):
    with pytest.raises(ConfigError, match=text) as caught:
        check_head(head)
    assert caught.value.field == field
    check_head(OutputHead(weight=rows(8, 4), bias=rows(8)))


HEAD = OutputHead(weight=rows(10, 4))
TOP = Teaching(vocabulary=8, top=True)
IDS = torch.tensor([[-1, -1], [7, 0], [3, -1]])


@pytest.mark.parametrize(
    ("fields", "teaching", "head", "error", "text"),
    [
        ({}, Teaching(vocabulary=8), None, EngineStateError, "output head of a teacher"),
        ({}, Teaching(vocabulary=13), HEAD, ConfigError, "at most the 12 tokens of the student"),
        ({}, Teaching(vocabulary=11), HEAD, ConfigError, "at most the 10 tokens of the teacher"),
        ({}, Teaching(vocabulary=8), HEAD, BatchError, "teacher_states"),
        (
            {"teacher_states": rows(3, 5)},
            Teaching(vocabulary=8),
            HEAD,
            BatchError,
            "expected states of 4 numbers, .* got 5",
        ),
        ({"teacher_top_ids": IDS}, TOP, None, BatchError, "teacher_top_log_probs"),
        (
            {"teacher_top_ids": IDS, "teacher_top_log_probs": rows(3, 2)},
            TOP,
            None,
            BatchError,
            "expected 3 log-probs for 2 tokens, got 2",
        ),
        (
            {"teacher_top_ids": IDS + 1, "teacher_top_log_probs": rows(3, 3)},
            TOP,
            None,
            BatchError,
            r"expected ids below 8, or -1, got \[8, 1\]",
        ),
        (
            {"teacher_top_ids": IDS - 1, "teacher_top_log_probs": rows(3, 3)},
            TOP,
            None,
            BatchError,
            r"got \[-2, -2\]",
        ),
        (
            {"teacher_top_ids": IDS.clamp(min=3), "teacher_top_log_probs": rows(3, 3)},
            TOP,
            None,
            BatchError,
            r"expected each token once, got \[3, 3\]",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(fields, teaching, head, error, text):
    with pytest.raises(error, match=text) as caught:
        check_taught(with_fields(**fields), teaching, head, 12)
    assert caught.value.remedy


def test_a_teacher_that_fits_is_accepted():
    check_taught(with_fields(teacher_states=rows(3, 4)), Teaching(vocabulary=10), HEAD, 12)
    best = {"teacher_top_ids": IDS, "teacher_top_log_probs": rows(3, 3)}
    check_taught(with_fields(**best), TOP, None, 12)
    none = Batch(input_ids=torch.zeros(0, dtype=torch.int64), cu_seqlens=torch.tensor([0]))
    check_taught(none, TOP, None, 12)


# --- fields with a row for each token -----------------------------------------------------------


def test_rows_follow_their_tokens_and_no_loss_reads_them():
    documents = [
        {
            "input_ids": ids,
            "loss_weight": [0.0] * len(ids),
            "teacher_states": torch.tensor(ids, dtype=torch.bfloat16)[:, None].expand(-1, 2),
            "teacher_top_ids": torch.tensor(ids, dtype=torch.int32)[:, None],
        }
        for ids in ([1, 2, 3], [4, 5])
    ]
    packed = Batch.pack(documents)
    both = Batch.concat([packed.select([1, 0]), packed])
    assert both["teacher_states"].dtype == torch.bfloat16
    assert torch.equal(both["teacher_states"][:, 1].long(), both.input_ids)
    assert torch.equal(both["teacher_top_ids"][:, 0].long(), both.input_ids)
    assert set(both.without_teacher().fields) == {"loss_weight"}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("teacher_states", rows(3), r"expected the shape \[3, n\], got \(3,\)"),
        ("teacher_states", rows(2, 4), r"expected the shape \[3, n\], got \(2, 4\)"),
        ("teacher_states", rows(3, 4, dtype=torch.int32), "expected a floating dtype"),
        ("teacher_top_log_probs", rows(3, 4, dtype=torch.int8), "expected a floating dtype"),
        ("teacher_top_ids", rows(3, 4), "expected a signed integer dtype, got torch.float32"),
        ("teacher_top_ids", rows(3, 4, dtype=torch.uint8), "got torch.uint8"),
    ],
)
def test_rows_of_another_form_are_refused(name, value, text):
    with pytest.raises(BatchError, match=text) as caught:
        with_fields(**{name: value})
    assert caught.value.field == name
    assert caught.value.remedy


def test_a_number_that_is_not_finite_is_found_by_its_token():
    states = rows(3, 4)
    states[1, 2] = torch.nan
    with pytest.raises(BatchError, match="nan is not finite") as caught:
        with_fields(teacher_states=states)
    assert caught.value.index == 1


def test_rows_of_different_teachers_are_not_joined():
    one, other = ({"input_ids": [1], "teacher_states": rows(1, n)} for n in (4, 6))
    with pytest.raises(BatchError, match="expected rows of 4 numbers as before, got 6") as caught:
        Batch.pack([one, other])
    assert caught.value.index == 1
    with pytest.raises(BatchError, match="as before"):
        Batch.concat([Batch.pack([one]), Batch.pack([other])])


# --- an engine ----------------------------------------------------------------------------------


class Distils:
    """The weighted sum of the divergence."""

    needs = ("log_probs", "divergence")
    teaching = Teaching(vocabulary=VOCABULARY)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        assert set(batch.fields) == {"loss_weight"}
        return LossOutput(loss=(batch.loss_weight * outputs.divergence).sum(), metrics={})


@pytest.fixture
def make_distilling(make_engine):
    """Return a function that makes a bigram engine whose state is the previous token."""

    def make(**config):
        engine = make_engine(capabilities=("distillation", "shared-prefixes"), **config)

        def states_step(batch):
            states = one_hot(batch.input_ids.roll(1), VOCABULARY).float()
            states[batch.cu_seqlens[:-1]] = 0.0
            return states

        def taught_step(batch, *, needs, temperature, teaching):
            student = states_step(batch) @ engine.weight / temperature
            taught = batch["teacher_states"] @ engine._teacher_head.weight.T / temperature
            log_p, log_q = student.log_softmax(-1), taught.log_softmax(-1)
            plain = engine.forward_step(batch, needs=needs, temperature=temperature)
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            return TokenOutputs(log_probs=plain.log_probs, divergence=kl)

        engine.states_step = states_step
        engine.taught_step = taught_step
        engine._whole_head = lambda: OutputHead(weight=engine.weight.detach().T.clone())
        engine._place_head = lambda head: head
        return engine

    return make


def test_states_and_head_make_the_log_probs_in_the_callers_order(make_distilling, make_batch):
    engine = make_distilling(max_tokens=6)
    batch = make_batch([2, 6, 3, 5, 4])
    states = engine.infer_states(batch)
    assert states.shape == (batch.num_tokens, VOCABULARY)
    logits = states @ engine.output_head().weight.T
    log_probs = logits.log_softmax(-1).gather(-1, batch.input_ids[:, None])[:, 0]
    log_probs[batch.cu_seqlens[:-1]] = 0.0
    torch.testing.assert_close(engine.infer_batch(batch).log_probs, log_probs)


@pytest.mark.parametrize("max_tokens", [7, 64])
def test_a_student_is_moved_by_the_divergence_over_the_vocabulary(
    make_distilling, make_batch, max_tokens
):
    student, teacher = make_distilling(max_tokens=max_tokens, seed=1), make_distilling(seed=2)
    batch = make_batch([4, 7, 3])
    student.set_teacher(teacher.output_head())
    taught = batch.with_fields(teacher_states=teacher.infer_states(batch))
    table = student.weight.detach().double().requires_grad_()
    counted = batch.loss_weight > 0
    previous = batch.input_ids.roll(1)[counted]
    log_p = (table[previous] / 0.7).log_softmax(-1)
    log_q = (teacher.weight.detach().double()[previous] / 0.7).log_softmax(-1)
    mean = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    mean.backward()
    result = student.train_batch(taught, Distils(), temperature=0.7)
    assert result.loss == pytest.approx(float(mean.detach()), rel=1e-6)
    want = table.detach() - 0.1 * table.grad
    torch.testing.assert_close(student.weight.detach().double(), want, rtol=0, atol=1e-6)


def test_wrong_calls_are_refused_and_leave_the_engine_usable(make_distilling, make_batch):
    engine = make_distilling()
    batch = make_batch([4])
    taught = batch.with_fields(teacher_states=engine.infer_states(batch))
    with pytest.raises(EngineStateError, match="output head of a teacher"):
        engine.train_batch(taught, Distils())
    with pytest.raises(ConfigError, match="expected an OutputHead"):
        engine.set_teacher(engine.weight)
    engine.set_teacher(engine.output_head())
    with pytest.raises(BatchError, match="teacher_states"):
        engine.train_batch(batch, Distils())
    assert engine.train_batch(taught, Distils()).weight_version == 1
    engine.set_teacher(None)
    with pytest.raises(EngineStateError, match="output head of a teacher"):
        engine.train_batch(taught, Distils())


def test_states_and_head_need_the_weights_on_the_device(make_distilling, make_batch):
    engine = make_distilling()
    engine._mark("model", True)
    for call in (lambda: engine.infer_states(make_batch([4])), engine.output_head):
        with pytest.raises(EngineStateError, match=r"offloaded \(model\)"):
            call()
    engine._mark("model", False)
    assert engine.output_head().weight.shape == (VOCABULARY, VOCABULARY)


def test_documents_that_share_prefixes_are_not_taught(make_distilling, make_batch):
    engine = make_distilling(memory=Memory(max_tokens=64, share_prefixes=True))
    engine.set_teacher(engine.output_head())
    with pytest.raises(ConfigError, match="expected false for a loss that needs a divergence"):
        engine.train_batch(make_batch([4]), Distils())


def test_an_engine_that_does_not_declare_distillation_refuses_it(make_engine, make_batch):
    engine = make_engine()
    calls = (
        lambda: engine.infer_states(make_batch([4])),
        engine.output_head,
        lambda: engine.set_teacher(None),
        lambda: engine.train_batch(make_batch([4]), Distils()),
    )
    for call in calls:
        with pytest.raises(UnsupportedCapability, match="distillation"):
            call()
    engine.close()
    with pytest.raises(EngineStateError, match="closed"):
        engine.output_head()
