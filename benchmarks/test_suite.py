"""The suite's names of several steps, and the environment of each step."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suite
from benchmarks.mfu import compare, entries, settings_of, union_length
from benchmarks.suite import STEPS, Step, expand, read_environments

ENGINES = ("fsdp2", "megatron", "veomni", "torchtitan", "automodel")


def write(path: Path, content: object) -> Path:
    """Write JSON and return its file."""
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("group", ["mfu-1.7b", "mfu-8b-2"])
def test_a_group_has_each_engine_at_its_best_and_at_its_defaults(group: str) -> None:
    """Each engine has two steps, and other work is not among them."""
    names = expand(group)
    for engine in ENGINES:
        assert {f"{group}-{engine}", f"{group}-{engine}-defaults"} <= set(names)
        assert "--defaults" in STEPS[f"{group}-{engine}-defaults"].command
        assert "--defaults" not in STEPS[f"{group}-{engine}"].command
    assert not [name for name in names if "long" in name or "kept" in name]


@pytest.mark.parametrize("group", ["auto-1.7b", "auto-8b-2"])
def test_each_engine_has_a_step_whose_micro_batches_the_trainer_chooses(group: str) -> None:
    """All else is as at the defaults."""
    assert expand(group) == [f"{group}-{engine}" for engine in ENGINES]
    for name in expand(group):
        assert STEPS[name].command[-3:] == ("--defaults", "--max-tokens", "auto")


def test_defaults_are_measured_beside_the_best_settings_in_training_and_in_rl() -> None:
    """A step of training measures both, and those of RL are two for each model."""
    names = expand("defaults")
    for name in ("defaults-0.6b", "defaults-1.7b", "defaults-8b-2"):
        assert name in names
        assert STEPS[name].command[-2:] == ("--defaults", "beside")
    for name in ("defaults-rl-0.6b", "defaults-rl-8b"):
        assert {name, f"{name}-best"} <= set(names)
        assert not [word for word in STEPS[name].command if "=" in word]


def test_a_step_that_is_named_twice_runs_once_where_it_was_named_first() -> None:
    """A group does not repeat a step."""
    names = expand("mfu-1.7b-veomni,mfu-1.7b,kernels")
    assert names[0] == "mfu-1.7b-veomni"
    assert names[-1] == "kernels"
    assert sorted(names) == sorted({*names})


def test_a_name_of_no_step_is_refused_with_the_known_ones() -> None:
    """The error lists groups and steps."""
    with pytest.raises(ValueError, match=r"got 'mfu-2b'; there are .*mfu-1\.7b, "):
        expand("kernels,mfu-2b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"torchtitn": {}}, "expected backends and steps, got 'torchtitn'"),
        ({"fsdp2": {"OMP_NUM_THREADS": 1}}, "fsdp2: expected an object of texts"),
        ({"fsdp2": "PYTHONPATH=/opt"}, "fsdp2: expected an object of texts"),
    ],
)
def test_an_environment_of_no_step_or_of_no_texts_is_refused(
    tmp_path: Path, content: object, message: str
) -> None:
    """A slip in the file does not run a step in another environment."""
    with pytest.raises(ValueError, match=message):
        read_environments(write(tmp_path / "environments.json", content))


def test_a_step_runs_in_its_own_environment_and_else_in_its_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step's variables come after its backend's."""
    print_them = (
        "import json, os; print(json.dumps({k: os.environ.get(k) for k in ('ONE', 'TWO')}))"
    )
    step = Step(command=("-c", print_them), seconds=60, gpus=0, backend="fsdp2")
    monkeypatch.setattr(suite, "STEPS", {"first": step, "second": step})
    variables = {"fsdp2": {"ONE": "backend", "TWO": "backend"}, "second": {"TWO": "step"}}
    file = write(tmp_path / "environments.json", variables)
    arguments = ["--only", "first,second", "--output", str(tmp_path), "--environments", str(file)]
    assert suite.main(arguments) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": "first", "ONE": "backend", "TWO": "backend"},
        {"step": "second", "ONE": "backend", "TWO": "step"},
    ]
    assert "first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "gib", "why"),
    [
        (1, 139.8, "it needs 2 GPUs, here are 1"),
        (2, 79.2, "it needs 90 GiB of memory on a GPU, here are 79.2"),
        (2, 139.8, ""),
    ],
)
def test_a_step_that_a_machine_cannot_run_says_what_it_needs(
    gpus: int, gib: float, why: str
) -> None:
    """The number of GPUs and their memory count."""
    step = Step(command=(), seconds=1, gpus=2, gib=90)
    assert suite.obstacle(step, gpus, gib) == why


def test_a_small_gpu_gets_the_arguments_that_fit_it_where_a_step_has_some() -> None:
    """A GPU that is large enough gets the step's own."""
    for name in ("mfu-1.7b-megatron", "defaults-1.7b"):
        step = STEPS[name]
        assert suite.obstacle(step, 1, 79.2) == ""
        assert suite.fit(step, 79.2).command == (*step.command, *step.smaller)
        assert suite.fit(step, 139.8) == step
        assert step.smaller[0] == "--max-tokens"
        assert f"of {step.gib} GiB (or with {' '.join(step.smaller)})" in suite.describe(name, step)


