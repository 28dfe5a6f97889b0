"""Reward functions of one's own that do all that such functions may: shared by their tests."""

from __future__ import annotations

from engine_trainer.rewards import Sample, Scorer

FUNCTIONS = """
import asyncio, os, sys, time
import beside

class Own:
    def __float__(self):
        raise KeyError("its own")

def length(sample, scale=1.0):
    return scale * len(sample.completion)

def borrowed(sample):
    return beside.SEVEN

def answer(sample):
    return float(sample.completion == sample.answer)

def process(sample):
    time.sleep(0.05)
    return float(os.getpid())

async def slow(sample):
    await asyncio.sleep(0.3)
    return 1.0

async def rude(sample):
    if sample.completion == "block":
        while True:
            time.sleep(0.01)
    await asyncio.sleep(0.01)
    return 1.0

def fickle(sample):
    what = sample.completion
    if what == "raise":
        raise KeyError("boom")
    if what == "spin":
        while True:
            pass
    if what == "in C":  # signals are blocked: no alarm comes through
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(60)
    if what == "die":
        os._exit(3)
    if what == "exit":
        sys.exit(3)
    if what == "huge":
        return 10 ** 400
    if what == "own":
        return Own()
    return float("nan") if what == "nan" else 1.0

async def afickle(sample):
    await asyncio.sleep(60 if sample.completion == "spin" else 0)
    return fickle(sample)

async def nested(sample):  # raises in a task of its own, which takes the event loop along
    return await asyncio.create_task(afickle(sample))

async def threaded(sample):
    await asyncio.to_thread(time.sleep, 60 if sample.completion == "hang" else 0)
    return 1.0

async def stubborn(sample):
    if sample.completion == "cancelled":
        raise asyncio.CancelledError
    while sample.completion == "hang":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # and tries again
            pass
    return 1.0

def starts(sample):  # a program of its own, and then C that no alarm interrupts and that lets no thread run
    import pathlib, re, signal, subprocess
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    process = subprocess.Popen(["sleep", "600"])
    pathlib.Path(sample.completion).write_text(f"{os.getpid()} {process.pid}")
    re.match("(a+)+$", "a" * 64 + "b")
    return 1.0

def ends_roughly(sample):
    import signal, struct, threading
    pipe = int(sys.argv[1])
    if sample.completion == "a child stays":  # and holds the other end of the pipe
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    if sample.completion == "half a word":
        os.write(pipe, struct.pack("!i", 1000) + b"x")
        os._exit(3)
    if sample.completion == "closes":
        os.close(pipe)
        time.sleep(600)
    return 1.0

NUMBER = 3
"""


def samples(*completions: str) -> list[Sample]:
    return [Sample(prompt="p", completion=c, answer="a") for c in completions]


def totals(scorer: Scorer, *completions: str) -> list[float]:
    return [score.total for score in scorer.score(samples(*completions))]
