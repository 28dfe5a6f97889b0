"""Folders of runs that never ran, and the elements of the pages that are made of them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine_trainer.telemetry.rollouts import SCHEMA, column, path_of

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "<!--<script>",
    "]]>&lt;b>&amp;\u2028",
    "</ScRiPt ><svg/onload=alert(3)>",
    "'\"><b onclick=alert(4)>",
)


class Parser(HTMLParser):
    """The elements of a page as a browser finds them, and the contents of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def parsed(page: Path) -> Parser:
    parser = Parser()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def data_of(page: Path) -> dict[str, object]:
    """The embedded JSON of a page by the name of its element."""
    parser = parsed(page)
    scripts = [attributes for tag, attributes in parser.elements if tag == "script"]
    return {
        str(attributes["id"]): json.loads(text)
        for attributes, text in zip(scripts, parser.scripts, strict=True)
        if attributes.get("type") == "application/json"
    }


def row(step: int, group: int, sample: int, **values) -> dict:
    text = str(values.get("text", "abc"))
    n = len(text)
    floats = np.linspace(-1.0, 1.0, n, dtype=np.float32)
    return {
        "step": step,
        "group": group,
        "sample": sample,
        "time": 1.0,
        "problem": f"train.jsonl:{group + 1}",
        "question": "q",
        "prompt": "p",
        "prompt_tokens": [1],
        "images": [],
        "answer": None,
        "text": text,
        "tokens": list(range(n)),
        "token_texts": list(text),
        "loss_mask": [True] * (n - 1) + [False],
        "rollout_log_probs": floats,
        "old_log_probs": floats,
        "ref_log_probs": None,
        "entropy": floats,
        "advantages": np.full(n, 0.5, dtype=np.float32),
        "weight_versions": [step] * n,
        "routed_experts": None,
        "teacher_prompt_tokens": None,
        "teacher_log_probs": None,
        "reward": float(sample),
        "shaped_reward": float(sample),
        "reward_parts": [("exact", float(sample))],
        "correct": False,
        "found_answer": None,
        "finish_reason": "stop",
        "tool_calls": [],
        "error": "",
        "learned": True,
        "seconds": [("train", 1.0)],
    } | values


def write_rollouts(run: Path, rows: list[dict]) -> None:
    folder = run / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    for step in sorted({r["step"] for r in rows}):
        mine = [r for r in rows if r["step"] == step]
        arrays = [column(name, [r[name] for r in mine]) for name in SCHEMA.names]
        pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), path_of(folder, step))


def completion(correct: bool, text: str = "") -> dict:
    return {
        "text": text,
        "reward": float(correct),
        "correct": correct,
        "answer": None,
        "tokens": len(text),
        "finished": True,
    }


def write_evaluation(folder: Path, step: int, verdicts: list[list[bool]], **values) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"problem": i, "question": f"question {i}", "answer": "1"}
        | {"completions": [completion(c) for c in some]}
        | values
        for i, some in enumerate(verdicts)
    ]
    (folder / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


class Element:
    """An element of a page with its children, which are elements and texts."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.children: list[Element | str] = []

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def all(self, tag: str, name: str = "") -> list[Element]:
        """All elements below this one with this tag, and with this name among their classes."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if child.tag == tag and (
                    not name or name in (child.attributes.get("class") or "").split()
                ):
                    found.append(child)
                found += child.all(tag, name)
        return found


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag != "meta":
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].children.append(data)


def tree_of(page: Path) -> Element:
    """The elements of a page, each of which it ends."""
    tree = _Tree()
    tree.feed(page.read_text(encoding="utf-8"))
    (root,) = tree.open
    return root


def write_metrics(run: Path, rows: list[dict]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
