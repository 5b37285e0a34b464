"""The sequences that are decoded together: their static buffers, and on a card the graph that replays their step.

A batch is made anew when somebody joins or many have left. Its first step runs call by call, which also compiles what
is missing; from the second on, a card replays one graph of the whole forward pass and the choice of the next tokens.
Between replays the host only puts the new tokens, places and lengths where the graph looks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..kvcache.slots import upload
from .sampling import Chooser, Sampling, uniforms
from .steps import DecodeStep

if TYPE_CHECKING:
    from .hf import ServedModel

DrawKey = tuple[int, int, int, int]  # what sampling.uniforms() takes


class Replay(Protocol):
    """A captured forward pass."""

    def replay(self) -> None: ...


class DecodeBatch:
    """Decodes the next token of `step.seqs`, each with its own Sampling. `tokens` are their latest ones.

    captures: how many graphs were captured, in the batch's life.
    """

    def __init__(
        self,
        model: ServedModel,
        step: DecodeStep,
        tokens: Sequence[int],
        samplings: Sequence[Sampling],
        *,
        cuda_graphs: bool,
    ) -> None:
        device = step.prefix.cache.device
        self.step, self.captures = step, 0
        self._latest = list(tokens)
        self._model, self._use_graph = model, cuda_graphs
        self._chooser = Chooser(samplings, model.shape.vocab, device)
        count = len(step.seqs)
        self._tokens = torch.zeros(count, dtype=torch.int64, device=device)
        self._uniform = torch.zeros(count, dtype=torch.float64, device=device)
        self._next = torch.zeros(count, dtype=torch.int64, device=device)
        self._graph: Replay | None = None
        self._has_run = False  # call by call, over the plans as they are

    def __call__(self, draws: Sequence[DrawKey]) -> list[int]:
        """The next tokens; those before them enter the cache by this.

        draws: what to draw with, see sampling.uniforms(). Raises OutOfPages with nothing changed.
        """
        kept = self.step.renew(self._latest)
        device = self._tokens.device
        upload(np.array(self._latest, np.int64), device, into=self._tokens)
        if self._chooser.draws:
            upload(uniforms(draws).view(np.int64), device, into=self._uniform.view(torch.int64))
        if not kept:
            self._graph, self._has_run = None, False
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # graphs go where one is
            self._run()
        self._latest = self._next.tolist()
        return self._latest

    def _run(self) -> None:
        """Fill `_next`, from a graph if there is one or it is time for one."""
        if self._graph is None and self._use_graph and self._has_run:
            self._graph = self.capture()
            self.captures += 1
        if self._graph is None:
            self._forward()
            self._has_run = True
        else:
            self._graph.replay()
            self.step.cache.mark_written(self.step.slots)

    def capture(self) -> Replay:
        """The forward pass as a CUDA graph, which has not run yet."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._forward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name = type(self._model.model).__name__
            raise RuntimeError(
                f"the forward pass of {name} cannot be captured in a CUDA graph; pass cuda_graphs=False"
            ) from error
        return graph

    def _forward(self) -> None:
        logits = self._model.forward(self._tokens, self.step.slots.positions, self.step)
        self._next.copy_(self._chooser(logits, self._uniform))
