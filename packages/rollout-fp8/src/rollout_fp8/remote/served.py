"""Settings of a rollout's server, which a client that only connects compares with its own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from engine_api.config import LoraConfig, ModelSource, near_matches
from engine_api.errors import ConfigError
from engine_api.rollout import Rollout
from rollout_fp8.options import Options
from rollout_fp8.remote.messages import dumps

# Defaults that a client uses for arguments that it was not given: they say how weights are sent,
# and where completions end.
DEFAULTS: Mapping[str, Any] = {
    "quantization": "none",
    "lora": None,
    "eos_token_ids": (),
    "scales": Options().scales,
    "audit": Options().audit,
}


def default_dtype(name: str) -> str:
    """Return the dtype of a rollout that is given none.

    Its class need not be importable where its clients are.
    """
    return "bfloat16" if name == "sglang" else "float32"


def settings_of(rollout: Rollout, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for /health.

    They are the arguments of the rollout that is registered as ``name``, its class's defaults for
    the others, and its options.
    """
    parameters = inspect.signature(type(rollout)).parameters.values()
    own = {p.name: p.default for p in parameters if p.default is not p.empty}
    options = getattr(rollout, "options", None)
    if is_dataclass(options) and not isinstance(options, type):
        own |= asdict(options)
    return {"name": name, "arguments": _plain({**_defaults(name), **own, **arguments})}


def require_same(
    url: str, name: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Raise ``ConfigError`` that names the settings in which a server differs."""
    there: Mapping[str, Any] = settings.get("arguments", {})
    wanted = _plain({**_defaults(name), **arguments})
    differ = {
        key: (value, there.get(key))
        for key, value in wanted.items()
        if key not in there or there[key] != value
    }
    unknown = [key for key in differ if key not in there]
    if settings.get("name") != name:
        differ = {"name": (name, settings.get("name")), **differ}
    if not differ:
        return
    why = [
        f"{key}: expected {mine!r}, got {theirs!r} from the server"
        for key, (mine, theirs) in differ.items()
        if key not in unknown
    ]
    why += [
        f"{key} is not an argument that it takes ({near_matches(key, list(there))})"
        for key in unknown
    ]
    raise ConfigError(
        "rollout.options.url",
        f"the server at {url} was created with other arguments",
        why="; ".join(why),
        remedy="give the run the server's own arguments, "
        "or leave url out: then a server is started",
    )


def _defaults(name: str) -> dict[str, Any]:
    return {"dtype": default_dtype(name), **DEFAULTS}


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON that is equal where the meaning is.

    Of the model only the fields remain that identify it.
    """
    plain: dict[str, Any] = {key: _fields(value) for key, value in arguments.items()}
    plain["eos_token_ids"] = sorted(set(plain["eos_token_ids"]))
    if plain["lora"] is not None:
        # A field that a server was not given is the default.
        plain["lora"] = asdict(LoraConfig(**plain["lora"]))
    if "model" in plain:
        model: Mapping[str, Any] = plain["model"]
        folder = Path(model["path"])
        plain["model"] = {
            "path": str(folder.resolve()) if folder.is_dir() else model["path"],
            "revision": model.get("revision"),
            "config_overrides": model.get("config_overrides", {}),
        }
    return json.loads(dumps(plain))


def _fields(value: Any) -> Any:
    return asdict(value) if isinstance(value, ModelSource | LoraConfig) else value
