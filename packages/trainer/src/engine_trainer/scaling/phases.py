"""The seconds of each phase of an RL step, and the resource that limits it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine_trainer.scaling.hardware import Hardware
from engine_trainer.scaling.shapes import Shape

# Bytes of the states of a parameter: fp32 weight, gradient and AdamW's two moments.
STATE_BYTES = 16
# Bytes that an optimizer step reads (weight, gradient, moments) and writes (weight, moments) for
# each parameter.
OPTIMIZER_BYTES = 28
# Share of a GPU's memory for the states. The rest is for activations, gathered layers and logits.
STATE_SHARE = 0.6
# Share of a GPU's memory for the weights of a rollout. Keys and values have the rest.
WEIGHT_SHARE = 0.4
# Number of points at which a generation is evaluated.
GRID = 64


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The seconds of a phase in total and by resource.

    Resources are computing, HBM, NVLink, network and host.
    """

    seconds: float
    parts: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """Resource that takes the most time."""
        return max(self.parts, key=lambda name: self.parts[name]) if self.parts else ""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The numbers of tokens of prompts and completions.

    The lengths of completions are evenly spread around ``mean``, up to ``longest``; ``mean`` is at
    least half of ``longest``.
    """

    prompt: int
    mean: float
    longest: float

    def alive(self, token: float) -> float:
        """Return the share of completions that are longer than ``token``."""
        shortest = 2 * self.mean - self.longest
        return (
            1.0
            if token < shortest
            else max(0.0, (self.longest - token) / max(self.longest - shortest, 1e-9))
        )


def shard_group(shape: Shape, hardware: Hardware, gpus: int) -> int:
    """Return the number of GPUs that FSDP shards a model over, or 0 if it does not fit.

    With more GPUs than that there are several copies of the model (HSDP). The group is a whole
    node where that is enough: with NVLink it is as fast as a smaller group, and leaves more memory.
    """
    wanted = STATE_BYTES * shape.parameters / (STATE_SHARE * hardware.memory)
    least = 2 ** max(0, math.ceil(math.log2(wanted)))
    return 0 if least > gpus else max(least, min(hardware.node, gpus))


def replica_gpus(shape: Shape, hardware: Hardware, weight_bytes: int = 2) -> int:
    """Return the number of tensor-parallel GPUs of a rollout replica."""
    return 2 ** max(
        0, math.ceil(math.log2(weight_bytes * shape.parameters / (WEIGHT_SHARE * hardware.memory)))
    )


def generate(
    shape: Shape,
    hardware: Hardware,
    lengths: Lengths,
    *,
    sequences: float,
    tensor_parallel: int,
    fp8: bool = False,
) -> Phase:
    """Return the time in which one replica completes ``sequences`` prompts.

    The phase ends with the longest completion.
    """
    weight_bytes = shape.parameters * (1 if fp8 else 2) / tensor_parallel
    free = hardware.memory * (1 - WEIGHT_SHARE) * tensor_parallel
    most = free / (shape.kv_bytes * (lengths.prompt + lengths.mean))
    together = min(sequences, most)
    flops = (
        2 * hardware.peak * hardware.serve_share_fp8
        if fp8
        else hardware.peak * hardware.serve_share
    ) * tensor_parallel
    # The parts begin with the prefill.
    parts = {
        "computing": sequences * lengths.prompt * shape.forward_flop(lengths.prompt / 2) / flops
    }

    def decode(alive: float, context: float, steps: float) -> None:
        read = weight_bytes * _touched(shape, alive)
        terms = {
            "computing": 2.0 * shape.active * alive / flops,
            "HBM (weights)": read / (hardware.hbm * hardware.stream_share),
        }
        name = max(terms, key=lambda n: terms[n])
        _add(parts, name, steps * terms[name])
        kv = alive * context * shape.kv_bytes / tensor_parallel
        _add(parts, "HBM (keys, values)", steps * kv / (hardware.hbm * hardware.stream_share))
        _add(parts, "host", steps * hardware.decode_host_s)
        if tensor_parallel > 1:
            moved = 2.0 * (tensor_parallel - 1) / tensor_parallel * alive * shape.hidden * 2
            once = hardware.link_latency_s + moved / hardware.link(tensor_parallel)[0]
            _add(parts, "NVLink", steps * 2 * shape.layers * once)

    # In these steps the memory is full, and a sequence starts whenever another one ends.
    before = (sequences - together) / max(together, 1e-9) * lengths.mean
    decode(together, lengths.prompt + lengths.mean / 2, before)
    for point in range(GRID):
        token = (point + 0.5) / GRID * lengths.longest
        alive = together * lengths.alive(token)
        if alive > 0:
            decode(max(alive, min(together, 1.0)), lengths.prompt + token, lengths.longest / GRID)
    return Phase(seconds=math.fsum(parts.values()), parts=parts)


def reward(*, completions: float, seconds: float, processes: int) -> Phase:
    """Return the time to score one replica's completions, ``seconds`` for each."""
    total = completions * seconds / max(1, processes)
    return Phase(seconds=total, parts={"reward function": total})


