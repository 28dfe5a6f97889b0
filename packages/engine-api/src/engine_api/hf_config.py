"""Reading of a model's ``config.json`` through transformers, with a check of its sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from engine_api.errors import ConfigError
from engine_api.hf_layers import EXPERT_KEYS

# Keys for the size of a model, with the least and the largest plausible value.
_SIZES = {
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "moe_intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, 4096),
    "num_attention_heads": (1, 2**14),
    "num_key_value_heads": (1, 2**14),
    "head_dim": (1, 2**14),
    "vocab_size": (1, 2**26),
    "max_position_embeddings": (1, 2**40),
    "num_experts_per_tok": (0, 2**14),
    **dict.fromkeys(EXPERT_KEYS, (0, 2**14)),
}
# Experts of all layers together. The largest model of 2026 has 23,424, and a table of all names
# beyond this bound takes gigabytes before the first file is looked at.
_MOST_EXPERTS = 2**18
# Keys of counts for which transformers' classes of configurations make a list (the type of each
# layer) or a mapping (the name of each label) while they read: 10**7 labels took 6 GB.
_COUNTED = re.compile(r"(.*_)?(layers?|labels)|first_k_dense_replace|attention_types")
# No model has nearly as many layers or labels, and lists of this length take a second.
_MOST_COUNTED = 2**17
# Families whose checkpoints give the width of a partial rotation as rotary_dim, which transformers
# before 5.18 does not read (huggingface/transformers#48241). It then rotates whole heads.
_ROTATED_IN_PART = frozenset({"minimax_m2"})


def read_hf_config(
    path: str,
    *,
    field: str = "model.path",
    what: str = "",
    remedy: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return a model's configuration as it is in the file, except MiniMax-M2's ``rotary_dim``.

    transformers before 5.18 passes over that key, which is applied here. ``hf_overrides`` changes
    the configuration later.

    Args:
        path: the folder, or the hub id.
        field: the configuration key that holds the path, for errors.
        what: text of the error; "" says that the file cannot be used.
        remedy: advice, for errors.
        revision: revision of the hub id; None is the default branch.
        trust_remote_code: permission for code of the folder to read the file.

    Raises:
        ConfigError: the file is absent or damaged, of a family that transformers does not know,
            has sizes that no model has, or asks for a rotation that transformers does not compute.
    """
    from transformers import AutoConfig, PreTrainedConfig

    file = f"{path}/config.json"
    try:
        # The annotations of both functions are partial.
        get_content: Any = PreTrainedConfig.get_config_dict  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        written, _ = get_content(path, revision=revision)
        check_counts(written, file, field)
        read: Any = AutoConfig.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        config: Any = read(path, revision=revision, trust_remote_code=trust_remote_code)
        content: Any = config.get_text_config()
    except ConfigError:
        raise
    # Each family's own code reads the file, and may raise anything on unexpected values.
    except Exception as error:
        raise ConfigError(
            field, what or f"{file} cannot be used", why=_first_line(error), remedy=remedy
        ) from error
    if not isinstance(content, PreTrainedConfig):
        raise ConfigError(
            field, f"{file}: expected a mapping as text_config, got {content!r}", remedy=remedy
        )
    check_sizes(content, file, field)
    _apply_rotary_dim(content, file, field)
    return config


def _apply_rotary_dim(text: Any, file: str, field: str) -> None:
    """Rotate as much of each head of a MiniMax-M2 as the ``rotary_dim`` of the file says.

    transformers keeps that key, even declares it in some classes, and computes nothing of it where
    RoPE has parameters. Servers rotate that part of each head alone: log-probs then differ by more
    than a nat. Code outside transformers may read the key itself, and is left alone.

    Raises:
        ConfigError: transformers rotates whole heads in a family other than MiniMax-M2.
    """
    width = _size(text, "rotary_dim")
    head = _head_size(text)
    from_transformers = type(text).__module__.startswith("transformers.")
    if not from_transformers or type(width) is not int or head is None or width >= head:
        return
    # GPT-J and CodeGen read the key, and have no parameters of RoPE.
    parts = [part for part in rope_parts(text).values() if part]
    if all("partial_rotary_factor" in part for part in parts):
        return
    if text.model_type not in _ROTATED_IN_PART:
        raise ConfigError(
            field,
            f"{file} is read as a rotation of {width} of each head's {head} dimensions "
            "(rotary_dim)",
            why=f"transformers does not compute that in a {text.model_type}, and rotates "
            f"all {head}",
            remedy=f"use a model of another family, or set rotary_dim in config.json to {head} if "
            "the model was trained with a rotation of whole heads",
        )
    # Both places are those of transformers 5.18, and reach the folders that are saved.
    text.partial_rotary_factor = width / head
    for part in parts:
        part.setdefault("partial_rotary_factor", width / head)


