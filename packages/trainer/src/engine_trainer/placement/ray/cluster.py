"""A Ray cluster, which is joined or started, checked for its resources, and given workers."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine_api.errors import ConfigError
from engine_trainer.config.sections import EngineSection, RaySection, RolloutSection
from engine_trainer.placement.loopback import loopback_variables
from engine_trainer.placement.ray.calls import attempt

POLL_S = 1.0
"""Seconds between two looks at a cluster that may grow."""
STARTS = 3
"""Attempts to start a cluster on this machine."""
LOGS = "the logs in ray/session_latest/logs below RAY_TMPDIR, TMPDIR or /tmp"
log = logging.getLogger("engine_trainer")
Resources = dict[str, float]
ACCELERATORS = {"cuda": "GPU", "npu": "NPU"}
"""Ray's name of the resource, by device type."""


@contextlib.contextmanager
def connected(section: RaySection, rollout: RolloutSection | None = None) -> Iterator[None]:
    """Join ``ray.address``, or start a cluster on this machine.

    A cluster that is started ends with the context (and with this process). It is confined to this
    machine, and so are its workers' gloo and NCCL, unless ``rollout`` is elsewhere. A process that
    is connected already stays so.

    Raises ``ConfigError`` when there is no cluster at the address, or none can be started.
    """
    if ray.is_initialized():
        yield
        return
    # Without it Ray warns every minute that variables for unused accelerators will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not section.address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local: dict[str, Any] = {} if section.address else {"include_dashboard": False}
    with contextlib.nullcontext() if section.address else _on_loopback(rollout):
        try:
            _start(section, **local)
            if not section.address:
                _require_loopback()
            yield
        finally:
            # Also after a start that failed or was interrupted, whose processes would stay.
            ray.shutdown()


def start_cluster(**arguments: Any) -> None:
    """Start a cluster on this machine, again where a busy machine took longer than Ray waits.

    Ray gives a node of its own 30 seconds, which no setting changes. The processes of a start that
    was too slow end with this one. ``arguments`` and errors are those of ``ray.init``.

    Workers run at the priority of this process, unless ``RAY_worker_niceness`` says otherwise.

    Raises ``ConfigError`` where Ray's workers refuse the folder of its sessions.
    """
    _require_folder_outside_environment()
    # Ray's default is 15: engines and servers would get a thirtieth of what any other process of
    # the machine gets, and training is what the machine is for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # By default ray.init waits for workers that Ray starts ahead of the first task, for ever where
    # they end with an error. Workers that start with their actor have ray.start_timeout_s.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    for left in reversed(range(STARTS)):
        try:
            ray.init(address="local", **arguments)
            return
        # Ray raises a bare Exception where a node does not start.
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start within its 30 s on this busy machine: it is tried again")


def _require_folder_outside_environment() -> None:
    """Raise ``ConfigError`` if Ray's sessions would lie in the virtual environment.

    Ray starts with such a folder, and each of its workers ends with an error in a log.
    """
    environment = os.environ.get("VIRTUAL_ENV")
    folder = Path(get_default_ray_temp_dir()).resolve()
    if environment and folder.is_relative_to(Path(environment).resolve()):
        raise ConfigError(
            "RAY_TMPDIR",
            f"expected a folder outside the virtual environment {environment}, got {folder}",
            why="Ray's workers refuse to start there",
            remedy="set RAY_TMPDIR (or TMPDIR) to another folder",
        )


def _start(section: RaySection, **local: Any) -> None:
    """Join the cluster, or start one."""
    arguments = {"logging_level": logging.ERROR, "log_to_driver": section.log_workers, **local}
    try:
        if section.address:
            ray.init(address=section.address, **arguments)
        else:
            _keep_token_private()
            start_cluster(**arguments)
    except ConfigError:
        raise
    # Ray raises a bare Exception where a node does not start, and any error of its files and ports.
    except Exception as error:
        raise _not_connected(section, error) from error


@contextlib.contextmanager
def _on_loopback(rollout: RolloutSection | None) -> Iterator[None]:
    """Confine a cluster that is started in the body to this machine.

    The same holds for gloo and NCCL in its workers. Ray takes the loopback address for a node by
    itself on Windows and macOS alone, where clusters of several nodes are not supported. Elsewhere
    a variable enables it: Ray read it when it was imported, and its daemons read it again.
    """
    names = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    names |= {
        name: value for name, value in loopback_variables(rollout).items() if name not in os.environ
    }
    before = {name: os.environ.get(name) for name in names}
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    os.environ |= names
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _keep_token_private() -> None:
    """Create the file of Ray's token, readable by this user alone.

    Ray would create it readable by everyone.
    """
    if os.environ.get("RAY_AUTH_MODE") == "disabled" or {
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
    } & set(os.environ):
        return
    path = Path.home() / ".ray" / "auth_token"  # Ray's documented path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        if path.stat().st_mode & 0o044:
            log.warning(
                "others may read %s, with which they can run code as you: chmod 600 it", path
            )


