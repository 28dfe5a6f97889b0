"""Heads of Hugging Face folders that predict further tokens than the next, which no engine trains.

The field calls them MTP (multi-token prediction). A server can guess tokens with such a head and
check its guesses with the model. ``hf_folder.save_hf`` writes it as the model's folder has it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

# Weights of the head of Qwen3-Next, Qwen3.5, MiMo-V2, Nemotron-H and others.
_OF_HEAD = re.compile(r"(?:model\.|language_model\.)*mtp[._]")
_OF_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")
# Number of further layers, under its name in files and under transformers' other name.
_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
MTP_COUNTS = frozenset((*_LAYERS, "mtp_num_hidden_layers"))
"""Keys of config.json with a number of layers of the head."""

_EMBEDDING = "embed_tokens.weight"
_OUTPUT = "lm_head.weight"
# Ends of the names that the embedding and the output head have in a head, and of the model's
# weights that these may be copies of, the likelier one first.
_COPIES = {
    _EMBEDDING: (_EMBEDDING, _OUTPUT),
    "shared_head.head.weight": (_OUTPUT, _EMBEDDING),
    _OUTPUT: (_OUTPUT, _EMBEDDING),
}


@dataclass(frozen=True, kw_only=True)
class MtpHead:
    """The weights of a model's folder that predict further tokens than the next."""

    folder: Path
    """The model's folder."""

    names: tuple[str, ...]
    """Names of the weights, sorted; empty for a folder without such a head."""

    originals: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Weights of the model that an embedding or output head in the head may be a copy of."""


def find_mtp_head(
    folder: Path, config: Mapping[str, Any], stored: Collection[str], model: Collection[str]
) -> MtpHead:
    """Return the head that a folder holds in addition to its model.

    DeepSeek-V3 (arXiv:2412.19437, section 2.2) and GLM-4.5 save it as layers beyond
    ``num_hidden_layers``, whose number is ``num_nextn_predict_layers``; Qwen3-Next and Qwen3.5
    save it as ``mtp.…``. There is none for a model of another number of layers than the folder's,
    as ``config_overrides`` makes it: the head was trained on the states of the last layer.

    Args:
        folder: the model's folder.
        config: content of its config.json.
        stored: names of all weights of the folder.
        model: names of the weights that the engine computes with.
    """
    text = _text_of(config)
    numbers = [int(found[1]) for name in model if (found := _OF_LAYER.match(name))]
    depth = max(numbers, default=-1) + 1
    if depth and text.get("num_hidden_layers") not in (None, depth):
        return MtpHead(folder=folder, names=())
    count = next((text[key] for key in _LAYERS if key in text), None)
    further = range(depth, depth + count) if depth and isinstance(count, int) else range(0)

    def is_of_head(name: str) -> bool:
        layer = _OF_LAYER.match(name)
        return bool(_OF_HEAD.match(name) or (layer and int(layer[1]) in further))

    names = tuple(name for name in sorted(set(stored) - set(model)) if is_of_head(name))
    return MtpHead(folder=folder, names=names, originals=dict(_find_originals(names, model)))


def _find_originals(
    names: Collection[str], model: Collection[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in names:
        for end, originals in _COPIES.items():
            if name.endswith(f".{end}"):
                found = [one for original in originals for one in model if one.endswith(original)]
                yield name, tuple(found)


def drop_counts(config: MutableMapping[str, Any]) -> None:
    """Let the content of a config.json say that its folder has no such head."""
    text = _text_of(config)
    for part in (config, text):
        for key in MTP_COUNTS:
            if part.get(key):
                cast("MutableMapping[str, Any]", part)[key] = 0


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that is about the language model."""
    text = config.get("text_config")
    return cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else config
