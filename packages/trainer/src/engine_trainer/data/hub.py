"""Data sets of the Hugging Face hub by name.

A name has the form ``hf://datasets/owner/name[@revision][/folder or file]``. ``huggingface_hub``
downloads the files into its cache once. Later runs, and runs without network, read the cache.
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
    """Return the local file or folder of a hub name.

    Only files with one of ``suffixes`` are downloaded.

    Raises:
        DataError: the name is malformed, or the hub refuses the data set or cannot be reached (with
            the hub's error as its cause).
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
    # All of huggingface_hub's errors derive from one of these two.
    except (OSError, ValueError) as error:
        raise DataError(
            "the hub does not provide this data set",
            file=source,
            why=(str(error).strip().splitlines() or [""])[0],
            remedy="check name and access; "
            f"without network: `hf download {repo} --repo-type dataset` where there is one, "
            "and HF_HOME to a copy of that cache, or data.source to the folder",
        ) from error
    return root / inside


def hint(path: Path) -> str:
    """Return a remedy for a missing path that looks like a hub name, or an empty text if not."""
    return f"for the hub write hf://datasets/{path}" if _REPO.fullmatch(str(path)) else ""
