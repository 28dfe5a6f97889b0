"""Run commands side by side on the GPUs of one host, until a deadline.

``python tools/gpu_lanes.py JOBS.json --seconds 1500 --lanes 20 --output DIR`` starts the jobs of a
JSON list in its order. A job is an object:

- ``name``: its log is ``DIR/NAME.log``, and its line in ``DIR/done.jsonl`` has status and seconds;
- ``command``: a list of words, run in the current folder;
- ``gpus``: how many GPUs it has to itself. Without it, it shares all GPUs with other jobs of its
  kind, of which ``--lanes`` run at a time; a job with GPUs of its own waits until all of them have
  ended, so that measurements are not disturbed;
- ``environment``: a name in ``--environments FILE``, a JSON object of objects with variables. Those
  of the name "" are every job's;
- ``variables``: some of its own, which come last;
- ``seconds``: after these it is ended, and its processes with it;
- ``least``: it does not start with fewer seconds left; 0 unless given.

A job that wants more GPUs than there are is not started. When this program ends, for whatever
reason, so do its jobs. ``{limit}`` in a command stands for nine tenths of the seconds that it has.
Nothing is repeated. With ``CUDA_VISIBLE_DEVICES`` it uses those GPUs alone, so that two of these
programs can share a host. The exit status is 1 if a job did not end with 0, or was not started.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

POLL_SECONDS = 0.2
# What a command has to write its results in before its processes are killed.
GRACE_SECONDS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A command, the GPUs that it has to itself (0: it shares all), and its time in seconds."""

    name: str
    command: Sequence[str]
    gpus: int = 0
    environment: str = ""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    seconds: float = 600
    least: float = 0


@dataclass(kw_only=True, slots=True)
class Running:
    """A process with the GPUs that it has, and the time at which it is ended."""

    job: Job
    process: subprocess.Popen[bytes]
    begin: float
    end: float
    devices: tuple[str, ...]
    was_stopped: bool = False
    started_by_it: list[psutil.Process] = field(default_factory=list[psutil.Process])
    """Its processes in groups of their own, when it was stopped."""

    def stop(self) -> None:
        """Ask the job, and all that it has started, to end."""
        self.was_stopped = True
        with suppress(psutil.NoSuchProcess):
            self.started_by_it = psutil.Process(self.process.pid).children(recursive=True)
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill what is left of the job and of what it had started."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        # The group of a leader that has ended still has its other processes.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        for one in self.started_by_it:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)


