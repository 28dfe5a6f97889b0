"""Positions as vLLM computes them: keys that it needs for them, and the refusal where they differ.

vLLM and transformers have different keys for the same thing. What a key does is not known until the
served tables are compared (``install/positions.py``), so that a key that has another effect than
here described, in some version or class of vLLM, ends in a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from engine_api.errors import RolloutError
from engine_api.hf_config import rope_parts
from rollout_fp8.failures import describe_error
from rollout_fp8.install.positions import (
    Positions,
    ServedPositions,
    differences,
    sample_positions,
    warn_if_not_compared,
)
from rollout_fp8.vllm import private

WHERE = "rollout 'vllm'"
# Number of reasons that an error shows: they are mostly the same for all layers.
_SHOWN = 3
# vLLM scales attention of Llama 4 only for a larger max_model_len (0.26.0 and 0.32.0,
# ``Llama4ForCausalLM``).
_UNSCALED_LENGTH = 32768


class Workers(Protocol):
    """Workers that tell what they serve (``InProcess`` or ``OtherProcesses``)."""

    def read_positions(self, positions: list[int]) -> list[ServedPositions]:
        """Return what each worker serves at these positions."""
        ...


def server_keys(model: Positions) -> dict[str, Any]:
    """Return the keys of ``config.json`` that vLLM needs in addition to transformers'.

    They are those of language models alone: in a model with a tower they would be in a part of the
    configuration, which an override replaces as a whole.
    """
    parts = rope_parts(model.text)
    if model.nested or [*parts] != [""]:
        return {}
    (rope,) = parts.values()
    keys: dict[str, Any] = {}
    if rope.get("llama_4_scaling_beta") is not None:
        # vLLM reads the scale of attention in Mistral's own format only (0.26.0 and 0.32.0,
        # ``MistralAttention``).
        keys["llama_4_scaling"] = {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope["llama_4_scaling_beta"],
        }
    if (factor := _missing_factor(model, rope)) != 1:
        keys["rope_parameters"] = {**rope, "attn_factor": factor}
    return keys


def _missing_factor(model: Positions, rope: dict[str, Any]) -> float:
    """Return the factor by which vLLM's cosines and sines of YaRN must be multiplied."""
    # Classes with latent attention compute YaRN by another module, which reads all keys.
    latent = getattr(model.text, "kv_lora_rank", None)
    if rope.get("rope_type") != "yarn" or latent or not private.takes_factor_of_yarn():
        return 1.0
    factors = {table.factor for table in model.tables.values()}
    if len(factors) != 1:
        return 1.0
    own = max(1.0, 0.1 * math.log(rope["factor"]) + 1)
    (wanted,) = factors
    return 1.0 if math.isclose(wanted, own, rel_tol=1e-6) else wanted / own


def require_served(model: Positions, workers: Workers, length: int) -> None:
    """Raise ``RolloutError`` where vLLM computes positions differently than transformers.

    Args:
        model: positions of the model's configuration.
        workers: workers of the server that has started.
        length: positions that a sequence may have.
    """
    try:
        found = workers.read_positions(sample_positions(length))
    # Attributes without a public name, of another vLLM. Errors of workers in their own processes
    # are typed already (``Processes.call``).
    except (AttributeError, TypeError, IndexError) as error:
        raise RolloutError(
            "positions of this version of vLLM cannot be compared with transformers'",
            where=WHERE,
            why=f"expected the attributes of its rotary and attention layers that tested versions "
            f"have, got {describe_error(error)}",
            remedy="a tested version of vLLM, or rollout.name=local",
        ) from error
    warn_if_not_compared(model, found)
    # Workers of one model have the same tables.
    reasons = [
        *dict.fromkeys(why for served in found for why in differences(model, served, length))
    ]
    if reasons:
        more = f", and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        raise RolloutError(
            "vLLM computes positions differently than transformers",
            where=WHERE,
            why="; ".join(reasons[:_SHOWN]) + more,
            remedy=_advise(model, found, length),
        )


def _advise(model: Positions, found: Sequence[ServedPositions], length: int) -> str:
    for rope in rope_parts(model.text).values():
        short = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and short is not None and length > short:
            # vLLM takes the long factors for every sequence then, and engines the short ones.
            return f"rollout.options.max_model_len of at most {short}"
    # RoPE of type ``dynamic``: vLLM's default max_model_len is ``factor`` times the table's length.
    shortest = min((table.length for served in found for table in served.tables), default=length)
    if shortest < length:
        return f"rollout.options.max_model_len of at most {shortest}"
    if model.scale is not None and getattr(model.text, "attn_temperature_tuning", False):
        unscaled = int(model.scale.every) - 1
        if unscaled < length <= _UNSCALED_LENGTH:
            return (
                f"rollout.options.max_model_len above {_UNSCALED_LENGTH}, or of at most {unscaled}"
            )
    return (
        "rollout.name=local for this model; or another version of vLLM that reads all of its "
        "rope_parameters (rollout.options.allow_untested_version=true)"
    )
