"""The trained model on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_api.errors import ConfigError
from engine_trainer.utils.hf_models import first_line

KEY = "run.push_to_hub"


def create_repository(name: str) -> None:
    """Create the repository ``owner/name``, private, where there is none.

    The call before the first step finds out whether the name is right and the token may write.

    Raises ``ConfigError`` with the hub's reason.
    """
    from huggingface_hub import create_repo

    _ask_hub(
        lambda: create_repo(name, private=True, exist_ok=True),
        f"the hub gives no repository {name!r} to write to",
        "check the name (owner/name) and HF_TOKEN or `hf auth login`, whose token must have the "
        f"right to write; {KEY}=null pushes nothing",
    )


def push_folder(folder: Path, name: str, message: str) -> str:
    """Upload the files of a folder as one commit, and return the commit's address.

    Raises ``ConfigError`` with the hub's reason.
    """
    from huggingface_hub import upload_folder

    found: list[str] = []
    _ask_hub(
        lambda: found.append(
            upload_folder(repo_id=name, folder_path=folder, commit_message=message).commit_url
        ),
        f"the model was not pushed to {name!r}",
        f"the run is complete, and the model is in {folder}: the same command pushes it again, and "
        f"so does `hf upload {name} {folder}`",
    )
    return found[0]


def _ask_hub(call: Callable[[], object], what: str, remedy: str) -> None:
    try:
        call()
    # Without an answer, the class of the error depends on the release of the hub's library.
    except Exception as error:
        raise ConfigError(KEY, what, why=first_line(error), remedy=remedy) from error
