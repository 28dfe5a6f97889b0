"""Compute tiny models of every family, and write docs/models.md from the results.

``python tools/zoo.py measure`` makes a tiny random model of each type that transformers has,
computes three packed documents with engine-fsdp, and compares with transformers' own eager
implementation in float64, one document at a time: each token's log-prob, the gradient of each
weight, an export that ``from_pretrained`` reads, exported shards and a checkpoint, and all again on
two ranks but for the reading by ``from_pretrained``. With ``--backend megatron`` it does the same
with engine-megatron on simulated CUDA, where two ranks split each layer. ``--rollout vllm`` serves
each type that engine-fsdp takes with vLLM in float32 (in vLLM's environment) and compares
log-probs of generated tokens after two weight syncs. It measures the types without a result, or
those that are named. With ``--device cuda`` vLLM computes in bf16 or in FP8 (``--quantization``) on
one GPU, ``--lanes`` types at a time; those results have a key of their own, with versions and the
date. The results go to conformance/zoo.json. ``python tools/zoo.py`` writes
docs/models.md from that file, and with ``--check`` says whether the page is current. It imports no
torch then.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matrix import table, write_or_check

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "conformance" / "zoo.json"
PAGE = ROOT / "docs" / "models.md"

# Largest differences for float32 against float64: of a log-prob in nats, and of a weight's gradient
# as a fraction of its norm (or of a thousandth of the norm of all gradients, if that is more).
NEAR = 1e-4
NEAR_GRADIENT = 1e-3
# Mean difference of log-probs on a GPU in nats, by quantization, that is allowed in addition to
# TIMES that of transformers in bf16 (0.01 to 0.16, where rounding chooses other experts), for FP8
# with emulated FP8 (0.2 to 0.9). Weights of another sync are off by 0.4 to 1.8 in bf16. Emulated in
# FP8 they are off by 3 to 4, exchanged halves of a gated MLP by 2 to 3.5, and the scales of another
# sync by 0.4 to 1.4, less than can be told in every family: the audit is for those.
NEAR_MEAN = {"none": 0.01, "fp8": 0.05}
TIMES = {"none": 3, "fp8": 2}
LAYOUTS = ("one rank", "two ranks")
FSDP = "fsdp2"
MEGATRON = "megatron"
VLLM = "vllm"
# Results of a GPU, by quantization, which are never measured by a run on a CPU.
SEEN = "vllm_cuda"
QUANTIZATIONS = ("none", "fp8")
# Seconds until a type's rollout counts as one that hangs.
DEADLINE = 420
ACCEPTED = ("right", "wrong")
TITLES = {
    "right": "Right",
    "refused": "Refused",
    "wrong": "Accepted and wrong",
    "crash": "Crash",
    "unmade": "No tiny model",
}
ORDER = ("right", "refused", "unmade", "wrong", "crash")
# Statuses in a count, where they differ from their names.
COUNTED = {"unmade": "without a tiny model", "crash": "crashed"}


# --- measuring ----------------------------------------------------------------------------------


def measure(model_type: str, folder: Path, ranks: int, backend: str) -> dict[str, Any]:
    """Return the result of a model type on this rank: its status and its largest differences."""
    from tiny_models import tiny_model

    from engine_api.errors import EngineError

    try:
        tiny_model(model_type).save_pretrained(folder)
        expected = Expected(folder)
        if backend != FSDP:
            # Before there are ranks, of which transformers lets the first alone save a model.
            expected.name_gradients(folder.with_name(f"{folder.name}-gradients"))
    # The family's own code may raise anything where the sizes do not fit it.
    except Exception as error:  # noqa: BLE001
        return {"status": "unmade", "why": _line(error)}
    try:
        if backend == FSDP:
            engine, changed = _start_divided(folder, ranks)
        else:
            engine, changed = _start(folder, ranks, backend)
    except EngineError as error:
        return {"status": "refused", "why": _line(error), "by": _mechanism(error)}
    except Exception as error:  # noqa: BLE001 - a crash is a result
        traceback.print_exc()
        return {"status": "crash", "why": _line(error)}
    asks = _list_mechanisms(engine.module.lm) if backend == FSDP else []
    compare = _compare if backend == FSDP else _compare_moved
    try:
        found: dict[str, Any] = compare(engine, expected, folder)
    except EngineError as error:
        found = {"status": "refused", "why": f"late: {_line(error)}", "by": _mechanism(error)}
    except Exception as error:  # noqa: BLE001 - a crash is a result
        traceback.print_exc()
        found = {"status": "crash", "why": _line(error)}
    finally:
        engine.close()
    found |= {"asks": asks}
    return found | ({"without": changed} if changed else {})


class Expected:
    """The log-probs and gradients that transformers computes in float64."""

    def __init__(self, folder: Path) -> None:
        import torch
        from tiny_models import documents, oracle

        self.model = oracle(str(folder))
        self.documents = documents()
        total = sum(len(ids) - 1 for ids in self.documents)
        found: list[Any] = []
        for ids in self.documents:
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
            # Some families round their logits to float32. Scores are not rounded again.
            scores = logits.double().log_softmax(-1)
            picked = scores[:-1].gather(-1, ids[1:, None])[:, 0]
            (-picked.sum() / total).backward()
            found.append(torch.cat([picked.new_zeros(1), picked.detach()]))
        self.log_probs = torch.cat(found)
        self.gradients = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def name_gradients(self, folder: Path) -> None:
        """Give the gradients the names of saved tensors, by saving them in their place."""
        import torch
        from safetensors.torch import load_file

        with torch.no_grad():
            for tensor in self.model.state_dict(keep_vars=True).values():
                tensor.copy_(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        self.model.save_pretrained(folder)
        self.gradients = load_file(folder / "model.safetensors")


def _start_divided(folder: Path, ulysses: int) -> tuple[Any, dict[str, float]]:
    """Return an engine that divides documents over ranks, or documents where it refuses that."""
    from engine_api.errors import UnsupportedCapability

    try:
        return _start(folder, ulysses, FSDP)
    except UnsupportedCapability as error:
        if ulysses == 1 or "under Ulysses" not in str(error):
            raise
        return _start(folder, 1, FSDP)


def _list_mechanisms(lm: Any) -> list[str]:
    """Return the names of the mechanisms that a model asks for."""
    from engine_torch.mechanisms import MECHANISMS

    text = lm.config.get_text_config()
    return [one.name for one in MECHANISMS if one.find(text, type(lm), lm)]


def _start(folder: Path, ranks: int, backend: str) -> tuple[Any, dict[str, float]]:
    """Return an initialized engine, and the overrides that a refusal's remedy asked for.

    engine-fsdp divides documents over ``ranks``, engine-megatron layers.
    """
    from engine_api import EngineConfig, EngineRegistry, ModelSource, OptimizerConfig, Parallelism
    from engine_api.errors import ConfigError

    options: dict[str, Any] = {}
    if backend == FSDP:
        parallelism, rate = Parallelism(ulysses=ranks), 0.0
    else:
        parallelism, rate = Parallelism(tp=ranks), 1.0
        options = {"sequence_parallel": ranks > 1}
        if ranks > 1 and _has_experts(folder):
            options["expert_tensor_parallel"] = 1

    def create(overrides: dict[str, float]) -> Any:
        config = EngineConfig(
            model=ModelSource(path=str(folder), config_overrides=overrides),
            optimizer=OptimizerConfig(name="torch.optim.SGD", lr=rate, clip_norm=None),
            parallelism=parallelism,
            options=options,
        )
        engine = EngineRegistry.create(backend=backend, device="cpu", config=config)
        engine.initialize()
        return engine

    try:
        return create({}), {}
    except ConfigError as error:
        if "config_overrides: {" not in error.remedy:
            raise
        off = dict.fromkeys(re.findall(r"(\w+): 0\.0", error.remedy), 0.0)
        return create(off), off


def _has_experts(folder: Path) -> bool:
    keys = json.loads((folder / "config.json").read_text())
    return any(key in keys for key in ("num_experts", "num_local_experts", "n_routed_experts"))


def _compare_moved(engine: Any, expected: Expected, folder: Path) -> dict[str, Any]:
    """Compare an engine by its exports alone, where a step moves weights by their gradients."""
    import torch
    from safetensors.torch import load_file
    from tiny_models import log_probs, oracle

    from engine_api import Batch, sft_loss

    rows = [
        {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
        for ids in expected.documents
    ]
    batch = Batch.pack(rows)
    stored = load_file(folder / "model.safetensors")
    got = engine.infer_batch(batch).log_probs.double()
    found: dict[str, Any] = {"log_probs": float((got - expected.log_probs).abs().max())}
    wrong = _first_changed(engine, stored)
    state = f"exported: {wrong}" if wrong else _check_shards(engine, stored)
    if engine.topology.world_size == 1:
        saved = folder.with_name(folder.name + "-saved")
        engine.save_hf(saved)
        again = oracle(str(saved))
        same = torch.cat([log_probs(again, ids) for ids in expected.documents])
        found["export"] = float((same - expected.log_probs).abs().max())
    place = _save_together(engine, folder)
    gradients = expected.gradients
    engine.train_batch(batch, sft_loss)
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    worst = (0.0, "")
    for name, tensor in engine.get_per_tensor_param():
        want = gradients[name]
        apart = float((stored[name].double() - tensor.double() - want).norm())
        apart /= max(float(want.norm()), 1e-3 * norm)
        # A gradient that is not a number must not pass a comparison.
        apart = math.inf if math.isnan(apart) else apart
        if apart > worst[0]:
            worst = (apart, name)
    engine.load_checkpoint(place)
    wrong = _first_changed(engine, stored)
    state = state or (f"loaded from a checkpoint: {wrong}" if wrong else "")
    found |= {"gradient": worst[0], "weight": worst[1], "state": state}
    near = found["log_probs"] < NEAR and worst[0] < NEAR_GRADIENT
    right = near and not state and found.get("export", 0.0) < 1e-9
    return {"status": "right" if right else "wrong", **found}


def _compare(engine: Any, expected: Expected, folder: Path) -> dict[str, Any]:
    import torch
    from tiny_models import log_probs, oracle

    from engine_api import Batch, sft_loss

    rows = [
        {"input_ids": ids.tolist(), "loss_weight": [0.0] + [1.0] * (len(ids) - 1)}
        for ids in expected.documents
    ]
    want = list(expected.log_probs.split([len(ids) for ids in expected.documents]))
    own = slice(engine.topology.dp_rank, None, engine.topology.dp_size)
    batch = Batch.pack(rows[own])
    got = engine.infer_batch(batch).log_probs.double()
    found: dict[str, Any] = {"log_probs": float((got - torch.cat(want[own])).abs().max())}
    engine.forward_backward(batch, sft_loss)
    worst, name = _worst_gradient(engine, expected)
    found |= {"gradient": worst, "weight": name}
    found["state"] = _check_state(engine, folder)
    if engine.topology.world_size == 1:
        saved = folder.with_name(folder.name + "-saved")
        engine.save_hf(saved)
        again = oracle(str(saved))
        same = torch.cat([log_probs(again, ids) for ids in expected.documents])
        found["export"] = float((same - expected.log_probs).abs().max())
    near = found["log_probs"] < NEAR and worst < NEAR_GRADIENT
    right = near and not found["state"] and found.get("export", 0.0) < 1e-9
    return {"status": "right" if right else "wrong", **found}


def _check_state(engine: Any, folder: Path) -> str:
    """Return a saved tensor that an export or a checkpoint changes, or an empty text.

    The learning rate is 0, so each tensor must be that of the folder, bit for bit.
    """
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    wrong = _first_changed(engine, stored)
    if wrong:
        return f"exported: {wrong}"
    wrong = _check_shards(engine, stored)
    if wrong:
        return f"exported in shards: {wrong}"
    _pass_through_checkpoint(engine, folder)
    wrong = _first_changed(engine, stored)
    return f"loaded from a checkpoint: {wrong}" if wrong else ""


def _first_changed(engine: Any, stored: dict[str, Any]) -> str:
    """Return the name of a whole exported tensor that is not the stored one."""
    import torch

    # Every tensor is read, because the ranks gather each together.
    changed = [
        name
        for name, tensor in engine.get_per_tensor_param()
        if not torch.equal(tensor, stored[name])
    ]
    return next(iter(changed), "")


def _check_shards(engine: Any, stored: dict[str, Any]) -> str:
    """Return the name of an exported shard that is wrong, or which elements are amiss."""
    import torch
    import torch.distributed as dist

    count = torch.zeros(1, dtype=torch.int64)
    wrong: list[str] = []
    names: set[str] = set()
    for name, shard, spec in engine.get_per_tensor_param_shard():
        names.add(name)
        if not torch.equal(shard, stored[name][spec.slices]):
            wrong.append(name)
        count += shard.numel() if spec.replica == 0 else 0
    if dist.is_initialized():
        dist.all_reduce(count)
    if int(count) != sum(stored[name].numel() for name in names):
        wrong.append("some elements are there twice or not at all")
    return next(iter(wrong), "")


def _save_together(engine: Any, folder: Path) -> Path:
    """Save the engine's state into one folder of all ranks, next to rank 0's model."""
    import torch.distributed as dist

    places = [str(folder.with_name(f"{folder.name}-state"))]
    if dist.is_initialized():
        dist.broadcast_object_list(places)
    place = Path(places[0])
    engine.save_checkpoint(place).result()
    return place


def _pass_through_checkpoint(engine: Any, folder: Path) -> None:
    """Save the engine's state, forget its weights, and load it again."""
    place = _save_together(engine, folder)
    for entry in engine.table:
        entry.local.detach().zero_()
        entry.publish()
    engine.load_checkpoint(place)


