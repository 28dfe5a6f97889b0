"""Kill training runs at random moments, restart them, and compare them with unbroken runs.

``python tools/kills.py --count 500 --lanes 8`` makes tiny models and data and runs ``engine-train
sft`` and ``rl``, with text and with pictures (``sft-images``, ``rl-images``), on one process and on
two (torchrun). Each runs once unbroken. Then it runs
repeatedly with SIGKILL to a rank, to all processes or to torchrun itself, a third of the kills
during a save. The same command then continues (``run.resume=auto``) and is killed again, until
the run ends. Its ``hf/``, its step folders and ``latest`` must be those of the unbroken run, bit
for bit, and no process may be left after a kill.

It ends with 0 where all of this held. It needs neither network nor GPU; from a tree that is not
installed: ``PYTHONPATH=$(python tools/from_source.py /tmp/site) python tools/kills.py …``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

STEPS = 16
KEEP = 2
TASKS = ("sft", "rl", "sft-images", "rl-images")
WORLDS = (1, 2)
# This variable is in the environment of every process of a start.
MARK = "ENGINE_KILLS_LIFE"
# All processes of a killed start must be gone by then: torchrun gives its ranks 30 s to end.
GONE_S = 90.0
# A start that is not killed must have ended after this time.
LIFE_S = 600.0
LOOK_S = 0.01
SAVE_LOOK_S = 0.0005
# A save of so small a model takes about this long.
SAVE_S = 0.01
CHARACTERS = ["<pad>", "<eos>", "+", "=", "#", " ", *"0123456789"]
RUN = {"steps": STEPS, "save_every": 1, "keep": KEEP, "seed": 3, "output_dir": "out"}
QUIET = {"progress": False, "tensorboard": False, "report": False}


# --- the training runs ----------------------------------------------------------------------------


def make_inputs(root: Path) -> None:
    """Write the inputs of the runs.

    They are a random model of two layers with its tokenizer, sums to complete, the model and some
    pictures of recipes/vision, and a configuration per task.
    """
    make_text(root)
    make_pictures(root)
    for task in TASKS:
        (root / f"{task}.yaml").write_text(yaml.safe_dump(configuration(task)))


def make_text(root: Path) -> None:
    """Write ``model``, and the rows of the tasks without pictures."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    tokenizer = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    whole.save_pretrained(root / "model")
    Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    ).save_pretrained(root / "model")
    sums = [(f"{a}+{b}=", str((a + b) % 10)) for a in range(10) for b in range(10)]
    columns = {"sft": ("prompt", "response"), "rl": ("prompt", "answer")}
    for task, names in columns.items():
        rows = (json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in sums)
        (root / f"{task}.jsonl").write_text("".join(rows))


