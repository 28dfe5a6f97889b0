"""Fuzz tests of chat templates.

The result is a text within the limits or a ``DataError`` that names the row, without a hang or a
loss of memory.
"""

from __future__ import annotations

import os
import signal
import threading
from itertools import count

import pytest
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from engine_api.errors import ConfigError
from engine_trainer.config.sections import DataSection
from engine_trainer.data import ChatTokenizer, Example, chat
from engine_trainer.data.templates import Renderer, TemplateError
from engine_trainer.errors import DataError

SECONDS, MEMORY, LONGEST = 0.5, 300 << 20, 100_000
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
# By what the error says.
BOMBS = {
    "multiplies a string": ("{{ 'a' * 10 ** 12 }}", "MiB of memory|OverflowError"),
    "makes a long text": ("{{ 'a' * 200000 }}", "100000 characters"),
    "makes a large number": ("{{ 2 ** (10 ** 9) }}", "processor time|MiB"),
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "processor time",
    ),
    "prints in loops": (
        (
            "{% for i in range(99999) %}{% for j in range(9999) %}aaaaaaaaaaaaaaaa"
            "{% endfor %}{% endfor %}"
        ),
        "processor time|MiB",
    ),
    "doubles a text": (
        (
            "{% set n = namespace(t='ab') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}"
            "{% endfor %}{{ n.t }}"
        ),
        "MiB of memory|processor time",
    ),
    "pads": ("{{ 'a'.ljust(10 ** 11) }}", "MiB of memory"),
    "divides by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "nests": (
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "RecursionError|MemoryError|TemplateSyntaxError|MiB",
    ),
    "looks inside": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "reaches a module": ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    "is cut short": ("{% for m in messages %}", "TemplateSyntaxError"),
    "makes half of a surrogate pair": ("{{ '\\ud800' }}", "surrogates not allowed"),
    "refuses": ("{{ raise_exception('no') }}", "no"),
}


@pytest.fixture(scope="module")
def small():
    """A renderer with small limits, which a test can reach."""
    renderer = Renderer(SECONDS, MEMORY, LONGEST)
    yield renderer
    renderer.close()


@pytest.fixture
def small_everywhere(small, monkeypatch):
    monkeypatch.setattr(chat, "renderer", lambda: small)


def section(template: str, **settings) -> DataSection:
    return DataSection(source="f", chat_template=template, **settings)


@pytest.mark.parametrize(("template", "said"), BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.usefixtures("small_everywhere")
def test_a_template_that_does_not_end_or_grows_is_refused_with_the_row(
    tokenizer_of, small, template, said
):
    # Only where a row is rendered: the probe of one question and its answer passes.
    late = (
        "{% if messages[0].content == 'late' %}"
        + template
        + "{% endif %}{{ messages[-1].content }}<|eos|>"
    )
    try:
        tokenizer = ChatTokenizer(tokenizer_of(None), section(late))
    except DataError as error:  # what is wrong in the whole template is found by the probe
        caught = error
        assert caught.file.startswith("data.chat_template")
    else:
        row = Example(messages=[{"role": "user", "content": "late"}], file="rows.jsonl", number=7)
        with pytest.raises(DataError) as raised:
            tokenizer.prompt_text(row)
        caught = raised.value
        assert (caught.file, caught.row) == ("rows.jsonl", 7)
    assert pytest.raises(DataError, match=said).matches(caught), str(caught)
    assert small.render("{{ messages[0].content }}", MESSAGES, ask=False, given={}) == "hi", (
        "the next one is rendered"
    )


ATOMS = [
    "messages",
    "messages[0]",
    "messages[-1].content",
    "'a'",
    "3",
    "100000",
    "10 ** 6",
    "none",
    "true",
    "m",
    "loop.index",
    "n",
    "x",
    "tools",
    "bos_token",
    "add_generation_prompt",
    "cycler",
    "joiner",
    "self",
    "''.__class__",
    "lipsum",
    "range",
    "raise_exception",
]
FORMS = [
    "{} * {}",
    "{} ** {}",
    "{} + {}",
    "{} ~ {}",
    "{} % {}",
    "{} // {}",
    "{} / {}",
    "{}[{}]",
    "{} in {}",
    "{} == {}",
    "[{}, {}]",
    "{{'a': {}, 'b': {}}}",
    "{}|join({})",
    "{}|center({})",
    "{}|replace('a', {})",
    "{}|indent({})",
    "{}|batch({})|list",
    "{}|round({})",
    "{}|tojson(indent={})",
    "{}|default({})",
    "{}.ljust({})",
    "{}.format({})",
    "{}.join({})",
    "{}.split({})",
    "{}({})",
    "range({}, {})|list",
    "lipsum({})|length + {}",
    "dict(a={}, b={})",
    "{}|sort|map(attribute={})|list",
    "{}|sum(start={})",
    "({} if {} else none)",
    "strftime_now({} ~ {})",
    "{}.update({})",
    "{}.__init__.{}",
]
expressions = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.builds(
        lambda form, a, b: form.format(a, b), st.sampled_from(FORMS), inner, inner
    ),
    max_leaves=5,
)
statements = st.recursive(
    st.one_of(
        expressions.map(lambda e: f"{{{{ {e} }}}}"),
        expressions.map(lambda e: f"{{% set x = {e} %}}"),
        st.text(max_size=4),
        st.sampled_from(
            [
                "{% set n = namespace(a=1) %}",
                "{% set n.a = [n.a, n.a] %}",
                "{{ f(x) }}",
                "{% break %}",
                "{% endif %}",
                "{{",
                "{%",
                "#}",
            ]
        ),
        st.just("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eos|>{% endfor %}"),
    ),
    lambda inner: st.one_of(
        st.builds(lambda e, s: f"{{% for m in {e} %}}{s}{{% endfor %}}", expressions, inner),
        st.builds(lambda e, s: f"{{% if {e} %}}{s}{{% endif %}}", expressions, inner),
        st.builds(lambda s: f"{{% macro f(x) %}}{s}{{% endmacro %}}", inner),
        st.builds(lambda s: f"{{% generation %}}{s}{{% endgeneration %}}", inner),
        st.builds(lambda s, t: s + t, inner, inner),
    ),
    max_leaves=5,
)


