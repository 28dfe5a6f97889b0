"""Secrets of a configuration, which are not written to files.

They are values from the environment, and values whose name says that they are a key or a password.
A configuration is written to ``config.yaml``, the report, manifests of checkpoints, wandb and the
terminal. All of these are shown to people who need not know the secrets of the run's owner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

MASK = "***"
# A whole word of a key's name: api_key, API-KEY, apiKey.
NAMES = re.compile(
    r"(^|_)(key|apikey|token|secret|password|passwd|passphrase|"
    r"credential|authorization|bearer|cookie)s?($|_)",
    re.IGNORECASE,
)
# Borders between words without an underscore.
_WORDS = re.compile(r"-|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Names of a tokenizer's tokens, and of numbers of tokens, which are no secrets.
OF_TEXTS = re.compile(r"^(bos|eos|pad|unk|sep|cls|mask|stop)_token$|^(max|min|num)(_\w+)?_tokens$")
# The user name and password in a URL.
LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# A reference to a different key.
NODE = re.compile(r"^\$\{([\w.\[\]-]+)\}$")


class ReferenceText(str):
    """A text that a configuration takes from elsewhere (``${oc.env:NAME}``).

    Code that uses the text gets its value; files and error texts show the reference.
    """

    __slots__ = ("reference",)
    reference: str

    def __new__(cls, value: str, reference: str) -> Self:
        """Build a text with ``value`` that is written as ``reference``."""
        made = super().__new__(cls, value)
        made.reference = reference
        return made

    def __getnewargs__(self) -> tuple[str, str]:
        return str.__str__(self), self.reference

    def __repr__(self) -> str:
        return repr(self.reference)


def refer(resolved: Any, source: Any) -> Any:
    """Return ``resolved`` with every text that has a reference in ``source`` as ``ReferenceText``.

    Both are plain trees.
    """
    if isinstance(source, str) and "${" in source:
        return _referred(resolved, source)
    if isinstance(resolved, dict):
        return {name: refer(value, source[name]) for name, value in resolved.items()}
    if isinstance(resolved, list):
        return [refer(value, given) for value, given in zip(resolved, source, strict=True)]
    return resolved


def masked(value: Any, name: str = "") -> Any:
    """Return the value of the key ``name`` without secrets, as a plain tree."""
    if isinstance(value, ReferenceText):
        return value.reference
    if isinstance(value, Mapping):
        return {str(key): masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, str):
        return MASK if value and _is_secret(name) else LOGIN.sub(MASK, value)
    if isinstance(value, Sequence):
        return [masked(inner, name) for inner in value]
    return value


def _referred(resolved: Any, source: str) -> Any:
    """Return the value of a reference with its texts as ``ReferenceText``.

    The texts in a section refer to the parts of the section.
    """
    if isinstance(resolved, str):
        return resolved if resolved == source else ReferenceText(resolved, source)
    node = NODE.match(source)
    if isinstance(resolved, dict):
        return {
            name: _referred(v, f"${{{node[1]}.{name}}}" if node else MASK)
            for name, v in resolved.items()
        }
    if isinstance(resolved, list):
        return [
            _referred(v, f"${{{node[1]}[{i}]}}" if node else MASK) for i, v in enumerate(resolved)
        ]
    return resolved


def _is_secret(name: str) -> bool:
    return bool(NAMES.search(_WORDS.sub("_", name))) and not OF_TEXTS.match(name)
