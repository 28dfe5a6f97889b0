"""The campaign changes one place of an engine's source at a time, and sees whether a case fails."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from layout import ROOT

SAMPLE = dedent('''
    """Text with 1 number."""
    import torch
    from logging import getLogger

    log = getLogger("sample")


    class Engine:
        """An engine."""

        def __repr__(self) -> str:
            return f"{1 + 2}"

        def step(self, config: dict[int, float], parts: list, *, scale: float = 1.0) -> None:
            """Do a step of 3 parts."""
            log.warning("step %d", 4)
            if config.memory.max_tokens < 8:
                raise ValueError(f"expected 8, got {5}")
            for part in parts:
                self.total += part.float() - scale
            self.pending = []
            self.comm.all_reduce(self.total, op="sum")
            self.cache.clear()
''')
RANK_0 = 'int(__import__("os").environ.get("RANK", "0")) == 0'
DEFAULTS = {"memory": {"max_tokens": "16384"}}
MINIMAL = "engine_minimal/engine.py"
# By operator and changed line: the verdict of the quick tier's cases that the test runs.
KNOWN = {
    ("keep-state", "self.model.zero_grad()", "pass"): "killed",
    (
        "swap-operands",
        "rows = torch.log_softmax(logits / temperature, dim=-1)",
        "rows = torch.log_softmax(((temperature) / (logits)), dim=-1)",
    ): "killed",
    (
        "loop-edge",
        "for ids in batch.input_ids.to(self.model.device).split(batch.lengths):",
        "for ids in list((batch.input_ids.to(self.model.device).split(batch.lengths)))[:1]:",
    ): "killed",
    # AdamW has one group of parameters here: the first is all of them.
    (
        "loop-edge",
        "for group in self.optimizer.param_groups:",
        "for group in list((self.optimizer.param_groups))[:1]:",
    ): "survived",
    # The cases give no layout.
    ("drop-raise", 'raise ConfigError("parallelism.dp_shard"', "pass"): "not-executed",
    # A row of the descriptor must have devices.
    (
        "ignore-argument",
        'backends=("minimal",), devices=("cuda", "cpu"), target=',
        "",
    ): "invalid",
}


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("mutate")


@pytest.fixture
def edits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("campaign_edits")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("campaign_lanes")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("campaign_record")


def test_each_operator_changes_its_places_and_no_others(mutate) -> None:
    found = mutate.sites(SAMPLE, "sample.py", DEFAULTS)

    assert [(one.operator, one.after) for one in found] == [
        ("ignore-argument", 'scale = 1.0 log.warning("step %d", 4)'),
        ("compare-direction", "if ((config.memory.max_tokens) > (8)):"),
        ("constant-option", "if (16384) < 8:"),
        ("negate", "if not (config.memory.max_tokens < 8):"),
        ("off-by-one", "if ((config.memory.max_tokens) <= (8)):"),
        ("off-by-one", "if config.memory.max_tokens < 9:"),
        ("off-by-one", "if config.memory.max_tokens < 7:"),
        ("drop-raise", "pass"),
        ("loop-edge", "for part in list((parts))[:1]:"),
        ("loop-edge", "for part in list((parts))[-1:]:"),
        ("loop-edge", "self.total = part.float() - scale"),
        ("dtype", "self.total += part.bfloat16() - scale"),
        ("swap-operands", "self.total += ((scale) - (part.float()))"),
        ("keep-state", "pass"),
        ("drop-call", "pass"),
        ("ignore-argument", "self.comm.all_reduce(self.total)"),
        ("rank-zero-alone", f'(self.comm.all_reduce(self.total, op="sum")) if {RANK_0} else None'),
        ("keep-state", "pass"),
    ]


def test_a_change_leaves_the_rest_of_the_file_byte_for_byte(mutate) -> None:
    source = SAMPLE.replace("An engine", "Ein Motor für 2 Geräte")
    for one in mutate.sites(source, "sample.py", DEFAULTS):
        before, changed = source.encode(), one.apply(source).encode()
        assert changed[: one.start] == before[: one.start]
        assert changed[one.start + len(one.text.encode()) :] == before[one.end :]


def test_statements_that_share_nothing_are_not_swapped(mutate) -> None:
    source = "def f(a, b):\n    a.step()\n    {}\n    return a\n"
    swapped = [
        [one.operator for one in mutate.sites(source.format(second), "f.py", {})]
        for second in ("b.step()", "b.take(a)")
    ]
    assert ["swap-statements" in operators for operators in swapped] == [False, True]


@pytest.mark.parametrize(
    ("body", "is_swapped"),
    [
        # Two calls whose results become local names change nothing for each other.
        ("q = a.turn(b)\n    k = a.turn(c)", False),
        ("q = a.pop()\n    k = a.pop()", True),
        ("a.q = a.turn(b)\n    k = a.q.turn(c)", True),
        ("a.turn(b)\n    k = a.turn(c)", True),
    ],
)
def test_looks_are_not_swapped_and_changes_are(mutate, body: str, is_swapped: bool) -> None:
    found = mutate.sites(f"def f(a, b, c):\n    {body}\n", "f.py", {})
    assert ("swap-statements" in [one.operator for one in found]) == is_swapped


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b=None):\n    del b\n    return a\n",
        "def f(a, b=None):\n    assert b is None\n    return a\n",
        "def f(a, b):\n    return zip(a, b, strict=True)\n",
        "def f(a, b):\n    return dumps(a, indent=2, sort_keys=True)\n",
        "def f(a, b):\n    return abs(a - b)\n",
        "def f(a, b):\n    return (a - b).abs()\n",
        "A = B(why='it is late', remedy='be early')\n",
        "class A:\n    timeout_s: int = 600\n",
    ],
)
def test_what_decides_nothing_is_not_changed(mutate, source: str) -> None:
    assert mutate.sites(source, "f.py", {}) == []


def test_a_collective_of_rank_0_alone_shows_on_two_ranks(mutate) -> None:
    found = mutate.sites(SAMPLE, "sample.py", DEFAULTS)
    assert {one.operator for one in found if one.world == 2} == {"rank-zero-alone"}


def test_the_same_seed_gives_the_same_list_whose_prefixes_have_every_operator(mutate) -> None:
    folder = ROOT / "packages/engine-torch/src/engine_torch"
    found = mutate.sites((folder / "head.py").read_text(), "head.py", {})
    first, again, other = (mutate.sampled(found, seed) for seed in (7, 7, 8))

    assert first == again != other
    assert mutate.sampled(found, 7, 40) == first[:40]
    assert sorted(one.place for one in other) == sorted(one.place for one in found)
    shares = [
        sum(one.operator == "off-by-one" for one in part) / len(part)
        for part in (first[:40], first)
    ]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_campaign_on_the_minimal_engine_ends_as_is_known(mutate, tmp_path: Path) -> None:
    folder = ROOT / "examples/engine-minimal/src"
    sites = [
        one
        for name in (MINIMAL, "engine_minimal/plugin.py")
        for one in mutate.sites((folder / name).read_text(), name, {})
    ]
    chosen = {}
    for (operator, before, after), verdict in KNOWN.items():
        one = next(
            site
            for site in sites
            if site.operator == operator
            and before in site.before
            and (site.after == after or not after)
        )
        chosen[f"minimal:{one.place}"] = verdict
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "tools/campaign.py", "--engine", "minimal", "--tier", "quick"]
    command += ["--world", "1", "--case", "forward.llama,train.trajectory", "--lanes", "2"]
    command += ["--work", str(tmp_path), "--out", str(out), "--only", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["id"]: row["verdict"] for row in rows} == chosen
    killed = [row for row in rows if row["verdict"] == "killed"]
    assert all(row["case"].split()[0] in ("forward.llama", "train.trajectory") for row in killed)


def test_rates_leave_out_what_cannot_be_told(record) -> None:
    stages = ["quick, world 1", "full, world 1"]
    verdicts = [
        ("killed", "quick", []),
        ("timeout", "full", stages[:1]),
        ("survived", "full", stages),
        ("survived", "quick", stages[:1]),
        ("not-executed", "full", stages),
        ("invalid", "quick", []),
    ]
    rows = [
        {"operator": "negate", "file": "a.py", "verdict": verdict, "tier": tier, "passed": passed}
        for verdict, tier, passed in verdicts
    ]

    line = record.summary(rows, stages).splitlines()[2]

    assert line == "| negate | 6 | 1 | 1 | 1 | 1 | 1 | 1 | 1 | 0 | 33 % | 67 % |"


def test_survivors_that_these_stages_cannot_show_count_against_no_case(record) -> None:
    shares = record._describe(9, {"equivalent": 5, "setting": 2, "hole": 1, "not looked at": 2})
    assert shares.startswith(
        "The survivors are 5 *equivalent*, 1 *hole*, 2 *not looked at*, 2 *setting*. Of the 12 "
    )
    assert shares.endswith("the cases kill 75%.")


def test_a_survivor_counts_as_equivalent_only_with_a_reason(record, tmp_path: Path) -> None:
    entry = dict.fromkeys(("file", "function", "operator", "before", "after"), "x")
    path = tmp_path / "triage.json"
    path.write_text(json.dumps([entry | {"class": "equivalent", "why": " "}]))

    with pytest.raises(ValueError, match=r"expected a class of equivalent.* and a reason"):
        record.triaged(path)


def test_the_triage_of_the_tree_has_classes_and_reasons(record) -> None:
    assert record.triaged()


EDITS = sorted((ROOT / "conformance/mutants/edits").glob("*.toml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EDITS, ids=lambda path: path.stem)
def test_each_edit_changes_a_text_that_is_there_once_into_python(
    edits, lanes, record, path
) -> None:
    files = lanes.ENGINES[path.stem].files()
    anchors = (ROOT / "docs/contract.md").read_text()
    read = edits.read_edits(path)

    assert read
    for one in read:
        changed = edits.mutation_of(one, files).apply(files[one.file])
        compile(changed, one.file, "exec", dont_inherit=True)
        assert changed != files[one.file], one.name
        assert f'<a id="{one.clause}">' in anchors, f"{one.name}: no clause {one.clause}"
        assert one.world in (1, 2, 4), one.name
        assert not one.why or one.why.partition(":")[0] in record.CLASSES, one.name


def test_an_edit_touches_the_statements_that_it_changes(edits) -> None:
    source = "def f(a):\n    b = a(\n        1,\n        2,\n    )\n    return b\n"
    given = {"name": "x", "group": "g", "defect": "D.", "clause": "c", "file": "f.py"}

    changed = edits.Edit(**given, before="        2,\n", after="        3,\n")
    added = edits.Edit(**given, before="    )\n", after="    )\n    b = 2\n")
    found = [edits.mutation_of(one, {"f.py": source}) for one in (changed, added)]

    assert [one.lines for one in found] == [(2, 5), (2, 6)]
    assert found[0].apply(source) == source.replace("2", "3")
    assert [(one.function, one.place) for one in found] == [("f", "x"), ("f", "x")]


@pytest.mark.parametrize("text", ["", "absent", "a"])
def test_an_edit_whose_text_is_not_there_once_is_refused(edits, text: str) -> None:
    one = edits.Edit(
        name="x", group="g", defect="D.", clause="c", file="f.py", before=text, after="b"
    )
    with pytest.raises(ValueError, match=r"edit x: expected its text once in f\.py, got it"):
        edits.mutation_of(one, {"f.py": "a = a\n"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[edit]]\nname = "x"\n', "expected the fields .*, got no group"),
        ("clauses", "expected fields of .*, got 'clauses'"),
        ("twice", "expected a name of its own"),
    ],
)
def test_a_file_of_edits_is_refused_by_the_edit_that_is_wrong(
    edits, tmp_path: Path, text: str, message: str
) -> None:
    fields = ("name", "group", "defect", "clause", "file", "before", "after")
    whole = "[[edit]]\n" + "".join(f'{field} = "x"\n' for field in fields)
    path = tmp_path / "edits.toml"
    path.write_text({"clauses": f'{whole}clauses = "x"\n', "twice": whole * 2}.get(text, text))

    with pytest.raises(ValueError, match=message):
        edits.read_edits(path)
