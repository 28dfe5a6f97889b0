"""The location of a Hugging Face model, and the content of its ``config.json``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, kind_of
from engine_api.hf_config import read_hf_config
from engine_api.hf_noise import noise_rates
from engine_api.hf_overrides import override
from engine_trainer.config.sections import EngineSection

MODEL_KEY = "engine.model.path"

CONFIG = "config.json"
# A cache that has one of these files has been filled.
_ANY_OF = (CONFIG, "tokenizer.json", "tokenizer_config.json")


def hf_config(
    source: ModelSource, *, key: str = MODEL_KEY, what: str = "", remedy: str = ""
) -> Any:
    """Return transformers' configuration of a model with its overrides, as the engines read it.

    Args:
        source: the location of the model, and its overrides.
        key: the configuration key of the path, for errors.
        what: the text of an error; the default says that the file cannot be used.
        remedy: the remedy of an error.

    Raises ``ConfigError``.
    """
    _require_config(source.path, key)
    config = read_hf_config(
        source.path,
        field=key,
        what=what,
        remedy=remedy or "name a folder with config.json, or a hub id",
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
    )
    override(config, source.config_overrides, field=f"{key.removesuffix('.path')}.config_overrides")
    return config


def text_config(source: ModelSource) -> Any:
    """Return the configuration of the model's language part. Raises ``ConfigError``."""
    require_source(source.path, MODEL_KEY, source.revision)
    what = f"no model that transformers knows at {source.path!r}"
    return hf_config(source, what=what, remedy=_inside(Path(source.path))).get_text_config()


def attends_uncompiled(text: Any) -> bool:
    """Return whether a text configuration has attention that engines do not compile.

    Its scores have a cap, as in Gemma 2, or some heads are wider than 256, as in Gemma 4.
    """
    widths = [value for key, value in text.to_dict().items() if key.endswith("head_dim")]
    is_wide = any(isinstance(width, int) and width > 256 for width in widths)
    return is_wide or bool(getattr(text, "attn_logit_softcapping", None))


def random_rates(source: ModelSource) -> dict[str, float]:
    """Return the dropout and jitter rates above 0 in ``config.json``, by key."""
    return noise_rates(text_config(source))


def draws_dropout(section: EngineSection) -> bool:
    """Return whether an update computes different log-probs than inference does.

    The reason is dropout or jitter in the model, or dropout in its adapter.
    """
    if section.lora is not None and section.lora.dropout > 0:
        return True
    return bool(random_rates(section.model))


def require_source(path: str, key: str, revision: str | None = None) -> None:
    """Raise ``ConfigError`` for a model that cannot be found.

    Such a ``path`` is no folder and not in the hub's cache, and the hub does not have it or cannot
    be reached. transformers finds that out, too, but asks five times for each of several files,
    which takes most of a minute without a network. A ``config.json`` in the folder must be whole.
    """
    from huggingface_hub import try_to_load_from_cache

    _refuse_file(path, key)
    if os.path.isdir(path):  # noqa: PTH112 - it is False, not an error, for a path that is too long
        require_json(path, key)
        return
    if path.startswith(("/", ".", "~")):  # no hub id begins with these
        raise ConfigError(
            key, f"there is no folder {path!r}", remedy="correct the path; ~ is not expanded"
        )
    _require_name(path, key)
    if not any(
        isinstance(try_to_load_from_cache(path, name, revision=revision), str) for name in _ANY_OF
    ):
        _require_on_hub(path, key, revision)


def require_json(path: str, key: str) -> None:
    """Raise ``ConfigError`` for a ``config.json`` in the folder ``path`` that is no JSON object.

    A folder without the file, and the name of a hub, are left to other checks.
    """
    file = Path(path) / CONFIG
    if not os.path.isfile(file):  # noqa: PTH113 - as above
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    # The error of bad UTF-8 is a ValueError, and a deeply nested text ends Python's stack.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            key,
            f"{file} cannot be read as JSON",
            why=first_line(error),
            remedy="fetch the file again (a truncated copy gives this error)",
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            key,
            f"{file}: expected an object, got {kind_of(content)}",
            remedy="fetch the file again, or name the folder of a model",
        )


def _refuse_file(path: str, key: str) -> None:
    if not os.path.isfile(path):  # noqa: PTH113 - it is False, not an error, for a path that is too long
        return
    folder = Path(path).parent
    raise ConfigError(
        key,
        f"expected a folder, got the file {path!r}",
        why=f"a model is a folder with {CONFIG}, its weights and its tokenizer",
        remedy=f"name {folder}" if (folder / CONFIG).is_file() else "name the model's folder",
    )


def _require_config(path: str, key: str) -> None:
    """Raise ``ConfigError`` for a path that is a file, and for a folder without ``config.json``."""
    _refuse_file(path, key)
    if os.path.isdir(path) and not (Path(path) / CONFIG).is_file():  # noqa: PTH112 - as above
        there = ", ".join(sorted(file.name for file in Path(path).iterdir())[:8]) or "nothing"
        raise ConfigError(
            key,
            f"no {CONFIG} in the folder {path!r}",
            why=f"it has {there}",
            remedy=_inside(Path(path))
            or f"copy the model's {CONFIG} into it, or name another folder or a hub id",
        )
    require_json(path, key)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or the error's type if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _require_name(path: str, key: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError as error:
        raise ConfigError(
            key,
            f"there is no folder {path!r}, and no model on the hub has such a name",
            why=first_line(error),
            remedy="correct the path (it is relative to the working directory), or give owner/name",
        ) from error


def _require_on_hub(path: str, key: str, revision: str | None) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    remedy = "correct the name; a folder's path is relative to the working directory"
    for last in (False, True):
        try:
            get_hf_file_metadata(hf_hub_url(path, _ANY_OF[0], revision=revision))
        except GatedRepoError:
            return  # transformers says how to get access
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise ConfigError(
                key,
                f"there is no folder {path!r}, and no such model on the hub",
                why=first_line(error),
                remedy=f"{remedy}; a private one needs `hf auth login`",
            ) from error
        except (HfHubHTTPError, OfflineModeIsEnabled):
            # The hub was reached, or must not be asked. transformers says what is wrong.
            return
        # Without an answer, the class of the error depends on the release of the hub's library.
        except Exception as error:
            if last:
                raise ConfigError(
                    key,
                    f"there is no folder {path!r}, and the hub cannot be reached",
                    why=first_line(error),
                    remedy=f"{remedy}; without a network, download it on a machine that has one "
                    f"(`hf download {path}`)",
                ) from error
            time.sleep(1)  # one lost packet must not end a run
        else:
            return


def _inside(folder: Path) -> str:
    """Return a remedy for a run's folder with a model in it and for an adapter's, or ""."""
    if (folder / "hf" / CONFIG).is_file():
        return f"name {folder / 'hf'}, the model that this run has saved"
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter: name the model that it belongs to, or a merged export"
    return ""
