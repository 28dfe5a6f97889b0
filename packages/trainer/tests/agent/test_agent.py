"""Agent functions, with tokens, budgets, times, failures, batches and submissions.

The last test is a whole RL run.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
from agent_parts import Scripted, Submitting, prompts, sampling
from waiting import NEVER_S

from engine_api.errors import ConfigError, RolloutError
from engine_trainer.agent import AgentError, AgentLoop, Episode
from engine_trainer.agent.generators import BatchingGenerator, derive
from engine_trainer.config.sections import AgentSection, DataSection
from engine_trainer.data import ChatTokenizer
from engine_trainer.errors import DataError

AGENTS = """
import asyncio, pathlib, sys, time

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

async def ask_twice(episode):
    await episode.generate()
    await episode.generate(" tool ")
    return episode.end()

async def messages(episode):
    await episode.generate(max_new_tokens=3)
    await episode.generate([{"role": "tool", "content": "42"}])
    return episode.end()

async def endless(episode):
    while True:
        try:
            await episode.generate("more")
        except Exception:  # as people write it: the end of an episode passes through
            pass

async def slow_tool(episode):
    await episode.generate()
    episode.info["began"] = True
    if "slow" in episode.prompt.text:
        await asyncio.Event().wait()
    await episode.generate("x")
    return episode.end()

async def hung_tool(episode):
    await episode.generate()
    await asyncio.to_thread(wait_for, pathlib.Path(__file__).with_name("go"))
    return episode.end()

async def fails(episode):
    await episode.generate()
    raise KeyError("tool")

async def exits(episode):
    await episode.generate()
    sys.exit(3)

async def exits_in_a_task(episode):
    return await asyncio.create_task(exits(episode))

async def blocks(episode):
    await episode.generate()
    if "slow" in episode.prompt.text:
        await asyncio.create_task(spins())
    await episode.generate("x")
    return episode.end()

async def spins():
    while True:
        pass

async def wrong(episode):
    await episode.generate()

async def twice_at_once(episode):
    await asyncio.gather(episode.generate(), episode.generate())
    return episode.end()

async def limited(episode, limit):
    await episode.generate(max_new_tokens=limit, stop_token_ids=[7])
    episode.append([5, 6])
    return episode.end()

def plain(episode):
    return episode.end()
