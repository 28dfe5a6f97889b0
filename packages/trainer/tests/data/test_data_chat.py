from __future__ import annotations

from dataclasses import replace

import pytest

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_trainer.config.sections import DataSection, RolloutSection
from engine_trainer.data import (
    ChatTokenizer,
    Example,
    PromptDataset,
    SFTDataset,
    load_tokenizer,
    longest_prompt,
)
from engine_trainer.errors import DataError


def turns(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    head = [{"role": "system", "content": system}] if system else []
    return Example(
        messages=[*head, *({"role": r, "content": t} for r, t in zip(roles, texts, strict=False))],
        file="f",
        number=3,
    )


def section(**settings):
    return DataSection(source="f", **settings)


def learned(tokenizer, dataset, index=0):
    document = dataset[index]
    return tokenizer.decode(
        [t for t, w in zip(document.input_ids, document.loss_weight, strict=True) if w]
    )


def build(tokenizer, example, **settings):
    return SFTDataset.build(
        [example], ChatTokenizer(tokenizer, section(**settings)), section(**settings)
    )


def test_loss_is_on_the_assistants_turns_with_their_end(tokenizer):
    data = build(tokenizer, turns("q1", "r1", "q2", "r2"))
    whole = "<|bos|><|user|>q1<|assistant|>r1<|eos|>\n<|user|>q2<|assistant|>r2<|eos|>"
    assert data[0].input_ids.tolist() == tokenizer(whole)["input_ids"]
    assert learned(tokenizer, data) == "r1<|eos|>r2<|eos|>"
    by_hand = [0] * 5 + [1, 1, 1] + [0] * 5 + [1, 1, 1]
    assert data[0].loss_weight.tolist() == by_hand


def test_train_on_last_leaves_earlier_turns_out(tokenizer):
    assert (
        learned(tokenizer, build(tokenizer, turns("q1", "r1", "q2", "r2"), train_on="last"))
        == "r2<|eos|>"
    )


def test_turns_that_are_given_carry_no_loss(tokenizer):
    example = replace(turns("q1", "r1", "q2", "r2"), given=3)
    assert learned(tokenizer, build(tokenizer, example, system_prompt="be brief")) == "r2<|eos|>"
    with pytest.raises(DataError, match="no assistant turn"):
        build(tokenizer, replace(turns("q1", "r1", "q2"), given=2))


WITH_TOOLS = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t['function']['name'] }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m['role'] != 'system' %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_the_chat_template_is_given_the_rows_tools(tokenizer_of):
    tokenizer, example = tokenizer_of(WITH_TOOLS), replace(turns("q", "r"), tools=TOOLS)
    text = "<|system|>add<|user|>q<|eos|><|assistant|>"
    assert ChatTokenizer(tokenizer, section()).prompt_text(example) == text
    document = build(tokenizer, example)[0]
    assert tokenizer.decode(document.input_ids).startswith(text)


def test_what_a_template_leaves_out_is_refused_with_the_row(tokenizer, tokenizer_of):
    with pytest.raises(DataError, match="leaves out the tool 'add'") as caught:
        build(tokenizer, replace(turns("q", "r"), tools=TOOLS))
    assert (caught.value.file, caught.value.row) == ("f", 3)
    with pytest.raises(DataError, match="leaves out a message of role 'system'"):
        build(tokenizer_of(WITH_TOOLS), turns("q", "r", system="be brief"))
    with pytest.raises(
        DataError, match=r"(?s)leaves out a message of role 'system'.*data.system_prompt"
    ):
        ChatTokenizer(tokenizer_of(WITH_TOOLS), section(system_prompt="be brief")).prompt_text(
            turns("q")
        )
    with pytest.raises(DataError, match="tools"):
        build(tokenizer_of(None), replace(turns("q", "r"), tools=TOOLS))
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add"}}],
    }
    example = turns("q", "r", "q2", "r2")
    with pytest.raises(DataError, match="leaves out the call of 'add'"):
        build(
            tokenizer, replace(example, messages=[example.messages[0], call, *example.messages[2:]])
        )


