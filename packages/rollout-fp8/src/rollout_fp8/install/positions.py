"""Rotary tables and attention scales of a server, compared with those of transformers.

A server reads the parameters of RoPE itself, and may pass over one of their keys: every weight is
then served rightly, the audit passes, and all log-probs are wrong. So a rollout compares, at its
start, the tables that the served layers have in memory with those of transformers' own modules, at
some positions from the first to the last one that it serves.

Compared are tables with a cosine and a sine for each position and frequency: those of all layers,
the ones with positions in time, height and width included. Each must be one of the configuration's,
and where the configuration has several, each must be served. Scales of attention by position are
compared for the families that `_read_scale` knows.

Not compared are: the layers that a table belongs to; the order of a head's dimensions; the sections
of positions in time, height and width; tables of vision towers; tables of another form (Fourier and
dual-chunk embeddings); and models whose frequencies transformers keeps differently than in
buffers ``inv_freq`` (GPT-J, CodeGen, code of the model's folder). The zoo's log-probs are for
those. A warning says so where only one of the two sides has any table.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_api.codec import register
from engine_api.config import ModelSource
from engine_api.hf_config import read_hf_config, rope_parts, unbuildable
from engine_api.hf_overrides import override
from engine_api.hf_vision import find_auto_class

log = logging.getLogger("rollout_fp8")

_FIELD = "engine.model"
FREQUENCIES = "inv_freq"
"""Name that the buffers of rotary frequencies in transformers' modules end with."""
# Fraction of an angle by which frequencies may differ: powers of float32 on a GPU have errors of
# some units in the last place, which the position multiplies.
_ANGLE = 2.0**-20
# Scales are computed in float32 or float64.
_SCALE = 1e-5


class RotaryTable(NamedTuple):
    """Frequencies of rotary positions, float64 [n], and the factor of their cosines and sines."""

    frequencies: Tensor
    factor: float

    def rows(self, positions: Sequence[int]) -> Tensor:
        """Return cosines, then sines, at these positions: float64 [positions, 2n]."""
        angles = self._angles(positions)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.factor

    def tolerances(self, positions: Sequence[int], epsilon: float) -> Tensor:
        """Return the differences that rounding may make, in the form of ``rows``.

        ``epsilon`` is the distance of 1 to the next number in the server's dtype.
        """
        angles = self._angles(positions)
        allowed = (epsilon + _ANGLE * angles) * max(self.factor, 1.0)
        return torch.cat([allowed, allowed], dim=-1)

    def _angles(self, positions: Sequence[int]) -> Tensor:
        return torch.tensor(positions, dtype=torch.float64)[:, None] * self.frequencies


