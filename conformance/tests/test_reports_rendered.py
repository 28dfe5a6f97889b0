"""Tests of the certificate and the page that people read."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from engine_conformance.report import certificate, html, to_document
from engine_conformance.report.chart import make_chart
from engine_conformance.report.document import counts
from engine_conformance.report.view import margin_text
from engine_conformance.results import BAD, Row
from report_samples import GOOD, LISTED, OTHERS, WORLD_1, made, row


def test_a_certificate_is_earned() -> None:
    run, verdicts = made(GOOD, certify=True)
    text = certificate(to_document(run, verdicts))
    assert text.startswith(
        "# Certificate: acme, engine contract 1.0: engine / language\\_model conformant, "
    )
    assert "Every case of the suite that applies was run, and none failed." in text


@pytest.mark.parametrize(
    ("rows", "certify", "told"),
    [
        (GOOD, False, "This is no certificate: `--certify` was not given."),
        ([*GOOD, OTHERS[3]], True, "A certificate was asked for, and is not given"),
        ([*GOOD, OTHERS[0]], True, "A certificate was asked for, and is not given"),
        ([], True, "A certificate was asked for, and is not given"),
    ],
)
def test_a_report_is_no_certificate(rows: list[Row], certify: bool, told: str) -> None:
    text = certificate(to_document(*made(rows, certify=certify)))
    assert text.startswith("# Report: acme")
    assert told in text


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_status_has_its_place_in_the_certificate() -> None:
    text = certificate(to_document(*made()))
    bad, listed, absent = (
        section(text, t) for t in ("What did not pass", "Deviations", "What was not run")
    )
    for one in OTHERS:
        status = one.outcome.status
        assert (f"### `{one.case}`: {status}" in bad) == (status not in ("deviation", "not-run"))
        assert (f"| `{one.case}`" in listed) == (status == "deviation")
        assert (one.case in absent) == (status == "not-run")
        if status in BAD:
            assert one.outcome.message in bad
            assert one.repeat in bad
    assert not any(one.case in bad + listed + absent for one in GOOD)
    assert "train.next`: failed (provisional, does not count)" in bad
    row_of_four = (
        "| needs 4 cpu devices, there are 2 "
        "| language\\_model, cpu, world 4, float32 | `parallel.four` |"
    )
    assert row_of_four in absent
    assert "https://example.org/issues/12" in listed


def test_the_certificate_says_how_to_repeat_it() -> None:
    text = section(certificate(to_document(*made())), "Reproduce")
    assert "pip install torch==2.13.0 engine-conformance==0.1.0 acme-engine==2.1.0\n" in text
    assert "engine-conformance run acme --world 1,2 --report 'my reports'\n" in text
    uninstalled = made(selection={"plugin": "acme.plugin:PLUGIN"})
    text = section(certificate(to_document(*uninstalled)), "Reproduce")
    assert "pip install torch==2.13.0 engine-conformance==0.1.0\n" in text
    assert "the module of acme.plugin:PLUGIN must be on the Python path" in text
    loose = made(distribution="in process (acme.plugin:PLUGIN)")
    assert "what was tested is no distribution: in process" in certificate(to_document(*loose))
    built = made(environment={"torch": "2.13.0+cpu"})
    assert "- torch 2.13.0+cpu comes from the package index of its own builds." in certificate(
        to_document(*built)
    )


def test_names_in_requirements_are_code() -> None:
    rows = [
        row("train.norm", "failed", 2.0, must="``weight_version`` and `b_c` MUST <i>stay</i> a_b.")
    ]
    document = to_document(*made(rows))
    assert "`weight_version` and `b_c` MUST &lt;i&gt;stay&lt;/i&gt; a\\_b.\n" in certificate(
        document
    )
    assert (
        "<code>weight_version</code> and <code>b_c</code> MUST &lt;i&gt;stay&lt;/i&gt; a_b."
        in html(document)
    )


@pytest.mark.parametrize(
    ("margin", "text"),
    [
        (None, ""),
        (0.0, "bitwise"),
        (math.inf, "infinite"),
        (0.9712, "0.97"),
        (9.96, "10"),
        (234.2, "234"),
        (1e-5, "1e-05"),
        (3e7, "3e+07"),
    ],
)
def test_margins_are_short(margin: float | None, text: str) -> None:
    assert margin_text(margin) == text


def test_markdown_shows_messages_as_they_are() -> None:
    nasty = "```\n<script>alert(1)</script> | *x* ```` end"
    rows = [
        row("train.norm", "failed", 2.0, message=nasty, must="<b>a|b</b> *MUST*\nhold."),
        row("parallel.four", "not-run", message="<i>x</i> | `y`\n| z"),
    ]
    text = certificate(to_document(*made(rows)))
    assert f"`````text\n{nasty}\n`````\n" in text
    assert "&lt;b&gt;a\\|b&lt;/b&gt; \\*MUST\\* hold." in text
    assert "| &lt;i&gt;x&lt;/i&gt; \\| \\`y\\` \\| z | " in text


def test_tables_have_as_many_cells_as_their_heads() -> None:
    lines = certificate(to_document(*made())).splitlines()
    tables = [(head, line) for head, line in pairwise(lines) if line.startswith("|")]
    assert len(tables) > 20
    widths = [len(re.findall(r"(?<!\\)\|", line)) for _, line in tables]
    for (head, _), width in zip(tables, widths, strict=True):
        assert not head.startswith("|") or len(re.findall(r"(?<!\\)\|", head)) == width


class Page(HTMLParser):
    """The elements and texts of a page, whose parser raises on bad nesting."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def part(text: str, title: str) -> str:
    return text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]


