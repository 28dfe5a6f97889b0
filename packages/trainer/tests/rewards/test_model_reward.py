"""The reward ``reward_model``: conversations scored by a trained sequence classifier."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import torch

from engine_api.errors import ConfigError
from engine_trainer.config.sections import DataSection, RewardSection
from engine_trainer.data import ChatTokenizer, Example, PromptDataset
from engine_trainer.model_reward import ModelScorer, reward_model
from engine_trainer.rewards import RewardError, Sample, Scorer
from engine_trainer.rewards.registry import RewardSpec


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, tokenizer_of):
    """A folder with a Qwen3 sequence classifier of 64 positions, and a tokenizer of characters."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("reward") / "hf"
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def sample(question="hi", completion="ho", **fields):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]
    return Sample(**{"prompt": "", "completion": completion, "messages": messages} | fields)


def expected(folder, question="hi", completion="ho"):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    roles = {"system": "be brief", "user": question, "assistant": completion}
    conversation = [{"role": role, "content": text} for role, text in roles.items()]
    # The template writes a line break behind the token that ends the turn.
    text = tokenizer.apply_chat_template(conversation, tokenize=False).rstrip()
    assert text == f"<|bos|><|system|>be brief<|user|>{question}<|assistant|>{completion}<|eos|>"
    with torch.inference_mode():
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        return model(input_ids=ids).logits[0, 0].item()


SAMPLES = [sample("hi" * i, "ho" * (7 - i)) for i in range(1, 7)]


@pytest.mark.slow
def test_the_score_is_the_models_logit_of_the_whole_conversation(classifier):
    score = reward_model(path=str(classifier), device="cpu")
    for one in SAMPLES[:3]:
        question = one.messages[1]["content"]
        assert asyncio.run(score(one)) == pytest.approx(
            expected(classifier, question, one.completion), abs=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_calls_of_one_chunk_are_scored_together(classifier, workers, monkeypatch):
    """One forward pass has up to ``batch_size`` conversations, padded to the longest."""
    sizes = []
    forward = ModelScorer._forward
    monkeypatch.setattr(
        ModelScorer,
        "_forward",
        lambda self, documents: sizes.append(len(documents)) or forward(self, documents),
    )
    section = RewardSection(
        name="reward_model",
        kwargs={"path": str(classifier), "device": "cpu", "batch_size": 4},
        workers=workers,
        timeout_s=60.0 if workers else None,
    )
    scorer = Scorer.from_section(section)
    try:
        found = [score.total for score in scorer.score(SAMPLES)]
    finally:
        scorer.close()
    alone = [expected(classifier, s.messages[1]["content"], s.completion) for s in SAMPLES]
    assert found == pytest.approx(alone, abs=1e-5)
    assert len({round(value, 4) for value in found}) == len(SAMPLES)
    if not workers:
        assert sizes == [4, 2]


def test_what_a_rollouts_prompt_says_reaches_the_model(classifier, tokenizer):
    """The messages of a prompt have the system prompt and the prompt template of ``data``."""
    section = DataSection(source="f", system_prompt="be brief", prompt_template="say {prompt}")
    example = Example(messages=[{"role": "user", "content": "hi"}], file="f", number=1)
    chat = ChatTokenizer(tokenizer, section)
    (prompt,) = PromptDataset.build([example], chat, section).prompts
    score = reward_model(path=str(classifier), device="cpu")
    given = Sample(prompt=prompt.rendered, completion="ho", messages=prompt.messages)
    assert asyncio.run(score(given)) == pytest.approx(expected(classifier, "say hi"), abs=1e-5)


def test_a_conversation_with_tools_or_a_long_one_is_refused_by_name(classifier):
    score = reward_model(path=str(classifier), device="cpu")
    with pytest.raises(
        RewardError, match=r"(?s)does not answer a prompt.*conversations with tools"
    ):
        asyncio.run(score(Sample(prompt="p", completion="c")))
    with pytest.raises(
        RewardError, match=r"has \d+ tokens of the reward model, whose context has 64"
    ):
        asyncio.run(score(sample("x" * 80)))

    async def both():
        return await asyncio.gather(
            score(sample("x" * 80)), score(sample()), return_exceptions=True
        )

    long, good = asyncio.run(both())
    assert isinstance(long, RewardError)
    assert good == pytest.approx(expected(classifier), abs=1e-5)


def test_a_call_that_takes_too_long_counts_0_and_the_next_ones_go_on(classifier, monkeypatch):
    """The event loop keeps the time while the model computes in a thread."""
    from engine_trainer.rewards.calls import call_all

    score = reward_model(path=str(classifier), device="cpu")
    forward = ModelScorer._forward
    free = threading.Event()

    def slow(self, documents):
        free.wait(60)
        return forward(self, documents)

    monkeypatch.setattr(ModelScorer, "_forward", slow)
    outcomes = list(call_all(score, SAMPLES[:3], concurrency=3, timeout_s=0.3))
    assert [outcome.timed_out for _, outcome in outcomes] == [True] * 3
    free.set()
    outcomes = dict(call_all(score, SAMPLES[:3], concurrency=3, timeout_s=600.0))
    first = SAMPLES[0]
    assert outcomes[0].value == pytest.approx(
        expected(classifier, first.messages[1]["content"], first.completion), abs=1e-5
    )


def test_an_error_of_the_forward_pass_is_that_of_each_call(classifier, monkeypatch):
    from engine_trainer.rewards.calls import call_all

    score = reward_model(path=str(classifier), device="cpu")

    def full(self, documents):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ModelScorer, "_forward", full)
    problems = [o.problem for _, o in call_all(score, SAMPLES[:2], concurrency=2)]
    assert len(problems) == 2
    assert all("RuntimeError: out of memory" in problem for problem in problems)


@pytest.mark.parametrize(
    ("kwargs", "field", "said"),
    [
        ({"path": "/no/such"}, "reward.kwargs.path", "there is no folder"),
        ({"dtype": "int8"}, "reward.kwargs.dtype", "expected one of auto, float32"),
        ({"batch_size": 0}, "reward.kwargs.batch_size", "at least 1, got 0"),
        ({"device": "cpu:7"}, "reward.kwargs.device", "expected a device of this machine"),
        ({"device": "cpu:x"}, "reward.kwargs.device", "expected a device of this machine"),
        ({"device": "abacus"}, "reward.kwargs.device", "abacus"),
        ({"paht": "x"}, "reward.kwargs", "cannot be created"),
    ],
)
def test_what_cannot_be_is_refused_by_key(classifier, kwargs, field, said):
    spec = RewardSpec(name="reward_model", kwargs={"path": str(classifier), **kwargs})
    with pytest.raises(ConfigError, match=said) as caught:
        spec.make()
    assert caught.value.field == field


def test_a_model_that_is_no_reward_model_is_refused(classifier, tokenizer, model_folder, tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with pytest.raises(ConfigError, match="no sequence classifier at") as caught:
        reward_model(path=str(model_folder))
    assert caught.value.field == "reward.kwargs.path"
    config = AutoConfig.from_pretrained(classifier)
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "two")
    tokenizer.save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match="one output, got 2"):
        reward_model(path=str(tmp_path / "two"))
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "language")
    tokenizer.save_pretrained(tmp_path / "language")
    with pytest.raises(ConfigError, match=r"(?s)no trained reward model.*score\.weight"):
        reward_model(path=str(tmp_path / "language"))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match="no tokenizer in the folder") as caught:
        reward_model(path=str(tmp_path / "bare"))
    assert caught.value.field == "reward.kwargs.path"
