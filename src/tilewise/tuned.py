"""What was measured on a card, looked up: which tilings are fastest there, and what decode's work costs there.

`tilewise tune` (bench/tune.py) measures and writes a table; nothing is ever measured inside a call. A table is a JSON
file of one card, with a section per family of kernels:

    {"format": 1, "card": "NVIDIA H200", "target": "sm_90a", "families": {"prefill": {
        "date": …, "source": …, "capability": "9.0", "driver": …, "clocks": {…}, "versions": {…},
        "tilings": {key: {field: value}}, "constants": {name: value}, "timings": [{…}]}}}

`of(device)` gives the sections that hold for a device: of the user's table (<cache folder>/tables), else of the one
that the package ships (tables/). A section holds if its table is of a card of this name that behaves as this target
(arch.card_of), and if the kernels' sources are those that were measured, or others that "carried" names: {digest: why
what was measured holds for them too}. Without a table everything is chosen as if there were none. Files are read once
per process; calls look up when they are bound to their kernel.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from tilewise import arch
from tilewise.compiler import cache
from tilewise.compiler.spec import KERNELS_ROOT, headers
from tilewise.formats import KVFormat
from tilewise.plan.cost import CPU_COST, GPU_COST, MLA_COST, MMA_COST, CostModel, Weights, streamed
from tilewise.scores import Scores

FORMAT = 1
FAMILIES = ("prefill", "decode", "sparse", "mla")
SHIPPED = Path(__file__).parent / "tables"
ROOMS = {"prefill": "prefill", "decode": "decode", "sparse": "prefill", "mla": "mla"}  # folders of kernels
# What a tiling may not get from a table: how lists are made is chosen by the schedule. Of decode nothing else than the
# depth of its rings, because the cuts of shared ranges, and with them the bits of the result, follow from the rest. How
# ranges are cut for MLA decode follows from its rows alone.
FIXED = {"prefill": ("unit", "operand"), "sparse": ("unit", "operand"), "mla": ("rows",)}
DECODE_FREE = ("stages",)
COSTS = (
    "item_us",
    "kv_bytes_per_us",
    "flops_per_us",
    "row_state_us",
    "launch_us",
    "floor_us",
    "own_bytes_per_us",
    "own_share",
)
TILED = ("bf16", "fp16")  # what kernels with tiles multiply: gpu/decode_kernels.py tiles_can
WEIGHTS = tuple(f.name for f in fields(Weights))
UNTUNED = Weights()
LENGTHS = ((1024, "short"), (4096, "middle"))  # query rows up to which a sequence is so; "long" beyond

T = TypeVar("T")
Value = int | bool


class Blocks(Protocol):
    """What of a pattern (gpu/pattern.py) tells kinds of sparse problems apart."""

    @property
    def block_q(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def mask(self) -> bool: ...
    @property
    def score(self) -> bool: ...


@dataclass(frozen=True)
class Section:
    """One family's part of a table. source: digest of the kernels that were measured; tilings: key -> fields of the
    fastest tiling, none where it is the one that is chosen anyway; constants: of CostModel and Weights, by name;
    carried: digest of other kernels -> why the section holds for them."""

    date: str
    source: str
    tilings: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    carried: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)  # the section as it stands in the file


@dataclass(frozen=True)
class Table:
    """A file: whose card it is of, and what it says of each family."""

    path: Path
    card: str
    target: str
    families: Mapping[str, Section]


@dataclass(frozen=True, eq=False)
class Tuned:
    """The sections that hold for a device, by family."""

    sections: Mapping[str, Section]

    def prefer(self, family: str, key: str, tiling: T, fits: Callable[[T], bool]) -> T:
        """The tiling that was fastest for problems of this key, or `tiling` if none was measured or it does not fit.

        tiling: a frozen dataclass, as it is chosen without a table. fits: does a tiling's kernel fit the card?
        """
        section = self.sections.get(family)
        found = section.tilings.get(key) if section else None
        if not found or unknown(family, tiling, found):
            return tiling
        other: T = replace(tiling, **found)  # type: ignore[type-var]
        return other if fits(other) else tiling

    @cached_property
    def weights(self) -> Weights:
        """What decode's work list weighs by."""
        return replace(UNTUNED, **self._constants(WEIGHTS))

    def cost_over(self, base: CostModel) -> CostModel:
        """What `share_prefix="auto"` reckons with; base: what it does where nothing was measured."""
        return replace(base, **self._constants(COSTS))  # type: ignore[arg-type]

    def _constants(self, names: Sequence[str]) -> dict[str, float]:
        section = self.sections.get("decode")
        return {n: x for n, x in section.constants.items() if n in names} if section else {}