def log_probs(
    shape: Shape, hardware: Hardware, *, gpus: int, tokens: float, length: float, micro_batch: int
) -> Phase:
    """Return the time of a forward pass over all tokens of a step."""
    return _passes(
        shape,
        hardware,
        gpus,
        tokens,
        shape.forward_flop(length / 2),
        2.0 * shape.parameters,
        micro_batch,
    )


def update(
    shape: Shape,
    hardware: Hardware,
    *,
    gpus: int,
    tokens: float,
    length: float,
    micro_batch: int,
    updates: int = 1,
) -> Phase:
    """Return the time of forward, backward and optimizer over all tokens of a step.

    The tokens are divided into ``updates`` parts.
    """
    group = shard_group(shape, hardware, gpus)
    # Weights are gathered in bf16 forward and backward, and gradients are reduced in fp32.
    passes = _passes(
        shape,
        hardware,
        gpus,
        tokens,
        shape.train_flop(length),
        8.0 * shape.parameters,
        micro_batch,
        updates,
    )
    parts = dict(passes.parts)
    optimizer = (
        updates
        * OPTIMIZER_BYTES
        * shape.parameters
        / group
        / (hardware.hbm * hardware.stream_share)
    )
    _add(parts, "HBM (optimizer)", optimizer)
    copies = gpus // group
    if copies > 1:  # the groups reduce the gradients of each shard
        moved = 2.0 * 4 * shape.parameters / group * (copies - 1) / copies
        speed, name = hardware.link(gpus)
        _add(parts, name, updates * moved / speed)
    return Phase(seconds=math.fsum(parts.values()), parts=parts)


def sync(
    shape: Shape, hardware: Hardware, *, group: int, tensor_parallel: int, fp8: bool = False
) -> Phase:
    """Return the time to send and audit the weights.

    They go from the shards of each ``group`` of GPUs to every replica in the same GPUs.
    """
    served = 1 if fp8 else 2
    hbm = hardware.hbm * hardware.sync_share
    # The engine reads in fp32, writes, and reads for the checksum. The server reads, writes, and
    # reads for the audit.
    passes = (4 + 2 * served) / group + 3 * served / tensor_parallel
    parts = {"HBM (weights)": passes * shape.parameters / hbm}
    if group > 1:
        speed, name = hardware.link(group)
        parts[name] = served * shape.parameters * (group - 1) / group / speed
    if math.fsum(parts.values()) < hardware.sync_host_s:
        parts = {"host": hardware.sync_host_s}
    return Phase(seconds=math.fsum(parts.values()), parts=parts)


def _passes(
    shape: Shape,
    hardware: Hardware,
    gpus: int,
    tokens: float,
    flop: float,
    gathered: float,
    micro_batch: int,
    updates: int = 1,
) -> Phase:
    """Return the time of the micro-batches on every GPU.

    Computing hides communication, or communication hides computing.
    """
    group = shard_group(shape, hardware, gpus)
    mine = tokens / gpus / updates
    rounds = max(1, math.ceil(mine / micro_batch))
    computing = updates * mine * flop / (hardware.peak * hardware.train_share)
    speed, link = hardware.link(group)
    wire = updates * rounds * gathered * (group - 1) / group / speed
    longer = {"computing": computing} if computing >= wire else {link: wire}
    parts = {**longer, "host": updates * rounds * hardware.step_host_s}
    return Phase(seconds=math.fsum(parts.values()), parts=parts)


def _touched(shape: Shape, sequences: float) -> float:
    """Return the share of all weights that a decoding step reads.

    Experts count only if some sequence is routed to them.
    """
    if not shape.experts:
        return 1.0
    missed = (1 - shape.active_experts / shape.experts) ** sequences
    experts = shape.layers * shape.experts * 3 * shape.hidden * shape.inner
    return 1.0 - missed * experts / shape.parameters


def _add(parts: dict[str, float], name: str, seconds: float) -> None:
    if seconds > 0:
        parts[name] = parts.get(name, 0.0) + seconds
