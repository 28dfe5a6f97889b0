"""Rule that a server's private names are used only in its ``private.py``, with a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rollout_fp8

PACKAGE = Path(next(iter(rollout_fp8.__path__)))
PRIVATE = [PACKAGE / "vllm" / "private.py", PACKAGE / "sglang" / "private.py"]
# It calls a hook of transformers, as engine-torch does, and nothing of a server's.
OF_TRANSFORMERS = PACKAGE / "install" / "positions.py"
# A private attribute, however it is written: ruff finds `module._name`, and does not look into
# getattr.
TOUCHES = re.compile(
    r"noqa: SLF001|attr\([^()]*, \"_(?!rollout_fp8)|tokenizer_manager|post_load_weights"
)


@pytest.mark.parametrize("file", PRIVATE, ids=lambda file: file.parent.name)
def test_each_has_a_thread_or_says_that_none_is_known(file: Path) -> None:
    told = {
        node.name: ast.get_docstring(node)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for name, text in told.items():
        if text is None:  # a part of one that has
            assert name.startswith("_"), name
            continue
        if "``" in text or not name.startswith("_"):
            assert re.search(r"Upstream: .*(#\d+|no thread)", " ".join(text.split())), name


def test_no_other_file_touches_what_is_private() -> None:
    found = [
        file.relative_to(PACKAGE)
        for file in sorted(PACKAGE.rglob("*.py"))
        if file not in (*PRIVATE, OF_TRANSFORMERS) and TOUCHES.search(file.read_text())
    ]
    assert found == []
    assert len(TOUCHES.findall(OF_TRANSFORMERS.read_text())) == 1