def make_pictures(root: Path) -> None:
    """Write ``model-images``, and rows of which every third has no picture.

    Some steps therefore have pictures on one rank alone.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent / "recipes" / "vision"))
    import prepare

    prepare.write_model(root / "model-images")
    (root / "pictures").mkdir()
    numbers = random.Random(0)
    rows = [
        prepare.draw_row(root, f"{i}", prepare.read_digit, numbers)
        if i % 3
        else {"prompt": "Which digit ?", "response": "0", "answer": "0", "images": []}
        for i in range(60)
    ]
    for task in ("sft-images", "rl-images"):
        prepare.write_rows(root / f"{task}.jsonl", rows)


def configuration(task: str) -> dict[str, Any]:
    """Return the configuration of a task.

    Its paths are relative to a run's folder, because it stands in every checkpoint.
    """
    command, _, pictures = task.partition("-")
    # The weights come from the seed. The adapter has dropout, so that a lost generator shows.
    kind: dict[str, Any] = (
        {"model": {"path": "../model-images", "init": "random"}}
        if pictures
        else {
            "model": {"path": "../model", "init": "random"},
            "lora": {"rank": 4, "dropout": 0.3},
        }
    )
    engine = {"backend": "fsdp2", "device": "cpu", "optimizer": {"lr": 1e-2}, **kind}
    own: dict[str, dict[str, Any]] = {
        "sft": {"batch_size": 4},
        "rl": {
            "algorithm": {"prompts_per_step": 4},
            "rollout": {"name": "local", "n": 4, "max_new_tokens": 4},
            "reward": {"name": "exact"},
        },
    }
    return {
        "engine": engine,
        "data": {"source": f"../{task}.jsonl"},
        "run": RUN | QUIET,
        **own[command],
    }


# --- one process, or one launcher with its ranks --------------------------------------------------


@dataclass
class RunStart:
    """One start of a run's command, with all processes that it started."""

    folder: Path
    task: str
    world: int
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = 0.0

    def start(self) -> None:
        """Start the command."""
        command = [sys.executable]
        if self.world > 1:
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={self.world}",
            ]
        command += ["-m", "engine_trainer", self.task.split("-")[0], f"../{self.task}.yaml"]
        own = {
            MARK: self.mark,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.began = time.time()
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"--- {' '.join(command)}\n")
            log.flush()
            STARTS.append(self)
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=os.environ | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self) -> dict[int, bool]:
        """Return the living processes of this start by their ids, and whether each is a rank."""
        found: dict[int, bool] = {}
        wanted = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            # The process has ended meanwhile, or belongs to a different user.
            except OSError:
                continue
            if wanted in environment:
                found[int(entry.name)] = self.world == 1 or any(
                    part.startswith(b"RANK=") for part in environment
                )
        return found

    def choose_victims(self, target: str, chance: random.Random) -> list[int]:
        """Return the processes to kill: torchrun, all, or one of the ranks."""
        if target == "launcher":
            return [self.process.pid]
        processes = self.processes()
        if target == "all":
            return sorted(processes)
        ranks = sorted(pid for pid, is_rank in processes.items() if is_rank)
        return chance.sample(ranks, min(1, len(ranks)))

    def kill(self, victims: Sequence[int]) -> bool:
        """Send SIGKILL and return whether the command had not ended yet."""
        if self.is_over():
            return False
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(victims)

    def wait_for_end(self) -> list[int]:
        """Wait until no process is left, and kill processes that do not end.

        Returns the processes that had to be killed.
        """
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            self.process.poll()
            if self.process.returncode is not None and not self.processes():
                return []
            time.sleep(0.05)
        left = sorted(self.processes())
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return left

    def is_over(self) -> bool:
        """Return whether the command has ended."""
        return self.process.poll() is not None

    def in_loop(self) -> bool:
        """Return whether this start has begun to train, that is, to write its log of metrics."""
        log = self.folder / "out/metrics.jsonl"
        return log.is_file() and log.stat().st_mtime > self.began

    def unsaved_fraction(self) -> float:
        """Return the fraction of the run's steps that is not saved yet."""
        saved = (
            int(path.name.removeprefix("step-"))
            for path in (self.folder / "out/checkpoints").glob("step-??????")
        )
        return 1 - max(saved, default=0) / STEPS

    def is_saving(self) -> bool:
        """Return whether a save or a removal is unfinished at this moment."""
        return any(True for _ in unfinished(self.folder / "out"))


STARTS: list[RunStart] = []
"""All starts that were started."""


def unfinished(out: Path) -> Iterator[Path]:
    """Yield the remains of a killed save.

    These are folders under provisional names, and a pointer that has not moved.
    """
    for path in (*_inside(out / "checkpoints"), *_inside(out)):
        if path.suffix == ".partial" or path.name.startswith("hf."):
            yield path
    yield from (out / "checkpoints").glob("step-*/latest")


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


# --- a run of several lives -----------------------------------------------------------------------


@dataclass
class Unbroken:
    """The end of a run that is not killed, and its duration."""

    digests: Mapping[str, str]
    rows: Sequence[Any]
    startup_s: float
    loop_s: float