"""


@pytest.fixture
def chat(tokenizer):
    return ChatTokenizer(tokenizer, DataSection(source="f"))


@pytest.fixture
def agents(tmp_path, chat):
    (tmp_path / "agents.py").write_text(AGENTS)

    def make(name, **settings) -> AgentLoop:
        return AgentLoop(AgentSection(function=f"{tmp_path}/agents.py:{name}", **settings), chat)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Scripted, Submitting])
def test_what_the_model_said_and_what_the_tool_said(chat, agents, kind):
    rollout = kind(chat, "one", "two")
    ((trajectory,),) = agents("ask_twice").run(rollout, prompts(chat, "q"), sampling())
    one = chat.encode_text("one")
    tool = chat.encode_text(" tool ")
    two = chat.encode_text("two")
    eos = [chat.eos_token_id]
    assert trajectory.tokens == one + eos + tool + two + eos
    assert trajectory.loss_weights == [1.0] * 4 + [0.0] * 6 + [1.0] * 4
    assert trajectory.log_probs == [-0.5] * 4 + [0.0] * 6 + [-0.5] * 4
    assert trajectory.weight_versions == [4] * 14
    assert (trajectory.text, trajectory.turns, trajectory.finished, trajectory.end) == (
        "onetwo",
        2,
        True,
        "done",
    )
    assert trajectory.info["turns"] == ["one", "two"]
    # Two forward passes a turn.
    assert trajectory.passes == 4
    # The second turn continued the very tokens of the first.
    assert rollout.asked["all"][1] == prompts(chat, "q")[0].tokens + one + eos + tool


def test_messages_go_through_the_template_and_the_models_tokens_stay(chat, agents):
    rollout = Scripted(chat, "abc", "ok")
    ((trajectory,),) = agents("messages").run(rollout, prompts(chat, "q"), sampling())
    # The first turn was cut at three tokens: the template's end of the turn is added there,
    # without loss.
    expected = "abc<|eos|>\n<|tool|>42<|assistant|>ok<|eos|>"
    assert trajectory.tokens == chat.encode_text(expected)
    assert trajectory.loss_weights == [1.0] * 3 + [0.0] * (len(trajectory.tokens) - 6) + [1.0] * 3
    rollout = Scripted(chat, "ab", "ok")
    ((trajectory,),) = agents("messages").run(rollout, prompts(chat, "q"), sampling())
    assert trajectory.tokens == chat.encode_text("ab<|eos|>\n<|tool|>42<|assistant|>ok<|eos|>")
    # The model's end of turn is learned, the line break is not.
    assert trajectory.loss_weights[:4] == [1.0, 1.0, 1.0, 0.0]


def test_a_template_that_leaves_tools_out_is_refused(tokenizer_of):
    deaf = (
        "{% for m in messages %}{% if m['role'] != 'tool' %}"
        "<|user|>{{ m['content'] }}<|eos|>{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match="leaves out a message of role 'tool'"):
        ChatTokenizer(tokenizer_of(deaf), DataSection(source="f")).encode_messages(
            [{"role": "tool", "content": "42"}], after=2
        )
    with pytest.raises(DataError, match="need a chat template"):
        ChatTokenizer(tokenizer_of(None), DataSection(source="f")).encode_messages(
            [{"role": "tool", "content": "42"}], after=2
        )


def test_turns_and_tokens_are_bounded_whatever_the_function_catches(chat, agents):
    rollout = Scripted(chat, "hello")
    ((trajectory,),) = agents("endless", max_turns=3).run(rollout, prompts(chat, "q"), sampling())
    assert (trajectory.turns, trajectory.end, trajectory.finished) == (3, "limit", False)
    ((trajectory,),) = agents("endless").run(
        Scripted(chat, "hello"), prompts(chat, "q"), sampling(max_new_tokens=23)
    )
    # more(4) hello.(6) more(4) hello.(6) = 20; another "more" does not fit
    assert (len(trajectory.tokens), trajectory.end, trajectory.turns) == (20, "limit", 2)
    ((trajectory,),) = agents("endless").run(
        Scripted(chat, "hello"), prompts(chat, "q"), sampling(max_new_tokens=26)
    )
    # The third turn had two tokens.
    assert (len(trajectory.tokens), trajectory.finished) == (26, False)
    rollout = Scripted(chat, "hello")
    agents("ask_twice", max_turn_tokens=2).run(rollout, prompts(chat, "q"), sampling())
    assert {s.max_new_tokens for _, s in rollout.batches} == {2}


def test_a_turns_own_limit_stop_tokens_and_tokens_from_outside(chat, agents):
    rollout = Scripted(chat, "hello")
    ((trajectory,),) = agents("limited", kwargs={"limit": 2}).run(
        rollout, prompts(chat, "q"), sampling(stop_token_ids=(2,))
    )
    assert trajectory.tokens == [*chat.encode_text("he"), 5, 6]
    ((_, asked),) = rollout.batches
    assert (asked.max_new_tokens, asked.stop_token_ids) == (2, (2, 7))


def test_many_trajectories_share_batches(chat, agents):
    rollout = Scripted(chat, "one", "two")
    found = agents("ask_twice", concurrency=4).run(
        rollout, prompts(chat, "p", "q", "r"), sampling(n=2)
    )
    assert [len(row) for row in found] == [2, 2, 2]
    assert [len(batch) for batch, _ in rollout.batches] == [4, 4, 2, 2]
    assert [s.n for _, s in rollout.batches] == [1] * 4
    assert len({s.seed for _, s in rollout.batches}) == 4
    again = Scripted(chat, "one", "two")
    agents("ask_twice", concurrency=4).run(again, prompts(chat, "p", "q", "r"), sampling(n=2))
    assert again.batches == rollout.batches


@pytest.mark.slow
def test_a_slow_tool_is_given_up_and_the_others_go_on(chat, agents):
    rollout = Scripted(chat, "one", "two", seconds=1.5)
    slow, fast = agents("slow_tool", timeout_s=1.0).run(
        rollout, prompts(chat, "slow", "fast"), sampling()
    )
    assert (slow[0].end, slow[0].finished, slow[0].turns) == ("timeout", False, 1)
    assert slow[0].info == {"began": True, "turns": ["one"]}
    # It is finished although the model alone took longer than the limit.
    assert (fast[0].end, fast[0].turns) == ("done", 2)


def test_a_tool_that_does_not_return_holds_nobody(chat, agents, tmp_path):
    ((one,),) = agents("hung_tool", timeout_s=0.2).run(
        Scripted(chat, "one"), prompts(chat, "q"), sampling()
    )
    assert one.end == "timeout"
    (tmp_path / "go").touch()  # the tool returns only now


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Scripted, Submitting])
def test_a_function_that_never_awaits_is_interrupted_and_the_model_is_not(chat, agents, kind):
    rollout = kind(chat, "one", "two", seconds=1.5)
    slow, fast = agents("blocks", timeout_s=1.0, concurrency=1).run(
        rollout, prompts(chat, "slow", "fast"), sampling()
    )
    assert (slow[0].end, slow[0].turns) == ("timeout", 1)
    assert (fast[0].end, fast[0].turns) == ("done", 2)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["exits", "exits_in_a_task"])
@pytest.mark.parametrize("kind", [Scripted, Submitting])
def test_a_function_that_exits_has_failed(chat, agents, kind, name):
    with pytest.raises(AgentError, match="SystemExit: 3"):
        agents(name).run(kind(chat, "one"), prompts(chat, "q"), sampling())
    found = agents(name, max_failures=4).run(
        kind(chat, "one"), prompts(chat, "q", "r"), sampling(n=2)
    )
    assert [[t.end for t in row] for row in found] == [["failed", "failed"], ["failed", "failed"]]


@pytest.mark.parametrize("kind", [Scripted, Submitting])
def test_a_function_that_raises(chat, agents, kind, caplog):
    with pytest.raises(AgentError, match="KeyError: 'tool'") as caught:
        agents("fails").run(kind(chat, "one"), prompts(chat, "a problem"), sampling())
    assert "a problem" in str(caught.value)
    loop = agents("fails", max_failures=3)
    ((first, second),) = loop.run(kind(chat, "one"), prompts(chat, "q"), sampling(n=2))
    assert (first.end, second.end, first.text) == ("failed", "failed", "one")
    assert "KeyError" in caplog.text
    with pytest.raises(AgentError, match="failed trajectories: 4"):
        loop.run(kind(chat, "one"), prompts(chat, "q"), sampling(n=2))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong", r"returned NoneType.*\n.*\n.*episode\.end"),
        ("twice_at_once", "called while the model still generates"),
    ],
)
def test_a_function_that_misuses_its_episode(chat, agents, name, said):
    with pytest.raises(AgentError, match=said):
        agents(name).run(Submitting(chat, "one", seconds=0.1), prompts(chat, "q"), sampling())


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("plain", {}, "not async"),
        ("limited", {"lim": 1}, "cannot be called"),
        ("no", {}, "no function 'no'"),
    ],
)
def test_a_function_that_cannot_be_an_agent_is_refused_before_the_run(agents, name, kwargs, said):
    with pytest.raises(ConfigError, match=said):
        agents(name, kwargs=kwargs)


def test_a_rollout_that_fails_ends_all(chat, agents):
    class Broken(Scripted):
        def generate(self, prompts, sampling):
            raise RolloutError("gone", where="there", remedy="none")

    with pytest.raises(RolloutError, match="gone"):
        agents("ask_twice", max_failures=100).run(
            Broken(chat, "x"), prompts(chat, "q", "r"), sampling(n=3)
        )


def test_submissions_run_side_by_side_and_their_seeds_know_no_order(chat, agents):
    rollout = Submitting(chat, "one", "two", together=16)
    agents("ask_twice", concurrency=16).run(rollout, prompts(chat, "p", "q"), sampling(n=8))
    seeds = {s.seed for _, s in rollout.submitted}
    assert len(seeds) == 32
    alone = Submitting(chat, "one", "two")
    agents("ask_twice", concurrency=1).run(alone, prompts(chat, "q"), sampling(n=8))
    assert {s.seed for _, s in alone.submitted} < seeds  # the same wherever q is asked
    assert derive(None, 1) is None


def test_a_turn_that_a_sync_aborted_is_continued_with_the_weights_after_it(chat, agents):
    rollout = Submitting(chat, "hello", aborts=1)
    ((trajectory,),) = agents("limited", kwargs={"limit": 8}).run(
        rollout, prompts(chat, "q"), sampling()
    )
    assert trajectory.weight_versions == [3, 3] + [4] * 6 + [4, 4]
    # One of the part that was aborted, and two of its rest.
    assert trajectory.passes == 3
    assert rollout.submitted[1][0] == prompts(chat, "q")[0].tokens + chat.encode_text("he")
    assert rollout.submitted[1][1].max_new_tokens == 6
    assert rollout.submitted[0][1].seed != rollout.submitted[1][1].seed


def test_a_turn_given_up_in_the_background_is_aborted(chat):
    rollout = Submitting(chat, "one", seconds=NEVER_S)
    from engine_trainer.agent.generators import SubmittingGenerator

    async def give_up():
        generator = SubmittingGenerator(rollout, sampling(), ["a"])
        episode = Episode(
            0,
            prompts(chat, "q")[0],
            generator,
            chat,
            max_tokens=9,
            max_turns=1,
            max_turn_tokens=None,
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await episode.generate()

    asyncio.run(give_up())
    assert len(rollout.aborted) == 1


def test_a_turn_given_up_leaves_its_batch(chat):
    async def give_up():
        generator = BatchingGenerator(Scripted(chat, "one"), sampling(), running=2)
        episodes = [
            Episode(
                i,
                prompts(chat, "q")[0],
                generator,
                chat,
                max_tokens=9,
                max_turns=2,
                max_turn_tokens=None,
            )
            for i in range(2)
        ]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await episodes[0].generate()
        return await asyncio.gather(*(e.generate() for e in episodes))

    assert [t.text for t in asyncio.run(give_up())] == ["one", "one"]


def test_no_prompts(chat, agents):
    assert agents("ask_twice").run(Scripted(chat, "x"), [], sampling()) == []
