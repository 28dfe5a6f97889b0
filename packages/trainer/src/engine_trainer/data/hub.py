"""Data sets of the Hugging Face hub by name: ``hf://datasets/owner/name[@revision][/folder or file]``.

``huggingface_hub`` brings the files into its cache once; later, and offline, they are read from there.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine_trainer.errors import DataError

PREFIX = "hf://"
_NAME = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[^/]+))?(/(?P<inside>.+?))?/?"
)
_REPO = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def from_hub(source: str, suffixes: tuple[str, ...]) -> Path:
    """The local file or folder of a hub name; only files with one of ``suffixes`` are brought.

    Raises ``DataError``: a malformed name, and with its cause what the hub says, or that it cannot be reached.
    """
    from huggingface_hub import snapshot_download

    found = _NAME.fullmatch(source)
    if found is None:
        raise DataError(
            "not a name of a data set on the hub",
            file=source,
            remedy="write hf://datasets/owner/name[@revision][/folder]",
        )
    repo, inside = found["repo"], found["inside"] or ""
    wanted = (
        [inside]
        if inside.endswith(suffixes)
        else [f"{inside}/*{s}" if inside else f"*{s}" for s in suffixes]
    )
    try:
        root = Path(
            snapshot_download(
                repo, repo_type="dataset", revision=found["revision"], allow_patterns=wanted
            )
        )
    except (OSError, ValueError) as error:  # all of huggingface_hub's errors are one of the two
        raise DataError(
            "the hub does not give this data set",
            file=source,
            why=(str(error).strip().splitlines() or [""])[0],
            remedy=f"check name and access; without network: `hf download {repo} --repo-type dataset` where there is one, "
            "and HF_HOME to a copy of that cache, or data.source to the folder",
        ) from error
    return root / inside


def hint(path: Path) -> str:
    """A remedy for a path that is not there but looks like a hub name; empty otherwise."""
    return f"for the hub write hf://datasets/{path}" if _REPO.fullmatch(str(path)) else ""