def test_every_status_has_its_place_in_the_page() -> None:
    text = html(to_document(*made()))
    bad, listed, absent, cases = (
        part(text, title)
        for title in ("What did not pass", "Deviations", "What was not run", "Cases")
    )
    for one in (*GOOD, *OTHERS):
        status = one.outcome.status
        code = f"<code>{one.case}</code>"
        assert cases.count(code) == 1
        assert (
            f'<span class="status {status}">{status}</span>'
            in cases.partition(code)[2].partition("</tr>")[0]
        )
        assert (code in bad) == (status in BAD or status == "suite-error")
        assert (code in listed) == (status == "deviation")
        assert (code in absent) == (status == "not-run")
    header = text.partition("</header>")[0]
    for status, number in counts([*GOOD, *OTHERS]).items():
        assert f'<span class="status {status}">{status}</span> {number}</li>' in header


def test_the_page_needs_nothing_else() -> None:
    page = Page(html(to_document(*made())))
    names = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(names)
    assert not any(
        name.startswith("on") or name == "src" for _, attributes in page.tags for name in attributes
    )
    style = "".join(page.texts).partition("prefers-color-scheme: dark")
    assert style[1]
    assert "url(" not in "".join(page.texts)
    assert "@import" not in "".join(page.texts)


def test_the_page_escapes_what_an_engine_says() -> None:
    attack = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>"
    bad_link = LISTED | {"issue": "javascript:alert(1)", "reason": attack}
    rows = [
        row(
            attack,
            "failed",
            2.0,
            message=attack,
            must=attack,
            hints=attack,
            repeat=attack,
            group=attack,
            setting=replace(WORLD_1, model_type=attack, device=attack, dtype=attack),
        ),
        row("train.moe", "deviation", 2.0, message=attack, deviation=bad_link),
        row("parallel.four", "not-run", message=attack),
    ]
    run = made(
        rows,
        name=attack,
        distribution=attack,
        trace=[attack],
        command=[attack],
        declared=[attack],
        environment={attack: attack},
    )
    text = html(to_document(*run))
    page = Page(text)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert [attributes for tag, attributes in page.tags if tag == "a"] == []
    assert "".join(page.texts).count(attack) > 15
    assert "&lt;script&gt;" in text


def test_an_issue_on_the_web_is_a_link() -> None:
    page = Page(html(to_document(*made())))
    assert {attributes["href"] for tag, attributes in page.tags if tag == "a"} == {LISTED["issue"]}


def test_margins_are_drawn_where_they_are() -> None:
    rows = [row(f"forward.case{i}", margin=m) for i, m in enumerate((0.0, 1e-9, 1e-4, 0.01, 1.0))]
    rows += [
        row("train.a", "failed", 1.5),
        row("train.b", "failed", 1e9),
        row("train.c", "failed", math.inf),
        row("train.d", "deviation", 5.0),
        row("train.e", provisional=True, margin=0.5),
        row("plugin.light"),
    ]
    chart = make_chart(rows)
    dots = {dot.title.split(" ")[0]: dot for one in chart.lanes for dot in one.dots}
    at = [dots[f"forward.case{i}"].x for i in range(5)]
    assert at[0] < at[1] == at[2] < at[3] < at[4] == chart.limit
    assert (
        at[4]
        < dots["train.a"].x
        < dots["train.d"].x
        < dots["train.b"].x
        < dots["train.c"].x
        < chart.width
    )
    assert (at[3] - at[2]) == pytest.approx(at[4] - at[3], abs=0.2), "two decades each"
    assert {
        name: dots[name].kind
        for name in ("train.a", "train.b", "train.c", "train.d", "forward.case0")
    } == {
        "train.a": "bad",
        "train.b": "bad",
        "train.c": "bad",
        "train.d": "deviation",
        "forward.case0": "good",
    }
    assert [name for name, dot in dots.items() if dot.provisional] == ["train.e"]
    assert chart.without == 1
    assert dots["train.c"].title == f"train.c [{WORLD_1}]: infinite, failed"


@pytest.mark.parametrize("margin", [0.0, 0.3, math.inf])
def test_dots_do_not_hide_each_other(margin: float) -> None:
    rows = [row(f"forward.case{i}", margin=margin) for i in range(40)]
    rows += [row(f"lora.case{i}", margin=margin, group="lora") for i in range(3)]
    chart = make_chart(rows)
    dots = [dot for lane in chart.lanes for dot in lane.dots]
    assert len(dots) == 43
    assert all(
        math.dist((a.x, a.y), (b.x, b.y)) > 2 * chart.radius
        for a in dots
        for b in dots
        if a is not b
    )
    for lane in chart.lanes:
        heights = [dot.y for dot in lane.dots]
        assert (min(heights) + max(heights)) / 2 == pytest.approx(
            lane.top + lane.height / 2, abs=0.2
        ), "in the middle"
        assert all(
            lane.top + chart.radius <= dot.y <= lane.top + lane.height - chart.radius
            for dot in lane.dots
        )
        assert all(0 < dot.x < chart.width - chart.radius for dot in lane.dots)


def test_a_page_without_margins_has_no_picture() -> None:
    assert "<svg" not in html(to_document(*made([row("plugin.light")])))