def _worst_gradient(engine: Any, expected: Expected) -> tuple[float, str]:
    """Return the largest relative difference of this rank's gradients, and the weight's name."""
    import torch

    from engine_torch.boxes import local_of

    norm = float(torch.stack([g.norm() for g in expected.gradients.values()]).norm())
    worst = (0.0, "")
    for entry in engine.table:
        if not entry.trainable:
            continue
        want = expected.gradients.get(entry.name)
        whole = torch.zeros(entry.param.shape, dtype=torch.float64) if want is None else want
        part = whole[entry.box.slices]
        grad = entry.param.grad
        mine = torch.zeros_like(part) if grad is None else local_of(grad).double()
        apart = float((mine - part).norm()) / max(float(whole.norm()), 1e-3 * norm)
        # A gradient that is not a number must not pass a comparison.
        apart = math.inf if math.isnan(apart) else apart
        if apart > worst[0]:
            worst = (apart, entry.name)
    return worst


def _mechanism(error: Any) -> str:
    """Return the name of what a refusal is about."""
    return str(getattr(error, "capability", None) or getattr(error, "field", type(error).__name__))


def _line(error: BaseException) -> str:
    """Return an error in a line, which for a refusal says why."""
    what, why = (str(getattr(error, key, "") or "") for key in ("what", "why"))
    said = "; ".join(part for part in (what if hasattr(error, "field") else "", why) if part)
    lines = (said or f"{type(error).__name__}: {error}").strip().splitlines() or [""]
    # The folder is another one in each run.
    return re.sub(r"/\S*/zoo-\w+/", "", lines[0])[:300]


