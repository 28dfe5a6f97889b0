"""A trained reward model as a folder that ``AutoModelForSequenceClassification`` reads.

An engine saves a value model, which has one output for each token and a head with a bias. A
sequence classifier of transformers has a head without a bias, and returns the output at the last
token that is not ``pad_token_id``.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from engine_api.config import ModelSource
from engine_api.folders import write_text
from engine_api.hf_folder import INDEX, read_index, unwritable
from engine_trainer.data import ChatTokenizer
from engine_trainer.utils.hf_models import text_config

log = logging.getLogger("engine_trainer")
BIAS = "score.bias"


def padding_token(tokenizer: ChatTokenizer, model: ModelSource) -> int:
    """Return the padding token of a reward model: the tokenizer's, or EOS.

    EOS takes the place of a padding token that the tokenizer lacks, and of one for which the model
    has no embedding.
    """
    size = getattr(text_config(model), "vocab_size", None)
    known = size is None or tokenizer.pad_token_id < size
    return tokenizer.pad_token_id if known else tokenizer.eos_token_id


def write_classifier(folder: Path, padding: int, *, centered: bool = False) -> None:
    """Change the folder of a value model to one of a sequence classifier.

    Args:
        folder: the folder, as ``Engine.save_hf`` writes it.
        padding: token to skip at the end of a sequence.
        centered: the loss reads the scores themselves, not only their differences. The bias that is
            left out then moves them, which the log says.

    Raises:
        CheckpointWriteError: the folder cannot be changed.
    """
    from safetensors import SafetensorError

    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {"pad_token_id": padding} | _architecture(config)
        # The language part of a model with several parts has a configuration of its own.
        if isinstance(inner := config.get("text_config"), dict):
            inner["pad_token_id"] = padding
        write_text(path, json.dumps(config, indent=2, sort_keys=True))
        bias = _remove_bias(folder)
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, error) from error
    if centered and bias:
        log.warning(
            "the scores of the saved reward model are %g lower than in training: a sequence "
            "classifier has no bias in its head",
            bias,
        )


def _architecture(config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the name of the class that reads the folder, by its key."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    name = names.get(str(config.get("model_type")))
    if name is None:
        log.warning(
            "transformers has no sequence classifier of type %s: "
            "AutoModelForSequenceClassification cannot read the saved reward model",
            config.get("model_type"),
        )
        return {}
    return {"architectures": [name]}


def _remove_bias(folder: Path) -> float:
    """Write the file with the head's bias again, without it, and return the bias."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    index = read_index(folder)
    path = folder / (index or {}).get(BIAS, "model.safetensors")
    with safe_open(path, framework="pt") as file:
        if BIAS not in file.keys():  # noqa: SIM118 - it is no mapping
            return 0.0
    tensors = load_file(path)
    bias = tensors.pop(BIAS)
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(path)
    if index is not None:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        del content["weight_map"][BIAS]
        content["metadata"]["total_size"] -= bias.nbytes
        write_text(folder / INDEX, json.dumps(content, indent=1))
    return float(bias)
