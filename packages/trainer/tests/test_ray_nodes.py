"""A node is lost: the run goes on when the cluster has room again, or says what is missing."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray_runs import on_ray, result_of

ray = pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")

from engine_api.errors import ConfigError  # noqa: E402 - behind importorskip
from engine_trainer.ray.controller import train_on_ray  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def nodes(monkeypatch):
    """A cluster whose head has no room for workers."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_node_is_lost(nodes, sums_model, tmp_path):
    first = nodes.add_node(num_cpus=2)
    train_on_ray(on_ray(sums_model, tmp_path / "alone", run={"steps": 4}))

    # In a thread, because the cluster's nodes are started and ended by the main one.
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(train_on_ray, on_ray(sums_model, tmp_path / "out", run={"steps": 4}))
        while not (tmp_path / "out" / "checkpoints" / "step-000001" / "manifest.json").is_file():
            assert not run.done(), run.result()
            time.sleep(0.02)
        nodes.remove_node(first, allow_graceful=False)
        time.sleep(5)
        nodes.add_node(num_cpus=2)
        assert run.result(200).step == 4
    assert result_of(tmp_path / "out") == result_of(tmp_path / "alone")
    with pytest.raises(ConfigError, match="1 CPU missing"):
        train_on_ray(on_ray(sums_model, tmp_path / "more", ray={"engines": 3}))
