"""Foundations of reinforcement learning in an engine.

Log-probs by one path, policy and value updates, versions, a reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine_api.capabilities import Capability
from engine_api.config import LoraConfig, Memory
from engine_api.contract import Engine
from engine_api.losses import LossFn
from engine_api.results import TrainOutput
from engine_conformance.cases import _rl_losses as losses
from engine_conformance.cases._case import LM, VALUE, case, must
from engine_conformance.cases._expect import documents, merged
from engine_conformance.cases._losses import CorruptedLoss, default_loss
from engine_conformance.cases._ranks import (
    InferCall,
    RankOutputs,
    checked,
    digest,
    infer_on_rank,
    local_batch,
    opened,
    save,
    step,
    whole_weights,
)
from engine_conformance.cases._rl_updates import (
    OPTIMIZER,
    SPLIT,
    Phase,
    Plan,
    infer_current,
    is_value,
    policy_holds,
    value_holds,
)
from engine_conformance.cases._target import Setup, Target
from engine_conformance.compare import assert_bitwise
from engine_conformance.fixtures import PackedDocuments, seeded_generator

BOTH = (LM, VALUE)


@dataclass(frozen=True, kw_only=True, slots=True)
class WithEntropy:
    """Loss of log-probs that has entropy computed in addition."""

    loss: LossFn
    needs: tuple[str, ...] = ("log_probs", "entropy")

    def __call__(self, outputs, batch):  # noqa: ANN001, ANN204 - as `LossFn`
        """Return the loss."""
        return self.loss(outputs, batch)


def on_policy(
    setup: Setup, batch: PackedDocuments, temperatures: Sequence[float]
) -> list[TrainOutput]:
    """Infer, then train, and compare the loss's inputs with the inference at each temperature.

    The second step computes entropy, too.
    """
    loss: LossFn = losses.value_is_old if is_value(setup) else losses.ratio_is_one
    name = "old_values" if is_value(setup) else "old_log_probs"
    rows = list[TrainOutput]()
    with opened(setup) as engine:
        for index, temperature in enumerate(temperatures):
            dp_shard = local_batch(engine, batch, setup.device)
            dp_shard = dp_shard.with_fields(
                **{name: infer_current(engine, dp_shard, temperature=temperature)}
            )
            chosen = WithEntropy(loss=loss) if index and not is_value(setup) else loss
            rows.append(
                checked(
                    engine.train_batch(dp_shard, chosen, temperature=temperature),
                    TrainOutput,
                    "train_batch",
                )
            )
    return rows


@case(id="rl.ratio_is_one", profile="rl", model_types=BOTH)
def ratio_is_one(target: Target) -> float:
    """Log-probs in ``train_batch`` on policy MUST be those of ``infer_batch`` bit for bit.

    PPO's ratio is then exactly 1. At one micro-batch split, whether or not entropy is
    computed, at temperatures 1 and 0.7, before and after a step, in one micro-batch and
    in several. A value model's values alike.

    If this fails: training and inference run other kernels, dtypes or modes (dropout,
    another attention, a head that rounds its logits elsewhere), so that clipping and
    importance weights correct a mismatch that need not be there (verl #2996, NeMo-RL
    #4243).
    """
    batch = documents(110, "uneven")
    for memory in (Memory(), SPLIT):
        config = target.config(target.model(), optimizer=OPTIMIZER, memory=memory)
        temperatures = (1.0, 1.0) if target.model_type == VALUE else (1.0, 0.7)
        rows = target.run(on_policy, config, batch=batch, temperatures=temperatures)
        for temperature, output in zip(temperatures, rows[0], strict=True):
            where = f"temperature {temperature}, {output.num_micro_batches} micro-batches"
            differ = output.metrics["differ"]
            tokens = output.metrics["tokens"]
            must(
                tokens == len(batch.input_ids),
                "metrics",
                f"{tokens} tokens seen of {len(batch.input_ids)}",
                where=where,
            )
            mean = output.metrics["by"] / max(differ, 1.0)
            problem = f"{differ:.0f} of {tokens:.0f} tokens differ, by {mean:.2g} on average"
            must(differ == 0, "training's outputs less inference's", problem, where=where)
    return 0.0


def one_path(setup: Setup, batch: PackedDocuments, model: Path, folder: Path) -> list[RankOutputs]:
    """Train, then infer before and after a gradient, and hand out the weights.

    They leave by export and, where declared, by checkpoint.
    """
    call = InferCall(documents=batch)
    with opened(setup) as engine:
        step(engine, setup, batch)
        step(engine, setup, batch)
        outputs = [infer_on_rank(engine, call, setup.device)]
        engine.forward_backward(
            local_batch(engine, batch, setup.device), default_loss(setup.model_type)
        )
        outputs.append(infer_on_rank(engine, call, setup.device))
        weights = whole_weights(engine)
        if engine.topology.rank == 0:
            (folder / "exported").mkdir()
            save_file(weights, folder / "exported" / "model.safetensors", metadata={"format": "pt"})
            copyfile(model / "config.json", folder / "exported" / "config.json")
        if Capability.PORTABLE_CHECKPOINT in engine.capabilities:
            save(engine, folder / "checkpoint")
        return outputs


def fresh(setup: Setup, batch: PackedDocuments, load: Path | None = None) -> RankOutputs:
    """Return the outputs of a new engine, with another seed's or a checkpoint's weights."""
    with opened(setup) as engine:
        if load is not None:
            engine.load_checkpoint(load)
        return infer_on_rank(engine, InferCall(documents=batch), setup.device)


@case(id="rl.old_and_new_by_one_path", profile="rl", model_types=BOTH)
def old_and_new_by_one_path(target: Target) -> float:
    """Equal weights MUST give equal bits: again, after a backward pass, and in another instance.

    The other instance has them from the exported tensors, and from a checkpoint where
    that is declared.

    If this fails: a trainer's mode (dropout) stays on after a step, a buffer is not
    exported, or weights are stored in one dtype and computed with in another that an
    instance recreates.
    """
    model = target.model()
    folder = target.scratch()
    batch = documents(111, "uneven")
    config = target.config(model, optimizer=OPTIMIZER)
    call = InferCall(documents=batch)
    ranks = target.run(one_path, config, batch=batch, model=model, folder=folder)
    before, after = (merged(call, [row[i] for row in ranks]) for i in range(2))
    assert_bitwise(after, before, name="outputs after a backward pass")
    exported = target.run(
        fresh, target.config(folder / "exported", optimizer=OPTIMIZER), batch=batch
    )
    assert_bitwise(merged(call, exported), before, name="outputs of the exported weights")
    if Capability.PORTABLE_CHECKPOINT in target.capabilities:
        loaded = target.run(fresh, replace(config, seed=9), batch=batch, load=folder / "checkpoint")
        assert_bitwise(merged(call, loaded), before, name="outputs of the loaded weights")
    return 0.0


def _epochs(target: Target, most: int) -> int:
    """Return the number of epochs on a batch.

    It is one in bfloat16, where rounding decides which tokens the second one clips.
    """
    return most if target.dtype == "float32" else 1


@case(id="rl.ppo", profile="rl")
def ppo(target: Target) -> float:
    """PPO's updates MUST be the oracle's, with old and reference log-probs by ``infer_batch``.

    Two epochs on one batch, then a new batch. Clipped surrogate, KL to the reference
    and entropy bonus in one loss; loss, norm, weights, and the clipped fraction and KL
    as sums, after every update. In bfloat16 one epoch: whom a second one clips,
    rounding decides.

    If this fails: old log-probs are recomputed with the new weights (the ratio is
    always 1), the reference follows the policy, entropy is detached (verl #1720),
    metrics are averaged over ranks, or the loss over micro-batches (verl #3294).
    """
    return policy_holds(target, _two_batches(target, 120), losses.PPO)


def _two_batches(target: Target, seed: int) -> Plan:
    """Return a plan of two epochs on one batch (in bfloat16 one), then another batch."""

    def plan(attempt: int) -> list[Phase]:
        first = seed + 1000 * attempt
        batches = ((documents(first, "uneven"), 2), (documents(first + 1, "skewed"), 1))
        return [
            Phase(batch=batch, epochs=_epochs(target, most), denominator=batch.denominator)
            for batch, most in batches
        ]

    return plan


def _grouped(batch: PackedDocuments, seed: int, *, size: int = 3) -> PackedDocuments:
    """Return GRPO's advantages, one per document and normalised in groups of ``size``.

    Each document's weights sum to one.
    """
    lengths = batch.lengths
    rewards = seeded_generator(seed).normal(size=(len(lengths) // size, size))
    normal = (rewards - rewards.mean(axis=1, keepdims=True)) / (
        rewards.std(axis=1, keepdims=True) + 1e-6
    )
    document = np.repeat(np.arange(len(lengths)), lengths)
    counted = (batch.loss_weight > 0).astype(np.float64)
    totals = np.maximum(np.bincount(document, weights=counted), 1.0)
    return replace(
        batch,
        advantages=normal.ravel()[document].astype(np.float32),
        loss_weight=(counted / totals[document]).astype(np.float32),
    )


@case(id="rl.grpo", profile="rl")
def grpo(target: Target) -> float:
    """GRPO's updates MUST be the oracle's: group-relative advantages, document means, k3.

    The estimator k3 of the KL to the reference is part of the loss. Two epochs on one
    batch (in bfloat16 one), then another one, over the number of documents
    (arXiv:2402.03300, eq. 3 and 4).

    If this fails: the engine divides by its own count of tokens, so that long completions
    weigh less (arXiv:2503.20783); documents of one group lie on several ranks and are
    averaged a rank (prime-rl #2562).
    """

    def plan(attempt: int) -> list[Phase]:
        return [
            Phase(batch=batch, epochs=_epochs(target, 2 - i), denominator=float(len(batch.lengths)))
            for i, batch in enumerate(
                _grouped(documents(122 + i + 1000 * attempt, "uneven"), 1 + i + 1000 * attempt)
                for i in range(2)
            )
        ]

    return policy_holds(target, plan, losses.GRPO)


@case(id="rl.value", profile="rl", model_types=(VALUE,))
def value(target: Target) -> float:
    """A critic's updates under a clipped value loss MUST be the oracle's.

    Old values are by ``infer_batch``. Two epochs on one batch (in bfloat16 one), so
    that values are clipped about the old ones, then another batch.

    If this fails: values are shifted by a token against returns, or old values are
    those of the new weights.
    """
    return value_holds(target, _two_batches(target, 124))


# The call, and the version and the digest of the export after it.
VersionAfterCall = tuple[str, int, str]


def versions(setup: Setup, batch: PackedDocuments, folder: Path) -> list[VersionAfterCall]:
    """Return the version and a digest of the export after each call that may change them."""
    loss = default_loss(setup.model_type)
    with opened(setup) as engine:
        mine = local_batch(engine, batch, setup.device)
        bad = _failing(setup)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("initialize", lambda: None),
            ("infer_batch", lambda: engine.infer_batch(mine)),
            ("train_batch", lambda: engine.train_batch(mine, loss)),
            ("forward_backward", lambda: engine.forward_backward(mine, loss)),
            ("optimizer_step", engine.optimizer_step),
            ("a skipped step", lambda: engine.train_batch(mine, bad)),
        ]
        if Capability.PORTABLE_CHECKPOINT in engine.capabilities:
            calls += [
                ("save_checkpoint", lambda: save(engine, folder / "c")),
                ("another train_batch", lambda: engine.train_batch(mine, loss)),
                ("load_checkpoint", lambda: engine.load_checkpoint(folder / "c")),
            ]
        return [_version_after(engine, name, call) for name, call in calls]


def _failing(setup: Setup) -> LossFn:
    return CorruptedLoss(model_type=setup.model_type, factor=math.nan)


def _version_after(engine: Engine, name: str, call: Callable[[], object]) -> VersionAfterCall:
    result = call()
    version = getattr(result, "weight_version", engine.weight_version)
    must(
        version == engine.weight_version,
        "weight_version",
        f"the output says {version}, the engine otherwise",
        where=name,
    )
    return name, engine.weight_version, digest(whole_weights(engine))


_VERSIONS = {
    "initialize": 0,
    "infer_batch": 0,
    "train_batch": 1,
    "forward_backward": 1,
    "optimizer_step": 2,
    "a skipped step": 2,
    "save_checkpoint": 2,
    "another train_batch": 3,
    "load_checkpoint": 2,
}


@case(id="rl.version", profile="rl", model_types=BOTH)
def version(target: Target) -> None:
    """``weight_version`` MUST tell exported weights apart and grow by one per step.

    The same version has the same weights. Nothing else changes it but a load, which
    brings back version and weights together.

    If this fails: a rollout takes stale weights for new ones, or new ones for those it
    has, and off-policy corrections are made for the wrong policy.
    """
    ranks = target.run(
        versions,
        target.config(target.model()),
        batch=documents(112, "uneven"),
        folder=target.scratch(),
    )
    for rank, seen in enumerate(ranks):
        first: dict[int, tuple[str, str]] = {}
        for name, number, bits in seen:
            where = f"{name}, rank {rank}"
            must(
                number == _VERSIONS[name],
                "weight_version",
                f"{number}, not {_VERSIONS[name]}",
                where=where,
            )
            before, known = first.setdefault(number, (name, bits))
            must(
                bits == known,
                "export",
                f"differs from the one after {before}, of the same version",
                where=where,
            )
        told_apart = {bits for _, bits in first.values()}
        must(
            len(told_apart) == len(first),
            "export",
            "two versions have the same weights",
            where=f"rank {rank}",
        )


def attention_of(engine: Any, setup: Setup) -> str:
    """Return the attention that an engine has chosen, or was asked for before contract 1.3."""
    if not hasattr(engine, "resolved"):
        return setup.config.model.attention
    return engine.resolved()["model.attention"]


def base_of(setup: Setup, batch: PackedDocuments) -> tuple[RankOutputs, str]:
    """Return the outputs of an engine without an adapter, and the attention that it has chosen."""
    with opened(setup) as engine:
        outputs = infer_on_rank(engine, InferCall(documents=batch), setup.device)
        return outputs, attention_of(engine, setup)


def with_adapter(setup: Setup, batch: PackedDocuments) -> tuple[list[RankOutputs], str]:
    """Return outputs with the adapter on and off, at the start and after two steps.

    The attention that the engine has chosen is returned, too.
    """
    calls = [InferCall(documents=batch, adapter=on) for on in (True, False)]
    with opened(setup) as engine:
        attention = attention_of(engine, setup)
        outputs = [infer_on_rank(engine, call, setup.device) for call in calls]
        for _ in range(2):
            step(engine, setup, batch)
        outputs += [infer_on_rank(engine, call, setup.device) for call in calls]
        return outputs, attention


@case(id="rl.reference", profile="rl", requires=(Capability.LORA,))
def reference(target: Target) -> float:
    """The policy with its adapter off MUST be the base model's reference bit for bit.

    The first KL is exactly 0. Before and after steps, as an engine without any adapter
    computes it. If the two choose other attention, it is asked for the policy's.

    If this fails: base weights are merged and unmerged again, and rounded; the
    adapter's dropout or scale stays on.
    """
    model = target.model(tied=False)
    batch = documents(113, "uneven")
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"))
    ranks = target.run(
        with_adapter, target.config(model, lora=lora, optimizer=OPTIMIZER), batch=batch
    )
    call = InferCall(documents=batch)
    on, off, trained, again = (merged(call, [outputs[i] for outputs, _ in ranks]) for i in range(4))
    attention, config = ranks[0][1], target.config(model)
    others = target.run(base_of, config, batch=batch)
    if others[0][1] != attention:
        alike = replace(config, model=replace(config.model, attention=attention))
        others = target.run(base_of, alike, batch=batch)
    base = merged(call, [outputs for outputs, _ in others])
    assert_bitwise(off, base, name="outputs with the adapter off")
    assert_bitwise(on, base, name="outputs with a new adapter")
    assert_bitwise(again, base, name="outputs with the adapter off, after steps")
    must(
        not torch.equal(trained["log_probs"], base["log_probs"]),
        "adapter",
        "changes nothing after two steps",
    )
    return 0.0
