"""Reading a model's ``config.json`` as transformers does, and refusing what no model can be built from."""

from __future__ import annotations

from typing import Any

from engine_api.errors import ConfigError

# Keys that say how large a model is: the least and the largest that are plausible.
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
    "num_experts": (0, 2**14),
    "num_local_experts": (0, 2**14),
    "n_routed_experts": (0, 2**14),
    "num_experts_per_tok": (0, 2**14),
}


def read_hf_config(
    path: str,
    *,
    field: str = "model.path",
    what: str = "",
    remedy: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return transformers' configuration of a folder or hub id, as the file has it (``hf_overrides`` changes it).

    Args:
        path: the folder, or the hub id.
        field: the configuration key that named it, for errors.
        what: what the error says; by default that the file is of no use.
        remedy: what to do, for errors.
        revision: of the hub id.
        trust_remote_code: whether code of the folder may read it.

    Raises:
        ConfigError: the file is absent or damaged, of a family that transformers does not know, or of sizes that no
            model has.
    """
    from transformers import AutoConfig, PreTrainedConfig

    file = f"{path}/config.json"
    try:
        # Its annotations are partial.
        read: Any = AutoConfig.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        config: Any = read(path, revision=revision, trust_remote_code=trust_remote_code)
        content: Any = config.get_text_config()
    except Exception as error:  # each family's own code reads the file, and raises anything on values that it did not expect
        raise ConfigError(
            field, what or f"{file} is of no use", why=_told(error), remedy=remedy
        ) from error
    if not isinstance(content, PreTrainedConfig):
        raise ConfigError(
            field, f"{file}: expected a mapping as text_config, got {content!r}", remedy=remedy
        )
    check_sizes(content, file, field)
    return config


def check_sizes(text: Any, file: str, field: str) -> None:
    """Raise ``ConfigError`` for sizes that no model has; ``file`` says where they stand, ``field`` which key named it."""
    for key, (least, most) in _SIZES.items():
        value = _size(text, key)
        for size in value if isinstance(value, list | tuple) else [value]:  # pyright: ignore[reportUnknownVariableType]
            if size is not None and (type(size) is not int or not least <= size <= most):  # pyright: ignore[reportUnknownArgumentType]
                raise ConfigError(
                    field,
                    f"{file}: expected an integer from {least} to {most} as {key}, got {size!r}",
                    remedy="correct the file, or fetch it again",
                )
    heads, shared = _size(text, "num_attention_heads"), _size(text, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ConfigError(
            field,
            f"{file}: {heads} attention heads cannot share {shared} key-value heads",
            remedy="set num_key_value_heads in config.json to one that divides num_attention_heads",
        )


def _size(text: Any, key: str) -> Any:
    try:
        return getattr(text, key, None)
    except Exception:  # noqa: BLE001 - transformers' own, of no public class, for a key that differs from layer to layer
        return None


def unbuildable(
    config: Any, path: str, error: Exception, *, field: str = "model.path"
) -> ConfigError:
    """Return the error of a configuration from which transformers could build no model."""
    return ConfigError(
        field,
        f"transformers builds no {config.model_type} from {path}/config.json",
        why=_told(error),
        remedy="correct the file, or fetch it again",
    )


def require_memory(
    config: Any, path: str, need: int, free: int, *, field: str = "model.path"
) -> None:
    """Raise ``ConfigError`` where ``need`` bytes of weights are more than the ``free`` ones."""
    if need > free:
        raise ConfigError(
            field,
            f"{path}/config.json describes a {config.model_type} of {need / 2**30:,.1f} GiB of weights, {free / 2**30:,.1f} GiB are free",
            remedy="correct the file, spread the model over more ranks, or use a machine with more memory",
        )


def _told(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"