class AttentionScale(NamedTuple):
    """Scale of attention by position p: ``1 + beta * log(1 + floor((p + shift) / every))``."""

    every: float
    beta: float
    shift: int = 0

    def rows(self, positions: Sequence[int]) -> Tensor:
        """Return the scale at these positions, float64 [positions]."""
        steps = [math.floor((position + self.shift) / self.every) for position in positions]
        return torch.tensor([1 + self.beta * math.log1p(step) for step in steps]).double()


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Effect of positions on a model's attention, as transformers computes it.

    Attributes:
        text: transformers' configuration of the language model.
        nested: True if ``text`` is a part of the model's configuration.
        tables: its rotary tables, by the names of their frequencies.
        scale: scale of attention by position, if the model has one.
    """

    text: Any
    nested: bool
    tables: Mapping[str, RotaryTable]
    scale: AttentionScale | None

    @classmethod
    def read(cls, source: ModelSource) -> Positions:
        """Return those of the model in a folder or hub id, read as the engine reads it.

        No weight gets memory. The frequencies are those of the hook by which transformers, and the
        engine, fill buffers that are in no file.

        Raises:
            ConfigError: transformers cannot read the configuration, or build the model.
        """
        config = read_hf_config(
            source.path,
            field=f"{_FIELD}.path",
            remedy="give a folder that save_pretrained wrote, or a hub id",
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
        )
        override(config, source.config_overrides, field=f"{_FIELD}.config_overrides")
        try:
            with torch.device("meta"):
                model = find_auto_class(config).from_config(
                    config, trust_remote_code=source.trust_remote_code
                )
            text = config.get_text_config()
            tables = dict(_read_tables(model, text))
        # The family's own code reads the configuration, and may raise anything.
        except Exception as error:
            raise unbuildable(config, source.path, error, field=f"{_FIELD}.path") from error
        return cls(
            text=text,
            nested=text is not config,
            tables=tables,
            scale=_read_scale(text),
        )


@register
class ServedTable(NamedTuple):
    """Rotary table of a server's module.

    ``rows`` are cosines, then sines, float32 [positions, columns], for the sampled positions that
    the table has. It has ``length`` positions, and ``epsilon`` is that of its dtype.
    """

    name: str
    kind: str
    length: int
    epsilon: float
    rows: Tensor


@register
class ServedPositions(NamedTuple):
    """Rotary tables of a server, and scales of its attention at the sampled positions, by name."""

    tables: list[ServedTable]
    scales: dict[str, Tensor]


def sample_positions(length: int) -> list[int]:
    """Return some positions below ``length``: 0, powers of two, three times those, and the last."""
    powers = [1 << exponent for exponent in range(length.bit_length())]
    wanted = {0, *powers, *(3 * power for power in powers), length - 1}
    return sorted(position for position in wanted if position < length)


def warn_if_not_compared(model: Positions, workers: Sequence[ServedPositions]) -> None:
    """Log a warning if only transformers, or only a server's workers, have rotary tables."""
    kinds = {table.kind for served in workers for table in served.tables}
    if model.tables and not all(served.tables for served in workers):
        log.warning(
            "rotary positions of this model are not compared with transformers': transformers has "
            "%s, and the server has no table of cosines and sines by position",
            ", ".join(sorted(model.tables)),
        )
    elif kinds and not model.tables:
        log.warning(
            "rotary positions of this model are not compared with transformers': the server has "
            "tables (%s), and transformers has no buffer %s",
            ", ".join(sorted(kinds)),
            FREQUENCIES,
        )


def differences(model: Positions, served: ServedPositions, length: int) -> Iterator[str]:
    """Yield what a server with ``length`` positions computes differently than transformers.

    ``served`` has the rows of ``sample_positions(length)``.
    """
    positions = sample_positions(length)
    yield from _compare_tables(model.tables, served.tables, positions)
    yield from _compare_scales(model.scale, served.scales, positions)


def _compare_tables(
    tables: Mapping[str, RotaryTable], served: Sequence[ServedTable], positions: Sequence[int]
) -> Iterator[str]:
    if not tables:
        return
    found: set[str] = set()
    for candidate in served:
        if candidate.length <= positions[-1]:
            yield (
                f"{candidate.name} ({candidate.kind}) has a table of {candidate.length:,} "
                f"positions for {positions[-1] + 1:,}"
            )
            continue
        apart = {name: _describe(candidate, table, positions) for name, table in tables.items()}
        alike = {name for name, difference in apart.items() if not difference}
        found |= alike
        if not alike:
            name, difference = next(iter(apart.items()))
            yield f"{candidate.name} ({candidate.kind}) is not {' or '.join(apart)}: {difference}"
    # Layers without positions may leave the only table unused.
    if found:
        for name in sorted(tables.keys() - found):
            yield f"no layer has the table of {name}"


