"""The ranks of a process group, as the calls of this package see them: whatever waits for another rank waits here.

torch.distributed moves the bytes. What is added is how it fails: a wait that does not end well raises
`TilewiseDistributedError` with the call, what was waited for, from whom, and what to do. Everything travels as bytes,
so that one message can carry several dtypes, and dtypes that a backend cannot send.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions  # type: ignore[attr-defined]

from tilewise import checks

ALIGN = 16  # bytes: where a part of a message may start, whatever its dtype
CARD_BYTES = 1024  # of what a rank says of its own call when ranks compare

Part = tuple[Sequence[int], torch.dtype]


class TilewiseDistributedError(RuntimeError):
    """Another rank did not do its part: it died, did not come in time, or came with another call.

    The process group is then of no more use. Destroy it, on every rank that is left, and start another.
    """


class Message:
    """How tensors of given shapes and dtypes lie in one buffer of bytes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._places: list[tuple[int, int, Sequence[int], torch.dtype]] = []
        self.nbytes = 0
        for shape, dtype in parts:
            size = math.prod(shape) * dtype.itemsize
            self._places.append((self.nbytes, size, shape, dtype))
            self.nbytes += -(-size // ALIGN) * ALIGN
        self.nbytes = max(self.nbytes, ALIGN)  # nothing is a message too: views of an empty buffer start anywhere

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer (at least nbytes,) uint8 that starts at a multiple of ALIGN."""
        return [buffer[at : at + size].view(dtype).view(*shape) for at, size, shape, dtype in self._places]

    def pack(self, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
        """Copy the tensors to their places; returns the bytes of `into` that they take."""
        for view, x in zip(self.views(into), tensors, strict=True):
            view.copy_(x)
        return into[: self.nbytes]


class Transfer:
    """Sends and receives under way; `wait` ends them."""

    def __init__(self, peers: Peers, works: Sequence[tuple[dist.Work, str, int]]) -> None:
        self._peers, self._works = peers, works

    def wait(self) -> None:
        """On a CPU, until the buffers may be used again; on a card, the current stream waits."""
        started = time.monotonic()
        for work, what, peer in self._works:
            self._peers.wait(work, what, (peer,), started)


class Peers:
    """This rank's view of a process group during one call.

    call: its name, for messages. group: None is the default one. timeout: seconds for each wait, None for the group's
    own. device: of the tensors that will travel. Ranks are counted within the group.
    """

    def __init__(self, call: str, group: dist.ProcessGroup | None, timeout: float | None, device: torch.device) -> None:
        self.call, self.device = call, device
        self.group = check_group(group)
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.timeout = None if timeout is None else checks.number("timeout", timeout, 0.0)
        if self.timeout == 0:
            raise ValueError("timeout must be more than 0 seconds, or None for the group's own, got 0")
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        self._backend = backends.get(device.type, "none")
        if self._backend == "none" or (device.type, self._backend) == ("cuda", "gloo"):
            wanted = "nccl" if device.type == "cuda" else "gloo"
            raise ValueError(
                f"group must have a backend for {device.type} tensors ({wanted}), "
                f"got {dist.get_backend_config(self.group)} and q on {device}"
            )

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    # What travels.

    def start(
        self, what: str, send: tuple[torch.Tensor, int] | None, receive: tuple[torch.Tensor, int] | None
    ) -> Transfer:
        """Start to send bytes to a rank and to receive bytes from one; both go on while this rank computes."""
        ops, told = [], []
        if receive is not None:  # first: it is the one whose failure says most
            source = dist.get_global_rank(self.group, receive[1])
            ops.append(dist.P2POp(dist.irecv, receive[0], source, self.group))
            told.append((f"receiving {what} from rank {receive[1]}", receive[1]))
        if send is not None:
            target = dist.get_global_rank(self.group, send[1])
            ops.append(dist.P2POp(dist.isend, send[0], target, self.group))
            told.append((f"sending {what} to rank {send[1]}", send[1]))
        if not ops:
            return Transfer(self, [])
        with self._told(" and ".join(t for t, _ in told), [peer for _, peer in told], time.monotonic()):
            works = dist.batch_isend_irecv(ops)
        if len(works) == 1 and len(told) == 2:  # one work for the whole batch: nccl
            told = [(f"{told[0][0]} and {told[1][0]}", told[0][1])]
        return Transfer(self, [(work, *one) for work, one in zip(works, told, strict=True)])

    def gather(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x (n,) uint8, n being the same on all."""
        found = self.buffer(self.world * x.numel()).view(self.world, x.numel())
        options = AllgatherOptions()
        self._limit(options)
        self._collective(what, lambda: self.group.allgather([list(found.unbind(0))], [x], options))
        return list(found.unbind(0))

    def all_to_all(
        self, what: str, outgoing: torch.Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> list[torch.Tensor]:
        """Bytes for every rank out, bytes of every rank in: `sends` and `receives` of them, in the order of ranks."""
        found = self.buffer(sum(receives))
        options = AllToAllOptions()
        self._limit(options)
        self._collective(what, lambda: self.group.alltoall_base(found, outgoing, list(receives), list(sends), options))
        return list(found.split(list(receives)))

    def _limit(self, options: Any) -> None:
        """Let gloo's own thread give up when the caller does: destroying the group would wait for it."""
        if self.timeout is not None and self._backend == "gloo":
            options.timeout = timedelta(seconds=self.timeout)

    def _collective(self, what: str, start: Any) -> None:
        others = [r for r in range(self.world) if r != self.rank]
        started = time.monotonic()
        with self._told(what, others, started):
            work = start()
        self.wait(work, what, others, started)

    # How it fails.

    def wait(self, work: dist.Work, what: str, others: Sequence[int], started: float) -> None:
        """Wait for one work, no longer than until `timeout` after `started`."""
        with self._told(what, others, started):
            if self.timeout is None:
                done = work.wait()
            else:
                left = max(0.001, started + self.timeout - time.monotonic())
                done = work.wait(timedelta(seconds=left))
            if not done:
                raise RuntimeError("it did not complete")

    @contextmanager
    def _told(self, what: str, others: Sequence[int], started: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            seconds = time.monotonic() - started
            names = ("rank " if len(others) == 1 else "one of ranks ") + ", ".join(map(str, others))
            limit = "the group's own timeout" if self.timeout is None else f"timeout={self.timeout:g} s"
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TilewiseDistributedError(
                f"{self.call} on rank {self.rank} of {self.world}: {what} failed after {seconds:.1f} s ({limit}). Has "
                f"{names} died, raised, or not made the same call? See its log; then, on every rank that is left, "
                "destroy_process_group() and start again, with a longer timeout= if it was only slow. "
                f"torch.distributed says: {reason}"
            ) from error

    # Whether all ranks mean the same.

    def agree(self, same: dict[str, Any], own: dict[str, Any]) -> list[dict[str, Any]]:
        """Compare `same` over the ranks, ValueError on all of them where it differs; returns every rank's `own`.

        One small collective, whose answer the CPU reads.
        """
        text = json.dumps([{"call": self.call, **same}, own]).encode()
        if len(text) > CARD_BYTES:
            raise ValueError(f"{self.call} has too much to compare over ranks: {len(text)} bytes of {CARD_BYTES}")
        card = torch.frombuffer(bytearray(text.ljust(CARD_BYTES)), dtype=torch.uint8).to(self.device)
        cards = [json.loads(bytes(x.tolist())) for x in self.gather("comparing the arguments of all ranks", card)]
        first = cards[0][0]
        for rank, (given, _) in enumerate(cards):
            for name in dict.fromkeys([*first, *given]):
                if given.get(name) != first.get(name):
                    raise ValueError(
                        f"{name} must be the same on every rank, "
                        f"got {first.get(name)!r} on rank 0 and {given.get(name)!r} on rank {rank}"
                    )
        return [mine for _, mine in cards]


def check_group(group: Any) -> dist.ProcessGroup:
    """The group, the default one for None, of which this process is a rank."""
    if not dist.is_available() or not dist.is_initialized():
        raise TilewiseDistributedError(
            "there is no process group: call torch.distributed.init_process_group on every rank first"
        )
    if group is None:
        default: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]  # a property of the metaclass
        return default
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must be one that this process is a rank of, got one that it is not in")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    return group
