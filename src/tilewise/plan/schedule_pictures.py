"""One head's pattern of a BlockSchedule as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewise.plan.pictures import save
from tilewise.plan.schedule_grid import Grid, Int32s, Pattern

SHADES = " ░▒▓█"


class Picture:
    """The pattern of head `head` of sequence `batch`; both are 0 where the pattern is shared.

    whole: those of its blocks in which every query sees every key, where that is known; a block that is kept and is not
    one of them is seen in part, and gets half the shade.
    """

    def __init__(self, grid: Grid, pattern: Pattern, whole: Pattern | None, head: int, batch: int) -> None:
        self.grid, self.head, self.batch = grid, head, batch
        first = (batch * (grid.heads or 1) + head) * grid.q_blocks
        self.kept = _part(pattern, first, grid.q_blocks)
        self.whole = None if whole is None else _part(whole, first, grid.q_blocks)

    def text(self, width: int) -> str:
        """At most `width` characters for the keys: a character is one block, or the share of several that is kept.

        What is seen in part counts half.
        """
        grid = self.grid
        columns = min(width, grid.cols)
        # A character is about twice as tall as it is wide, so a picture that has to shrink shrinks to half the lines.
        fits = columns == grid.cols and grid.q_blocks <= width
        lines = grid.q_blocks if fits else min(grid.q_blocks, max(1, width // 2))
        text = [self.facts()]
        if not lines or not columns:
            return "\n".join([*text, "(no blocks)"])
        share = self.shades(lines, columns)
        # ' ' means that nothing is kept and '█' that everything is; the three shades between them are thirds, so that
        # a block seen in part is '▒'.
        shades = np.where(share >= 1, 4, np.ceil(share * 3)).astype(int)
        first_query = -(-np.arange(lines) * grid.q_blocks // lines) * grid.block_q
        margin = max(len("queries"), len(str(grid.seqlen_q)))
        per = "1 block" if fits else f"{grid.q_blocks / lines:.3g} × {grid.cols / columns:.3g} blocks"
        text.append(f"{'':{margin}}  keys 0 to {grid.seqlen_k - 1} →   (a character is {per})")
        text.append(f"{'queries':>{margin}} ┌{'─' * columns}┐")
        for line, codes in enumerate(shades):
            label = first_query[line] if line % 8 == 0 else ""
            text.append(f"{label:>{margin}} │{''.join(SHADES[code] for code in codes)}│")
        text.append(f"{grid.seqlen_q - 1:>{margin}} └{'─' * columns}┘")
        return "\n".join(text)

    def draw(self, target: Path) -> None:
        """Writes a PNG or an SVG, axes in tokens."""
        from matplotlib.figure import Figure  # slow to import, and only this call needs it

        grid = self.grid
        figure = Figure(figsize=(7.5, 7.0), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(self.facts().replace("; ", "\n"), fontsize=10)
        axes.set_xlabel("key (token)")
        axes.set_ylabel("query (token)")
        lines, columns = min(grid.q_blocks, 1024), min(grid.cols, 1024)
        if lines and columns:
            shrunk = (lines, columns) != (grid.q_blocks, grid.cols)
            image = axes.imshow(
                self.shades(lines, columns),
                cmap="Blues",
                vmin=0.0,
                vmax=1.0,
                interpolation="nearest",
                extent=(0, grid.cols * grid.block_k, grid.q_blocks * grid.block_q, 0),
                aspect="equal" if 0.25 <= grid.seqlen_q / grid.seqlen_k <= 4 else "auto",
            )
            axes.set_xlim(0, grid.seqlen_k)
            axes.set_ylim(grid.seqlen_q, 0)
            if shrunk:
                kept = "share of blocks kept" + ("" if self.whole is None else ", half of those seen in part")
                figure.colorbar(image, ax=axes, shrink=0.7, label=kept)
            elif self.whole is not None:
                for name, shade in (("whole", 1.0), ("in part", 0.5), ("not seen", 0.0)):
                    axes.fill([], [], facecolor=image.cmap(shade), edgecolor="0.6", label=name)
                figure.legend(loc="outside lower center", ncols=3, frameon=False)
            if max(lines, columns) <= 64:
                axes.vlines(np.arange(1, columns) * grid.block_k, 0, grid.seqlen_q, colors="0.8", linewidth=0.5)
                axes.hlines(np.arange(1, lines) * grid.block_q, 0, grid.seqlen_k, colors="0.8", linewidth=0.5)
        else:
            axes.text(0.5, 0.5, "no blocks", ha="center", va="center", transform=axes.transAxes)
        save(figure, target)

    def facts(self) -> str:
        grid, kept = self.grid, len(self.kept.indices)
        total = grid.q_blocks * grid.cols
        whose = "all heads" if grid.heads is None else f"head {self.head} of {grid.heads}"
        if grid.batch is not None:
            whose += f", sequence {self.batch} of {grid.batch}"
        whole = "" if self.whole is None else f", {len(self.whole.indices)} of them whole"
        return (
            f"{grid.seqlen_q} queries × {grid.seqlen_k} keys in blocks of {grid.block_q} × {grid.block_k}; "
            f"{whose}: {kept} of {total} blocks kept ({kept / max(1, total):.1%}){whole}"
        )

    def shades(self, lines: int, columns: int) -> npt.NDArray[np.float64]:
        """(lines, columns): the share of the blocks in each cell of a coarser grid that is kept; in part: half."""
        kept = self._cells(self.kept, lines, columns)
        return kept if self.whole is None else (kept + self._cells(self.whole, lines, columns)) / 2

    def _cells(self, pattern: Pattern, lines: int, columns: int) -> npt.NDArray[np.float64]:
        line_of = np.arange(self.grid.q_blocks) * lines // self.grid.q_blocks
        column_of = np.arange(self.grid.cols) * columns // self.grid.cols
        cell = np.repeat(line_of * columns, np.diff(pattern.indptr))
        cell += column_of[pattern.indices]
        kept = np.bincount(cell, minlength=lines * columns).reshape(lines, columns)
        share: npt.NDArray[np.float64] = kept / np.outer(np.bincount(line_of), np.bincount(column_of))
        return share


def _part(pattern: Pattern, first: int, rows: int) -> Pattern:
    """The rows of one head: indptr is still counted from the first of all rows."""
    indptr = pattern.indptr[first : first + rows + 1]
    indices: Int32s = pattern.indices[indptr[0] : indptr[-1]]
    return Pattern(indptr, indices)
