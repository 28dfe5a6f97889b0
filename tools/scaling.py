"""Write the tables of docs/scaling.md from ``engine_trainer.scaling``.

With ``--check``, check that they are current instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields

from matrix import ROOT, replace_section, table, write_or_check

from engine_trainer.scaling import H200, SHAPES, Job, Step, phases, step_of
from engine_trainer.scaling.phases import Lengths
from engine_trainer.scaling.step import NAMES

PAGE = ROOT / "docs" / "scaling.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-32b")
GPUS = (8, 64, 512, 4096)
RESPONSES = (2048, 8192, 32768)
# Each pattern matches a row of one of the page's tables of measurements.
TRAINING = re.compile(
    r"^\| ([\d.]+B) \| (\d) \| ([\d,]+) \| ([\d,]+) \| cuDNN \|.* ([\d.]+) ms \|$", re.MULTILINE
)
ONE_GPU = re.compile(
    r"^\| Qwen3-([\d.]+B) \| (bf16|FP8) \| [\d.]+ GB \| \**([\d.]+) ms", re.MULTILINE
)
SEVERAL_GPUS = re.compile(r"^\| (\d) \| (bf16|FP8) \| \**([\d.]+) ms", re.MULTILINE)
GENERATION = re.compile(r"^\| Qwen3-8B \| ([\d,]+) tokens/s .*?\| ([\d,]+) tokens/s", re.MULTILINE)
RL_STEP = re.compile(
    r"^\| ([\d.]+B), (2|1 \+ 1) GPUs, [^|]*\| (bf16|FP8)[^|]*\|[^|]*\| ([\d.]+) s \|", re.MULTILINE
)
# The measured steps have 256 completions on these numbers of replicas, of these numbers of tokens.
RL_REPLICAS = {"2": 2, "1 + 1": 1}
RL_RESPONSES = {"0.6B": 1024, "8B": 512}


def job(response: int, prompts: int = 512) -> Job:
    """Return the step of the tables.

    It has 16 completions per prompt, evenly spread up to ``response`` tokens.
    """
    return Job(prompts=prompts, lengths=Lengths(prompt=512, mean=response / 2, longest=response))


def measured() -> list[tuple[str, float, float]]:
    """Return each row of docs/benchmarks.md that the calculation covers.

    A row is its name, the measured seconds and the calculated seconds.
    """
    page = BENCHMARKS.read_text()
    return [*_training(page), *_syncs(page), *_generation(page), *_steps(page)]


def _training(page: str) -> Iterator[tuple[str, float, float]]:
    for model, gpus, tokens, document, ms in TRAINING.findall(page):
        each, length = int(tokens.replace(",", "")), int(document.replace(",", ""))
        calculated = phases.update(
            SHAPES[f"qwen3-{model.lower()}"],
            H200,
            gpus=int(gpus),
            tokens=float(each * int(gpus)),
            length=length,
            micro_batch=each,
        )
        yield (
            f"update, {model}, {gpus} GPU, {tokens} tokens of {document}",
            float(ms) / 1e3,
            calculated.seconds,
        )


def _syncs(page: str) -> Iterator[tuple[str, float, float]]:
    rows = [(model, "1", kind, ms) for model, kind, ms in ONE_GPU.findall(page)]
    rows += [("8B", gpus, kind, ms) for gpus, kind, ms in SEVERAL_GPUS.findall(page)]
    for model, gpus, kind, ms in rows:
        calculated = phases.sync(
            SHAPES[f"qwen3-{model.lower()}"],
            H200,
            group=int(gpus),
            tensor_parallel=1,
            fp8=kind == "FP8",
        )
        yield f"sync, {model}, {gpus} GPU, {kind}", float(ms) / 1e3, calculated.seconds


def _generation(page: str) -> Iterator[tuple[str, float, float]]:
    found = GENERATION.search(page)
    assert found is not None, "the page has the throughput of 8B"
    lengths = Lengths(prompt=128, mean=256, longest=256)
    for kind, tokens in zip(("bf16", "FP8"), found.groups(), strict=True):
        calculated = phases.generate(
            SHAPES["qwen3-8b"], H200, lengths, sequences=512, tensor_parallel=1, fp8=kind == "FP8"
        )
        yield (
            f"generate, 8B, 512 × 256 tokens, {kind}",
            512 * 256 / float(tokens.replace(",", "")),
            calculated.seconds,
        )


def _steps(page: str) -> Iterator[tuple[str, float, float]]:
    for model, gpus, kind, seconds in RL_STEP.findall(page):
        response, sequences = RL_RESPONSES[model], 256 // RL_REPLICAS[gpus]
        lengths = Lengths(prompt=128, mean=response, longest=response)
        calculated = phases.generate(
            SHAPES[f"qwen3-{model.lower()}"],
            H200,
            lengths,
            sequences=sequences,
            tensor_parallel=1,
            fp8=kind == "FP8",
        )
        yield (
            f"generate in a step of RL, {model}, {sequences} × {response} tokens, {kind}",
            float(seconds),
            calculated.seconds,
        )


def render(page: str) -> str:
    """Return the page with its generated sections."""
    page = replace_section(page, "assumptions", _assumptions())
    page = replace_section(page, "check", _check())
    for response in RESPONSES:
        rows = [
            _row(name, step_of(SHAPES[name], gpus, job(response)))
            for name in MODELS
            for gpus in GPUS
        ]
        page = replace_section(page, f"response {response}", table(_HEAD, rows))
    return replace_section(page, "weak", _weak())


_HEAD = ("model", "GPUs", "GPUs a replica", "step", *NAMES, "first bottleneck")


def _row(name: str, step: Step) -> tuple[str, ...]:
    if not step.fits:
        return (name, str(step.gpus), "", "does not fit", *[""] * (len(NAMES) + 1))
    shares = (f"{step.share(n):.1%}" for n in NAMES)
    return (
        name,
        str(step.gpus),
        str(step.tensor_parallel),
        _time(step.seconds),
        *shares,
        step.bottleneck,
    )


def _weak() -> str:
    head = (
        "model",
        "GPUs",
        "prompts",
        "step",
        *NAMES,
        "trained tokens/s and GPU",
        "first bottleneck",
    )
    rows: list[tuple[str, ...]] = []
    for name in ("qwen3-8b", "qwen3-32b"):
        for gpus in GPUS:
            work = job(8192, prompts=8 * gpus)
            step = step_of(SHAPES[name], gpus, work)
            shares = (f"{step.share(n):.1%}" for n in NAMES)
            rows.append(
                (
                    name,
                    str(gpus),
                    str(work.prompts),
                    _time(step.seconds),
                    *shares,
                    f"{step.tokens_per_gpu_s(work):,.0f}",
                    step.bottleneck,
                )
            )
    return table(head, rows)


def _assumptions() -> str:
    rows = [
        (f"`{f.name}`", f"{getattr(H200, f.name):g}" if f.name != "name" else H200.name)
        for f in fields(H200)
    ]
    constants = ("STATE_BYTES", "OPTIMIZER_BYTES", "STATE_SHARE", "WEIGHT_SHARE")
    rows += [(f"`{name}`", f"{getattr(phases, name):g}") for name in constants]
    one = job(8192)
    rows += [
        (f"`{name}`", f"{getattr(one, name):g}")
        for name in ("prompts", "n", "micro_batch", "updates", "reward_s", "reward_processes")
    ]
    return table(("constant", "value"), rows)


def _check() -> str:
    rows = [
        (what, _time(seen), _time(said), f"{said / seen - 1:+.0%}")
        for what, seen, said in measured()
    ]
    return table(("what", "measured", "calculated", "difference"), rows)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, render(PAGE.read_text()), "scaling.py"))
