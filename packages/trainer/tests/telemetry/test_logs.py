from __future__ import annotations

import sys
import time
import types
from types import SimpleNamespace

import pytest
import torch
from waiting import until

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_trainer.config.sections import EngineSection, RunSection
from engine_trainer.placement.groups import divide
from engine_trainer.telemetry.logs import RunLog, Timers, read_metrics, truncate
from engine_trainer.telemetry.series import summary
from engine_trainer.telemetry.throughput import Throughput


def section(**settings):
    return RunSection(
        output_dir="o", steps=5, **({"progress": False, "tensorboard": False} | settings)
    )


def test_phases_add_up_and_begin_anew():
    timers = Timers()
    for _ in range(2):
        with timers.phase("a"):
            time.sleep(0.01)
    last, taken = timers.last("a"), timers.take()
    assert last >= 0.01
    assert taken["time/a"] >= last + 0.01
    assert timers.take() == {}


def test_only_rank_zero_writes(tmp_path):
    for active in (False, True):
        log = RunLog(tmp_path / str(active), section(), active=active, total_steps=5)
        log.open(0)
        log.write(1, {"a": 1.0, "b": float("inf")})
        log.close()
        log.close()
    assert not (tmp_path / "False").exists()
    (row,) = read_metrics(tmp_path / "True" / "metrics.jsonl")
    assert (row["step"], row["a"], row["b"]) == (1, 1.0, None)


def test_rows_after_the_restored_step_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 2}\n{"step": 3}\n{"st')
    assert truncate(path, 2) == 2
    assert path.read_text() == '{"step": 0}\n{"step": 2}\n'
    assert truncate(path, 0) == 2
    assert path.read_text() == ""
    assert truncate(tmp_path / "none", 3) == 0


def test_tensorboard_gets_the_same_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, section(tensorboard=True), active=True, total_steps=5)
    log.open(0)
    log.write(3, {"train/loss": 0.5})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 0.5)]


