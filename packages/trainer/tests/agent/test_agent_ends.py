"""The end of conversations, where all end when one fails.

Whatever a function does about its end, none of its work goes on afterwards.
"""

from __future__ import annotations

import asyncio

import pytest
from agent_parts import Scripted, Submitting, prompts, sampling
from waiting import NEVER_S

from engine_api.errors import RolloutError
from engine_trainer.agent import AgentError, AgentLoop, runner
from engine_trainer.agent.episode import Request
from engine_trainer.agent.generators import BatchingGenerator, generate_all
from engine_trainer.config.sections import AgentSection, DataSection
from engine_trainer.data import ChatTokenizer

AGENTS = """
import asyncio, os, pathlib, signal

async def one_fails(episode):
    if episode.prompt.text == "wrong":
        await asyncio.sleep(0.1)
        raise KeyError("tool")
    await episode.generate()
    return episode.end()

async def stubborn(episode):
    if episode.prompt.text == "wrong":
        raise KeyError("tool")
    await episode.generate()
    while "slow" in episode.prompt.text:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # and tries again
            pass
    return episode.end()

async def strays(episode):
    task = asyncio.create_task(episode.generate())
    await asyncio.sleep(0.05)
    return episode.end()

async def shrugs(episode):
    try:
        await episode.generate()
    except Exception:  # as people write it
        pass
    return episode.end()

async def cancels_itself(episode):
    raise asyncio.CancelledError

async def rings(episode):  # as where the process had no processor for longer than the limit
    await episode.generate()
    rung = asyncio.Event()
    asyncio.get_running_loop().call_soon(lambda: (os.kill(os.getpid(), signal.SIGALRM), rung.set()))
    await rung.wait()
    return episode.end()

async def returns_early(episode):
    await episode.generate()
    first = episode.end()
    await episode.generate(" tool ")
    return first

async def nothing(episode):
    await episode.generate()

async def twice_at_once(episode):
    await asyncio.gather(episode.generate(), episode.generate())
    return episode.end()
"""


@pytest.fixture
def chat(tokenizer):
    return ChatTokenizer(tokenizer, DataSection(source="f"))


@pytest.fixture
def agents(tmp_path, chat, monkeypatch):
    monkeypatch.setattr(runner, "FAREWELL_S", 0.5, raising=False)
    (tmp_path / "agents.py").write_text(AGENTS)

    def make(name, **settings) -> AgentLoop:
        return AgentLoop(AgentSection(function=f"{tmp_path}/agents.py:{name}", **settings), chat)

    return make


def test_one_that_fails_ends_the_others_and_their_turns(chat, agents):
    rollout = Submitting(chat, "one", seconds=NEVER_S)
    with pytest.raises(AgentError, match=r"(?s)KeyError.*problem 'wrong'"):
        agents("one_fails").run(rollout, prompts(chat, "a", "wrong", "b"), sampling(n=2))
    assert len(rollout.submitted) == len(rollout.aborted) == 4


@pytest.mark.parametrize("kind", [Scripted, Submitting])
def test_one_that_pays_no_heed_to_its_cancellation_holds_nobody(chat, agents, kind):
    slow, fast = agents("stubborn", timeout_s=3.0).run(
        kind(chat, "one"), prompts(chat, "slow", "fast"), sampling()
    )
    assert (slow[0].end, slow[0].turns, fast[0].end) == ("timeout", 1, "done")
    with pytest.raises(AgentError, match=r"(?s)KeyError.*problem 'wrong'"):
        agents("stubborn", concurrency=1).run(
            kind(chat, "one"), prompts(chat, "fast", "wrong", "slow"), sampling()
        )
    with pytest.raises(AgentError, match=r"(?s)KeyError.*problem 'wrong'"):
        agents("stubborn").run(kind(chat, "one"), prompts(chat, "slow", "wrong"), sampling())


@pytest.mark.parametrize("kind", [Scripted, Submitting])
def test_an_alarm_while_the_event_loop_waits_is_no_functions_fault(chat, agents, kind):
    ((one,),) = agents("rings", timeout_s=NEVER_S).run(
        kind(chat, "one"), prompts(chat, "q"), sampling()
    )
    assert one.end == "done"


def test_a_turn_that_a_function_left_behind_ends_with_it(chat, agents):
    rollout = Submitting(chat, "one", seconds=NEVER_S)
    found = agents("strays", concurrency=1).run(rollout, prompts(chat, "p", "q", "r"), sampling())
    assert [t.tokens for (t,) in found] == [[], [], []]
    assert len(rollout.submitted) == len(rollout.aborted) == 3


def test_a_conversation_is_as_it_was_when_it_was_taken(chat, agents):
    ((trajectory,),) = agents("returns_early").run(
        Scripted(chat, "one", "two"), prompts(chat, "q"), sampling()
    )
    assert (trajectory.text, len(trajectory.tokens), trajectory.turns) == ("one", 4, 1)
    assert len(trajectory.tokens) == len(trajectory.loss_weights) == len(trajectory.log_probs)


@pytest.mark.parametrize("name", ["nothing", "twice_at_once"])
def test_a_misuse_names_its_problem(chat, agents, name):
    with pytest.raises(AgentError, match="problem 'the third one'"):
        agents(name).run(
            Submitting(chat, "one", seconds=0.1), prompts(chat, "the third one"), sampling()
        )


def test_one_that_is_cancelled_from_inside_has_failed(chat, agents):
    with pytest.raises(AgentError, match=r"(?s)raised CancelledError.*problem 'q'"):
        agents("cancels_itself").run(Scripted(chat, "one"), prompts(chat, "q"), sampling())


@pytest.mark.parametrize("kind", [Scripted, Submitting])
def test_a_rollout_that_fails_ends_all_though_a_function_shrugs(chat, agents, kind):
    def gone(*_):
        raise RolloutError("gone", where="there", remedy="none")

    rollout = kind(chat, "x")
    setattr(rollout, "generate" if kind is Scripted else "submit", gone)

    with pytest.raises(RolloutError, match="gone"):
        agents("shrugs", timeout_s=NEVER_S).run(rollout, prompts(chat, "q", "r"), sampling(n=2))


def test_a_turn_that_was_just_given_up_is_not_answered(chat):
    """Give up a turn whose task has not run since, so that the batch still has it."""

    async def give_up() -> str:
        generator = BatchingGenerator(Scripted(chat, "one"), sampling(), running=2)
        asked = [
            Request(number=i, turn=0, tokens=prompts(chat, "q")[0].tokens, max_new_tokens=9)
            for i in range(2)
        ]
        first = asyncio.create_task(generator.generate(asked[0]))
        await asyncio.sleep(0)
        first.cancel()
        completion = await generator.generate(asked[1])
        assert first.cancelled() or first.cancelling()
        return chat.decode(completion.tokens)

    assert asyncio.run(give_up()) == "one"


def test_a_rollout_that_forgets_a_turn_is_named(chat):
    class Forgetful(Scripted):
        def generate(self, prompts, sampling):
            return super().generate(prompts, sampling)[1:]

    requests = [Request(number=i, turn=0, tokens=[1, 2], max_new_tokens=4) for i in range(2)]
    with pytest.raises(RolloutError, match=r"expected 1 completions of prompt 0 .*, got 0"):
        generate_all(Forgetful(chat, "a"), requests, sampling(), lambda _: None)
