"""The tensors that pages lie in: how they are laid out, checked, copied and read, and which tokens were written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise.formats import KVFormat
from tilewise.kvcache.pool import Ints, Pages
from tilewise.kvcache.slots import upload
from tilewise.plan.tiles import page_step

Parts = list[torch.Tensor]
LATE, LATE_TOKENS = 64, 1024  # steps, and tokens of one, that Written keeps without having noted them


def uses_kernels(device: torch.device) -> bool:
    """Whether pages there are written and read by kernels, and laid out for them."""
    return device.type == "cuda"


def allocate(form: KVFormat, lead: tuple[int, int, int, int], device: torch.device, *, for_kernels: bool) -> Parts:
    """Uninitialised components, each (layers, pages, page_size, heads, *trailing); `lead` is the first four.

    A run of consecutive pages of one layer is a plain view (tokens, heads, D), which attention reads without a copy.
    For kernels, scales and zeros lie as (layers, pages, heads, page_size, *trailing): those of one head are then
    contiguous within a page, as a warp that reads one head wants them. The components of a quantised latent row lie
    side by side, in the row's own bytes.
    """
    layers, pages, size, heads = lead
    made = []
    with torch.inference_mode(False):  # or only code under inference_mode could write to it
        if form.latent:
            return form.from_rows(torch.empty((*lead, form.bytes_per_token_head), dtype=torch.uint8, device=device))
        for number, c in enumerate(form.components):
            if for_kernels and number:
                shape = (layers, pages, heads, size, *c.shape)
                made.append(torch.empty(shape, dtype=c.dtype, device=device).transpose(2, 3))
            else:
                made.append(torch.empty((*lead, *c.shape), dtype=c.dtype, device=device))
    return made


def copy_pages(storage: Sequence[torch.Tensor], old: Ints, new: Ints, *, by_kernel: bool) -> None:
    """Pages `old` to `new` in every layer and component; no page is in both."""
    if by_kernel:
        from tilewise.gpu import append  # it needs the compiler and the driver, which a cache on the CPU does not

        append.copy_pages(storage, upload(np.stack([old, new]), storage[0].device))
        return
    for stored in storage:
        stored = as_bytes(stored)
        stored.index_copy_(1, torch.from_numpy(new), stored.index_select(1, torch.from_numpy(old)))


def write(form: KVFormat, parts: Parts, index: torch.Tensor, x: torch.Tensor) -> None:
    """Store x (tokens, heads, D) at `index` of one layer's components, on the CPU."""
    for stored, part in zip(parts, form.encode(x.detach()), strict=True):
        as_bytes(stored).flatten(0, 1).index_copy_(0, index, as_bytes(part))


def read(
    storages: Sequence[tuple[KVFormat, Parts]], layer: int, touched: Pages, rows: slice, dtype: torch.dtype
) -> list[torch.Tensor]:
    """(n, rows, heads, D) of each storage: rows of the tokens in n lists of pages `touched` (n, c), as load() says."""
    step = page_step(touched)
    first = int(touched[0, 0]) if touched.size else 0
    index = None

    def part(stored: torch.Tensor) -> torch.Tensor:
        nonlocal index
        size = stored.shape[1]
        if step is not None and (size == 1 or stored.stride(0) == size * stored.stride(1)):
            tokens = stored.flatten(0, 1)[first * size + rows.start :]
            shape = (len(touched), rows.stop - rows.start, *tokens.shape[1:])
            return tokens.as_strided(shape, (step * size * tokens.stride(0), *tokens.stride()))
        if index is None:
            index = upload(touched.astype(np.int64).reshape(-1), stored.device)
        gathered = as_bytes(stored).index_select(0, index).view(stored.dtype)
        return gathered.reshape(len(touched), touched.shape[1] * size, *stored.shape[2:])[:, rows]

    return [form.decode([part(stored[layer]) for stored in storage], dtype) for form, storage in storages]


def read_tokens(
    storages: Sequence[tuple[KVFormat, Parts]], layer: int, index: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """(tokens, heads, D) of each storage: the tokens at `index`, page · page_size + offset, int64."""

    def part(stored: torch.Tensor) -> torch.Tensor:
        return as_bytes(stored).flatten(0, 1).index_select(0, index).view(stored.dtype)

    return [form.decode([part(stored[layer]) for stored in storage], dtype) for form, storage in storages]


def bytes_of(form: KVFormat, parts: Parts) -> torch.Tensor:
    """The rows whose components these are, (…, bytes of a row) uint8: a view."""
    codes = parts[0].view(torch.uint8)
    return codes.as_strided((*codes.shape[:-1], form.bytes_per_token_head), codes.stride())


def kept(form: KVFormat, parts: Parts) -> Parts:
    """Components as a copy of the cache is made of them: the rows of a latent format, whose components lie side by
    side, and bytes, since torch pickles no float8."""
    return [bytes_of(form, parts)] if form.latent and parts else [as_bytes(x) for x in parts]


def found(form: KVFormat, parts: Parts) -> Parts:
    """The components of which kept() made these."""
    if form.latent and parts:
        return form.from_rows(parts[0])
    return [x.view(part.dtype) for x, part in zip(parts, form.components, strict=False)]  # of no values none


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """One-byte dtypes as uint8: torch copies float8 by index only so."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def check_device(device: Any) -> torch.device:
    """The device with its number, of a kind that serves."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a str or torch.device, got {type(device).__name__}")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}, which is no device") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise NotImplementedError(f"device {found} is not served: the paged cache runs on device='cpu' or 'cuda'")
    if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
        raise NotImplementedError(f"device {found} is not here: torch {torch.__version__} cannot use it; device='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def check_writable(name: str, pages: torch.Tensor) -> None:
    """Raise ValueError where torch would not let them be written."""
    if pages.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} must be tensors that can be written here, got some made under torch.inference_mode(), which can "
            "be written only under it; make them outside of it, or clone() them here"
        )


