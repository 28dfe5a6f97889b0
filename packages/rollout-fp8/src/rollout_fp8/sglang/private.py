"""Everything of SGLang that has no public call, each with the reason and the upstream thread; as of 0.5.16."""

from __future__ import annotations

import asyncio
import atexit
from typing import Any

from torch import nn


def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
    """The loop that ``Engine`` was made on, and runs inside its own blocking calls alone.

    Nothing answers in the background unless somebody else runs that very loop: on a second one its
    requests hang. Upstream: sgl-project/sglang#5162, of engines that hang on a second loop.
    """
    return engine.loop


def abort(engine: Any, rid: str) -> None:
    """End one request; unknown ids are passed over. To be called on the engine's loop.

    ``Engine`` has no call for it; SGLang's own HTTP server makes this one. Upstream:
    sgl-project/sglang#5963 asked for it; it is closed, and ``Engine`` has none as of 0.5.16.
    """
    engine.tokenizer_manager.abort_request(rid=rid)


def shut_down(engine: Any) -> None:
    """End the engine's processes: with them go *all* children of this process (``kill_process_tree`` in ``Engine.shutdown``).

    The constructor has it called once more when the process ends, which would end the children that
    came since. Upstream: no thread known (0.5.16).
    """
    engine.shutdown()
    atexit.unregister(engine.shutdown)


def renew_derived(model: Any) -> None:
    """Compute again what some models derive from their weights, DeepSeek's w_kc and w_vc say.

    SGLang's loader calls it wherever it does not go through ``load_weights``, which a sync after
    the first does not. Upstream: no thread known (0.5.16, ``model_loader/loader.py``).
    """
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def is_constant(parameter: nn.Parameter) -> bool:
    """Whether it is a scale of the key-value cache, which no checkpoint need have (``layers/quantization/kv_cache.py``).

    SGLang marks them so for its own check of loaded weights; the mark has no public name.
    Upstream: sgl-project/sglang#31621, on what that check does with them.
    """
    return bool(getattr(parameter, "_skip_weight_check", False))