def test_a_template_may_read_what_it_does_not_write(tokenizer_of):
    mode = (
        "{% for m in messages %}{% if m['role'] == 'system' and '/no_think' in m['content'] %}"
        "<|system|>quick<|eos|>"
        "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|eos|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = ChatTokenizer(tokenizer_of(mode), section(system_prompt="be brief /no_think"))
    assert chat.prompt_text(turns("q")) == "<|system|>quick<|eos|><|user|>q<|eos|><|assistant|>"


def test_the_prompt_of_rl_begins_the_document_of_sft(tokenizer):
    settings = {"system_prompt": "be brief", "prompt_template": "Q: {prompt}"}
    chat = ChatTokenizer(tokenizer, section(**settings))
    example = turns("hi", "ho")
    document = SFTDataset.build([example], chat, section(**settings))[0]
    prompt = PromptDataset.build([example], chat, section(**settings))[0]
    assert document.input_ids.tolist()[: len(prompt)] == prompt.tokens
    assert prompt.rendered == "<|bos|><|system|>be brief<|user|>Q: hi<|assistant|>"
    assert (prompt.text, prompt.file, prompt.number) == ("hi", "f", 3)
    assert not document.loss_weight[: len(prompt)].any()


REWRITES = (  # drops the text of earlier assistant turns, as reasoning templates do with thoughts
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_that_rewrites_earlier_text_is_refused_with_the_row(tokenizer_of):
    tokenizer = tokenizer_of(REWRITES)
    with pytest.raises(DataError, match="train_on=last") as caught:
        build(tokenizer, turns("q1", "r1", "q2", "r2"))
    assert (caught.value.file, caught.value.row) == ("f", 3)
    assert (
        learned(tokenizer, build(tokenizer, turns("q1", "r1", "q2", "r2"), train_on="last"))
        == "r2<|eos|>"
    )


def test_a_template_without_end_of_turn_gets_eos(tokenizer_of):
    tokenizer = tokenizer_of(
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = ChatTokenizer(tokenizer, section())
    assert chat.stop_token_ids == (tokenizer.eos_token_id,)
    assert learned(tokenizer, build(tokenizer, turns("q", "r"))) == "r<|eos|>"


def test_the_end_of_turn_stops_a_completion_too(tokenizer_of):
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|system|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = tokenizer_of(template)
    chat = ChatTokenizer(tokenizer, section())
    assert chat.stop_token_ids == (
        tokenizer.convert_tokens_to_ids("<|system|>"),
        tokenizer.eos_token_id,
    )


def test_without_a_template_prompt_and_response_follow_each_other(tokenizer_of):
    tokenizer = tokenizer_of(None)
    data = build(tokenizer, turns("q", "r"), prompt_template="{prompt}\n")
    assert data[0].input_ids.tolist() == tokenizer("q\nr<|eos|>")["input_ids"]
    assert learned(tokenizer, data) == "r<|eos|>"
    with pytest.raises(DataError, match="no chat template"):
        build(tokenizer, turns("q", "r", "q", "r"))


def test_a_template_can_be_given_as_text_or_file(tokenizer_of, tmp_path):
    text = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    (tmp_path / "t.jinja").write_text(text)
    for value in (text, str(tmp_path / "t.jinja")):
        chat = ChatTokenizer(tokenizer_of(None), section(chat_template=value))
        assert chat.prompt_text(turns("hi")) == "hi|"
    with pytest.raises(ConfigError, match="expected a Jinja template"):
        ChatTokenizer(tokenizer_of(None), section(chat_template="no.jinja"))


@pytest.mark.parametrize("said", ["", " \n"])
def test_an_empty_answer_is_refused_though_its_end_could_be_learned(tokenizer, tokenizer_of, said):
    for one in (tokenizer, tokenizer_of(None)):
        with pytest.raises(DataError, match="the response is empty") as caught:
            build(one, turns("q", said))
        assert (caught.value.file, caught.value.row) == ("f", 3)
    with pytest.raises(DataError, match="the response is empty"):
        build(tokenizer, turns("q", "r", "q", said))


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_an_earlier_turn_that_says_nothing_carries_no_loss(tokenizer, train_on):
    assert (
        learned(tokenizer, build(tokenizer, turns("q", " ", "q", "r"), train_on=train_on))
        == "r<|eos|>"
    )


def test_rows_that_teach_nothing_or_cannot_be_rendered_are_refused(tokenizer, tokenizer_of):
    with pytest.raises(DataError, match="no assistant turn"):
        build(tokenizer, turns("q"))
    with pytest.raises(DataError, match="empty"):
        build(
            tokenizer_of("{% for m in messages %}{{ m['content'] }}{% endfor %}"),
            Example(messages=[{"role": "assistant", "content": ""}]),
        )
    strict = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(DataError, match="no system") as caught:
        build(tokenizer_of(strict), turns("q", "r", system="s"))
    assert caught.value.row == 3


def test_too_long_is_an_error_or_is_dropped_and_counted(tokenizer, caplog):
    rows = [turns("q", "r"), turns("q" * 50, "r")]
    chat = ChatTokenizer(tokenizer, section())
    with pytest.raises(DataError, match=r"\d\d tokens, data.max_length is 20"):
        SFTDataset.build(rows, chat, section(max_length=20))
    data = SFTDataset.build(rows, chat, section(max_length=20, on_too_long="drop"))
    assert (len(data), data.dropped) == (1, 1)
    assert "1 of 2 rows" in caplog.text
    with pytest.raises(DataError, match="all 2 rows"):
        SFTDataset.build(rows, chat, section(max_length=2, on_too_long="drop"))


def test_too_long_can_be_cut_a_document_at_its_end_a_prompt_at_its_beginning(tokenizer, caplog):
    rows = [turns("q", "r" * 50), turns("q" * 50, "r"), turns("q", "r")]
    chat = ChatTokenizer(tokenizer, section())
    whole = SFTDataset.build(rows, chat, section())
    data = SFTDataset.build(rows, chat, section(max_length=20, on_too_long="truncate"))
    # The second one's first 20 tokens hold nothing to learn: it is dropped.
    assert (len(data), data.truncated, data.dropped) == (2, 1, 1)
    assert data[0].input_ids.tolist() == whole[0].input_ids.tolist()[:20]
    assert data[0].loss_weight.tolist() == whole[0].loss_weight.tolist()[:20]
    assert "1 of 3 rows are too long and were cut: data.max_length is 20" in caplog.text
    prompts = PromptDataset.build(rows, chat, section(on_too_long="truncate"), context=20)
    full = PromptDataset.build(rows, chat, section())
    assert (len(prompts), prompts.truncated, prompts.dropped) == (3, 1, 0)
    assert prompts[1].tokens == full[1].tokens[-20:]
    assert (prompts[1].text, prompts[0].tokens) == (full[1].text, full[0].tokens)


def test_a_prompt_that_leaves_no_room_for_its_completion_is_named_before_the_run(tokenizer):
    chat = ChatTokenizer(tokenizer, section())
    with pytest.raises(
        DataError, match=r"\d\d tokens, the context minus rollout.max_new_tokens is 20"
    ) as caught:
        PromptDataset.build([turns("q" * 50, "r")], chat, section(max_length=1000), context=20)
    assert caught.value.row == 3


def test_a_document_longer_than_the_models_context_is_named_or_cut(tokenizer, caplog):
    chat, rows = ChatTokenizer(tokenizer, section()), [turns("q", "r"), turns("q", "r" * 50)]
    with pytest.raises(
        DataError, match=r"(?s)\d\d tokens, the context has 20.*max_position_embeddings"
    ) as caught:
        SFTDataset.build(rows, chat, section(max_length=1000), context=20)
    assert caught.value.row == 3
    with pytest.raises(DataError, match=r"(?s)engine\.memory\.max_tokens is 19.*raise engine\.mem"):
        SFTDataset.build(rows, chat, section(max_length=20), context=20, budget=19)
    data = SFTDataset.build(rows, chat, section(on_too_long="truncate"), context=20, budget=20)
    assert [len(document) for document in data.documents] == [len(data[0]), 20]
    assert "1 of 2 rows are too long and were cut: the context has 20" in caplog.text


@pytest.mark.parametrize(
    ("options", "longest"), [({}, 40), ({"max_model_len": 48}, 24), ({"max_model_len": 4096}, 40)]
)
def test_the_longest_prompt_is_the_models_or_the_servers_context_less_the_completion(
    sums_model, options, longest
):
    model, rollout = (
        ModelSource(path=str(sums_model)),
        RolloutSection(max_new_tokens=24, options=options),
    )
    assert longest_prompt(model, rollout) == longest
    with pytest.raises(ConfigError, match="nothing is left for a prompt"):
        longest_prompt(model, rollout, 64)


def test_a_model_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        load_tokenizer(section(), ModelSource(path=str(tmp_path / "no")))
    with pytest.raises(ConfigError, match="no tokenizer") as caught:
        load_tokenizer(section(tokenizer=str(tmp_path)), ModelSource(path="m"))
    assert caught.value.field == "data.tokenizer"


@pytest.mark.parametrize(("own", "revision"), [(None, "abc"), ("elsewhere", None)])
def test_the_models_tokenizer_is_of_the_models_revision(monkeypatch, tokenizer, own, revision):
    asked = {}

    def load(path, **options):
        asked.update(options)
        return tokenizer

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    monkeypatch.setattr("engine_trainer.data.chat.require_source", lambda *_: None)
    # Else it is looked for on the hub, again and again where there is no network.
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: ({}, {}))
    load_tokenizer(
        DataSection(source="x", tokenizer=own), ModelSource(path="some/model", revision="abc")
    )
    assert asked["revision"] == revision
