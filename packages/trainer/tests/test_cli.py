from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import yaml
from waiting import DEADLINE_S

from engine_api.plugin import CONTRACT
from engine_trainer.cli import COMMANDS, main
from engine_trainer.config import SFTConfig
from engine_trainer.config.loading import from_tree


@pytest.fixture
def broken(tmp_path, sft_file):
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"prompt": "x", "resp\n')
    return sft_file


def test_print_config_prints_everything_and_runs_nothing(sft_file, capsys, tmp_path):
    assert main(["sft", str(sft_file), "--print-config", "run.steps=77"]) == 0
    config = from_tree(SFTConfig, yaml.safe_load(capsys.readouterr().out))
    assert (config.run.steps, config.engine.memory.max_tokens) == (77, 16384)
    assert not (tmp_path / "run").exists()


def test_a_run_ends_with_a_summary_and_zero(sft_file, capsys):
    assert main(["sft", str(sft_file), "run.report=true"]) == 0
    out = capsys.readouterr().out
    assert "6 steps" in out
    assert "train/loss" in out
    assert "report.html" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.stepss=3"], "did you mean steps"),
        (["data.source=no.jsonl"], "no such file"),
        (["engine.model.path=/no"], "no folder"),
    ],
)
def test_wrong_input_is_two_without_a_traceback(sft_file, capsys, arguments, said):
    assert main(["sft", str(sft_file), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "to do:" in err
    assert "Traceback" not in err


def test_a_broken_line_is_two_and_named(broken, capsys):
    assert main(["sft", str(broken)]) == 2
    assert "rows.jsonl:21: the line is not JSON" in capsys.readouterr().err


def test_an_unknown_plug_in_is_wrong_input(sft_file, capsys):
    assert main(["sft", str(sft_file), "engine.backend=bigramm"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_the_values_of_a_key_are_listed_once(sft_file, capsys):
    assert main(["sft", str(sft_file), "engine.schedule.name=polynomial"]) == 2
    assert capsys.readouterr().err == (
        "error: config engine.schedule.name: expected one of constant, linear, cosine, got "
        "'polynomial'\n  to do: choose one of them\n"
    )


def test_debug_shows_the_traceback(sft_file, capsys):
    assert main(["sft", str(sft_file), "--debug", "run.nothing=1"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_wrong_usage_is_two():
    with pytest.raises(SystemExit) as caught:
        main(["train", "x.yaml"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ([], "command"),
        (["sft"], "config"),
        (["--debug", "rl"], "config"),
        (["schema"], "task"),
    ],
)
def test_what_is_missing_is_named_and_overrides_are_not(capsys, arguments, missing):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    end = f"the following arguments are required: {missing}\n"
    assert capsys.readouterr().err.endswith(end)


@pytest.mark.parametrize(
    "order",
    [
        ["sft", "FILE", "run.steps=77", "run.keep=3", "--print-config"],
        ["sft", "FILE", "run.steps=77", "--print-config", "run.keep=3"],
        ["sft", "--print-config", "FILE", "run.steps=77", "--debug", "run.keep=3"],
        ["--print-config", "sft", "FILE", "run.steps=77", "run.keep=3"],
    ],
)
def test_options_may_stand_anywhere_between_the_overrides(sft_file, capsys, order):
    assert main([str(sft_file) if word == "FILE" else word for word in order]) == 0
    run = yaml.safe_load(capsys.readouterr().out)["run"]
    assert (run["steps"], run["keep"]) == (77, 3)


def test_an_option_that_a_command_does_not_have_is_refused(sft_file, capsys):
    for arguments in (["sft", str(sft_file), "--stepss", "3"], ["recipes", "--print-config"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "unrecognized arguments: --" in capsys.readouterr().err


def test_every_command_has_a_line_in_the_help_and_a_help_of_its_own(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    overview = capsys.readouterr().out
    for name in COMMANDS:
        (line,) = [one for one in overview.splitlines() if one.split()[:1] == [name]]
        assert len(line.split()) > 3, "each has a meaning"
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert f"usage: engine-train {name}" in capsys.readouterr().out


def test_the_version_names_package_contract_and_torch(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"engine-train {version('engine-trainer')} (contract {CONTRACT}, torch ")


def test_print_config_says_what_a_key_means_and_what_it_may_be(sft_file, capsys):
    assert main(["sft", str(sft_file), "--print-config"]) == 0
    said = capsys.readouterr().out
    assert "    # One of: auto, none, full.\n    # `auto` is `none` where the estimated" in said
    assert re.search(r"  # Installed here: .*\blocal\b.*\n(  # .*\n)+  name: auto\n", said)


def test_under_torchrun_every_rank_says_who_it_is(sft_file, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["sft", str(sft_file), "run.nothing=1"]) == 2
    assert all(line.startswith("[rank 1] ") for line in capsys.readouterr().err.splitlines())
    assert main(["sft", str(sft_file), "--print-config"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_wrong_key_is_answered_without_loading_torch(sft_file):
    code = (
        "import sys; from engine_trainer.cli import main; status = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "sft", str(sft_file), "run.nothing=1"]
    done = subprocess.run(
        command, env=os.environ, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert done.returncode == 2, done.stderr