@dataclass(kw_only=True)
class Lanes:
    """The jobs that run, and those that wait.

    Attributes:
        waiting: jobs in the order in which they start.
        environments: variables by the name of an environment.
        output: the folder of logs.
        devices: the GPUs, as ``CUDA_VISIBLE_DEVICES`` names them.
        lanes: jobs that share GPUs at a time.
        deadline: the time on `time.monotonic` at which all end.
    """

    waiting: list[Job]
    environments: Mapping[str, Mapping[str, str]]
    output: Path
    devices: Sequence[str]
    lanes: int
    deadline: float
    running: list[Running] = field(default_factory=list[Running])
    failed: list[str] = field(default_factory=list[str])
    started: int = 0

    def run(self) -> list[str]:
        """Run all jobs and return the names of those that failed or did not start."""
        try:
            while self.waiting or self.running:
                for one in list(self.running):
                    self._look_at(one)
                while (job := self._next()) is not None:
                    self._start(job)
                time.sleep(POLL_SECONDS)
        finally:
            for one in self.running:
                one.stop()
                one.kill()
        return self.failed

    def _next(self) -> Job | None:
        """Return the next job that can start now, and take it and those that cannot any more."""
        for job in list(self.waiting):
            left = self.deadline - time.monotonic()
            if left < max(job.least, 1) or job.gpus > len(self.devices):
                self.waiting.remove(job)
                self._note(job, "not started", 0)
                continue
            if self._has_room(job):
                self.waiting.remove(job)
                return job
        return None

    def _has_room(self, job: Job) -> bool:
        sharing = sum(not one.job.gpus for one in self.running)
        if not job.gpus:
            return sharing == len(self.running) and sharing < self.lanes
        sharing_waits = any(not one.gpus for one in self.waiting)
        return not sharing and not sharing_waits and len(self._free()) >= job.gpus

    def _free(self) -> list[str]:
        taken = {device for one in self.running for device in one.devices}
        return [device for device in self.devices if device not in taken]

    def _start(self, job: Job) -> None:
        # Commands that share all GPUs put most of their work on the first one that they see.
        turn = self.started % len(self.devices)
        order = [*self.devices[turn:], *self.devices[:turn]]
        devices = tuple(self._free()[: job.gpus]) if job.gpus else ()
        seconds = min(job.seconds, self.deadline - time.monotonic())
        command = [word.replace("{limit}", str(int(0.9 * seconds))) for word in job.command]
        variables = dict(self.environments.get("", {}))
        if job.environment:
            variables |= self.environments[job.environment]
        variables |= job.variables
        visible = ",".join(devices or order)
        with (self.output / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | variables | {"CUDA_VISIBLE_DEVICES": visible},
                start_new_session=True,
            )
        now = time.monotonic()
        self.started += 1
        self.running.append(
            Running(job=job, process=process, begin=now, end=now + seconds, devices=devices)
        )

    def _look_at(self, one: Running) -> None:
        """End a job whose time is over, and take note of one that has ended."""
        now = time.monotonic()
        if one.process.poll() is None:
            if now > one.end + GRACE_SECONDS:
                one.kill()
            elif now > one.end and not one.was_stopped:
                one.stop()
            return
        one.kill()
        self.running.remove(one)
        status = one.process.returncode
        self._note(one.job, "stopped" if one.was_stopped else str(status), now - one.begin)

    def _note(self, job: Job, status: str, seconds: float) -> None:
        if status != "0":
            self.failed.append(job.name)
        line = {"name": job.name, "status": status, "seconds": round(seconds, 1)}
        with (self.output / "done.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{status:>12} {seconds:7.1f} s  {job.name}", flush=True)


def read_jobs(path: Path) -> list[Job]:
    """Return the jobs of a file.

    Raises:
        ValueError: a job is not one, or two have one name.
    """
    entries: list[dict[str, Any]] = json.loads(path.read_text())
    known = set(Job.__dataclass_fields__)
    for entry in entries:
        if unknown := sorted(set(entry) - known):
            name = entry.get("name")
            raise ValueError(f"{path}: {name}: expected {sorted(known)}, got {unknown}")
    jobs = [Job(**entry) for entry in entries]
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: expected a name for each job, got {twice} twice")
    return jobs


def check_environments(jobs: Sequence[Job], environments: Collection[str]) -> None:
    """Raise ``ValueError`` for a job whose environment is not described."""
    for job in jobs:
        if job.environment and job.environment not in environments:
            raise ValueError(
                f"job {job.name}: expected an environment of --environments "
                f"({', '.join(sorted(filter(None, environments))) or 'none is given'}), "
                f"got {job.environment!r}"
            )


def find_devices() -> list[str]:
    """Return the GPUs that torch can use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in given.split(",")][:count]


def end_by(signal_number: int, _: object) -> None:
    """End this program, and with it its jobs, by an exception."""
    sys.exit(128 + signal_number)


def main() -> int:
    """Run the jobs of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--environments", type=Path)
    options = parser.parse_args()
    jobs = read_jobs(options.jobs)
    environments = json.loads(options.environments.read_text()) if options.environments else {}
    check_environments(jobs, environments)
    devices = find_devices()
    if not devices:
        parser.error("expected a host with GPUs, got none that torch can use")
    options.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, end_by)
    lanes = Lanes(
        waiting=jobs,
        environments=environments,
        output=options.output,
        devices=devices,
        lanes=options.lanes,
        deadline=time.monotonic() + options.seconds,
    )
    return 1 if lanes.run() else 0


if __name__ == "__main__":
    sys.exit(main())
