"""Plans for people: the summary of a work list, the floor on a named card, and the picture of rows meeting keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.plan.tiles import Plan, Rectangle


@dataclass(frozen=True)
class Card:
    """A card's two ceilings: bytes per second read from memory, 16-bit matrix FLOP/s on random data."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    measured: bool


# H200: our own measurements at 700 W. The others: data sheets, dense 16-bit, so their floors are optimistic.
CARDS = (
    Card("H200", 4.44e12, 756e12, True),
    Card("H100", 3.35e12, 989e12, False),
    Card("A100", 2.04e12, 312e12, False),
    Card("L40S", 0.86e12, 362e12, False),
    Card("RTX 4090", 1.01e12, 165e12, False),
)


def find_card(card: str | Card) -> Card:
    """The card of that name, in any case, or the Card given."""
    if isinstance(card, Card):
        return card
    for known in CARDS:
        if isinstance(card, str) and known.name.lower().replace(" ", "") == card.lower().replace(" ", ""):
            return known
    names = ", ".join(c.name for c in CARDS)
    raise ValueError(f"card must be one of {names}, or a tilewise.show.Card with your own ceilings; got {card!r}")


@dataclass(frozen=True)
class PlanSummary:
    """A work list in numbers. Rows and keys are tokens; bytes and flops are over all heads of one layer."""

    kind: str
    items: int
    tiles: int
    rows: int
    heads_q: int
    heads_kv: int
    keys_stored: int
    keys_read: int
    bytes: int
    flops: int
    states_merged: int

    def floor_us(self, card: Card) -> float:
        """The larger of bytes over bandwidth and FLOPs over rate, in microseconds."""
        return max(self.bytes / card.bytes_per_s, self.flops / card.flops_per_s) * 1e6

    def text(self, card: Card) -> str:
        """The summary as a few aligned lines."""
        memory, matrix = self.bytes / card.bytes_per_s, self.flops / card.flops_per_s
        bound = "memory" if memory >= matrix else "matrix units"
        source = "measured" if card.measured else "data sheet"
        lines = [
            ("work items", f"{self.items:,} ({self.tiles:,} tiles)"),
            ("query rows", f"{self.rows:,} × {self.heads_q} heads"),
            ("key rows", f"{self.keys_read:,} read, {self.keys_stored:,} stored, × {self.heads_kv} heads"),
            ("states merged", f"{self.states_merged:,}" if self.states_merged else "none"),
            ("bytes to move", _unit(self.bytes, "B")),
            ("FLOPs", _unit(self.flops, "FLOP")),
            ("floor", f"{self.floor_us(card):,.2f} µs on {card.name} ({source} ceilings; bound by {bound})"),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join([f"{self.kind} plan", *(f"  {name:<{width}}  {value}" for name, value in lines)])


def _unit(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


MOST_DRAWN = 200_000  # rectangles; past it a picture is one blur and takes minutes


def draw_plan(plan: Plan, path: str) -> None:
    """A picture of the work list: rows down, keys across, one rectangle a tile, darker where fewer pairs are masked."""
    from matplotlib.collections import PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle as Patch

    offsets = [sum(plan.keys[:source]) for source in range(len(plan.keys))]
    # Per-head patterns lie over one another; the first head's stands for them.
    seen: dict[tuple[int, int, int], Rectangle] = {}
    for r in plan.rectangles():
        seen.setdefault((r.row, r.source, r.key), r)
        if len(seen) > MOST_DRAWN:
            raise ValueError(f"path: the plan has over {MOST_DRAWN:,} tiles, too many to draw; plan a smaller problem")
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    patches, shades = [], []
    for r in seen.values():
        patches.append(Patch((offsets[r.source] + r.key, r.row), r.keys, r.rows))
        shades.append(r.pairs / (r.rows * r.keys))
    drawn = PatchCollection(patches, cmap="Blues", edgecolor="#1b3a57", linewidth=0.4 if len(patches) < 2000 else 0.0)
    drawn.set_array(shades)
    drawn.set_clim(-0.35, 1.35)  # keeps the palest tile visible on white
    axes.add_collection(drawn)
    for offset in offsets[1:]:
        axes.axvline(offset, color="#b04a2f", linewidth=1, linestyle="--")
    axes.set_xlim(0, max(1, sum(plan.keys)))
    axes.set_ylim(max(1, plan.rows), 0)
    axes.set_xlabel("key rows" + (" (dashed: next source)" if len(offsets) > 1 else ""))
    axes.set_ylabel("query rows")
    s = plan.summary
    axes.set_title(
        f"{plan.kind}: {s.tiles:,} tiles, {_unit(s.flops, 'FLOP')}, {_unit(s.bytes, 'B')} to move", fontsize=11
    )
    figure.savefig(path, dpi=120)
