"""A backend of torch.compile that keeps its graphs, for tests that look for Tilewise's operators in them."""

from __future__ import annotations

import torch


class Graphs:
    """A backend that keeps its graphs, which run as `backend` makes them."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self._graphs, self._compile = [], torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self._graphs.append(graph.graph)
        return self._compile(graph, inputs)

    def operators(self) -> list[list[str]]:
        """Of each graph, the names of Tilewise's operators in it. Graphs that torch gave up again are empty."""
        found = [[n.target.__name__ for n in g.nodes if "tilewise" in str(n.target)] for g in self._graphs]
        return [names for names in found if names]


def compiled(function, graphs: Graphs, **options):
    return torch.compile(function, fullgraph=True, backend=graphs, **options)
