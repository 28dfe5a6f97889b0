"""A node that is lost.

The run continues when the cluster has enough resources again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from ray_runs import let_workers_import_helpers, on_ray, result_of
from waiting import DEADLINE_S, until

ray = pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")

from engine_trainer.rl.on_ray import train_on_ray  # noqa: E402 - behind importorskip

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def nodes(monkeypatch):
    """Start a cluster whose head cannot run workers."""
    from ray.cluster_utils import Cluster

    let_workers_import_helpers(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.nightly
def test_a_node_is_lost(nodes, sums_model, tmp_path):
    first = nodes.add_node(num_cpus=2)
    train_on_ray(on_ray(sums_model, tmp_path / "alone", run={"steps": 4}))

    # In a thread, because the cluster's nodes are started and ended by the main one.
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(train_on_ray, on_ray(sums_model, tmp_path / "out", run={"steps": 4}))
        saved = tmp_path / "out" / "checkpoints" / "step-000001" / "manifest.json"
        until(lambda: saved.is_file() or run.done())
        assert not run.done(), run.result()
        nodes.remove_node(first, allow_graceful=False)
        until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)  # the head alone
        nodes.add_node(num_cpus=2)
        assert run.result(DEADLINE_S).step == 4
    assert result_of(tmp_path / "out") == result_of(tmp_path / "alone")