def check_turned(q: torch.Tensor) -> None:
    """Raise unless q can be turned in place."""
    check_writable("q", q)
    if q.requires_grad and q.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            "q is turned in place, and requires gradients, which nobody would see; give a detach()ed copy of it"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(q.stride(), q.shape, strict=True)):
        raise ValueError(
            f"q is turned in place, and several of its elements share memory, with strides {q.stride()} for shape "
            f"{tuple(q.shape)}; use q.contiguous()"
        )


class Written:
    """Which layers each token of the pages was given. It means something only for tokens that a sequence has.

    bits: (pages, page_size, words) uint64, one bit per layer; `every_layer` (words,) is a token that has them all.
    Tokens that got every layer at once are noted in it when somebody looks.
    """

    def __init__(self, num_pages: int, page_size: int, num_layers: int) -> None:
        words = -(-num_layers // 64)
        self.every_layer = np.array([2 ** min(64, num_layers - 64 * w) - 1 for w in range(words)], np.uint64)
        self._bits = np.zeros((num_pages, page_size, words), np.uint64)
        self._late: list[Ints] = []  # tokens that have every layer
        self._losses = 0  # of the pool when `_late` was empty

    @property
    def bits(self) -> npt.NDArray[np.uint64]:
        if self._late:
            index = np.concatenate(self._late)
            self._late.clear()
            if len(self.every_layer) == 1:
                self._bits.reshape(-1)[index] = self.every_layer[0]
            else:
                self._bits.reshape(-1, len(self.every_layer))[index] = self.every_layer
        return self._bits

    def clear_pages(self, pages: Ints, losses: int) -> None:
        """Pages that somebody has from now on. losses: the pool's."""
        if losses != self._losses:  # or a page that was freed and taken again would get what is late
            self._losses = losses
            self.bits[pages] = 0
        else:
            self._bits[pages] = 0

    def clear_after(self, index: Ints) -> None:
        """Whatever comes after these tokens in their pages is to be written."""
        bits, size = self.bits, self._bits.shape[1]
        pages = index // size
        bits[pages] *= (np.arange(size) <= (index - pages * size)[:, None]).astype(np.uint64)[:, :, None]

    def forget(self, index: Ints) -> None:
        """Tokens at `index`, page · page_size + offset, are to be written."""
        if len(self.every_layer) == 1:
            self.bits.reshape(-1)[index] = 0
        else:
            self._by_token()[index] = 0

    def mark(self, index: Ints, layer: int) -> None:
        self._by_token()[index, layer // 64] |= _bit(layer)

    def mark_all(self, index: Ints) -> None:
        self._late.append(index)
        if len(self._late) > LATE or len(index) > LATE_TOKENS:
            self.bits  # noqa: B018

    def copy_pages(self, old: Ints, new: Ints) -> None:
        self.bits[new] = self.bits[old]

    def in_every_layer(self, pages: Ints, tokens: Ints) -> npt.NDArray[np.bool_]:
        """For each of the pages, whether its first `tokens` were written in every layer."""
        written = (self.bits[pages] == self.every_layer).all(-1)
        written |= np.arange(written.shape[1]) >= tokens[:, None]
        whole: npt.NDArray[np.bool_] = written.all(-1)
        return whole

    def has(self, layer: int, lists: Pages, rows: slice) -> bool:
        """Whether these rows of the tokens in n lists of pages (n, c) were all written in the layer."""
        # The same pages over and over need one look, and that of consecutive ones is without a copy.
        lists = lists[:1] if len(lists) > 1 and (lists == lists[0]).all() else lists
        one, count = len(lists) == 1 and lists.size, lists.shape[1]
        consecutive = one and int(lists[0, -1]) - int(lists[0, 0]) == count - 1 and (np.diff(lists[0]) == 1).all()
        looked_at = slice(int(lists[0, 0]), int(lists[0, 0]) + count) if consecutive else lists
        written = self.bits[looked_at, :, layer // 64] & _bit(layer)
        return bool(written.reshape(len(lists), count * self.bits.shape[1])[:, rows].all())

    def are(self, layer: int, index: Ints) -> bool:
        """Whether the tokens at `index`, page · page_size + offset, were all written in the layer."""
        return bool((self._by_token()[index, layer // 64] & _bit(layer)).all())

    def _by_token(self) -> npt.NDArray[np.uint64]:
        return self.bits.reshape(-1, self.bits.shape[2])


def _bit(layer: int) -> np.uint64:
    return np.uint64(1 << layer % 64)
