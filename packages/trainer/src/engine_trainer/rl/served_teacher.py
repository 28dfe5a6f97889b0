"""A client of servers that return the log-probs of a prompt, as vLLM's completions API does."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from engine_api.errors import ConfigError, EngineError
from engine_trainer.config import TeacherSection
from engine_trainer.config.secrets import LOGIN, MASK

T = TypeVar("T")
KEY = "algorithm.teacher.url"
ATTEMPTS = 4
"""Number of times that a request is made while the server is busy or cannot be reached."""
BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of HTTP after which the same request may succeed."""
PAUSE_S = 1.0
"""Seconds before the second attempt; each further pause is twice as long."""
LEAST_REST = 2.0**-23
"""Least probability of all tokens that a server does not name. Servers compute in float32, in which
the sum of the named ones is no nearer to 1, and a logarithm of 0 would be no number.
"""
PROBED = 256
"""Number of tokens of the vocabulary that are compared with the server's."""


class TeacherError(EngineError):
    """The error of a teacher's server that does not answer, or not with log-probs."""


class TeacherClient:
    """Requests to the server of ``algorithm.teacher.url``."""

    def __init__(self, section: TeacherSection) -> None:
        assert section.url is not None
        self._section = section
        self._url = str(section.url).rstrip("/")
        # For errors, which must not show a login.
        self._shown = LOGIN.sub(MASK, self._url)
        if urlsplit(self._url).scheme not in ("http", "https"):
            raise ConfigError(
                KEY,
                f"expected an address with http:// or https://, got {self._shown!r:.200}",
                remedy="give the address of the API, such as http://localhost:8000/v1",
            )
        self._model = section.served_model

    def log_probs(self, documents: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the log-probs of each document's tokens, ``[t]`` float32, 0 for the first one.

        Raises ``TeacherError``.
        """
        return [
            torch.tensor([0.0, *(values for values, _ in row)], dtype=torch.float32)
            for row in self._ask_all(documents, self._score)
        ]

    def best_tokens(
        self, documents: Sequence[Sequence[int]], vocabulary: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the ``top_k`` most likely tokens in the place of each document's tokens.

        A token that is not below ``vocabulary``, which is padding of the served model, counts as
        one of the others.

        Returns:
            For each document ids ``[t, k]`` int32, -1 where there is none, and log-probs
            ``[t, k + 1]`` float32, the last one of all other tokens together. The first token has
            none.

        Raises:
            TeacherError: the server does not answer, or with fewer tokens.
        """
        k = self._section.top_k

        def ask(model: str, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            ids = torch.full((len(tokens), k), -1, dtype=torch.int32)
            log_probs = torch.zeros(len(tokens), k + 1, dtype=torch.float64)
            for place, row in enumerate(self._rows(model, tokens, k), start=1):
                best = sorted(row.values(), reverse=True)[:k]
                if len(best) < k and len(row) < vocabulary:
                    raise TeacherError(
                        f"the server returns {len(best)} tokens, expected {k}",
                        where=f"{self._shown}/completions",
                        remedy=f"serve it with --max-logprobs {k}, or lower "
                        "algorithm.teacher.top_k",
                    )
                named = [token for token in row if row[token] >= best[-1] and token < vocabulary]
                for column, token in enumerate(named[:k]):
                    ids[place, column] = token
                    log_probs[place, column] = row[token]
                log_probs[place, k] = _log_of_rest([row[token] for token in named[:k]])
            return ids, log_probs.float()

        return self._ask_all(documents, ask)

    def _ask_all(
        self, documents: Sequence[Sequence[int]], ask: Callable[[str, Sequence[int]], T]
    ) -> list[T]:
        """Return the answer to each document, ``concurrency`` at a time."""
        model = self._find_model()
        with ThreadPoolExecutor(self._section.concurrency, thread_name_prefix="teacher") as pool:
            return list(pool.map(lambda tokens: ask(model, tokens), documents))

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ``ConfigError`` if the server's tokens have other texts than the tokenizer's.

        Tokens in equal distances over the vocabulary are compared. ``TeacherError`` says that the
        server cannot be asked.
        """
        size = len(tokenizer)
        ids = list(range(0, size, max(size // PROBED, 1)))
        row = self._score(self._find_model(), ids)
        special = set(tokenizer.all_special_ids)
        pairs = [
            (token, tokenizer.decode([token]), text)
            for token, (_, text) in zip(ids[1:], row, strict=True)
            # A server may show a special token as no text, and a part of a character in its way.
            if token not in special and text is not None
        ]
        different = [
            pair for pair in pairs if "\ufffd" not in pair[1] + pair[2] and pair[1] != pair[2]
        ]
        if not different:
            return
        token, own, served = different[0]
        raise ConfigError(
            KEY,
            "expected a model with the tokenizer of the policy, got one in which "
            f"{len(different)} of {len(pairs)} tokens have another text",
            why=f"token {token} is {own!r} here and {served!r} at {self._shown}",
            remedy="serve a model with the policy's tokenizer",
        )

    # --- inside ---------------------------------------------------------------------------------

    def _find_model(self) -> str:
        if self._model is None:
            listed = self._request("models", None)
            names = [str(one.get("id")) for one in _list_of(listed, "data")]
            if len(names) != 1:
                raise TeacherError(
                    f"expected one served model, got {', '.join(names) or 'none'}",
                    where=self._shown,
                    remedy="name one in algorithm.teacher.served_model",
                )
            self._model = names[0]
        return self._model

    def _score(self, model: str, tokens: Sequence[int]) -> list[tuple[float, str | None]]:
        """Return log-prob and text of each token after the first one."""
        found: list[tuple[float, str | None]] = []
        for token, row in zip(tokens[1:], self._answer(model, tokens, 1), strict=True):
            entry: Any = row.get(str(token))
            text = entry.get("decoded_token") if isinstance(entry, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            found.append((self._log_prob_of(entry, token), None if text is None else str(text)))
        return found

    def _rows(self, model: str, tokens: Sequence[int], k: int) -> list[dict[int, float]]:
        """Return the log-prob of each returned token, for each token after the first one."""
        return [
            {int(name): self._log_prob_of(entry, name) for name, entry in row.items()}
            for row in self._answer(model, tokens, k)
        ]

    def _answer(self, model: str, tokens: Sequence[int], k: int) -> list[Mapping[str, Any]]:
        """Return the server's entries for each token after the first one.

        They are the best ``k`` tokens and the prompt's own, by id.
        """
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
        }
        choices = _list_of(self._request("completions", body), "choices")
        rows = choices[0].get("prompt_logprobs") if choices else None
        if not isinstance(rows, list) or len(rows) != len(tokens):  # pyright: ignore[reportUnknownArgumentType]
            raise self._without_log_probs(f"expected {len(tokens)} entries, got {rows!r:.200}")
        given: list[Any] = rows[1:]
        for token, row in zip(tokens[1:], given, strict=True):
            if not _is_by_id(row):
                raise self._without_log_probs(f"token {token} has {row!r:.200}")
        return given

    def _log_prob_of(self, entry: Any, token: object) -> float:
        value = entry.get("logprob") if isinstance(entry, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self._without_log_probs(f"token {token} has {entry!r:.200}")
        return float(value)

    def _without_log_probs(self, why: str) -> TeacherError:
        return TeacherError(
            "the server does not return the log-probs of a prompt",
            where=f"{self._shown}/completions",
            why=why,
            remedy="serve the teacher with vLLM, whose completions have prompt_logprobs",
        )

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """Return the JSON of an answer. Raises ``TeacherError``."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._section.api_key is not None:
            headers["Authorization"] = f"Bearer {str.__str__(self._section.api_key)}"
        # The scheme was checked above: no file is opened.
        request = urllib.request.Request(f"{self._url}/{path}", data=data, headers=headers)  # noqa: S310
        why = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self._section.timeout_s) as answer:  # noqa: S310
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                why = f"status {error.code}: {error.read()[:500].decode(errors='replace')}"
                if error.code not in BUSY:
                    break
            # A connection that is refused, reset or silent for too long.
            except OSError as error:
                why = str(error)
            except ValueError as error:
                why = f"the answer is no JSON: {error}"
                break
        raise TeacherError(
            "the teacher's server does not answer",
            where=f"{self._shown}/{path}",
            why=why,
            remedy="start it, or correct algorithm.teacher.url, served_model or api_key",
        )


def _list_of(answer: Any, name: str) -> list[Mapping[str, Any]]:
    rows = answer.get(name) if isinstance(answer, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []  # pyright: ignore[reportUnknownVariableType]


def _is_by_id(row: object) -> bool:
    """Return whether an entry of ``prompt_logprobs`` maps token ids, as JSON's texts."""
    return isinstance(row, Mapping) and all(str(name).isdecimal() for name in row)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _log_of_rest(log_probs: Sequence[float]) -> float:
    """Return the log-prob of all other tokens together, at least that of ``LEAST_REST``."""
    return math.log(max(1.0 - math.fsum(math.exp(one) for one in log_probs), LEAST_REST))
