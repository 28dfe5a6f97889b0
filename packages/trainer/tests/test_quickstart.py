"""The chat template of recipes/quickstart/prepare.py.

The quickstart and the first hour begin with its model.
"""

from __future__ import annotations

import importlib.util

import jinja2
import pytest
from layout import ROOT

from engine_trainer.config.sections import DataSection
from engine_trainer.data import ChatTokenizer, Example
from engine_trainer.errors import DataError

PREPARE = ROOT / "recipes" / "quickstart" / "prepare.py"


@pytest.fixture
def quickstart(tokenizer_of):
    spec = importlib.util.spec_from_file_location("quickstart_prepare", PREPARE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tokenizer_of(module.CHAT_TEMPLATE)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_question_and_its_answer(quickstart):
    text = quickstart.apply_chat_template(
        [turn("user", "hi"), turn("assistant", "ho")], tokenize=False
    )
    assert text == "<|bos|><|user|>hi<|assistant|>ho<|eos|>"


@pytest.mark.parametrize("role", ["system", "tool", "developer"])
def test_a_role_that_it_does_not_know_is_refused(quickstart, role):
    """Check the refusal, which vLLM or transformers show too.

    Without it a caller would think that the model has read the message.
    """
    with pytest.raises(jinja2.TemplateError, match=role):
        quickstart.apply_chat_template([turn(role, "be brief"), turn("user", "hi")], tokenize=False)
    example = Example(
        messages=[turn("user", "hi"), turn(role, "4"), turn("assistant", "ho")], file="f", number=3
    )
    with pytest.raises(DataError, match=f"(?s)f:3.*{role}"):
        ChatTokenizer(quickstart, DataSection(source="f")).document(example)
