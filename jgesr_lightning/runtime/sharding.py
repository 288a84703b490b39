"""Who holds what: clients (rows) while they train, parameters (columns) while the server aggregates.

No process holds more than its share of the K x d matrix: rows travel to columns by one all-to-all, sums over columns
(Gram matrices) are all-reduced, and the columns travel back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


class PeerLostError(ConnectionError):
    """Another process of the run is gone; what went wrong is for that one to say."""


@contextmanager
def talking() -> Iterator[None]:
    """Turn the failure of a collective, which comes as a bare RuntimeError, into a `PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        said = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).split(". ")[0]  # without source line and advice
        raise PeerLostError(f"lost another process of this run ({said})") from error


def assign(loads: Sequence[float], world_size: int) -> list[list[int]]:
    """Spread clients over processes: longest first, each to the process with the least work so far.

    Args:
        loads: work of each client (training samples x epochs).
        world_size: number of processes.

    Returns:
        The clients of each process, ascending. Within 4/3 of the best possible makespan (Graham, 1969).
    """
    owners: list[list[int]] = [[] for _ in range(world_size)]
    work = [0.0] * world_size
    for client in sorted(range(len(loads)), key=lambda k: (-loads[k], k)):
        rank = min(range(world_size), key=lambda r: (work[r], len(owners[r]), r))
        owners[rank].append(client)
        work[rank] += loads[client]
    return [sorted(clients) for clients in owners]


class Sharding:
    """Moves the K x d matrix between its row and its column layout, and sums small tensors over processes.

    Args:
        owners: the clients of each process.
        size: number of columns d.
        rank: this process.
        device: where the matrices live.
    """

    def __init__(self, owners: Sequence[Sequence[int]], size: int, rank: int, device: torch.device) -> None:
        self.owners = [list(clients) for clients in owners]
        self.size = size
        self.rank = rank
        self.world_size = len(owners)
        self.device = device
        self.num_clients = sum(len(clients) for clients in owners)
        arrival = [client for clients in self.owners for client in clients]
        if sorted(arrival) != list(range(self.num_clients)):
            raise ValueError("every client belongs to exactly one process")
        self._arrival = torch.tensor(arrival, dtype=torch.long, device=device)
        self._bounds = [size * r // self.world_size for r in range(self.world_size + 1)]
        self._widths = [high - low for low, high in pairwise(self._bounds)]

    @property
    def clients(self) -> list[int]:
        """Clients whose rows this process holds."""
        return self.owners[self.rank]

    @property
    def columns(self) -> slice:
        """Columns that this process holds of all clients' rows."""
        return slice(self._bounds[self.rank], self._bounds[self.rank + 1])

    def layers(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return how many of each layer's columns this process holds."""
        shares, start = [], 0
        for width in sizes:
            low = max(start, self.columns.start)
            high = min(start + width, self.columns.stop)
            shares.append(max(0, high - low))
            start += width
        return tuple(shares)

    def to_columns(self, rows: Tensor) -> Tensor:
        """Return (K, columns of this process) from the (clients of this process, d) rows."""
        if self.world_size == 1:
            return rows
        widths, mine, width = self._widths, len(self.clients), self._widths[self.rank]
        outgoing = torch.cat([part.reshape(-1) for part in self._wire(rows).split(widths, dim=1)])
        incoming = outgoing.new_empty(self.num_clients * width)
        with talking():
            dist.all_to_all_single(
                incoming, outgoing, [len(clients) * width for clients in self.owners], [mine * w for w in widths]
            )
        columns = incoming.view(self.num_clients, width)
        ordered = torch.empty_like(columns)
        ordered[self._arrival] = columns
        return ordered.to(rows.dtype)

    def to_rows(self, columns: Tensor) -> Tensor:
        """Return (clients of this process, d) from the (K, columns of this process) columns."""
        if self.world_size == 1:
            return columns
        widths, mine, width = self._widths, len(self.clients), self._widths[self.rank]
        outgoing = self._wire(columns)[self._arrival].reshape(-1)
        incoming = outgoing.new_empty(mine * self.size)
        with talking():
            dist.all_to_all_single(
                incoming, outgoing, [mine * w for w in widths], [len(clients) * width for clients in self.owners]
            )
        parts = incoming.split([mine * w for w in widths])
        rows = torch.cat([part.view(mine, w) for part, w in zip(parts, widths, strict=True)], dim=1)
        return rows.to(columns.dtype)

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of `partial` over all processes, the same bits on each, where `partial` lives.

        Raises:
            PeerLostError: another process is gone; so do all that move or sum.
        """
        if self.world_size == 1:
            return partial
        total = partial.detach().to(self.device, copy=True).contiguous()
        with talking():
            dist.all_reduce(total)
        return total.to(partial.device)

    def gather(self, values: Tensor) -> Tensor:
        """Return (K, ...) float64 on the CPU from the (clients of this process, ...) values."""
        everyone = torch.zeros(self.num_clients, *values.shape[1:], dtype=torch.float64)
        everyone[self.clients] = values.to("cpu", torch.float64)
        return self.sum(everyone)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any process."""
        return bool(self.sum(torch.tensor(float(flag))) > 0)

    def barrier(self) -> None:
        """Wait for all processes."""
        self.any(False)

    @staticmethod
    def _wire(matrix: Tensor) -> Tensor:
        return matrix.view(torch.uint8) if matrix.dtype == torch.bool else matrix