def _require_loopback() -> None:
    found = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(found).is_loopback:
        raise ConfigError(
            "ray.address",
            f"expected a cluster on loopback, got one on {found}",
            why="this version of Ray finds its address differently",
            remedy="start a cluster of your own (ray start --head) where no one else reaches it, "
            "and give its address",
        )


def per_worker(section: RaySection, engine: EngineSection) -> Resources:
    """Return the resources of one worker.

    ``engine.device: auto`` takes GPUs where the cluster has some.
    """
    device = engine.device
    if device == "auto":
        device = next(
            (d for d, name in ACCELERATORS.items() if ray.cluster_resources().get(name, 0) > 0),
            "cpu",
        )
    given: Resources = {"CPU": section.cpus_per_worker}
    if device in ACCELERATORS:
        given[ACCELERATORS[device]] = (
            1.0 if section.gpus_per_worker is None else section.gpus_per_worker
        )
    return {name: amount for name, amount in given.items() if amount}


def require(each: Resources, workers: int, patience_s: float = 0.0) -> None:
    """Raise ``ConfigError`` if the cluster lacks resources for so many workers.

    It raises only if they are still missing after ``patience_s``. The error names the missing
    resources.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return _require(each, workers)
        except ConfigError:
            if time.monotonic() >= end:
                raise
        time.sleep(POLL_S)


def _require(each: Resources, workers: int) -> None:
    has = ray.cluster_resources()
    missing = {
        n: workers * a - has.get(n, 0.0) for n, a in each.items() if workers * a > has.get(n, 0.0)
    }
    if missing:
        raise ConfigError(
            "ray",
            "the cluster is too small: "
            + ", ".join(f"{m:g} {n} missing" for n, m in missing.items()),
            why=f"{workers} workers of {_text(each)} each; "
            f"the cluster has {_text({n: has.get(n, 0.0) for n in each})}",
            remedy="add nodes, or lower ray.engines, ray.rollouts, ray.cpus_per_worker or "
            "ray.gpus_per_worker",
        )
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    capacity = workers
    if each:
        fitting = [min(node.get(n, 0.0) / a for n, a in each.items()) for node in nodes]
        capacity = sum(int(count + 1e-9) for count in fitting)
    if capacity < workers:
        raise ConfigError(
            "ray",
            f"expected nodes for {workers} workers, got nodes for {capacity}",
            why=f"a worker runs as a whole on one node and takes {_text(each)}",
            remedy="lower ray.cpus_per_worker or ray.gpus_per_worker, or add nodes",
        )


class Placement:
    """Bundles of resources, one per worker, as near to each other as possible.

    Raises ``ConfigError`` when other jobs use the resources.
    """

    def __init__(self, each: Resources, workers: int, timeout_s: float) -> None:
        self.each = each
        self._group: PlacementGroup = placement_group(
            [dict(each) for _ in range(workers)], strategy="PACK"
        )
        try:
            ray.get(self._group.ready(), timeout=timeout_s)
        except GetTimeoutError as error:
            self.release()
            raise ConfigError(
                "ray",
                f"{workers} workers of {_text(each)} could not be placed within {timeout_s:g} s",
                why=f"free now: {_text({n: ray.available_resources().get(n, 0.0) for n in each})}",
                remedy="wait for the cluster's other jobs, or raise ray.start_timeout_s; "
                f"{LOGS} tell of workers that ended when they started",
            ) from error

    def start(self, cls: type, bundle: int, *arguments: Any) -> Any:
        """Start an actor in a bundle."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )
        named = {n: a for n, a in self.each.items() if n not in ("CPU", "GPU")}
        return (
            ray.remote(cls)
            .options(
                num_cpus=self.each.get("CPU", 0),
                num_gpus=self.each.get("GPU", 0),
                resources=named,
                scheduling_strategy=strategy,
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(*arguments)
        )

    def release(self) -> None:
        """Release the bundles and end all actors in them (idempotent)."""
        attempt(lambda: remove_placement_group(self._group))


def kill(actors: Sequence[Any]) -> None:
    """End actors at once, including those that hang."""
    for actor in actors:
        attempt(lambda actor=actor: ray.kill(actor, no_restart=True))


def _not_connected(section: RaySection, error: Exception) -> ConfigError:
    why = f"{type(error).__name__}: {_first_line(error)}"
    if section.address:
        return ConfigError(
            "ray.address",
            f"no cluster at {section.address}",
            why=why,
            remedy="start one (ray start --head), or leave ray.address out for one on this machine",
        )
    return ConfigError(
        "ray.address",
        "no cluster could be started here",
        why=why,
        remedy=f"see {LOGS}; set RAY_TMPDIR to a folder with free space, "
        "or join a cluster: ray.address",
    )


def _text(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