def measure_all(
    model_types: Sequence[str], ranks: int, backend: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (model type, result) of each type, one after another."""
    import torch

    if backend != FSDP:
        from engine_conformance.shim import install

        install()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
        for model_type in model_types:
            yield model_type, measure(model_type, Path(scratch) / model_type, ranks, backend)


# --- the command --------------------------------------------------------------------------------


def _run_ranks(model_types: Sequence[str], count: int, backend: str) -> dict[str, dict[str, Any]]:
    """Measure on ``count`` ranks, and return each type's worst result.

    A type that ends its ranks is a crash, and the next ones run in new ranks.
    """
    worst: dict[str, dict[str, Any]] = {}
    left = list(model_types)
    while left:
        results = _run_some(left, count, backend)
        for model_type in left:
            rows = [rank[model_type] for rank in results if model_type in rank]
            if len(rows) < count:
                rows.append({"status": "crash", "why": "a rank ended"})
            row = max(rows, key=_badness)
            worst[model_type] = {key: value for key, value in row.items() if key != "type"}
            left = left[1:]
            if len(rows) > count or row["status"] == "crash":
                break
    return worst


def _badness(row: dict[str, Any]) -> tuple[int, float]:
    return ORDER.index(row["status"]), row.get("gradient", 0.0)


def _run_some(
    model_types: Sequence[str], count: int, backend: str
) -> list[dict[str, dict[str, Any]]]:
    """Return the results of each rank, until the last type or the first rank that ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(count):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            environment = {key: str(value) for key, value in place.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1"}
            command = [sys.executable, __file__, "rank", "--ranks", str(count)]
            command += ["--backend", backend]
            command += ["--results", f"{scratch}/{rank}.jsonl", *model_types]
            ranks.append(subprocess.Popen(command, env=os.environ | environment))
        while all(rank.poll() is None for rank in ranks):
            time.sleep(0.2)
        # The other ranks would wait for one that ended.
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
        for rank in ranks:
            rank.wait()
        files = [Path(scratch, f"{rank}.jsonl") for rank in range(count)]
        return [
            {row["type"]: row for row in map(json.loads, file.read_text().splitlines())}
            for file in files
            if file.is_file()
        ]


def _measure_command(arguments: argparse.Namespace) -> int:
    """Measure the chosen types, and write their results into the record."""
    import transformers
    from tiny_models import MODEL_TYPES

    from engine_torch.mechanisms import MECHANISMS

    backend: str = arguments.backend
    chosen: list[str] = arguments.types or list(MODEL_TYPES)
    types: dict[str, Any] = {}
    if RECORD.is_file() and (arguments.types or backend != FSDP):
        types = json.loads(RECORD.read_text())["types"]
    for model_type, found in measure_all(chosen, 1, backend):
        asks = found.pop("asks", [])
        row = {LAYOUTS[0]: _rounded(found)}
        former = types.get(model_type, {})
        if backend == FSDP:
            kept = {name: former[name] for name in (MEGATRON, VLLM, SEEN) if name in former}
            types[model_type] = {"asks": asks, **row, **kept}
        else:
            types[model_type] = former | {backend: row}
        print(f"{model_type}: {_sentence(found)}", flush=True)
    rows = {name: types[name] if backend == FSDP else types[name][backend] for name in chosen}
    accepted = [name for name, row in rows.items() if row[LAYOUTS[0]]["status"] in ACCEPTED]
    if accepted and not arguments.one_rank:
        for model_type, found in _run_ranks(accepted, 2, backend).items():
            found.pop("asks", None)
            rows[model_type][LAYOUTS[1]] = _rounded(found)
            print(f"{model_type} on two ranks: {_sentence(found)}", flush=True)
    record = {
        "transformers": transformers.__version__,
        **_served_versions(),
        "mechanisms": {
            one.name: {"served_by": one.served_by, "why": one.why} for one in MECHANISMS
        },
        "types": dict(sorted(types.items())),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(summary(rows))
    return int(any(_status(row) in ("wrong", "crash") for row in rows.values()))


def _served_versions() -> dict[str, Any]:
    """Return the versions of the measured rollouts, which stay when engines are measured."""
    former = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return {name: former[name] for name in (VLLM, SEEN) if name in former}


# --- rollouts -----------------------------------------------------------------------------------


def measure_rollout(
    model_type: str, device: str = "cpu", quantization: str = "none"
) -> dict[str, Any]:
    """Return the result of a model type that vLLM serves with engine-fsdp's weights."""
    from tiny_rollouts import compare_vllm, make_served_model

    from engine_api.errors import EngineError

    with tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
        folder = Path(scratch, model_type)
        try:
            make_served_model(model_type, folder, device)
        # The family's own code may raise anything where the sizes do not fit it.
        except Exception as error:  # noqa: BLE001
            return {"status": "unmade", "why": _line(error)}
        try:
            found = compare_vllm(folder, device, quantization)
        except EngineError as error:
            traceback.print_exc()
            return {"status": "refused", "why": f"{error.what}: {_short(error.why)}"}
        except Exception as error:  # noqa: BLE001 - a crash is a result
            traceback.print_exc()
            return {"status": "crash", "why": _line(error)}
    if device == "cpu":
        near = found["log_probs"] < NEAR and found["greedy"] < NEAR
    else:
        near = found["mean"] < TIMES[quantization] * found["plain"] + NEAR_MEAN[quantization]
    return {"status": "right" if near else "wrong", **found}


def _short(why: str) -> str:
    """Return a reason in one line, without the title of pydantic's errors and their values.

    Files are named by their places in their packages.
    """
    text = re.sub(r".*validation error for \w+", "", " ".join(why.split()))
    text = re.sub(r"/\S*/site-packages/", "", text)
    return text.partition(" [type=")[0].strip()[:300]


def _measure_into(model_type: str, results: str, device: str, quantization: str) -> None:
    """Measure in a process of its own, and leave it at once: a server's threads may not end."""
    if device != "cpu":
        # transformers would take its functions from them, for a model on the CPU, too.
        for kernel in ("fla", "causal_conv1d", "mamba_ssm"):
            sys.modules[kernel] = None  # type: ignore[assignment]
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = measure_rollout(model_type, device, quantization)
    Path(results).write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _measure_alone(model_type: str, device: str, quantization: str) -> dict[str, Any]:
    """Return the result of a type from a process of its own, which has a deadline."""
    # A copy of this process has vLLM imported, and none of its threads. CUDA allows no copies.
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
        results = Path(scratch, "result.json")
        process = context.Process(
            target=_measure_into, args=(model_type, str(results), device, quantization)
        )
        process.start()
        process.join(DEADLINE)
        if process.is_alive():
            process.kill()
            process.join()
            return {"status": "crash", "why": f"no result in {DEADLINE} seconds"}
        if not results.is_file():
            return {"status": "crash", "why": f"its process ended with {process.exitcode}"}
        return json.loads(results.read_text())


def _measure_rollouts(arguments: argparse.Namespace) -> int:
    """Measure the rollouts of the chosen types, and record each result when it is there."""
    if arguments.device != "cpu":
        return _measure_rollouts_on_gpu(arguments)
    # Before the processes that measure begin, each of which would import it.
    import rollout_fp8.vllm.rollout

    del rollout_fp8
    record = json.loads(RECORD.read_text())
    types: dict[str, Any] = record["types"]
    version = _version_of_vllm("cpu")
    if record.get(VLLM) != version:
        for row in types.values():
            row.pop(VLLM, None)
    left = [name for name in _taken(types) if VLLM not in types[name]]
    chosen: list[str] = arguments.types or left
    for model_type in chosen:
        found = _measure_alone(model_type, "cpu", "none")
        types[model_type][VLLM] = _rounded(found)
        record = {"transformers": record["transformers"], VLLM: version} | record | {VLLM: version}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{model_type}: {_sentence(found)}", flush=True)
    return _sum_up(chosen, [types[name][VLLM] for name in chosen])


def _measure_rollouts_on_gpu(arguments: argparse.Namespace) -> int:
    """Measure rollouts on one GPU, and record each result when it is there.

    Without types those are measured that have no result of this server on this GPU, so that a run
    that was ended goes on in the next one.
    """
    import torch
    import transformers

    record = json.loads(RECORD.read_text())
    types: dict[str, Any] = record["types"]
    quantization: str = arguments.quantization
    measured = {
        "vllm": _version_of_vllm("cuda"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "gpu": _name_of_gpu(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    seen = record.setdefault(SEEN, {})
    same = ("vllm", "transformers", "torch", "gpu")
    if any(seen.get(quantization, {}).get(key) != measured[key] for key in same):
        for row in types.values():
            row.get(SEEN, {}).pop(quantization, None)
    seen[quantization] = measured
    left = [name for name in _taken(types) if quantization not in types[name].get(SEEN, {})]
    chosen: list[str] = arguments.types or left

    def measure_one(model_type: str) -> dict[str, Any]:
        return _measure_alone(model_type, arguments.device, quantization)

    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(arguments.lanes) as pool:
        for model_type, found in zip(chosen, pool.map(measure_one, chosen), strict=True):
            rows.append(found)
            types[model_type].setdefault(SEEN, {})[quantization] = _rounded(found)
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{model_type} ({quantization}): {_sentence(found)}", flush=True)
    return _sum_up(chosen, rows)


def _taken(types: dict[str, Any]) -> list[str]:
    """Return the types that engine-fsdp takes."""
    return [name for name, row in types.items() if row[LAYOUTS[0]]["status"] in ACCEPTED]


def _sum_up(chosen: Sequence[str], rows: Sequence[dict[str, Any]]) -> int:
    """Print how many types are not right, and return the exit status."""
    pairs = zip(chosen, rows, strict=True)
    bad = [name for name, row in pairs if row["status"] in ("wrong", "crash")]
    print(f"{len(chosen)} types, {len(bad)} wrong or crashed: {', '.join(bad) or 'none'}")
    return int(bool(bad))


def _version_of_vllm(device: str) -> str | None:
    from rollout_fp8 import versions

    line = versions.tested(VLLM, device)
    assert line is not None
    return versions.installed(line)


def _name_of_gpu() -> str:
    """Return the GPU's name without touching CUDA, which the measuring processes need."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    named = subprocess.run(command, capture_output=True, text=True, check=True)
    return named.stdout.splitlines()[0].strip()


def _status(row: dict[str, Any]) -> str:
    """Return the worst status of a type's layouts."""
    return max((row[one]["status"] for one in LAYOUTS if one in row), key=ORDER.index)


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    # One digit: the rest differs between machines.
    return {k: float(f"{v:.0e}") if isinstance(v, float) else v for k, v in found.items()}


def _sentence(found: dict[str, Any]) -> str:
    parts = [f"{k} {v:.1e}" for k, v in found.items() if isinstance(v, float)]
    parts += [found["state"]] if found.get("state") else []
    if "audited" in found:
        parts.append(f"audited: {found['audited']}, served as {found['served_as']}")
    return ", ".join([found["status"], *parts, *([found["why"]] if "why" in found else [])])


def summary(types: dict[str, Any]) -> str:
    """Return the number of types of each status in a line."""
    statuses = [_status(row) for row in types.values()]
    counts = {name: statuses.count(name) for name in TITLES}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"Of {len(types)} types: {said}"


def main() -> int:
    """Run the command, and return the exit status."""
    if sys.argv[1:] in ([], ["--check"]):
        return write_or_check(PAGE, render(json.loads(RECORD.read_text())), "zoo.py")
    sys.path.insert(0, str(ROOT / "tests"))
    parser = argparse.ArgumentParser(prog="zoo.py", description=__doc__)
    parser.add_argument("command", choices=("measure", "rank"))
    parser.add_argument(
        "types", nargs="*", help="model types; all without any, of a rollout those that are left"
    )
    parser.add_argument("--backend", choices=(FSDP, MEGATRON), default=FSDP)
    parser.add_argument("--rollout", choices=(VLLM,), help="a rollout instead of an engine")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the rollout")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none", help="on CUDA")
    parser.add_argument("--lanes", type=int, default=4, help="types at a time on CUDA")
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("--one-rank", action="store_true", help="leave the two ranks out")
    arguments = parser.parse_intermixed_args()
    if arguments.device == "cpu" and arguments.quantization != "none":
        parser.error("--quantization fp8 needs --device cuda")
    if arguments.command == "measure" and arguments.rollout:
        return _measure_rollouts(arguments)
    if arguments.command == "measure":
        return _measure_command(arguments)
    with Path(arguments.results).open("a") as results:
        for model_type, found in measure_all(arguments.types, arguments.ranks, arguments.backend):
            print(json.dumps({"type": model_type, **found}), file=results, flush=True)
            if found["status"] == "crash":
                return 1
    return 0


# --- the page -----------------------------------------------------------------------------------

INTRODUCTION = """\
# Models

<!-- Generated from conformance/zoo.json by tools/zoo.py: run `nox -s zoo`. -->

engine-fsdp serves a model by its *mechanisms*, not by its name. For each type of causal language
model that transformers {transformers} has, `nox -s zoo` makes a tiny model with random weights,
computes three packed documents and compares with transformers' own eager implementation in float64,
one document at a time: the log-prob of each token, and the gradient of each weight. Exports, whole
and as shards, and a checkpoint must hold the weights bit for bit, and `from_pretrained` must read
what `save_hf` writes. All but the last runs once more on two ranks, which share the weights and
divide each document (Ulysses), or the documents where a mechanism refuses Ulysses. Windows and
selections are shorter than the documents.

*Right* means that no log-prob is off by {near} nats or more, and no gradient by {gradient} of its
norm. A model that asks for anything else is refused by the name of the mechanism, before its
weights are read. A new release of transformers is one command: `nox -s zoo`.

Vision-language models are not among these types: `packages/engine-fsdp/tests/test_vision.py`
compares each family of `engine_api.hf_vision.FAMILIES` with transformers in the same way.

Types with experts are compared with themselves under expert parallelism (`parallelism.ep: 2`) in
`packages/engine-fsdp/tests/test_experts.py`, some of them with float64. All are right but `jetmoe`
and `longcat_flash`, whose experts are in code of their own and are then refused.

**{summary}.**
"""

MTP = """\
## Heads that predict further tokens (MTP)

Folders of DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5 and others hold a head in addition to the
model: layers beyond `num_hidden_layers` (`num_nextn_predict_layers`), or weights named `mtp.…`. A
server can guess tokens with it and check them with the model. This holds for every engine here:

- The head is not trained, and is on no GPU. Training makes its guesses worse, so that a server
  accepts fewer of them; what it generates stays the model's.
- `save_hf` writes the head bit for bit and in its own dtype, with an adapter merged too, and
  config.json names it as before. The log says `kept N weights of the MTP head, which are not
  trained`.
- DeepSeek-V3's head has the model's embedding and output head once more. Where a folder holds these
  as copies (the same bits), `save_hf` writes the trained values for them. Where they differ, they
  are kept as they are.
- Weights of the head come from the model's folder (`model.path`) at each save, also after a resume:
  checkpoints do not hold them. A folder whose index names a missing file of the head is refused at
  the start, and a folder that has lost the head by the time of `save_hf` is an error
  (`ConfigError`) before anything is replaced.
- A model with another `num_hidden_layers` than its folder's (`model.config_overrides`), or with
  random weights (`model.init: random`), is saved without the head, and its config.json names none.
- A weight sync brings no weight of a head. A server that was started on the folder and loaded a
  head itself keeps it as it was, copies of the embedding too; no rollout here guesses with one.
"""


def render(record: dict[str, Any]) -> str:
    """Return docs/models.md."""
    types: dict[str, Any] = record["types"]
    introduction = INTRODUCTION.format(
        transformers=record["transformers"],
        near=NEAR,
        gradient=NEAR_GRADIENT,
        summary=summary(types),
    )
    parts = [introduction, "## Mechanisms\n", _mechanisms(record), *_sections(types)]
    return "\n".join([*parts, MTP, *_megatron(types), *_vllm(record), *_vllm_on_gpu(record)])


MEGATRON_INTRODUCTION = """\
## engine-megatron

The same models with engine-megatron on simulated CUDA (`nox -s zoo -- --backend megatron`). On two
ranks it divides each layer (`tp: 2` with sequence parallelism; experts stay whole). {right} It
computes {count} types, and refuses the others:
"""


def _megatron(types: dict[str, Any]) -> list[str]:
    """Return the section of engine-megatron, or nothing where it was not measured."""
    rows = {name: row[MEGATRON] for name, row in types.items() if MEGATRON in row}
    if not rows:
        return []
    accepted = {name: row for name, row in rows.items() if row[LAYOUTS[0]]["status"] in ACCEPTED}
    wrong = [name for name, row in accepted.items() if _status(row) != "right"]
    right = f"Wrong: {_names(wrong)}." if wrong else "Each type that it takes is right."
    refusals: dict[str, list[str]] = {}
    for name, row in rows.items():
        first = row[LAYOUTS[0]]
        if first["status"] == "refused":
            by = "no mapping" if first["by"] == "model.path" else f"`{first['by']}`"
            refusals.setdefault(by, []).append(name)
    introduction = MEGATRON_INTRODUCTION.format(right=right, count=len(accepted))
    table_of = [(by, _names(names)) for by, names in sorted(refusals.items())]
    refused = table(("by", "model types"), table_of) if table_of else ""
    return [introduction, refused, _right(accepted)]


VLLM_INTRODUCTION = """\
## Rollouts on vLLM

The same models with larger heads, served by vLLM's CPU build ({version}) in float32, in the process
of the engine (`nox -s zoo -- --rollout vllm`). The weights are engine-fsdp's. They are synced twice
with the audit on, and every weight and saved buffer changes in between. After each sync,
transformers in float64 computes the log-probs of the greedy tokens that vLLM reports for prompts of
different lengths. *Right* means that none is off by {near} nats or more, and that no other token is
more probable by that. *Served as* is vLLM's class, of which those that begin with
`Transformers` compute with transformers' own. *Audit* says whether every tensor was read back
and compared: experts that vLLM packs and weights that it transforms cannot be, and the sync warns.

**Of {count} types: {summary}.**
"""


def _vllm(record: dict[str, Any]) -> list[str]:
    """Return the section of vLLM's rollouts, or nothing where they were not measured."""
    rows = {name: row[VLLM] for name, row in record["types"].items() if VLLM in row}
    if not rows:
        return []
    statuses = [row["status"] for row in rows.values()]
    said = [f"{statuses.count(one)} {one}" for one in TITLES if one in statuses]
    introduction = VLLM_INTRODUCTION.format(
        version=record[VLLM], near=NEAR, count=len(rows), summary=", ".join(said)
    )
    right = [
        (
            f"`{name}`",
            f"`{row['served_as']}`",
            f"{row['log_probs']:.0e}",
            "every tensor" if row["audited"] else "not every tensor",
        )
        for name, row in rows.items()
        if row["status"] == "right"
    ]
    other = [
        (f"`{name}`", TITLES[row["status"]].lower(), _why_not_served(row))
        for name, row in rows.items()
        if row["status"] != "right"
    ]
    parts = [introduction, table(("model type", "served as", "log-probs", "audit"), right)]
    return [*parts, *([table(("model type", "result", "why"), other)] if other else [])]


SEEN_INTRODUCTION = """\
### On a GPU

{measured}.

There vLLM computes in bf16, and in FP8 where the table of layers has the family, without CUDA
graphs, from weights that are synced twice (`python tools/zoo.py measure --rollout vllm --device
cuda`). The figures are the mean difference of the greedy tokens' log-probs from float64, in nats,
and in brackets that of transformers in bf16, for FP8 with the rounding of FP8 emulated in the same
layers.
*Right* means less than {near}.
"""


def _vllm_on_gpu(record: dict[str, Any]) -> list[str]:
    """Return the section of vLLM's rollouts on a GPU, or nothing where none was measured."""
    rows = {name: row[SEEN] for name, row in record["types"].items() if row.get(SEEN)}
    if not rows:
        return []
    by_precision = {"none": "bf16", "fp8": "FP8"}
    taken = len(_taken(record["types"]))
    measured = ";\n".join(
        f"{by_precision[one]}: {_count_seen(rows, one, taken)},\n"
        f"as seen on one {said['gpu']}, vLLM {said['vllm']}, "
        f"transformers {said['transformers']}, torch {said['torch']}, {said['date']}"
        for one, said in record[SEEN].items()
    )
    near = " and ".join(
        f"{TIMES[one]} times the latter plus {NEAR_MEAN[one]} in {by_precision[one]}"
        for one in QUANTIZATIONS
    )
    cells = [
        (f"`{name}`", *(_seen(row[one]) if one in row else "" for one in QUANTIZATIONS))
        for name, row in rows.items()
    ]
    introduction = SEEN_INTRODUCTION.format(measured=measured, near=near)
    return [introduction, table(("model type", *by_precision.values()), cells)]


def _count_seen(rows: dict[str, Any], quantization: str, taken: int) -> str:
    """Return how many types were tried in a precision, and how many have each status."""
    statuses = [row[quantization]["status"] for row in rows.values() if quantization in row]
    counts = [
        f"{statuses.count(name)} {COUNTED.get(name, name)}" for name in ORDER if name in statuses
    ]
    none_right = [] if "right" in statuses else ["none right"]
    return f"{len(statuses)} of {taken} types tried, {', '.join(none_right + counts)}"


def _seen(row: dict[str, Any]) -> str:
    if "mean" not in row:
        return f"{TITLES[row['status']].lower()}: {_why_not_served(row)}"
    audit = "" if row["audited"] else ", not every tensor audited"
    return f"{row['status']}, {row['mean']:.0e} ({row['plain']:.0e}){audit}"


def _why_not_served(row: dict[str, Any]) -> str:
    if row["status"] == "wrong":
        return f"log-probs are off by {row['log_probs']:.0e}, served as `{row['served_as']}`"
    # The other half names the families that are known, which is the same for all.
    unknown, _, _ = str(row["why"]).partition(": the quantized layers are known for ")
    return unknown.replace("|", "/")


def _mechanisms(record: dict[str, Any]) -> str:
    rows = []
    for name, one in record["mechanisms"].items():
        asking = [
            kind
            for kind, row in record["types"].items()
            if name in row.get("asks", ()) or row[LAYOUTS[0]].get("by") == name
        ]
        served = one["served_by"] or f"nothing: {one['why']}"
        rows.append((f"`{name}`", served, _names(asking)))
    return table(("mechanism", "served by", "asked for by"), rows)


def _sections(types: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    for status, title in TITLES.items():
        found = {name: row for name, row in types.items() if _status(row) == status}
        if not found:
            continue
        parts.append(f"## {title}\n")
        if status == "right":
            rollouts = {name: row[VLLM] for name, row in found.items() if VLLM in row}
            parts.append(_right(found, rollouts or None))
        else:
            rows = [(f"`{name}`", _reason(row)) for name, row in found.items()]
            parts.append(table(("model type", "why"), rows))
    return parts


def _right(types: dict[str, Any], rollouts: dict[str, Any] | None = None) -> str:
    """Return the table of right types, with the results of rollouts where there are any."""
    rows = []
    for name, row in types.items():
        one, two = (row.get(layout, {}) for layout in LAYOUTS)
        without = ", ".join(one.get("without", ()))
        rows.append(
            (
                f"`{name}`",
                ", ".join(f"`{each}`" for each in row.get("asks", ())),
                f"{one['log_probs']:.0e}",
                f"{one['gradient']:.0e}",
                two.get("status", "not run"),
                *(() if rollouts is None else (rollouts.get(name, {}).get("status", ""),)),
                f"with {without} at 0" if without else "",
            )
        )
    served = () if rollouts is None else (f"`{VLLM}`",)
    head = ("model type", "asks for", "log-probs", "gradients", LAYOUTS[1], *served, "note")
    return table(head, rows)


def _reason(row: dict[str, Any]) -> str:
    worst = next(row[one] for one in reversed(LAYOUTS) if one in row)
    if worst["status"] == "wrong" and worst["state"]:
        return str(worst["state"])
    if worst["status"] == "wrong":
        apart = f"log-probs are off by {worst['log_probs']:.0e}"
        return f"{apart}, the gradient of {worst['weight']} by {worst['gradient']:.0e}"
    by = f"`{worst['by']}`: " if "by" in worst else ""
    return by + worst["why"].replace("|", "/")


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(main())