def outcome(call):
    """Return the result of a call, or the typed error that it raises.

    Any other exception fails the test.
    """
    try:
        return call()
    except (DataError, TemplateError) as error:
        return error


def _prompt(tokenizer, template):
    made = ChatTokenizer(tokenizer, section(template))
    return made.prompt_text(Example(messages=MESSAGES[:1], file="rows.jsonl", number=7))


@fuzz(cost=4)
@given(statements)
@example("{{ 1 / 0 }}")
def test_a_template_of_any_text_renders_within_its_limits_or_is_refused(small, template):
    text = outcome(
        lambda: small.render(
            template, MESSAGES, ask=True, given={"bos_token": "<s>", "tools": None}
        )
    )
    if isinstance(text, TemplateError):
        assert str(text)
        return
    assert len(text) <= LONGEST
    text.encode("utf-8")


@fuzz(cost=8)
@given(statements)
def test_a_tokenizer_with_any_template_makes_prompts_or_names_the_place(
    tokenizers, small, template
):
    before = chat.renderer
    chat.renderer = lambda: small
    try:
        text = outcome(lambda: _prompt(tokenizers, "{{ '' }}" + template))
    finally:
        chat.renderer = before
    if isinstance(text, DataError):
        assert text.file.startswith(("data.chat_template", "rows.jsonl"))
        return
    assert isinstance(text, str)


@pytest.fixture(scope="module")
def tokenizers(tokenizer_of):
    return tokenizer_of(None)


@pytest.mark.parametrize("name", sorted(chat.RESERVED))
def test_what_the_trainer_gives_a_template_is_no_argument_of_the_users(tokenizer, name):
    with pytest.raises(ConfigError) as caught:
        ChatTokenizer(tokenizer, DataSection(source="f", chat_template_kwargs={name: 1}))
    assert caught.value.field == f"data.chat_template_kwargs.{name}"


@pytest.mark.parametrize("value", ["a" * 5000, "\0", "/", "no.jinja", ""])
def test_a_template_that_is_no_file_is_named(tokenizer, value):
    with pytest.raises(ConfigError) as caught:
        ChatTokenizer(tokenizer, DataSection(source="f", chat_template=value))
    assert caught.value.field == "data.chat_template"


@pytest.mark.slow
def test_a_renderer_that_was_killed_is_started_again():
    renderer = Renderer()
    try:
        assert renderer.render("{{ messages[0].content }}", MESSAGES, ask=False, given={}) == "hi"
        os.kill(renderer._process.pid, signal.SIGKILL)
        renderer._process.wait()
        with pytest.raises(TemplateError, match="ended with status -9"):
            renderer.render("{{ messages[0].content }}", MESSAGES, ask=False, given={})
        assert renderer.render("{{ messages[1].content }}", MESSAGES, ask=False, given={}) == "ho"
    finally:
        renderer.close()


def test_threads_are_given_their_own_texts(small):
    numbers, texts = count(), {}

    def work():
        for _ in range(30):
            number = next(numbers)
            texts[number] = small.render("{{ a }}", MESSAGES, ask=False, given={"a": number})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) for number in range(120)}


def test_a_text_is_the_one_that_transformers_makes(tokenizer):
    asked = [{"role": "user", "content": "a\n{{ b }} é\U0001f600"}]
    made = ChatTokenizer(tokenizer, DataSection(source="f")).prompt_text(Example(messages=asked))
    assert made == tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
