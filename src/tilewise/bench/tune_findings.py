"""What `tilewise doctor` says of tables: which one is used on each card, from where and how old, and why not others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise import arch, tuned
from tilewise.formats import KVFormat
from tilewise.gpu import mla_kernels
from tilewise.gpu.decode_kernels import DecodeTiling, fits
from tilewise.gpu.pattern import Pattern
from tilewise.gpu.tilings import choose, spec_of
from tilewise.scores import Scores
from tilewise.tuned import COSTS, WEIGHTS, Table, Value

REMEDY = "tilewise tune"
ROWS = {"short": 1024.0, "middle": 4096.0, "long": float(1 << 20)}


class Found(NamedTuple):
    """A line: what it is about, whether it is well ("ok" or "note"), what there is to say, and what to do."""

    name: str
    state: str
    text: str
    remedy: str = ""


class CardAt(NamedTuple):
    """A device, its card's name, and the card that it behaves as."""

    device: str
    name: str
    target: str


def findings(cards: Sequence[CardAt] | None = None) -> list[Found]:
    """Of these cards, by default of all that are here. Reads files, and changes nothing."""
    if cards is None:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        cards = [CardAt(str(d), torch.cuda.get_device_name(d), arch.card_of(d)) for d in devices]
    if not cards:
        return [Found("tables", "note", "no GPU here: nothing is looked up")]
    places = [place for place in (tuned.folder(), tuned.SHIPPED) if place is not None]
    tables = [_read(path) for place in places for path in sorted(place.glob("*.json"))]
    found = [line for card in cards for line in _of_card(card, tables)]
    wanted = {tuned.file_name(card.name, card.target) for card in cards}
    for path, table in tables:
        if path.name not in wanted:
            of = f"it is of another card: {table.card} as {table.target}" if isinstance(table, Table) else table
            found.append(Found("not used", "note", f"{path}: {of}"))
    return found


def _read(path: Path) -> tuple[Path, Table | str]:
    """The table, or what is wrong with the file."""
    try:
        return path, tuned.read(path)
    except (OSError, ValueError) as error:
        return path, str(error)


def _of_card(card: CardAt, tables: Sequence[tuple[Path, Table | str]]) -> list[Found]:
    """Which table each family is looked up in; the user's stand first."""
    found, used = [], set()
    for path, table in tables:
        if path.name != tuned.file_name(card.name, card.target):
            continue
        if isinstance(table, str):
            found.append(Found(card.device, "note", f"{path} is not used: {table}", REMEDY))
            continue
        for family, section in table.families.items():
            why = tuned.refusal(table, family, card.name, card.target)
            if not why and family in used:
                why = "your own table comes first"
            if why:
                remedy = "" if family in used else f"{REMEDY} {family}"
                found.append(Found(card.device, "note", f"{family} of {path} is not used: {why}", remedy))
                continue
            used.add(family)
            what = _count(len(section.tilings), "tiling") if section.tilings else ""
            what += (", " if what else "") + _count(len(section.constants), "constant") if section.constants else ""
            text = f"{family} by {path}: {what}, measured {_age(section.date)}"
            if reason := section.carried.get(tuned.source(family)):
                text += f", with earlier kernels ({reason})"
            found.append(Found(card.device, "ok", text))
            found += [Found(card.device, "note", text) for text in _faults(family, section, card.target)]
    for family in tuned.FAMILIES:
        if family not in used and (family != "mla" or arch.hopper(card.target)):  # others: nothing to measure
            text = f"{family}: no table of {card.name} as {card.target}; kernels are chosen without one"
            found.append(Found(card.device, "note", text, f"{REMEDY} {family}"))
    return found


def _faults(family: str, section: tuned.Section, target: str) -> list[str]:
    found = []
    for key, entry in section.tilings.items():
        if why := entry_fault(family, key, entry, target):
            found.append(f"{family} {key} is not used: {why}")
    for name in section.constants:
        if name not in (*COSTS, *WEIGHTS):
            found.append(f"{family} {name} is not used: no constant of this version")
    return found


def entry_fault(family: str, key: str, entry: Mapping[str, Value], target: str) -> str:
    """Why an entry is ignored in calls; "" if it is not."""
    try:
        parts = key.split("/")
        if family == "decode":
            form = KVFormat(parts[0], int(parts[1]))
            rows, warps, blocks = (int(part.split()[0]) for part in parts[2:])
            ring = DecodeTiling(rows, warps, 2, blocks)
            if why := tuned.unknown(family, ring, entry):
                return why
            ring = DecodeTiling(rows, warps, int(entry.get("stages", 2)), blocks)
            return "" if fits(form, ring, target) else "it does not fit the card's shared memory"
        if family == "mla":
            return _mla_fault(parts, entry, target)
        return _forward_fault(family, parts, entry, target)
    except (ValueError, IndexError, KeyError, AttributeError, StopIteration):
        return "no problem of this version has this key"


def _mla_fault(parts: Sequence[str], entry: Mapping[str, Value], target: str) -> str:
    stored, dims, rows, way = parts
    head_dim, value_dim = map(int, dims.split("x"))
    boxes = tuned.MLA_WAYS.index(way) == 0
    codes = stored not in ("bf16", "fp16")
    width = int(rows.removesuffix(" rows"))
    tiling = mla_kernels.choose_tiling(head_dim, value_dim, width, target, codes=codes, boxes=boxes)
    if why := tuned.unknown("mla", tiling, entry):
        return why
    changed: Any = replace(tiling, **entry)  # type: ignore[arg-type]
    return "" if mla_kernels.fits(head_dim, value_dim, changed, target, boxes=boxes) else "no kernel has this shape"


def _forward_fault(family: str, parts: Sequence[str], entry: Mapping[str, Value], target: str) -> str:
    dtype, width, kind, features = getattr(torch, parts[0]), int(parts[1]), parts[2], parts[3].split("+")
    pattern, causal, rows = Pattern(), kind == "causal", ROWS["long"]
    if family == "sparse":
        blocks = [word for word in kind.split("+") if "x" in word]
        block_q, block_k = map(int, blocks[0].split("x")) if blocks else (0, 0)
        flags = {name: name in kind.split("+") for name in ("mask", "score")}
        text = "function" if any(flags.values()) else ""
        pattern = Pattern(block_q, block_k, text=text, mask=flags["mask"], score=flags["score"])
    else:
        rows = ROWS[parts[4]]
    scores = Scores((None, 0 if causal else None), -1.0 if "scored" in features else 1.0, exact="exact" in features)
    loads: dict[str, Any] = {"page_size": 16 * ("loaded" in features), "pattern": pattern}
    tiling = choose(target, dtype, width, rows, scores, **loads)
    if why := tuned.unknown(family, tiling, entry):
        return why
    changed: Any = replace(tiling, **entry)  # type: ignore[arg-type]
    needs = spec_of(dtype, width, changed, scores, **loads).shared_bytes
    most = arch.shared_block(target)
    return f"it needs {needs} bytes of shared memory, {target} has {most}" if needs > most else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _age(date: str) -> str:
    """The date, and how long ago that was."""
    try:
        then = datetime.fromisoformat(date)
        days = (datetime.now(timezone.utc) - then).days
    except (ValueError, TypeError):
        return f"on {date}"
    return f"on {then:%Y-%m-%d}, {_count(max(0, days), 'day')} ago"