def _describe(served: ServedTable, table: RotaryTable, positions: Sequence[int]) -> str:
    """Return how a served table differs from one of transformers', or "" if it does not."""
    wanted = table.rows(positions)
    if served.rows.shape != wanted.shape:
        return (
            f"it rotates {served.rows.shape[1]} dimensions of each head, and transformers "
            f"{wanted.shape[1]}"
        )
    rows = served.rows.double()
    excess = (rows - wanted).abs() - table.tolerances(positions, served.epsilon)
    # NaN is within no tolerance.
    wrong = ~(excess <= 0)
    if not bool(wrong.any()):
        return ""
    row = int(wrong.any(dim=1).nonzero()[0])
    column = int(excess[row].nan_to_num(math.inf).argmax())
    half = wanted.shape[1] // 2
    function = "cosine" if column < half else "sine"
    return (
        f"the {function} of frequency {column % half} at position {positions[row]} is "
        f"{float(rows[row, column]):.4f}, and in transformers {float(wanted[row, column]):.4f}"
    )


def _compare_scales(
    scale: AttentionScale | None, served: Mapping[str, Tensor], positions: Sequence[int]
) -> Iterator[str]:
    unscaled = torch.ones(len(positions), dtype=torch.float64)
    wanted = unscaled if scale is None else scale.rows(positions)
    last = positions[-1]
    if not served and not torch.equal(wanted, unscaled):
        yield (
            f"no layer scales its attention by position, and transformers does, by "
            f"{float(wanted[-1]):.4f} at position {last}"
        )
    for name, rows in served.items():
        apart = (rows.double() - wanted).abs()
        if not bool((apart <= _SCALE * wanted).all()):
            row = int(apart.nan_to_num(math.inf).argmax())
            yield (
                f"{name} scales its attention at position {positions[row]} by "
                f"{float(rows[row]):.4f}, and transformers by {float(wanted[row]):.4f}"
            )


def _read_tables(model: nn.Module, text: Any) -> Iterator[tuple[str, RotaryTable]]:
    """Yield the rotary tables of a language model, whose buffers get memory and values."""
    # The model around each module that has a hook, and the configuration of that model.
    owners: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        owner = module if isinstance(module, PreTrainedModel) else owners[name.rpartition(".")[0]]
        owners[name] = owner
        leaves = find_frequencies(module)
        # A tower has a configuration of its own.
        if not leaves or owner.config.get_text_config() is not text:
            continue
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            # Hooks of code outside transformers may leave them as they are.
            fill = math.nan if buffer.is_floating_point() else 0
            setattr(module, leaf, torch.full_like(buffer, fill, device="cpu"))
        with torch.no_grad():
            owner._init_weights(module)  # noqa: SLF001 - the hook, which has no public name
        for leaf in leaves:
            table = read_table(module, leaf)
            if bool(table.frequencies.isfinite().all()):
                yield f"{name}.{leaf}", table


def find_frequencies(module: nn.Module) -> list[str]:
    """Return the names of the buffers of rotary frequencies in a module of transformers'."""
    return [
        leaf
        for leaf, _ in module.named_buffers(recurse=False)
        if leaf.endswith(FREQUENCIES) and not leaf.endswith(f"original_{FREQUENCIES}")
    ]


def read_table(module: nn.Module, leaf: str) -> RotaryTable:
    """Return the table of a module of transformers', from its buffer ``leaf`` of frequencies."""
    prefix = leaf.removesuffix(FREQUENCIES)
    factor = getattr(module, f"{prefix}attention_scaling", 1.0)
    return RotaryTable(getattr(module, leaf).double().cpu(), float(factor))


def _read_scale(text: Any) -> AttentionScale | None:
    """Return the scale of attention by position, or None for a model that has none.

    Ministral 3 and Mistral 4 have its ``beta`` in the parameters of RoPE, and Llama 4 has one for
    layers without rotary positions.
    """
    for part in rope_parts(text).values():
        beta = part.get("llama_4_scaling_beta")
        if beta is not None:
            return AttentionScale(every=part["original_max_position_embeddings"], beta=beta)
    if getattr(text, "attn_temperature_tuning", False) and not all(text.no_rope_layers):
        return AttentionScale(every=text.floor_scale, beta=text.attn_scale, shift=1)
    return None
