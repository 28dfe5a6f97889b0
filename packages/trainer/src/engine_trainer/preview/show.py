"""The text of ``engine-train data``, for a terminal of at least 60 columns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import mean

from engine_api.errors import ConfigError
from engine_trainer.preview.collect import Fate, Part, Preview, PreviewRow
from engine_trainer.utils.terminal import escape, paint, wrap

MARGIN = 2
NARROWEST = 60
# Characters of a part that are shown of one row among several; `--row` shows all of them.
SHOWN = 1500
# Numbers of rows that are listed for each reason.
LISTED = 8
BINS = 10
LEARNED, MASKED = "+", "·"
# What happens to rows, in the order of the summary: words, style.
FATES: dict[Fate, tuple[str, str]] = {
    "cut": ("cut", "yellow"),
    "dropped": ("dropped", "yellow"),
    "refused": ("would end the run before it begins", "red"),
}
LEGENDS = {
    "rl": f"{MASKED} the prompt, which the rollout continues",
    "rm": f"{LEARNED} the token that is scored   {MASKED} all other tokens",
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """The width of lines, and whether they are colored."""

    width: int
    color: bool

    def paint(self, text: str, *styles: str) -> str:
        """Return the text, painted if lines are colored."""
        return paint(text, *styles) if self.color else text


def show(preview: Preview, *, rows: int, row: int | None, width: int, color: bool) -> Iterator[str]:
    """Yield the lines: some rows as they are trained on, their lengths, and what is left out.

    Control characters of the data are escaped in every line.

    Args:
        preview: the rows.
        rows: number of rows to show, the first that are trained on.
        row: number of the one row to show in full in place of these, from 1.
        width: columns of the terminal.
        color: use ANSI colors. The marks at the margin are the same with and without.

    Raises:
        ConfigError: ``rows`` is negative, or there is no row of the number ``row``.
    """
    style = Style(width=max(NARROWEST, width), color=color)
    if rows < 0:
        raise ConfigError(
            "--rows",
            f"expected a number of at least 0, got {rows}",
            remedy="give the number of rows to show; 0 shows the lengths and the summary alone",
        )
    if row is not None and not 1 <= row <= len(preview.rows):
        raise ConfigError(
            "--row",
            f"expected a number from 1 to {len(preview.rows)}, got {row}",
            remedy="give the number of a row, counted over all files",
        )
    yield from _header(preview, style)
    if row is not None:
        yield from _row(preview, row, style, whole=True)
    else:
        kept = [i for i, one in enumerate(preview.rows, start=1) if one.fate in ("kept", "cut")]
        for number in kept[:rows]:
            yield from _row(preview, number, style, whole=False)
    yield from _lengths(preview, style)
    yield from _summary(preview, style)


def _header(preview: Preview, style: Style) -> Iterator[str]:
    files = list(dict.fromkeys(row.file for row in preview.rows))
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    name = getattr(preview.tokenizer.tokenizer, "name_or_path", "")
    template = "with" if preview.tokenizer.has_template else "without"
    yield from _text(
        f"{preview.task}: {_count(len(preview.rows), 'row')} of {files[0]}{more}", style, "bold"
    )
    yield from _text(f"tokenizer {name}, {template} a chat template", style)
    if preview.bound.tokens is not None:
        yield from _text(f"limit {preview.bound.tokens:,} tokens: {preview.bound.reason}", style)
    if preview.unknown_context:
        yield from _text(f"the model's context is not known: {preview.unknown_context}", style)
    legend = LEGENDS.get(preview.task, f"{LEARNED} tokens that carry loss   {MASKED} masked tokens")
    yield from _text(legend, style)


def _row(preview: Preview, number: int, style: Style, *, whole: bool) -> Iterator[str]:
    row = preview.rows[number - 1]
    # The two documents of a pair each say their own size.
    sizes = _size(preview, row.length, row.learned) if len(row.parts) == 1 else ""
    yield ""
    yield from _text(f"row {number}   {_place(row)}{sizes}", style, "bold")
    if row.fate != "kept":
        verb = {"cut": "cut", "dropped": "dropped", "refused": "refused"}[row.fate]
        yield from _text(f"{verb}: {row.reason}", style, FATES[row.fate][1])
        yield from _details(row, style)
    before: Part | None = None
    for part in row.parts:
        if len(row.parts) > 1:
            size = _size(preview, len(part.tokens), sum(part.learned))
            yield from _text(part.title + size, style, "bold")
        yield from _tokens(preview, part, before, style, whole=whole)
        before = part
    if preview.task == "rl" and row.parts:
        answer = "no answer" if row.answer is None else f"answer: {row.answer}"
        yield from _text(answer.replace("\n", "⏎"), style)
    if preview.task == "kto" and row.parts:
        yield from _text(f"label: {row.parts[0].title}", style)


def _size(preview: Preview, tokens: int, learned: int) -> str:
    """Return the words of a size, behind blanks."""
    more = f", {learned:,} learned" if preview.task in ("sft", "dpo", "kto") else ""
    return f"   {_count(tokens, 'token')}{more}"


def _tokens(
    preview: Preview, part: Part, before: Part | None, style: Style, *, whole: bool
) -> Iterator[str]:
    """Yield the text of a part, in runs of tokens with the same mask.

    ``before`` is the part above; the masked beginning that is equal to its own is not repeated.
    """
    start = 0 if before is None else _shared(before, part)
    if start:
        yield from _text(f"… {_count(start, 'token')} as above", style, "dim")
    left = math.inf if whole else SHOWN
    at = start
    for learned, group in groupby(part.learned[start:]):
        end = at + sum(1 for _ in group)
        text = _fold_images(preview, _decode(preview, part.tokens, at, end))
        at = end
        shown = text if len(text) <= left else text[: int(left)]
        yield from _run(shown, style, learned=learned)
        left -= len(shown)
        if len(shown) < len(text) or (left <= 0 and at < len(part.tokens)):
            rest = len(part.tokens) - at
            more = f" and {_count(rest, 'token')} behind it" if rest else ""
            cut = len(text) - len(shown)
            yield from _text(f"… {cut:,} more characters{more}: --row shows all", style, "dim")
            return


def _shared(before: Part, part: Part) -> int:
    """Return the number of first tokens, all masked, that two parts have in common."""
    both = zip(before.tokens, part.tokens, before.learned, part.learned, strict=False)
    count = 0
    for left, right, *learned in both:
        if left != right or any(learned):
            break
        count += 1
    return count


def _decode(preview: Preview, tokens: Sequence[int], start: int, end: int) -> str:
    """Return the text of some tokens of a document, special ones included.

    Some tokenizers leave out a blank before the first token, so the text is the difference of two.
    """

    def text(ids: Sequence[int]) -> str:
        return str(preview.tokenizer.tokenizer.decode(list(ids), skip_special_tokens=False))

    former, whole = text(tokens[:start]), text(tokens[:end])
    return whole.removeprefix(former) if whole.startswith(former) else text(tokens[start:end])


def _fold_images(preview: Preview, text: str) -> str:
    """Return the text with the tokens of each image or video as one of them, and their number."""
    for number in (preview.tokenizer.image_token, preview.tokenizer.video_token):
        if number is None:
            continue
        token = preview.tokenizer.tokenizer.convert_ids_to_tokens(number)
        text = re.sub(
            f"(?:{re.escape(token)})+",
            lambda found, token=token: f"{token} × {len(found[0]) // len(token)}",
            text,
        )
    return text


def _run(text: str, style: Style, *, learned: bool) -> Iterator[str]:
    """Yield the lines of a run, each with the mark of its mask at the margin."""
    mark = " " * MARGIN + (LEARNED if learned else MASKED) + " "
    lines = escape(text).split("\n")
    for number, line in enumerate(lines):
        last = number == len(lines) - 1
        if last and not line:
            # The run ends with a line break, which has been shown.
            return
        # Blanks at the end of a line would not be seen.
        blanks = len(line) - len(line.rstrip(" "))
        visible = line[: len(line) - blanks] + "␣" * blanks + ("" if last else "⏎")
        for piece in wrap(visible, style.width - len(mark)):
            yield style.paint(mark + piece, "green" if learned else "dim")


def _lengths(preview: Preview, style: Style) -> Iterator[str]:
    """Yield a histogram of the rows' lengths, before any is cut or left out."""
    lengths = sorted(row.length for row in preview.rows if row.length)
    if not lengths:
        return
    limit = preview.bound.tokens
    of = " of the longer document" if preview.task in ("dpo", "rm") else ""
    yield ""
    yield from _text(f"lengths in tokens{of}", style, "bold")
    at = {share: lengths[min(len(lengths) - 1, int(share * len(lengths)))] for share in (0.5, 0.9)}
    yield from _text(
        f"smallest {lengths[0]:,}   median {at[0.5]:,}   mean {mean(lengths):,.1f}   "
        f"90 % below {at[0.9] + 1:,}   largest {lengths[-1]:,}",
        style,
    )
    edges = bins(lengths[0], lengths[-1], at[0.5])
    counts = [sum(low <= n < high for n in lengths) for low, high in edges]
    digits = len(f"{edges[-1][1] - 1:,}")
    size = len(f"{max(counts):,}")
    room = style.width - MARGIN - 2 * digits - size - 8
    for (low, high), count in zip(edges, counts, strict=True):
        over = 0 if limit is None else sum(low <= n < high and n > limit for n in lengths)
        bar = math.ceil(room * count / max(counts))
        dark = bar - math.ceil(bar * over / count) if count else 0
        label = f"{low:>{digits},} – {high - 1:>{digits},}  {count:>{size},}  "
        light = style.paint("░" * (bar - dark), "yellow") if bar > dark else ""
        yield (" " * MARGIN + label + "█" * dark + light).rstrip()
    if limit is not None and lengths[-1] > limit:
        yield from _text(f"░ longer than the limit of {limit:,}", style)


