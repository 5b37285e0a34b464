"""The page and the JSON of a report: well-formed, self-contained, escaped, and the same after a round trip."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

import pytest
from report_cases import OURS, Page, beside, broken, everywhere, failed, line, report, row

from tilewise.bench import peers
from tilewise.bench.measure import FAILED, OK, Result, Timing
from tilewise.bench.report import charts, figures, model, page
from tilewise.bench.report.compare import BETTER, GONE, NEW, SAME, WORSE, compare
from tilewise.bench.report.model import NOT_SERVED, Ceiling, Ladder, Line
from tilewise.bench.report.rows import ABOUT, DECODE, KINDS, SHARED
from tilewise.bench.workloads import Point

HOSTILE = "</title></style></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt; "


def test_page_is_well_formed_and_links_lead_somewhere():
    made = page.render(report(), compare(report(), report()))
    read = Page(made)
    assert made.startswith("<!doctype html>")
    assert len(read.ids) == len(set(read.ids))
    assert read.links
    assert all(link.startswith("#") and link[1:] in read.ids for link in read.links)
    assert {"html", "head", "title", "style", "main", "section", "table", "svg", "script"} <= set(read.tags)
    assert not re.search(r"nan|inf\b|None", read.text)


def test_page_needs_nothing_from_anywhere():
    made = page.render(report())
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<img|srcset|\bsrc=", made)
    (script,) = re.findall(r"<script>(.*?)</script>", made, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [value for tag, name, value in Page(made).attributes if name == "content" and "default-src" in value]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_style_and_script_are_in_the_wheel():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (listed,) = re.findall(r'^"tilewise.bench.report" = \[(.*)\]$', project, re.MULTILINE)
    patterns = re.findall(r'"(.+?)"', listed)
    beside_code = [path for path in files("tilewise.bench.report").iterdir() if path.suffix not in (".py", "")]
    assert {path.name for path in beside_code} == {"page.css", "page.js"}
    assert all(any(path.match(pattern) for pattern in patterns) for path in beside_code)


@pytest.mark.parametrize("keys", [False, True])
def test_hostile_strings_stay_text(keys):
    evil = everywhere(report(), HOSTILE, keys=keys)
    made = page.render(evil, compare(evil, everywhere(report(), "<b>", keys=keys)))
    read = Page(made)
    plain = Page(page.render(report(), compare(report(), report())))
    assert read.tags.count("script") == plain.tags.count("script") == 1
    assert "img" not in read.tags
    assert "b" not in read.tags
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert HOSTILE.strip() in read.text
    (title,) = re.findall(r"<title>(.*?)</title>", made.partition("<body>")[0], re.S)
    assert "&lt;script&gt;" in title or keys  # where the name is has no name


def test_json_round_trip(tmp_path):
    whole = report(
        rows=[*report().rows, row("wrong", [broken(), failed("RuntimeError: no memory")])], stopped="Stopped."
    )
    path = tmp_path / "report.json"
    model.save(model.dump(whole), path)
    loaded = model.load(path)
    assert loaded == whole
    assert page.render(loaded) == page.render(whole)
    assert json.loads(path.read_text())["format"] == "tilewise report"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("what", "no JSON"),
        ("\udcff", "no JSON"),
        ("[]", "no JSON that `tilewise report` wrote"),
        ('{"rows": []}', "no JSON that `tilewise report` wrote"),
        ('{"format": "tilewise report", "version": 99}', "of version 99"),
        ('{"format": "tilewise report", "version": 1}', "damaged"),
        (("rows", 3), "rows must be list"),
        (("quick", "yes"), "quick must be bool"),
        (("machine", {"name": 3}), "name must be str, got 3"),
        (("rows", [{"section": "a"}]), "missing"),
        (("surprise", 1), "'surprise' that no report has"),
    ],
)
def test_what_is_no_report_is_refused_by_name(tmp_path, text, why):
    path = tmp_path / "old.json"
    if isinstance(text, tuple):
        text = json.dumps({"format": model.FORMAT, "version": model.VERSION, **asdict(report()), text[0]: text[1]})
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(why)) as error:
        model.load(path)
    assert str(path) in str(error.value)


def test_results_become_lines():
    timing = Timing(2e-3, 1e-3, 3e-3, 1e-3, 7)
    ratios = {peers.SDPA: 1.23456789}
    right = Result(OURS, True, OK, "", 1e-7, 2e-7, timing, 0.5, 10.0, 1.0, 40.0, 1.2, ratios, 5.12345678e-7)
    refused = Result("a", True, FAILED, "NotImplementedError: float8 needs 8.9; use bfloat16")
    crashed = Result("b", True, FAILED, "RuntimeError: out of memory", error=float("inf"))
    one, two, three = model.lines_of(Point(), [right, refused, crashed])
    assert (one.median_ms, one.p20_ms, one.p80_ms, one.loops) == (2.0, 1.0, 3.0, 7)
    assert one.ratio_to == {peers.SDPA: 1.23457}
    assert (one.allowed, two.allowed) == (5.12346e-7, None)
    assert one.intensity == pytest.approx(0.5e12 / 10e9)
    assert (two.status, two.reason) == (NOT_SERVED, "float8 needs 8.9; use bfloat16")
    assert (three.status, three.error) == (FAILED, None)  # JSON knows no infinity


def test_every_number_of_a_row_is_in_its_table():
    lines = [line(OURS, 2.0, ratio_to={peers.SDPA: 1.5, "cuDNN": 0.75}, tflops=0.125, gbps=32.0, pct_of_ceiling=61.0,
                  allowed=5e-7)]  # fmt: skip
    text = Page(page.render(report(rows=[row("one", lines)]))).text
    assert "one tilewise cpu ok 1.0e-07 5.0e-07 2 1.8–2.2 0.125 32 61% 1.50× 0.75×" in text
    for head in ("× torch SDPA", "× cuDNN", "median ms", "p20–p80 ms", "of ceiling", "allowed"):
        assert head in text
    assert "tilewise bench --only 'one'" in text  # the command


def test_short_times_are_in_microseconds():
    text = Page(page.render(report(rows=[row("one", [line(OURS, 0.0256)])]))).text
    assert "median µs" in text
    assert "25.6 23–28.2" in text


def test_what_failed_or_is_not_served_stands_there_with_why():
    rows = [row("bad", [broken()]), row("crash", [failed("RuntimeError: no memory")]), *report().rows]
    made = report(rows=rows)
    whole = Page(page.render(made)).text
    for words in ("bad tilewise cpu WRONG error 3 is over 1", "crash tilewise cpu failed RuntimeError: no memory",
                  "float8 tilewise cpu not served no kernel takes float8 here",
                  "the ladder numba skipped numba-cuda is not installed"):  # fmt: skip
        assert words in whole
    assert "FlashAttention-3 not installed" in whole
    assert made.broken
    assert not report().broken  # what is not served is no failure
    assert "6 of 7" in whole  # judged: six right, one wrong; the others gave no answer
    assert "Every kernel that was asked for ran" in Page(page.render(report(rows=[], ladder=Ladder(skipped="no")))).text


def test_a_stopped_report_says_so_on_top():
    text = Page(page.render(report(stopped="Stopped by Ctrl-C; 3 of 9 parts were not measured: a, b, c."))).text
    assert text.index("3 of 9 parts were not measured: a, b, c") < text.index("Machine")


def test_a_report_of_nothing_has_a_page():
    empty = report(rows=[], ceilings=[], pictures=[], ladder=Ladder(skipped="no C++ compiler"))
    text = Page(page.render(empty, compare(report(), empty))).text
    assert "No rung was run: no C++ compiler" in text
    assert "0 of 0" in text


# ---- figures ----------------------------------------------------------------------------------------------------


def test_headlines_are_geometric_means_of_the_ratio_to_the_best_peer():
    lines = [replace(beside(1.0, 2.0)[0], ratio_to={"a": 2.0, "b": 8.0}), beside(1.0, 2.0)[1]]
    rows = [row("one", lines, section=SHARED), row("two", beside(1.0, 8.0), section=SHARED)]
    text = Page(page.render(report(rows=rows))).text
    assert "Shared prefixes 4.00× the best peer's speed 2.00–8.00× over 2 rows" in text


def test_charts_over_length_and_batch_have_every_kernel_and_whiskers():
    made = report()
    length, decode = ([r for r in made.rows if r.section == s] for s in ("Prefill over length", DECODE))
    colours = figures.slots(made)
    (chart,) = figures.over_axis("Prefill over length", length, colours)
    assert chart.count('class="whisker"') == 6
    read = Page(chart)
    assert OURS in read.texts
    assert peers.SDPA in read.texts
    assert "sequence length (tokens)" in read.texts
    (chart,) = figures.over_axis(DECODE, decode, colours)
    assert "ms per step" in Page(chart).texts
    assert figures.over_axis(KINDS, length, colours) == []
    assert figures.over_axis("Prefill over length", length[:1], colours) == []  # one point is no line
    assert colours[OURS] == 0


def test_roofline_places_rows_under_the_roofs():
    made = report(ceilings=[Ceiling("measured", "float32", 1e12, 1e10)])
    svg = figures.roofline(made, list(ABOUT))
    drawn = [float(y) for y in re.findall(r'<circle cx="[^"]+" cy="([^"]+)" r="4.2"><title>', svg)]
    assert drawn
    assert len(re.findall("<title>", svg)) == 6  # the row that is not served has no place
    roof = re.search(r'class="roof" d="M[\d.]+,[\d.]+L([\d.]+),([\d.]+)L', svg)
    assert all(y > float(roof.group(2)) for y in drawn)
    assert "1 float32, measured" in Page(svg).texts
    assert "10 GB/s, measured" in Page(svg).texts
    assert figures.roofline(replace(made, ceilings=[]), list(ABOUT)) is None


def test_scales_ticks_and_labels():
    x = charts.scale((1.0, 16.0), (0.0, 100.0), log=True)
    assert [x(v) for v in (1, 2, 4, 16)] == pytest.approx([0, 25, 50, 100])
    assert charts.nice_ticks(0.17) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert charts.nice_ticks(812) == [0, 500, 1000]
    assert charts.nice_ticks(0) == [0, 1]
    assert charts.log_ticks(0.9, 11) == [1, 2, 5, 10]
    places = charts.spread([10, 11, 50, 12], 10, low=0, high=55)
    assert sorted(places) == pytest.approx([10, 20, 30, 50])
    assert charts.spread([54, 55], 10, high=55) == [45, 55]


def test_plans_are_drawn_tile_by_tile():
    picture = report().pictures[0]
    svg = figures.plan_picture(picture)
    tiles = re.findall(r'class="tile" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)
    assert len(tiles) == 2
    (x0, y0, w0, h0), (x1, y1, w1, h1) = (map(float, tile) for tile in tiles)
    assert x0 == x1
    assert w1 == pytest.approx(2 * w0, abs=0.02)
    assert y1 == pytest.approx(y0 + h0, abs=0.02)
    assert h1 == h0
    assert "work items 2" in Page(page.render(report())).text


# ---- two reports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (line(OURS, 2.0), line(OURS, 1.0), BETTER),
        (line(OURS, 1.0), line(OURS, 2.0), WORSE),
        (line(OURS, 1.0), line(OURS, 1.02, spread=0.001), SAME),  # less than noise
        (line(OURS, 1.0, spread=0.3), line(OURS, 1.2, spread=0.3), SAME),  # within each other's spread
        (line(OURS, 1.0), broken(), WORSE),
        (broken(), line(OURS, 1.0), BETTER),
        (broken(), failed("no memory"), SAME),
        (None, line(OURS, 1.0), NEW),
        (line(OURS, 1.0), None, GONE),
    ],
)
def test_verdicts(before, now, verdict):
    old, new = (report(rows=[row("one", [] if side is None else [side])]) for side in (before, now))
    (change,) = compare(old, new).changes
    assert change.verdict == verdict
    assert compare(old, new).count() == {verdict: 1}
    text = Page(page.render(new, compare(old, new))).text
    assert f"1 {verdict}" in text


def test_comparison_is_by_problem_and_kernel():
    old = report(rows=[row("one", beside(2.0, 3.0)), row("two", beside(1.0, 1.0))])
    other_size = row("two", beside(1.0, 1.0), point=Point(seq=128, heads=2, kv_heads=2, hdim=16))
    new = report(rows=[row("one", beside(1.0, 1.5)), other_size])
    found = compare(old, new)
    assert [(change.name, change.kernel, change.verdict) for change in found.changes] == [
        ("one", OURS, BETTER), ("one", peers.SDPA, BETTER), ("two", OURS, NEW), ("two", peers.SDPA, NEW),
        ("two", OURS, GONE), ("two", peers.SDPA, GONE),
    ]  # fmt: skip
    assert found.changes[0].ratio == 2
    assert found.peers_moved == pytest.approx(2)
    assert found.text == "1 better, 0 worse, 0 same, 1 new, 1 gone"


def test_what_else_differs_is_told():
    old = report()
    new = replace(old, machine={**old.machine, "name": "Another"}, versions={"tilewise": "0.1.0"}, quick=False)
    found = compare(old, new)
    assert found.differences == [
        "name: A Processor before, Another now", "torch: 2.13.0 before, not there now", "rows: --quick before, all now"
    ]  # fmt: skip
    assert "name: A Processor before, Another now" in Page(page.render(new, found)).text
    assert "Machine, versions and peers are the same as then" in Page(page.render(old, compare(old, old))).text


def test_lines_without_answers_have_no_numbers():
    bare = Line(OURS, True, FAILED, "why")
    assert (bare.intensity, bare.allowed) == (None, None)
    assert row("one", [bare]).ratio is None
