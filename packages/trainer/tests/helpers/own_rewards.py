"""Reward functions of one's own that do all that such functions may: shared by their tests."""

from __future__ import annotations

from engine_trainer.rewards import Sample, Scorer

# What is still imported long after any limit: its own code, and a module in C that imports in turn.
SLOW = "import time\ntime.sleep(600)\n"
SLOW_IN_C = "import torch\nimport slow_module\n"

FUNCTIONS = """
import asyncio, os, pathlib, sys, time
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
    folder = pathlib.Path(__file__).with_name("met")
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.01)
    return float(os.getpid())

WAITING = []

async def together(sample):
    all_of_them = len(WAITING) // 20 * 20 + 20
    WAITING.append(sample)
    while len(WAITING) < all_of_them:
        await asyncio.sleep(0.01)
    return 20.0

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
        time.sleep(3600)
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
    await asyncio.sleep(3600 if sample.completion == "spin" else 0)
    return fickle(sample)

async def nested(sample):  # raises in a task of its own, which takes the event loop along
    return await asyncio.create_task(afickle(sample))

async def threaded(sample):
    def wait():
        while sample.completion != "fine" and not pathlib.Path(sample.completion).exists():
            time.sleep(0.01)
    await asyncio.to_thread(wait)
    return 1.0

async def stubborn(sample):
    if sample.completion == "cancelled":
        raise asyncio.CancelledError
    while sample.completion == "hang":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:  # and tries again
            pass
    return 1.0

def lasts(sample):  # whatever happens
    what = sample.completion
    if what == "imports":
        import slow_module
    if what == "imports in C":
        import slow_module_in_c
    if what == "regex":
        import re
        re.match("(a+)+$", "a" * 64 + "b")
    if what == "powers":
        10 ** 10 ** 9
    if what == "sleeps in C":
        import ctypes, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.PyDLL(None).sleep(600)  # and lets no thread run
    while what == "catches":
        try:
            time.sleep(600)
        except BaseException:
            pass
    return 1.0

def forks(sample):
    if sample.completion == "both return":
        os.fork()
    if sample.completion == "the child stays" and os.fork() == 0:
        time.sleep(600)
    if sample.completion == "the child exits" and os.fork() == 0:
        sys.exit(3)
    if sample.completion == "the child raises" and os.fork() == 0:
        raise KeyError("of the child")
    return 1.0

async def holds(sample):  # C that no alarm interrupts, side by side with others
    if sample.completion == "regex":
        import re
        re.match("(a+)+$", "a" * 64 + "b")
    await asyncio.sleep(0)
    return 1.0

def writes(sample):  # into the pipe to its parent
    import struct
    if sample.completion == "garbage":
        os.write(int(sys.argv[1]), struct.pack("!i", 5) + b"hello")
    return 1.0

def starts(sample):  # a program of its own, and then C that no alarm interrupts \
and that lets no thread run
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