def unknown(family: str, tiling: Any, found: Mapping[str, Value]) -> str:
    """Why an entry cannot stand for a tiling of this kind; "" if it can."""
    for name, value in found.items():
        now = getattr(tiling, name, None)
        if now is None or name in FIXED.get(family, ()) or (family == "decode" and name not in DECODE_FREE):
            return f"{type(tiling).__name__} takes no {name} from a table"
        if type(now) is not type(value):
            return f"{name} must be {type(now).__name__}, got {value!r}"
    unit = getattr(tiling, "unit", 0)
    if unit and int(found.get("tile_kv", 0)) % unit:
        return f"tile_kv must be a multiple of {unit}, got {found['tile_kv']}"
    return ""


# ---- what a call asks -------------------------------------------------------------------------------------------

_trial: Tuned | None = None


def of(device: torch.device) -> Tuned | None:
    """What was measured on this card; None where nothing was, and for CPU tensors."""
    if _trial is not None or device.type != "cuda":
        return _trial
    return _of_card(device, arch.chosen)


@lru_cache
def _of_card(device: torch.device, chosen: str | None) -> Tuned | None:
    """chosen: what `arch.card_of` goes by, so that another choice is looked up again."""
    found = held(torch.cuda.get_device_name(device), arch.card_of(device), folder())
    return found if found.sections else None


def weights(device: torch.device) -> Weights:
    """What decode's work list for this device weighs by. No choice of them changes a bit of the result."""
    tuned = of(device)
    return UNTUNED if tuned is None else tuned.weights


def cost(device: torch.device, fmt: KVFormat | None = None, *, shared_kv: bool = False) -> CostModel:
    """The cost model of this device, over a cache of this format: by default, one that there are tiles for. shared_kv:
    its rows are keys and values at once."""
    if device.type != "cuda":
        return CPU_COST
    if shared_kv:
        return MLA_COST
    card, tuned = arch.card_of(device), of(device)
    found = base_cost(card) if tuned is None else tuned.cost_over(base_cost(card))
    tiled = fmt is None or fmt.name in TILED or (arch.hopper(card) and fmt.values is fmt)
    return found if tiled else streamed(found)


def base_cost(card: str) -> CostModel:
    """The cost model of a card without a table."""
    return GPU_COST if arch.hopper(card) else MMA_COST


@contextmanager
def trying(tuned: Tuned | None) -> Iterator[None]:
    """Within it every device has this for its table; what is bound meanwhile keeps it. For measuring, and for tests."""
    global _trial
    before, _trial = _trial, tuned
    try:
        yield
    finally:
        _trial = before


def key_of(
    dtype: torch.dtype, width: int | str, rows: float, scores: Scores, *, plain: bool, pattern: Blocks
) -> tuple[str, str]:
    """The family and the key of a prefill problem; plain: as choose_tiling has it; width: the padded head dimension,
    "192x128" where V has another.

    "bfloat16/128/causal/plain/long", or of a schedule or a function "bfloat16/128/64x64/plain".
    """
    told = {"exact": scores.exact, "scored": scores.changed, "loaded": not plain}
    features = "+".join(name for name, there in told.items() if there) or "plain"
    kind = str(dtype).removeprefix("torch.")
    blocks = [f"{pattern.block_q}x{pattern.block_k}"] if pattern.block_q else []
    blocks += [name for name in ("mask", "score") if getattr(pattern, name)]
    if blocks:
        return "sparse", f"{kind}/{width}/{'+'.join(blocks)}/{features}"
    length = next((name for most, name in LENGTHS if rows <= most), "long")
    causal = "causal" if scores.window[1] is not None else "full"
    return "prefill", f"{kind}/{width}/{causal}/{features}/{length}"


