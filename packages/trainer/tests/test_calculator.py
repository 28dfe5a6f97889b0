"""recipes/rl/calculator.py: the tool, and the conversation that calls it."""

from __future__ import annotations

import importlib.util

import pytest
from agent_parts import Scripted, prompts, sampling
from layout import ROOT

from engine_trainer.agent import AgentLoop
from engine_trainer.config.sections import AgentSection, DataSection
from engine_trainer.data import ChatTokenizer


@pytest.fixture
def chat(tokenizer):
    return ChatTokenizer(tokenizer, DataSection(source="f"))


def recipe():
    spec = importlib.util.spec_from_file_location("calculator", ROOT / "recipes/rl/calculator.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("2 * (3 - -4)", "14"),
        ("1/8", "0.125"),
        ("1/0", "error: Fraction(1, 0)"),
        ("2**99", "error: only numbers, + - * / and brackets"),
        ("open('x')", "error: only numbers, + - * / and brackets"),
        ("3 +", "error: invalid syntax (<unknown>, line 1)"),
    ],
)
def test_the_calculator(expression, value):
    assert recipe().calculate(expression) == value


def test_the_calculator_recipe(chat):
    loop = AgentLoop(AgentSection(function=f"{ROOT}/recipes/rl/calculator.py:solve"), chat)
    rollout = Scripted(chat, "half: <calc>48/2</calc>", "#### 24")
    ((trajectory,),) = loop.run(rollout, prompts(chat, "q"), sampling())
    assert (
        chat.tokenizer.decode(trajectory.tokens)
        == "half: <calc>48/2</calc><|eos|>\n<|tool|>24<|assistant|>#### 24<|eos|>"
    )
    assert trajectory.info["calls"] == 1