def test_the_arguments_for_a_small_gpu_are_in_the_command_that_runs_and_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step without such arguments does not run, and the exit status tells."""
    print_arguments = "import json, sys; print(json.dumps({'arguments': sys.argv[1:]}))"
    step = Step(command=("-c", print_arguments), seconds=60, gpus=0, gib=90)
    steps = {"fits": replace(step, smaller=("--max-tokens", "8192")), "large": step}
    monkeypatch.setattr(suite, "STEPS", steps)
    monkeypatch.setattr(suite, "smallest_memory", lambda: 79.2)
    assert suite.main(["--only", "fits,large", "--output", str(tmp_path)]) == 1
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert row == {"step": "fits", "arguments": ["--max-tokens", "8192"]}
    said = capsys.readouterr().out
    assert "with --max-tokens 8192, since a GPU has 79.2 GiB" in said
    assert "not run: it needs 90 GiB of memory on a GPU, here are 79.2" in said


def test_defaults_beside_other_settings_come_first_and_are_what_the_ratios_refer_to() -> None:
    """Each precision follows, each with all settings of recomputation."""
    (layout,) = entries("fsdp2")
    words = "bfloat16,float8:rowwise"
    shown = settings_of(Namespace(defaults="beside", precision=words, recompute="none"), layout)
    assert [entry.has_defaults for entry in shown] == [True, False, False]
    assert [entry.precision for entry in shown[1:]] == ["bfloat16", "float8"]
    one = Namespace(defaults="only", precision="bfloat16", recompute="none")
    assert settings_of(one, layout) == shown[:1]
    both = Namespace(defaults=None, precision=words, recompute="full,full:0.2")
    assert [
        (entry.precision, entry.recompute, entry.own) for entry in settings_of(both, layout)
    ] == [
        ("bfloat16", "full", {}),
        ("bfloat16", "full", {"kept_activations": 0.2}),
        ("float8", "full", {"float8_recipe": "rowwise"}),
        ("float8", "full", {"float8_recipe": "rowwise", "kept_activations": 0.2}),
    ]
    rows = [
        measured("", 10000, defaults=True),
        measured("", 12500, options={"kept_activations": 0.2}),
    ]
    first, second = compare(rows).splitlines()[2:]
    assert "| defaults: bfloat16 | full | 2000.0 | 1900.0 | 10,000 | 1.00 | 40.0% |" in first
    assert "| bfloat16 | full, 0.2 kept | 2000.0 | 1900.0 | 12,500 | 1.25 | 40.0% |" in second


def measured(step: str, rate: int, **given: Any) -> dict[str, Any]:
    """Return a row as the suite writes it."""
    row = {
        "step": step,
        "backend": "torchtitan",
        "layout": "",
        "shape": "8b",
        "gpus": 2,
        "tokens": 16384,
        "micro_batches": 1,
        "document": 4096,
        "defaults": False,
        "precision": "bfloat16",
        "compile": True,
        "recompute": "full",
        "options": {},
        "step_ms": 2000.0,
        "gpu_ms": 1900.0,
        "tokens_per_s": rate,
        "mfu": 0.4,
        "peak_gib": 66.94,
        "loss": 12.7,
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "device": "GPU",
    }
    return row | given


def test_the_table_names_settings_fastest_first_and_says_what_float8_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of other measurements are left out, and only like work is compared."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    from engine_table import render  # pyright: ignore[reportMissingImports]

    rows = [
        measured("plain", 16000),
        measured("plain-defaults", 10000, defaults=True, micro_batches=2),
        measured("float8", 20000, precision="float8", options={"float8_recipe": "rowwise"}),
        {"step": "kernels", "ms": 1.0},
    ]
    facts, *parts = render(rows).split("\n\n")
    assert facts == (
        "2 × GPU. torch 2.11.0, transformers 5.17.0. "
        "Tokens a step and GPU: 16,384 in documents of 4,096."
    )
    lines = parts[0].splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == ["float8", "plain", "plain-defaults"]
    assert "| float8, compiled, recomputed, float8_recipe=rowwise | 20,000 | 40.0 % |" in lines[0]
    assert "| defaults, bfloat16, compiled, recomputed, 2 micro-batches |" in lines[2]
    assert parts[1:] == [
        "`float8`: float8 (rowwise) has 1.25 × the tokens/s of bfloat16 of `plain`."
    ]
    rows.append(measured("float8", 12500))
    assert render(rows).endswith(
        "`float8`: float8 (rowwise) has 1.60 × the tokens/s of bfloat16 in one process."
    )
    monkeypatch.delitem(sys.modules, "engine_table")


def test_kernels_that_overlap_count_once() -> None:
    """The busy time of a GPU is the length of a union."""
    assert union_length([(1.0, 3.0), (0.0, 2.0), (5.0, 6.0), (5.0, 5.5)]) == 4.0
    assert union_length([]) == 0.0