class Streaming(Protocol):
    """What of a decode kernel without tiles (gpu/decode_kernels.py) tells kinds of them apart."""

    @property
    def rows(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def blocks(self) -> int: ...


def decode_key(form: KVFormat, tiling: Streaming) -> str:
    """The key of a decode kernel without tiles: "bf16/128/8 rows/4 warps/2 blocks", or "bf16/192x128/…"."""
    return f"{form.name}/{form.dims}/{tiling.rows} rows/{tiling.warps} warps/{tiling.blocks} blocks"


MLA_WAYS = ("boxes", "gather", "chosen")  # how rows come: by TMA; one by one; those that each query token has chosen


def mla_key(stored: str, head_dim: int, value_dim: int, rows: int, way: str) -> str:
    """The key of an MLA decode kernel: "bf16/576x512/64 rows/boxes". stored: the cache's format; rows: of
    gpu/mla_kernels.py CLASSES."""
    return f"{stored}/{head_dim}x{value_dim}/{rows} rows/{way}"


# ---- files ------------------------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Where the user's tables are: beside the compiled kernels. None where the user has no home."""
    root = cache.root()
    return root / "tables" if root else None


def file_name(card: str, target: str) -> str:
    """The name of a card's table."""
    return f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}-{target}.json"


def held(card: str, target: str, own: Path | None) -> Tuned:
    """The sections that hold for such a card: of the user's table in `own`, else of the package's."""
    sections: dict[str, Section] = {}
    for place in (own, SHIPPED):
        if place is None:
            continue
        try:
            table = read(place / file_name(card, target))
        except (OSError, ValueError):  # none, or not to be used: `tilewise doctor` says why
            continue
        for family, section in table.families.items():
            if family not in sections and not refusal(table, family, card, target):
                sections[family] = section
    return Tuned(sections)


def refusal(table: Table, family: str, card: str, target: str) -> str:
    """Why a table's section is not used on such a card; "" if it is."""
    if (table.card, table.target) != (card, target):
        return f"it is of another card: {table.card} as {table.target}"
    section, now = table.families[family], source(family)
    if section.source != now and now not in section.carried:
        return "it was measured with other kernels than this version has"
    return ""


@lru_cache
def source(family: str) -> str:
    """The digest of the sources of a family's kernels, as they are installed."""
    room = ROOMS[family]
    files = sorted((KERNELS_ROOT / room).glob("*.cu"))
    found = headers("".join(f'#include "{room}/{file.name}"\n' for file in files), emulator=False)
    return cache.digest(*(part for item in sorted(found.items()) for part in item))


def read(path: Path) -> Table:
    """The table in a file. ValueError says what is wrong with one that is none, OSError that there is none."""
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    try:
        if record["format"] != FORMAT:
            raise ValueError(f"it has format {record['format']!r}, this version reads {FORMAT}")
        sections = {str(name): _section(made) for name, made in record["families"].items() if name in FAMILIES}
        return Table(path, _text(record["card"]), _text(record["target"]), sections)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no table of `tilewise tune`: {type(error).__name__} {error}") from error


def _section(record: Any) -> Section:
    tilings = {
        _text(key): {_text(name): _plain(value) for name, value in entry.items()}
        for key, entry in record.get("tilings", {}).items()
    }
    constants = {_text(name): _positive(name, value) for name, value in record.get("constants", {}).items()}
    carried = {_text(name): _text(why) for name, why in record.get("carried", {}).items()}
    return Section(_text(record["date"]), _text(record["source"]), tilings, constants, carried, record)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, got {value!r}")
    return value


def _plain(value: Any) -> Value:
    if not isinstance(value, int) or not 0 <= value <= 1 << 20:
        raise ValueError(f"a tiling has whole numbers and flags, got {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)
