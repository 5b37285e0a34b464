"""What the tests of the report share: reports made by hand, and a reader of pages that minds their nesting."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser

from tilewise.bench import peers
from tilewise.bench.measure import FAILED, WRONG
from tilewise.bench.report import rows as rows_module
from tilewise.bench.report.markup import VOID
from tilewise.bench.report.model import NOT_SERVED, Ceiling, Ladder, Line, Picture, Report, Row
from tilewise.bench.workloads import Point, complete, dimensions

OURS = "tilewise cpu"


def line(kernel, median_ms, *, ours=True, spread=0.1, **more):
    times = {"median_ms": median_ms, "p20_ms": median_ms * (1 - spread), "p80_ms": median_ms * (1 + spread), "loops": 9}
    values = {"error": 1e-7, "baseline": 2e-7, "tflops": 0.1 / median_ms, "gbps": 2 / median_ms, "pct_of_ceiling": 40.0}
    return Line(kernel, ours, "ok", **{**times, **values, **more})


def row(name, lines, *, section=rows_module.LENGTH, point=None):
    place = dimensions(complete(point or Point(seq=64, heads=2, kv_heads=2, hdim=16)))
    return Row(section, name, f"tilewise bench --only '{name}'", dict(place), lines, {"clock": 2800.0})


def beside(ours_ms, peer_ms, **more):
    """Tilewise and torch on one problem."""
    ours = line(OURS, ours_ms, ratio_to={peers.SDPA: peer_ms / ours_ms}, **more)
    return [ours, line(peers.SDPA, peer_ms, ours=False, ratio_to={peers.SDPA: 1.0})]


def report(rows=None, **more):
    """A report with a bit of everything that a page can show."""
    dense = Point(heads=2, kv_heads=2, hdim=16)
    found = [row(f"full, N {n}", beside(n / 64, n / 70), point=replace(dense, seq=n)) for n in (64, 256, 1024)] + [
        row(f"{b} × 64", beside(0.1 * b, 0.2 * b), section=rows_module.DECODE, point=Point("decode", batch=b, seq=64))
        for b in (1, 4)
    ]
    found.append(
        row("float8", [Line(OURS, True, NOT_SERVED, "no kernel takes float8 here"), line(peers.SDPA, 3.0, ours=False)],
            section=rows_module.KINDS)
    )  # fmt: skip
    names = [peers.SDPA, peers.CUDNN, peers.FA2, *peers.CUDA_PEERS]  # all that a card may have beside us
    ratios = dict.fromkeys(names, 1.25)
    wide = [
        line(name, 1234.5, ours=name.startswith("tilewise"), ratio_to=ratios) for name in (f"{OURS}, exact", *names)
    ]
    found.append(row("ragged, 100 to 16384 tokens, causal, D 128", wide, section=rows_module.KINDS))
    rung = {"rung": "mma", "idea": "fragments", "dtype": "bfloat16", "hdim": 64, "status": "ok", "reason": "",
            "error": 1e-3, "allowed": 1e-2, "peer": False}  # fmt: skip
    timed = {"median_ms": 2.0, "p20_ms": 1.9, "p80_ms": 2.2, "loops": 3, "tflops": 200.0, "over_previous": 1.5,
             "over_sdpa": 0.5, "over_fa2": None}  # fmt: skip
    skipped = {**rung, "rung": "numba", "status": "skipped", "reason": "numba-cuda is not installed"}
    whole = Report(
        created="2026-11-16T01:02:03+00:00",
        command="tilewise report --quick",
        device="cpu",
        quick=True,
        machine={"device": "cpu", "name": "A Processor", "cores": "2", "memory": "8 GiB"},
        versions={"tilewise": "0.1.0", "torch": "2.13.0"},
        peers={peers.SDPA: "torch 2.13.0", peers.FA3: "not installed"},
        ceilings=[Ceiling("measured", "float32", 3e11, 2e10), Ceiling("H200's peaks", "bfloat16", 1e15, 4e12, False)],
        rows=found,
        pictures=[Picture("Causal", "a note", "dense plan\n  work items  2\n  floor       1 µs", 64, 64,
                          [[0.0, 0.0, 32.0, 32.0, 0.5], [0.0, 32.0, 64.0, 32.0, 0.75]])],
        ladder=Ladder("128 tokens", False, "", "tilewise ladder", [{**rung, **timed}, skipped]),
        notes=["other programs were running"],
    )  # fmt: skip
    return replace(whole, **({} if rows is None else {"rows": rows}), **more)


def broken(kernel=OURS, status=WRONG, reason="error 3 is over 1"):
    return Line(kernel, True, status, reason, error=3.0 if status == WRONG else None)


def failed(reason):
    return broken(status=FAILED, reason=reason)


def everywhere(value, text, *, keys=False):
    """The same value with `text` before every string; before the keys of mappings too if `keys`."""
    if isinstance(value, str):
        return text + value
    if isinstance(value, list):
        return [everywhere(item, text, keys=keys) for item in value]
    if isinstance(value, dict):
        return {text + key if keys else key: everywhere(item, text, keys=keys) for key, item in value.items()}
    if is_dataclass(value):
        return replace(value, **{f.name: everywhere(getattr(value, f.name), text, keys=keys) for f in fields(value)})
    return value


class Page(HTMLParser):
    """Reads a page and fails where elements are not closed in order: `tags`, `texts`, `ids` and `links` are lists."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.ids, self.links, self.attributes, self._open = [], [], [], [], [], []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name == "href"]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())