def bins(smallest: int, largest: int, median: int) -> list[tuple[int, int]]:
    """Return the intervals [low, high) of a histogram of lengths.

    They have one width, or where the largest is far from the median double from one to the next.
    """
    if largest > BINS * median:
        low = 1 << (smallest.bit_length() - 1)
        edges = [low]
        while edges[-1] <= largest:
            edges.append(2 * edges[-1])
    else:
        wanted = max(1, math.ceil((largest - smallest + 1) / BINS))
        scale = 10 ** (len(str(wanted)) - 1)
        width = next(scale * step for step in (1, 2, 5, 10) if scale * step >= wanted)
        edges = list(range(smallest // width * width, largest + 1, width))
        edges.append(edges[-1] + width)
    return list(pairwise(edges))


def _summary(preview: Preview, style: Style) -> Iterator[str]:
    rows = preview.rows
    trained = [row for row in rows if row.fate in ("kept", "cut")]
    tokens = sum(len(part.tokens) for row in trained for part in row.parts)
    learned = sum(row.learned for row in trained)
    yield ""
    share = f", {learned:,} of them learned ({learned / tokens:.1%})" if tokens and learned else ""
    share = share if preview.task in ("sft", "dpo", "kto") else ""
    yield from _text(
        f"{len(trained):,} of {_count(len(rows), 'row')} can be trained on: "
        f"{_count(tokens, 'token')}{share}",
        style,
        "bold",
    )
    if preview.task == "rl" and (blank := sum(row.answer is None for row in trained)):
        yield from _text(f"{_count(blank, 'row')} without an answer", style)
    for fate, (words, color) in FATES.items():
        for reason, found in _by_reason(rows, fate):
            head = f"{_count(len(found), 'row')} {words}"
            yield from _text(f"{head}: {reason}", style, color)
            listed = ", ".join(f"{number:,}" for number in found[:LISTED])
            more = ", …" if len(found) > LISTED else ""
            first = rows[found[0] - 1]
            label, which = ("row", "") if len(found) == 1 else ("rows", "the first: ")
            yield from _text(f"  {label} {listed}{more} ({which}{_place(first)})", style)
            yield from _details(first, style)


def _details(row: PreviewRow, style: Style) -> Iterator[str]:
    """Yield the lines of a row's error after the first, as the run would print them."""
    for line in str(row.error or "").split("\n")[1:]:
        yield from _text(line, style)


def _by_reason(rows: Sequence[PreviewRow], fate: Fate) -> list[tuple[str, list[int]]]:
    """Return the numbers of the rows of a fate by reason, the most frequent reason first."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows, start=1):
        if row.fate == fate:
            found.setdefault(row.reason, []).append(number)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _place(row: PreviewRow) -> str:
    return f"{Path(row.file).name}:{row.number}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _text(text: str, style: Style, *styles: str) -> Iterator[str]:
    """Yield a text of one paragraph, wrapped to the width."""
    text = escape(text, keep="")
    indent = len(text) - len(text.lstrip(" "))
    for number, piece in enumerate(wrap(text[indent:], style.width - indent - MARGIN)):
        pad = " " * (indent + (MARGIN if number else 0))
        yield pad + (style.paint(piece.rstrip(), *styles) if styles else piece.rstrip())
