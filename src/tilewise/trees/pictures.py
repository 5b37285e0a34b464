"""A tree of tokens as text, and as a picture beside its mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.plan.branches import Ends, plan_branches
from tilewise.plan.pictures import EDGE, SEEN, WHOLE, picture_path, save
from tilewise.plan.schedule_files import AnyPath
from tilewise.trees.trie import Nodes

MOST_BRANCHES = 4096  # that a picture has room for


def _title(nodes: Nodes, unpacked: int) -> str:
    packed, roots = int(nodes.offsets[-1]), int((nodes.parents < 0).sum())
    trees = "" if roots == 1 else f" in {roots} trees"
    return f"{len(nodes.lasts)} sequences of {unpacked:,} tokens as {packed:,}{trees}: {unpacked / packed:.3g} × shared"


def text(nodes: Nodes, unpacked: int, lines: int) -> str:
    """A line per node, those of equal leaves side by side as one."""
    offsets, parents = nodes.offsets.tolist(), nodes.parents.tolist()
    children: dict[int, list[int]] = {}
    for n, parent in enumerate(parents):
        children.setdefault(parent, []).append(n)
    made: list[str] = []
    stack: list[tuple[list[int], str, str]] = [(group, "", "") for group in reversed(_alike(children, nodes, -1))]
    while stack:
        group, lead, below = stack.pop()
        first, tokens = group[0], offsets[group[0] + 1] - offsets[group[0]]
        many = f"{len(group)} × " if len(group) > 1 else ""
        last = offsets[group[-1] + 1] - 1
        made.append(f"{lead}{many}{tokens:,} tokens  [{offsets[first]}…{last}]")
        kinds = _alike(children, nodes, first) if len(group) == 1 else []
        for n, kind in reversed(list(enumerate(kinds))):
            end = n == len(kinds) - 1
            stack.append((kind, below + ("└─ " if end else "├─ "), below + ("   " if end else "│  ")))
    rest = [f"… and {len(made) - lines} more lines"] if len(made) > lines else []
    return "\n".join([_title(nodes, unpacked), *made[:lines], *rest])


def _alike(children: dict[int, list[int]], nodes: Nodes, parent: int) -> list[list[int]]:
    """The children of a node, leaves of the same length that follow each other together."""
    sizes = np.diff(nodes.offsets)
    groups: list[list[int]] = []
    for n in children.get(parent, []):
        leaf = n not in children
        before = groups[-1][-1] if groups else None
        if leaf and before is not None and before not in children and sizes[before] == sizes[n]:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def draw(nodes: Nodes, ends: Ends, unpacked: int, path: AnyPath) -> None:
    """Writes the tree, by position, and the mask over its packed tokens."""
    from matplotlib.figure import Figure  # slow to import, and only this call needs it

    target = picture_path(path)
    if len(nodes.parents) > MOST_BRANCHES:
        raise ValueError(f"path: the tree has over {MOST_BRANCHES:,} branches, too many to draw")
    figure = Figure(figsize=(12, 5.6), layout="constrained")
    figure.suptitle(_title(nodes, unpacked), fontsize=12)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_nodes(left, nodes)
    _draw_mask(right, ends)
    save(figure, target)


def _draw_nodes(axes: Any, nodes: Nodes) -> None:
    """A bar per node: where its tokens stand in their sequences across, a lane per leaf down."""
    from matplotlib.patches import Rectangle

    parents, sizes = nodes.parents.tolist(), np.diff(nodes.offsets).tolist()
    start, lanes = [0] * len(parents), [0] * len(parents)
    for n, parent in enumerate(parents):
        start[n] = 0 if parent < 0 else start[parent] + sizes[parent]
    for n in reversed(range(len(parents))):
        lanes[n] = max(1, lanes[n])
        if parents[n] >= 0:
            lanes[parents[n]] += lanes[n]
    free = {-1: 0}
    for n, parent in enumerate(parents):
        lane = free[parent]
        free[parent], free[n] = lane + lanes[n], lane
        shade = WHOLE if lanes[n] > 1 else SEEN
        axes.add_patch(Rectangle((start[n], lane), sizes[n], lanes[n], facecolor=shade, edgecolor="white"))
        if len(parents) <= 64:
            axes.text(start[n] + sizes[n] / 2, lane + lanes[n] / 2, f"{sizes[n]}", ha="center", va="center",
                      fontsize=8, color="white" if lanes[n] > 1 else EDGE)  # fmt: skip
    axes.set(xlim=(0, max(a + b for a, b in zip(start, sizes, strict=True))), ylim=(free[-1], 0), yticks=[])
    axes.set(xlabel="position in the sequence", ylabel="branches")
    axes.set_title("the tree: tokens of each branch", fontsize=10, loc="left")


def _draw_mask(axes: Any, ends: Ends) -> None:
    """What each packed query sees, tile by tile of the plan."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Polygon, Rectangle

    from tilewise.plan.pictures import seen_part

    whole, parts = [], []
    for r in plan_branches(ends, 1, 1, 1).rectangles():
        if r.pairs == r.rows * r.keys:
            whole.append(Rectangle((r.key, r.row), r.keys, r.rows))
        else:
            parts.append(Polygon(seen_part(r) + np.array([r.key, r.row])))
    axes.add_collection(PatchCollection(whole, facecolor=WHOLE, edgecolor="white", linewidth=0.5))
    axes.add_collection(PatchCollection(parts, facecolor=SEEN, linewidth=0))
    axes.set(xlim=(0, len(ends)), ylim=(len(ends), 0), aspect="equal", xlabel="packed key", ylabel="packed query")
    axes.set_title("its mask: dark, what is below a shared stretch sees all of it", fontsize=10, loc="left")