def test_a_run_that_begins_anew_in_its_folder_leaves_nothing_of_what_was_there(
    tmp_path, monkeypatch
):
    """Begin metrics.jsonl and its views again after a kill before the first checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ids = []

    def init(**settings):
        ids.append(settings["id"])
        return SimpleNamespace(id=f"run-{len(ids)}", log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for begin, step, loss in ((0, 1, 0.5), (0, 1, 0.25), (1, 2, 0.125)):
        log = RunLog(tmp_path, section(tensorboard=True, wandb="p"), active=True, total_steps=5)
        log.open(begin)
        log.write(step, {"train/loss": loss})
        log.close()
        # TensorBoard orders its files by the second in their names.
        second = int(time.time())
        until(lambda second=second: int(time.time()) > second)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.25), (2, 0.125)]
    assert ids == [None, None, "run-2"]


def test_wandb_is_used_when_installed_and_asked_for_when_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        RunLog(tmp_path, section(wandb="p"), active=True, total_steps=5)
    assert caught.value.field == "run.wandb"
    calls = []
    run = types.SimpleNamespace(
        id="abc", log=lambda m, step: calls.append((step, m)), finish=lambda: calls.append("end")
    )
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **kw: calls.append(kw) or run)
    )
    for done in range(2):
        log = RunLog(tmp_path, section(wandb="p"), active=True, total_steps=5, config={"a": 1})
        log.open(done)
        log.write(1, {"x": 2.0})
        log.close()
    assert (calls[0]["project"], calls[0]["id"], calls[0]["config"]) == ("p", None, {"a": 1})
    assert calls[1:3] == [(1, {"x": 2.0}), "end"]
    assert calls[3]["id"] == "abc"  # the second part of a run goes on in the same wandb run


def test_trackio_goes_on_in_the_run_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(
        ConfigError, match=r"(?s)not installed.*engine-trainer\[trackio\]"
    ) as caught:
        RunLog(tmp_path, section(trackio="p"), active=True, total_steps=5)
    assert caught.value.field == "run.trackio"
    given, logged = [], []
    run = SimpleNamespace(
        name="calm-sea", log=lambda m, step: logged.append((step, m)), finish=lambda: None
    )
    package = SimpleNamespace(init=lambda **kw: given.append(kw) or run)
    monkeypatch.setitem(sys.modules, "trackio", package)
    for done in (0, 1, 0):
        log = RunLog(tmp_path, section(trackio="p"), active=True, total_steps=5, config={"a": 1})
        log.open(done)
        log.write(done + 1, {"x": 2.0})
        log.close()
    assert [kw["name"] for kw in given] == [None, "calm-sea", None]
    assert given[0] == {"project": "p", "resume": "allow", "config": {"a": 1}, "name": None}
    assert logged == [(1, {"x": 2.0}), (2, {"x": 2.0}), (1, {"x": 2.0})]


SHOWN = {"train/loss": 0.12345, "eval/accuracy": 0.5, "other": 1.0}
NAMES = ("train/loss", "eval/accuracy", "absent")


def test_the_bar_shows_the_figures_that_matter_and_the_phase(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    log = RunLog(tmp_path, section(progress=True), active=True, total_steps=5)
    log.open(2)
    with Timers(log.show_phase).phase("generate"):
        pass
    log.progress(3, SHOWN, NAMES)
    log.close()
    err = capsys.readouterr().err
    assert "3/5" in err
    assert "generate" in err
    assert "loss=0.1235, eval/accuracy=0.5" in err


def test_without_a_terminal_there_are_lines(tmp_path, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("engine_trainer.telemetry.logs.time.monotonic", lambda: now[0])
    log = RunLog(tmp_path, section(progress=True), active=True, total_steps=5)
    log.open(0)
    for step in range(1, 6):
        now[0] += 4.0
        log.progress(step, SHOWN, NAMES)
    log.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 1 of 5", "step 4 of 5", "step 5 of 5"]
    assert lines[0] == "step 1 of 5, 0:00:04, loss 0.1235, eval/accuracy 0.5"


def test_the_time_of_an_interruption_does_not_count(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("engine_trainer.telemetry.logs.time.monotonic", lambda: now[0])
    for done, step in ((0, 1), (1, 2)):
        log = RunLog(tmp_path, section(), active=True, total_steps=5)
        log.open(done)
        now[0] += 90.0
        log.write(step, {"a": 1.0})
        log.close()
        now[0] += 5000.0  # the machine is off
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["perf/elapsed_s"] for row in rows] == [90.0, 180.0]
    assert "2 steps, 0:03:00" in summary(tmp_path)


def test_flop_formula_against_a_model_counted_by_hand():
    # one layer, hidden 8, 2 heads of 4: projections 4·64, mlp 3·8·16, head 8·11, no norms
    n = 4 * 64 + 3 * 8 * 16 + 8 * 11
    speed = Throughput(parameters=n, attention=1 * 2 * 4, peak=1e9)
    matmul = 3 * 2 * n * 10  # 2 FLOP a weight and token, forward and twice backward
    # The terms are QK and PV of 6 and 4 tokens, half of which is masked.
    attention = 3 * (2 * 2 * 6 * 6 * 8 + 2 * 2 * 4 * 4 * 8) / 2
    assert speed.flop([6, 4]) == matmul + attention
    assert speed.metrics([6, 4], 2.0) == {
        "perf/tokens_per_s": 5.0,
        "perf/mfu": (matmul + attention) / 2e9,
    }
    assert "perf/mfu" not in Throughput(parameters=n, attention=8, peak=None).metrics([6], 1.0)


def test_documents_are_shared_out_whole_and_balanced():
    lengths = torch.randint(1, 100, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = divide(lengths, SimpleNamespace(dp_size=3, local_dp_ranks=range(3)))
    assert divide(lengths, SimpleNamespace(dp_size=3, local_dp_ranks=(1,))) == [parts[1]]
    assert sorted(i for part in parts for i in part) == list(range(40))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) < 100


def test_the_mfu_of_rls_updates_from_the_configuration_alone(sums_model, monkeypatch):
    """2 layers, hidden 32, 4 heads of 8, 2 of them for keys, MLP 64, vocabulary 16, tied."""
    from engine_trainer.telemetry import throughput

    config = EngineSection(model=ModelSource(path=str(sums_model))).build(seed=0, total_steps=1)
    assert throughput.of_config(config, "cpu", 2) is None
    monkeypatch.setattr(throughput, "_peak", lambda device, dtype: 1e9)
    speed = throughput.of_config(config, "cuda", 2)
    n = 2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64) + 16 * 32
    assert (speed.parameters, speed.attention, speed.peak) == (n, 2 * 4 * 8, 2e9)
    # half of the tokens of two documents, in two seconds
    flop = (6 * n * 30 + 6 * 64 * (10**2 + 20**2)) / 2
    assert speed.of_updates([10, 20], 15.0, 2.0) == {"perf/mfu": pytest.approx(flop / 2.0 / 2e9)}
    assert speed.of_updates([10, 20], 15.0, 0.0) == {}
