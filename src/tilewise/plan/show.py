"""Plans for people: the summary of a work list and the floor on a named card. pictures.py draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.plan.tiles import Launch


@dataclass(frozen=True)
class Card:
    """A card's peaks: bytes per second of its memory, 16-bit matrix FLOP/s at its top clock; no kernel exceeds them.

    fp8_rate: how many times faster FP8 products are, 1 where the card has none. reached_bytes_per_s,
    reached_flops_per_s: what a plain read and a large GEMM on random data reach, where that was measured.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    fp8_rate: float = 1.0
    reached_bytes_per_s: float | None = None
    reached_flops_per_s: float | None = None


# Memory: bus width times data rate. Matrix units: multiprocessors · FLOP per clock and multiprocessor · top clock, with
# float32 sums. Under load a card runs slower, for its power. H200: reached at 700 W, our own measurements.
CARDS = (
    Card("H200", 4.92e12, 132 * 4096 * 1.98e9, 2.0, 4.44e12, 756e12),
    Card("H100", 3.36e12, 132 * 4096 * 1.98e9, 2.0),
    Card("A100", 2.04e12, 108 * 2048 * 1.41e9),
    Card("L40S", 0.864e12, 142 * 1024 * 2.52e9, 2.0),
    Card("RTX 4090", 1.01e12, 128 * 512 * 3.105e9, 2.0),
)


def find_card(card: str | Card) -> Card:
    """The card of that name, in any case, or the Card given."""
    if isinstance(card, Card):
        return card
    for known in CARDS:
        if isinstance(card, str) and known.name.lower().replace(" ", "") == card.lower().replace(" ", ""):
            return known
    names = ", ".join(c.name for c in CARDS)
    raise ValueError(f"card must be one of {names}, or a tilewise.plan.show.Card with your own ceilings; got {card!r}")


@dataclass(frozen=True)
class PlanSummary:
    """A work list in numbers. Rows and keys are tokens; bytes and flops are over all heads of one layer.

    bytes: as the tiles read them, through L2 or not. least_bytes: each needed byte once, and no partial states.
    """

    kind: str
    items: int
    tiles: int
    rows: int
    heads_q: int
    heads_kv: int
    keys_stored: int
    keys_read: int
    bytes: int
    least_bytes: int
    flops: int
    states_merged: int
    fp8: bool = False

    @property
    def title(self) -> str:
        """The summary in a line."""
        return f"{self.kind}: {self.tiles:,} tiles, {_unit(self.flops, 'FLOP')}, {_unit(self.bytes, 'B')} to move"

    def floor_us(self, card: Card) -> float:
        """The larger of bytes over bandwidth and FLOPs over rate, at the card's peaks, in microseconds."""
        return max(self._times_us(card.bytes_per_s, card.flops_per_s, card))

    def _times_us(self, bytes_per_s: float, flops_per_s: float, card: Card) -> tuple[float, float]:
        rate = flops_per_s * (card.fp8_rate if self.fp8 else 1.0)
        return self.least_bytes / bytes_per_s * 1e6, self.flops / rate * 1e6

    def text(self, card: Card, launch: Launch | None = None) -> str:
        """The summary as a few aligned lines; launch: how a kernel takes the list."""
        memory, matrix = self._times_us(card.bytes_per_s, card.flops_per_s, card)
        bound = "memory" if memory >= matrix else "matrix units"
        floor = f"{self.floor_us(card):,.2f} µs on {card.name} at its peaks (bound by {bound})"
        if card.reached_bytes_per_s is not None and card.reached_flops_per_s is not None:
            reached = max(self._times_us(card.reached_bytes_per_s, card.reached_flops_per_s, card))
            rate = _unit(card.reached_flops_per_s, "FLOP/s")
            floor += (
                f"; {reached:,.2f} µs at the {rate} of a GEMM and {_unit(card.reached_bytes_per_s, 'B/s')} of a read"
            )
        taken = []
        if launch is not None:
            packed = f", {launch.packed} heads side by side" if launch.packed > 1 else ""
            tile = f"{launch.tile_rows} rows × blocks of {launch.tile_keys} keys{packed}"
            taken = [("kernel", f"{launch.kernel}: {tile}; {launch.blocks:,} thread blocks, in the order of the list")]
            taken.append(("because", launch.why))
        lines = [
            *taken,
            ("work items", f"{self.items:,} ({self.tiles:,} tiles)"),
            ("query rows", f"{self.rows:,} × {self.heads_q} heads"),
            ("key rows", f"{self.keys_read:,} read, {self.keys_stored:,} stored, × {self.heads_kv} heads"),
            ("states merged", f"{self.states_merged:,}" if self.states_merged else "none"),
            ("bytes to move", _unit(self.bytes, "B")),
            ("FLOPs", _unit(self.flops, "FLOP")),
            ("floor", floor),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join([f"{self.kind} plan", *(f"  {name:<{width}}  {value}" for name, value in lines)])


def _unit(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"
