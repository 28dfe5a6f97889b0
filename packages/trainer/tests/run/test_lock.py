"""One run at a time in a folder: refused before anything is loaded, on all ranks together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rl_runs import configure, start, tree
from waiting import DEADLINE_S

from engine_api.comm import SingleComm
from engine_api.errors import ConfigError
from engine_trainer.placement.spmd import Spmd
from engine_trainer.rl.loop import train_rl
from engine_trainer.run.lock import FolderLock
from engine_trainer.run.run import Run
from engine_trainer.sampling.evaluate import evaluate_model

pytest.importorskip("engine_fsdp", reason="the loop needs an engine")


@pytest.fixture
def taken(tmp_path):
    lock = FolderLock(tmp_path / "out")
    lock.acquire()
    yield tmp_path / "out"
    lock.release()


def test_a_folder_that_is_in_use_is_refused_before_anything_is_made(sums_model, taken):
    asked: list[object] = []
    launcher = SimpleNamespace(
        comm=SingleComm(), close=lambda: None, resolve=asked.append, engines=asked.append
    )
    with pytest.raises(ConfigError, match="another run writes to"):  # noqa: SIM117 - the run is entered by itself
        with Run(configure(sums_model, taken), kind="rl", total_steps=1, launcher=launcher) as run:
            run.start()
    assert asked == []


@pytest.mark.parametrize("what", [train_rl, evaluate_model])
def test_every_kind_of_run_takes_the_lock(sums_model, taken, monkeypatch, what):
    monkeypatch.setattr(Spmd, "engines", lambda *_: pytest.fail("an engine was made"))
    with pytest.raises(ConfigError, match="another run writes to"):
        what(configure(sums_model, taken, eval={"source": str(sums_model / "test.jsonl")}))


@pytest.mark.slow
@pytest.mark.distributed
def test_under_torchrun_all_ranks_end_and_one_says_why(sums_model, taken):
    process = start(taken.parent, tree(sums_model, taken), 2)
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert "[rank 0] error: config run.output_dir: another run writes to" in text
    assert "[rank 1]" not in text


def test_a_place_that_no_folder_can_be_made_at_is_a_wrong_configuration(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"(?s)cannot create a folder.*file") as caught:
            FolderLock(place).acquire()
        assert caught.value.field == "run.output_dir"