def digests(out: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in ``hf/`` and in ``checkpoints/``, ``latest`` included.

    Manifests are taken without the run's id, which is another one in each run, and without their
    own digests.
    """
    files = [
        path for part in ("hf", "checkpoints") for path in (out / part).rglob("*") if path.is_file()
    ]
    return {
        str(p.relative_to(out)): hashlib.sha256(_content(p)).hexdigest()
        for p in sorted(files)
        if p.name != "manifest.sha256"
    }


def _content(path: Path) -> bytes:
    if path.name != "manifest.json":
        return path.read_bytes()
    manifest = json.loads(path.read_bytes())
    del manifest["extra"]["run"]
    return json.dumps(manifest).encode()


def rows(out: Path) -> list[Any]:
    """Return the rows of the log of metrics, without the values that a clock gives."""
    kept = ("step", "train/loss", "train/grad_norm", "reward/mean")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [[row.get(name) for name in kept] for row in map(json.loads, lines)]


def unbroken(root: Path, task: str, world: int) -> Unbroken:
    """Run a task to its end without a kill."""
    folder = root / f"{task}-{world}-unbroken"
    folder.mkdir()
    start = RunStart(folder, task, world)
    start.start()
    entered = wait(start, start.in_loop)
    code = start.process.wait(LIFE_S)
    if code:
        raise SystemExit(
            f"{task} on {world} failed by itself:\n{(folder / 'log.txt').read_text()[-4000:]}"
        )
    return Unbroken(
        digests(folder / "out"), rows(folder / "out"), entered - start.began, time.time() - entered
    )


def wait(
    start: RunStart, until: Callable[[], bool], *, seconds: float = LIFE_S, every: float = LOOK_S
) -> float:
    """Wait for a condition, the start's end, or ``seconds``, and return the time waited."""
    deadline = time.monotonic() + seconds
    while not until() and not start.is_over() and time.monotonic() < deadline:
        time.sleep(every)
    return time.time()


class Campaign:
    """The kills that are left to do, and the results of the kills so far."""

    def __init__(
        self, root: Path, tasks: Sequence[str], count: int, seed: int, deadline: float
    ) -> None:
        self.root = root
        self.tasks = tasks
        self.left = count
        self.seed = seed
        self.deadline = deadline
        self.counts: dict[tuple[str, int], Counter[str]] = {
            (t, w): Counter() for t in tasks for w in WORLDS
        }
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._runs = 0

    def next_run(self) -> int | None:
        """Return the number of a new run, or None where no kill is left or the time is up."""
        with self._lock:
            if self.left <= 0 or time.monotonic() > self.deadline:
                return None
            self._runs += 1
            return self._runs - 1

    def note(self, task: str, world: int, *names: str) -> None:
        """Count an event of each name."""
        with self._lock:
            self.counts[task, world].update(names)
            if "kills" in names:
                self.left -= 1

    def wants_a_save(self) -> bool:
        """Return whether fewer than a third of the kills so far fell into a save."""
        with self._lock:
            total = sum(self.counts.values(), Counter[str]())
            return 3 * total["in a save"] <= total["kills"]

    def run(self, number: int, references: Mapping[tuple[str, int], Unbroken]) -> None:
        """Kill and continue one run until it ends, then compare it."""
        chance = random.Random(f"{self.seed}:{number}")
        task = self.tasks[number % len(self.tasks)]
        world = WORLDS[number // len(self.tasks) % len(WORLDS)]
        reference = references[task, world]
        folder = self.root / f"{task}-{world}-{number}"
        folder.mkdir()
        kills = chance.randint(3, 8)
        while True:
            start = RunStart(folder, task, world)
            start.start()
            self.note(task, world, "lives")
            killed = (
                kills > 0
                and self.left > 0
                and time.monotonic() < self.deadline
                and self.strike(start, reference, chance)
            )
            kills -= killed
            if not killed:
                wait(start, start.is_over)
            if left := start.wait_for_end():
                self.fail(folder, f"processes {left} were left")
            if not killed:
                break
        self.compare(folder, start, reference)

    def strike(self, start: RunStart, reference: Unbroken, chance: random.Random) -> bool:
        """Kill at a random moment, and return whether the start was killed before its end."""
        target = chance.choice(["rank", "all", "launcher"] if start.world > 1 else ["all"])
        moment = "save" if self.wants_a_save() else chance.choice(["start", "loop", "loop"])
        if moment == "start":
            wait(start, lambda: False, seconds=chance.uniform(0.0, reference.startup_s))
        else:
            wait(start, start.in_loop)
            wait(
                start,
                lambda: False,
                seconds=chance.uniform(0.0, 0.6 * start.unsaved_fraction() * reference.loop_s),
            )
        # The victims are chosen first: a look at all processes lasts longer than a save.
        victims = start.choose_victims(target, chance)
        if moment == "save":
            wait(start, lambda: not start.is_saving(), every=SAVE_LOOK_S)
            wait(start, start.is_saving, every=SAVE_LOOK_S)
            time.sleep(chance.choice([0.0, chance.uniform(0.0, SAVE_S)]))
        trained = start.in_loop()
        if not start.kill(victims):
            return False
        if left := start.wait_for_end():
            self.fail(
                start.folder, f"processes {left} were left {GONE_S:.0f} s after SIGKILL to {target}"
            )
        # Before it trains, a start removes the remains of earlier kills: later remains are its own.
        inside = (
            "while starting"
            if not trained
            else "in a save"
            if start.is_saving()
            else "while training"
        )
        self.note(start.task, start.world, "kills", f"of {target}", inside)
        return True

    def compare(self, folder: Path, start: RunStart, reference: Unbroken) -> None:
        """Compare a run that has ended with the unbroken run."""
        if start.process.returncode:
            self.fail(folder, f"exit {start.process.returncode}")
            return
        found, out = digests(folder / "out"), folder / "out"
        differ = sorted(
            n for n in {*found, *reference.digests} if found.get(n) != reference.digests.get(n)
        )
        if differ:
            self.fail(
                folder, f"{len(differ)} files are not the unbroken run's: {', '.join(differ[:6])}"
            )
        elif rows(out) != reference.rows:
            self.fail(folder, "metrics.jsonl does not say what the unbroken run's says")
        elif remains := sorted(str(path.relative_to(out)) for path in unfinished(out)):
            self.fail(folder, f"remains of killed saves: {', '.join(remains)}")
        else:
            self.note(start.task, start.world, "equal")
            shutil.rmtree(folder)
        self.note(start.task, start.world, "runs")

    def fail(self, folder: Path, what: str) -> None:
        """Note a failure, with the end of the run's log."""
        log = (folder / "log.txt").read_text(errors="replace")
        with self._lock:
            self.problems.append(f"{folder.name}: {what}\n{log[-3000:]}")


@contextmanager
def ended_with(campaign: Campaign) -> Iterator[None]:
    """Kill all starts when the campaign is interrupted, so that none outlives it."""
    try:
        yield
    except BaseException:
        campaign.left = 0
        for start in STARTS:
            for pid in start.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        raise


COLUMNS = (
    "runs",
    "equal",
    "lives",
    "kills",
    "of rank",
    "of all",
    "of launcher",
    "while starting",
    "while training",
    "in a save",
)


def table(counts: Mapping[tuple[str, int], Counter[str]]) -> str:
    """Return the counts, one line for each task and world and one for all."""
    lines = [["task", "world", *COLUMNS]]
    lines += [
        [task, str(world), *(str(own[name]) for name in COLUMNS)]
        for (task, world), own in counts.items()
    ]
    total = sum(counts.values(), Counter[str]())
    lines += [["all", "", *(str(total[name]) for name in COLUMNS)]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign.

    Returns 0 where runs were killed and each ended as the unbroken one.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="kills (500)")
    parser.add_argument(
        "--lanes", type=int, default=os.cpu_count() or 1, help="runs at a time (one a core)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no kill after so many minutes, and say how many there were",
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=TASKS, help="kinds of runs (all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (0)")
    parser.add_argument(
        "--folder", type=Path, help="where runs are made; those that failed stay there"
    )
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="kills-", dir=options.folder))
    make_inputs(root)
    deadline = begin + 60 * (options.minutes or 1e6)
    campaign = Campaign(root, options.tasks, options.count, options.seed, deadline)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with ThreadPoolExecutor(options.lanes) as pool, ended_with(campaign):
        keys = list(campaign.counts)
        references = dict(zip(keys, pool.map(lambda key: unbroken(root, *key), keys), strict=True))

        def lane(_: int) -> None:
            while (number := campaign.next_run()) is not None:
                campaign.run(number, references)

        list(pool.map(lane, range(options.lanes)))
    if campaign.left == options.count:
        campaign.problems.append("no run was killed: nothing is shown; give it more --minutes")
    print("\n\n".join(campaign.problems))
    print(table(campaign.counts))
    print(f"seed {options.seed}, {options.lanes} lanes, {time.monotonic() - begin:.0f} s")
    if campaign.problems:
        print(f"{len(campaign.problems)} problems; what is left lies in {root}")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
