"""The search for a cause: each suspect is told from the others, and a right reading has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_conformance.diagnosis import (
    CAUSES,
    Document,
    Reading,
    Subject,
    build_oracle,
    compare_layers,
    diagnose,
)
from engine_conformance.diagnosis.suspects import suspects
from engine_conformance.fixtures import TinyModel, write_checkpoint
from engine_conformance.oracle import (
    OracleModel,
    WeightMismatch,
    load_oracle,
    read_safetensors,
)
from engine_conformance.oracle.weights import make_adapter

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
SIZES = {**SMALL, "num_heads": 2, "num_kv_heads": 1}
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    """A model with everything that a suspect may get wrong."""
    folder = tmp_path_factory.mktemp("subject")
    models = [
        load_oracle(
            write_checkpoint(
                folder / f"{seed}",
                TinyModel(seed=seed, rope_theta=3e4, rms_norm_eps=1e-2, keys=WINDOW, **SIZES),
            )
        )
        for seed in (0, 1)
    ]
    generator = torch.Generator().manual_seed(3)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora"
    tensors = {
        f"{name}_A.weight": torch.randn(3, 16, generator=generator),
        f"{name}_B.weight": torch.randn(32, 3, generator=generator),
    }
    return Subject(
        config=models[0].config,
        params=models[0].params,
        adapter=make_adapter(tensors, 0.7),
        older={"step 1": models[1]},
        temperature=0.8,
        top_k=6,
        top_p=0.9,
    )


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> list[int]:
        return torch.randint(32, (count,), generator=generator).tolist()

    return [
        Document(
            name=f"document {i}",
            tokens=draw(16 + i),
            prompt=5,
            other_prompts={"by another template": draw(7)},
        )
        for i in range(3)
    ]


def right(subject: Subject, documents: list[Document]) -> list[torch.Tensor]:
    """Return the oracle's own log-probs of the completions, by its public method."""
    tokens = [token for one in documents for token in one.tokens]
    ends = torch.tensor([0, *[len(one.tokens) for one in documents]]).cumsum(0)
    values = subject.oracle.token_outputs(tokens, ends, subject.temperature).log_probs
    parts = values.split([len(one.tokens) for one in documents])
    return [part[one.prompt :] for part, one in zip(parts, documents, strict=True)]


def test_a_right_reading_has_no_cause_and_tokens_without_a_number_do_not_count(
    subject: Subject, documents: list[Document]
) -> None:
    values = right(subject, documents)
    values[0] = values[0].clone()
    values[0][2:5] = torch.nan
    finding = diagnose(subject, documents, Reading(name="engine", log_probs=values))
    assert finding.is_right
    assert finding.worst < 1e-12
    assert finding.tokens == sum(map(len, values)) - 3
    assert not finding.cause


@pytest.mark.slow
def test_each_suspect_is_named_by_its_own_log_probs(
    subject: Subject, documents: list[Document]
) -> None:
    reading = Reading(name="engine", log_probs=right(subject, documents), packed=True)
    tried = list(suspects(subject, documents, reading))
    assert set(CAUSES) - {one.cause for one in tried} == {"dtype"}
    for suspect in tried:
        values = [part.float() for part in suspect.predict()]
        got = Reading(name="engine", log_probs=values, packed=True)
        finding = diagnose(subject, documents, got)
        assert not finding.is_right, suspect.detail
        assert finding.left < 1e-3, (suspect.detail, finding.nearest)
        assert finding.cause == suspect.cause, (suspect.detail, finding.nearest)
        assert finding.places[0].position >= documents[0].prompt


def test_rounding_is_a_cause_in_float32_and_none_in_its_own_dtype(
    subject: Subject, documents: list[Document]
) -> None:
    coarse = replace(subject, params={n: v.bfloat16().double() for n, v in subject.params.items()})
    values = right(coarse, documents)
    found = diagnose(subject, documents, Reading(name="engine", log_probs=values))
    assert found.cause == "dtype"
    assert "bfloat16" in found.detail
    same = Reading(name="engine", log_probs=values, dtype="bfloat16")
    assert diagnose(subject, documents, same).is_right


def test_a_defect_that_is_not_in_the_table_has_no_cause(
    subject: Subject, documents: list[Document]
) -> None:
    generator = torch.Generator().manual_seed(9)
    values = [
        part + 3 * torch.randn(len(part), generator=generator).double()
        for part in right(subject, documents)
    ]
    finding = diagnose(subject, documents, Reading(name="engine", log_probs=values))
    assert not finding.is_right
    assert not finding.cause
    assert len(finding.nearest) == 3


def test_a_reading_of_other_documents_is_refused(
    subject: Subject, documents: list[Document]
) -> None:
    values = right(subject, documents)[:2]
    with pytest.raises(ValueError, match="expected log-probs of"):
        diagnose(subject, documents, Reading(name="engine", log_probs=values))


def test_the_first_wrong_layer_is_named(subject: Subject, documents: list[Document]) -> None:
    oracle, document = subject.oracle, documents[0]
    states = oracle.layers(document.tokens)
    from engine_conformance.oracle.layers import norm

    last = norm(oracle.effective_params(), oracle.config, "model.norm", states[-1])
    torch.testing.assert_close(last, oracle.hidden(document.tokens))
    assert compare_layers(oracle, document, [s.float() for s in states], "float32").first is None
    for wrong, name in ((0, -1), (2, 1)):
        off = [s.clone() for s in states]
        off[wrong] = off[wrong] * 1.01
        assert compare_layers(oracle, document, off, "float32").first == name
    lost = [states[0], states[1] * torch.nan, states[2]]
    assert compare_layers(oracle, document, lost, "float32").first == 0
    with pytest.raises(ValueError, match="expected 3 states"):
        compare_layers(oracle, document, states[:2], "float32")


def test_an_oracle_is_built_of_tensors_in_memory(tmp_path: Path) -> None:
    import json

    folder = write_checkpoint(tmp_path / "model", TinyModel(**SIZES))
    content = json.loads((folder / "config.json").read_text())
    tensors = read_safetensors(folder)
    built, loaded = build_oracle(content, tensors), load_oracle(folder)
    assert isinstance(built, OracleModel)
    assert torch.equal(built.logits([1, 2, 3]), loaded.logits([1, 2, 3]))
    tensors.pop("model.norm.weight")
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight"):
        build_oracle(content, tensors)