def rope_parts(text: Any) -> dict[str, dict[str, Any]]:
    """Return RoPE's parameters by type of layer, or under ``""`` where all layers share them.

    Types of layers without parameters are left out. A configuration without any has an empty
    mapping for all layers.
    """
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return {"": {}}
    parameters = cast("dict[str, Any]", rope)
    parts = {
        kind: cast("dict[str, Any]", part)
        for kind, part in parameters.items()
        if isinstance(part, dict)
    }
    return parts or {"": parameters}


def _head_size(text: Any) -> int | None:
    """Return the dimensions of each head, or None if the configuration does not say them."""
    head = _size(text, "head_dim")
    if head is None:
        hidden = _size(text, "hidden_size")
        heads = _size(text, "num_attention_heads")
        if type(hidden) is int and type(heads) is int:
            return hidden // heads
    return head if type(head) is int else None


def check_counts(content: Mapping[str, Any], file: str, field: str) -> None:
    """Raise ``ConfigError`` for counts of layers or labels that no model has.

    transformers would fill the memory, or never end, before it returns the configuration whose
    sizes ``check_sizes`` looks at.

    Args:
        content: what ``config.json`` or overrides of it say, as yet unread by transformers.
        file: the place of ``content``, for the error.
        field: the configuration key that holds the place, for the error.
    """
    for key, count in _counts(content):
        if count > _MOST_COUNTED:
            raise ConfigError(
                field,
                f"{file}: expected at most {_MOST_COUNTED:,} as {key}, got {count:,}",
                why="transformers would make a list of that length",
                remedy="correct the file, or fetch it again",
            )


def _counts(content: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each count of layers or labels with its key, those of parts of the model too."""
    # A stack, because a file may nest deeper than functions may call each other.
    pending: list[tuple[str, bool, Any]] = [("", False, content)]
    while pending:
        path, is_counted, value = pending.pop()
        if isinstance(value, Mapping):
            for name, part in cast("Mapping[str, Any]", value).items():
                below = f"{path}.{name}" if path else name
                pending.append((below, bool(_COUNTED.fullmatch(str(name))), part))
        elif isinstance(value, list):
            # gpt_neo has its counts in lists.
            pending += [(path, is_counted, part) for part in cast("list[Any]", value)]
        elif is_counted and type(value) is int:
            yield path, value


def check_sizes(text: Any, file: str, field: str) -> None:
    """Raise ``ConfigError`` for sizes that no model has.

    ``file`` names the file that holds them, and ``field`` the configuration key that holds its
    path, for the error.
    """
    for key, (least, most) in _SIZES.items():
        value = _size(text, key)
        sizes = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)
        for size in sizes:
            if size is not None and (type(size) is not int or not least <= size <= most):
                raise ConfigError(
                    field,
                    f"{file}: expected an integer from {least} to {most} as {key}, got {size!r}",
                    remedy="correct the file, or fetch it again",
                )
    layers = _size(text, "num_hidden_layers")
    for key in EXPERT_KEYS:
        experts = _size(text, key)
        if type(layers) is int and type(experts) is int and layers * experts > _MOST_EXPERTS:
            raise ConfigError(
                field,
                f"{file}: expected at most {_MOST_EXPERTS:,} experts in all layers, got "
                f"{layers:,} layers of {experts:,} ({key})",
                remedy="correct the file, or fetch it again",
            )
    heads = _size(text, "num_attention_heads")
    shared = _size(text, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ConfigError(
            field,
            f"{file}: {heads} attention heads cannot share {shared} key-value heads",
            remedy="set num_key_value_heads in config.json to one that divides num_attention_heads",
        )


def _size(text: Any, key: str) -> Any:
    try:
        return getattr(text, key, None)
    # transformers raises an error of no public class for a key that differs between layers.
    except Exception:  # noqa: BLE001
        return None


def unbuildable(
    config: Any, path: str, error: Exception, *, field: str = "model.path"
) -> ConfigError:
    """Return the error for a configuration from which transformers cannot build a model."""
    return ConfigError(
        field,
        f"transformers cannot build a {config.model_type} from {path}/config.json",
        why=_first_line(error),
        remedy="correct the file, or fetch it again",
    )


def require_memory(
    config: Any, path: str, need: int, free: int, *, field: str = "model.path"
) -> None:
    """Raise ``ConfigError`` if ``need`` bytes of weights are more than the ``free`` bytes."""
    if need > free:
        raise ConfigError(
            field,
            f"{path}/config.json describes a {config.model_type} of {need / 2**30:,.1f} GiB of "
            f"weights, {free / 2**30:,.1f} GiB are free",
            remedy="correct the file, spread the model over more ranks, or use a machine with "
            "more memory",
        )


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"
