"""The interface of every aggregation method: one call a round, from what arrived to what is sent next.

A method is one class in one file: it subclasses `Aggregator`, names its settings as keyword arguments with defaults,
and implements `aggregate`. Checks, absent clients, timing and memory ownership are handled here.

Columns may be shared out over processes: each process then sees all clients but only its own columns of the K x d
matrices. A method stays correct if every sum over columns (Gram matrices, norms, counts) passes through
`Upload.reduce` and everything else acts on each column alone. Decisions come from reduced numbers only, so that all
processes take the same branch and meet in the same calls of `reduce`.

What did not arrive is treated in two ways. An average of a coordinate is taken over the clients that delivered it, with
weights renormalised (`mix`). Where models are compared as wholes (distances, cosines), a gap counts as unchanged since
the last round (`complete`).
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jgesr_lightning.checks import plain
from jgesr_lightning.graph.gram import chunks, column_means
from jgesr_lightning.regularisers import Proximal, Regulariser

logger = logging.getLogger(__name__)

STARTS = ("cloud", "own")
OWNS = ("received", "clean")

Reduce = Callable[[Tensor], Tensor]
"""Sums a small tensor over the processes that hold the other columns (identity when there is only one)."""


def no_reduce(partial: Tensor) -> Tensor:
    """Return `partial` unchanged: this process holds every column."""
    return partial


@dataclass(frozen=True)
class Upload:
    """What arrived in one round, participants only (P of the K clients; P = K unless some sat out).

    Attributes:
        received: (P, d) what arrived, one row a client. Not to be modified.
        weights: (P,) float64, positive, summing to one: shares of training samples among the participants.
        mask: (P, d) bool, True where an entry arrived, or None where all did. `received` means nothing where False.
        previous: (P, d) what the server sent last round, or None.
        initial: (d,) the model of round 0, or None.
        clients: (P,) indices of the participants among all K clients, ascending.
        num_clients: K.
        layers: number of columns of each layer of the network, summing to d, or None where not known.
        reduce: sums partial results over the processes that hold the other columns.
        noise_std: (P,) float64 standard deviation of the noise on each client's entries, or None where not known.
    """

    received: Tensor
    weights: Tensor
    mask: Tensor | None
    previous: Tensor | None
    initial: Tensor | None
    clients: Tensor
    num_clients: int
    layers: tuple[int, ...] | None = None
    reduce: Reduce = no_reduce
    noise_std: Tensor | None = None


@dataclass(frozen=True)
class Own:
    """What is sent where clients put in the clean models of their own: ``w_k x_k + (1 - w_k) rest_k`` is then theirs.

    Attributes:
        weights: (layers, K) float64, or (1, K) for the whole model, on the CPU; NaN for those who are sent nothing.
        rest: (K, d) the others' part, own memory, dtype and device of what was received.
    """

    weights: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Aggregate:
    """Result of one aggregation.

    Attributes:
        models: (K, d) what the server sends next, own memory, dtype and device of what was received. With `own`, what
            it takes the clients to make of that.
        graph: (K, K) float64, on the CPU: adjacency W for methods that learn a graph, else the mixing matrix (rows sum
            to one).
        info: plain numbers, strings and lists: iterations, converged, objective, seconds, clusters, ...
        layer_graphs: (layers, K, K) float64, on the CPU, where one graph a layer was learnt, else None.
        own: what is sent in place of `models` where the method has clients put in models of their own.
    """

    models: Tensor
    graph: Tensor
    info: dict[str, Any] = field(default_factory=dict)
    layer_graphs: Tensor | None = None
    own: Own | None = None


class Aggregator(nn.Module, ABC):
    """Base of the aggregation methods; calling one checks its input, sets absent clients aside and times it.

    Class attributes:
        name: the word that configuration files use.
        mixing: True where `graph` is a mixing matrix (an absent client's row is then the identity's), False where it
            is an adjacency matrix (an absent client is then isolated).
        shares: False for a method that leaves every client by itself on purpose.
        min_clients: fewer clients than this in the whole federation is an error.
        column_state: entries of `state` whose last dimension is the columns that this process holds, such as a momentum
            of the server; all others must be the same on all processes.
        needs: which of "previous", "initial" and "noise_std" the method cannot do without, as it is set.

    Attributes:
        start: where the clients' training starts: "cloud", from what the server sent; "own", from what they trained
            last, what was sent being the anchor of their penalties alone.
        own: which model of its own goes into what a client is given: "received", the one that arrived; "clean", the
            one that the client knows it sent, which it puts in itself (every result then has its `Aggregate.own`).
    """

    name: ClassVar[str]
    mixing: ClassVar[bool] = True
    shares: ClassVar[bool] = True
    min_clients: ClassVar[int] = 1
    column_state: ClassVar[tuple[str, ...]] = ()
    needs: tuple[str, ...] = ()
    start: str = "cloud"
    own: str = "received"

    def __init__(self) -> None:
        super().__init__()
        self.warned = False

    @abstractmethod
    def aggregate(self, upload: Upload) -> Aggregate:
        """Aggregate the participants' models; the result has P rows, and a (P, P) graph."""

    def client_terms(self, proximal_mu: float | None = None) -> tuple[Regulariser, ...]:
        """Return what the clients add to their loss; `proximal_mu` None leaves the proximal weight to the method."""
        return (Proximal(proximal_mu),) if proximal_mu else ()

    def state(self) -> dict[str, Any]:
        """Return what the next round needs beyond the models: plain containers and tensors; see `column_state`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""

    @torch.no_grad()
    def forward(
        self,
        received: Tensor,
        weights: Tensor,
        mask: Tensor | None = None,
        previous: Tensor | None = None,
        initial: Tensor | None = None,
        *,
        present: Tensor | None = None,
        layers: Sequence[int] | None = None,
        reduce: Reduce = no_reduce,
        noise_std: Tensor | None = None,
    ) -> Aggregate:
        """Aggregate one round.

        Args:
            received: (K, d) floating point, any device; never modified.
            weights: (K,) positive shares of training samples; normalised here.
            mask: (K, d) bool, True where an entry arrived; None: all arrived.
            previous: (K, d) models sent last round.
            initial: (d,) model of round 0.
            present: (K,) bool, False for clients that did not take part: they keep `previous` and enter no sum. A
                client of whose model no entry arrived counts as absent too, if `previous` is given.
            layers: columns of each layer, summing to d.
            reduce: sums partial results over processes that hold the other columns.
            noise_std: (K,) standard deviation of the noise on each client's entries, where it is known.

        Raises:
            ValueError: wrong shape, type or value, with its name; `previous` missing where it is needed.
        """
        start = time.perf_counter()
        weights = self._check(received, weights, mask, previous, initial, layers, noise_std)
        mask = None if mask is None else mask.to(received.device)
        previous = None if previous is None else previous.to(received)
        initial = None if initial is None else initial.to(received)
        num_clients = received.shape[0]
        taking_part = self._present(received, mask, previous, present, reduce)
        clients = taking_part.nonzero().squeeze(1)
        everyone = len(clients) == num_clients

        def rows(matrix: Tensor | None) -> Tensor | None:
            return matrix if matrix is None or everyone else matrix[clients.to(matrix.device)]

        part = None
        if len(clients) > 0:
            shares = weights[clients]
            upload = Upload(
                received=received if everyone else received[clients.to(received.device)],
                weights=shares / shares.sum(),
                mask=rows(mask),
                previous=rows(previous),
                initial=initial,
                clients=clients,
                num_clients=num_clients,
                layers=None if layers is None else tuple(layers),
                reduce=reduce,
                noise_std=None if noise_std is None else torch.as_tensor(noise_std).double().cpu()[clients],
            )
            part = self._alone(upload) if len(clients) < self.min_clients else self._checked(upload)
        out = part if part is not None and everyone else self._scatter(part, clients, num_clients, previous)
        if received.is_cuda:
            torch.cuda.synchronize(received.device)  # else `seconds` would miss what is still queued
        info = plain(f"{type(self).__name__}'s info", out.info)
        info |= {"participants": len(clients), "seconds": time.perf_counter() - start}
        layer_graphs = None if out.layer_graphs is None else out.layer_graphs.to("cpu", torch.float64)
        models = out.models.to(received).contiguous()  # of a method of whoever's, one row for all may have come
        if models.untyped_storage().data_ptr() == received.untyped_storage().data_ptr():
            models = models.clone()
        return Aggregate(models, out.graph.to("cpu", torch.float64), info, layer_graphs, out.own)

    def _check(
        self,
        received: Tensor,
        weights: Tensor,
        mask: Tensor | None,
        previous: Tensor | None,
        initial: Tensor | None,
        layers: Sequence[int] | None,
        noise_std: Tensor | None,
    ) -> Tensor:
        if not isinstance(received, Tensor):
            raise ValueError(f"received must be a tensor; got a {type(received).__name__}")
        if received.ndim != 2 or not received.is_floating_point():
            raise ValueError(
                f"received must be a (clients, parameters) floating-point matrix; "
                f"got {received.dtype} of shape {tuple(received.shape)}"
            )
        num_clients, size = received.shape
        if num_clients < max(1, self.min_clients):
            raise ValueError(f"{self.name} needs at least {max(1, self.min_clients)} clients; got {num_clients}")
        weights = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
        if weights.shape != (num_clients,):
            raise ValueError(f"weights must have shape ({num_clients},); got {tuple(weights.shape)}")
        if not bool((torch.isfinite(weights) & (weights > 0)).all()):
            raise ValueError("weights must be positive and finite, one for each client")
        whole = (num_clients, size)
        expected = {"mask": whole, "previous": whole, "initial": (size,), "noise_std": (num_clients,)}
        noise_std = None if noise_std is None else torch.as_tensor(noise_std)
        given = {"mask": mask, "previous": previous, "initial": initial, "noise_std": noise_std}
        for name, tensor in given.items():
            if tensor is not None and not isinstance(tensor, Tensor):
                raise ValueError(f"{name} must be a tensor; got a {type(tensor).__name__}")
            if tensor is not None and tensor.shape != expected[name]:
                raise ValueError(f"{name} must have shape {expected[name]}; got {tuple(tensor.shape)}")
            if tensor is None and name in self.needs:
                raise ValueError(f"{self.name} needs `{name}`")
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask must be of type bool; got {mask.dtype}")
        if noise_std is not None and not bool((torch.isfinite(noise_std) & (noise_std >= 0)).all()):
            raise ValueError("noise_std must be finite and at least 0, one for each client")
        if layers is not None and sum(layers) != size:
            raise ValueError(f"layers must sum to the {size} columns; they sum to {sum(layers)}")
        weights = weights / weights.max()  # first, lest the sum overflows
        return weights / weights.sum()

    @staticmethod
    def _present(
        received: Tensor, mask: Tensor | None, previous: Tensor | None, present: Tensor | None, reduce: Reduce
    ) -> Tensor:
        num_clients = received.shape[0]
        if present is None:
            taking_part = torch.ones(num_clients, dtype=torch.bool)
        else:
            taking_part = torch.as_tensor(present, dtype=torch.bool).cpu()
            if taking_part.shape != (num_clients,):
                raise ValueError(f"present must have shape ({num_clients},); got {tuple(taking_part.shape)}")
            if previous is None and not bool(taking_part.all()):
                raise ValueError("clients that are absent keep their model: `previous` is needed")
        if mask is not None and previous is not None:
            taking_part = taking_part & (reduce(mask.any(1).to(torch.float64)) > 0).cpu()
        return taking_part

    def _checked(self, upload: Upload) -> Aggregate:
        """Aggregate, and see that a method of whoever's gave what every round goes on with."""
        part = self.aggregate(upload)
        (count, size), layers = upload.received.shape, len(upload.layers or ())
        self._give(part, Aggregate, "an Aggregate")
        self._give(part.models, (count, size), "models")
        self._give(part.graph, (count, count), "a graph")
        if part.layer_graphs is not None:
            self._give(part.layer_graphs, (layers, count, count), "layer_graphs")
        off = (part.graph.sum(1, dtype=torch.float64) - 1).nan_to_num(0, 0, 0)  # those are refused with their round
        if self.mixing and bool((off.abs() > 1e-2).any()):  # far beyond rounding in half precision
            worst = 1 + float(off[off.abs().argmax()])
            raise ValueError(
                f"{type(self).__name__}.aggregate returned a mixing matrix in which a row sums to {worst:.4g}; "
                "rows sum to one, or say `mixing = False` in the class for a graph of edges"
            )
        if self.own == "clean":
            self._give(part.own, Own, "an own for own='clean', as in Aggregate(..., own=Own(weights, rest))")
            assert part.own is not None
            parts = layers if len(part.own.weights) == layers else 1
            self._give(part.own.weights, (parts, count), "own.weights")
            self._give(part.own.rest, (count, size), "own.rest")
        return part

    def _give(self, part: object, due: type | tuple[int, ...], what: str) -> None:
        """Raise ValueError unless what `aggregate` returned has the type, or has the shape, that is due."""
        shape = tuple(part.shape) if isinstance(part, Tensor) else None
        if isinstance(part, due) if isinstance(due, type) else shape == due:
            return
        what = what if isinstance(due, type) else f"{what} of shape {due}"
        returned = shape or ("none" if part is None else f"a {type(part).__name__}")
        raise ValueError(f"{type(self).__name__}.aggregate must return {what}; it returned {returned}")

    def _alone(self, upload: Upload) -> Aggregate:
        """One participant, in a federation of several: nobody to share with, so its model stays what arrived."""
        count = len(upload.clients)
        graph = torch.eye(count, dtype=torch.float64) if self.mixing else torch.zeros(count, count, dtype=torch.float64)
        info = {"note": "fewer participants than the method needs: models kept"}
        return Aggregate(complete(upload), graph, info, own=kept(upload) if self.own == "clean" else None)

    def _scatter(self, part: Aggregate | None, clients: Tensor, num_clients: int, previous: Tensor | None) -> Aggregate:
        assert previous is not None  # `_present` leaves nobody out without it
        models = previous.clone()
        info = {} if part is None else part.info

        def spread(small: Tensor, absent: Tensor) -> Tensor:
            full = absent.clone()
            full[..., clients[:, None], clients[None, :]] = small.to(full.device)
            return full

        own = None
        if self.own == "clean":
            parts = 1 if part is None or part.own is None else len(part.own.weights)
            own = Own(torch.full((parts, num_clients), torch.nan, dtype=torch.float64), previous.clone())
            if part is not None and part.own is not None:
                own.weights[:, clients] = part.own.weights
                own.rest[clients.to(models.device)] = part.own.rest
        identity = torch.eye(num_clients, dtype=torch.float64)
        absent = identity if self.mixing else torch.zeros_like(identity)
        if part is None:
            return Aggregate(models, absent, info, own=own)
        models[clients.to(models.device)] = part.models
        absent[clients, clients] = 0
        layer_graphs = part.layer_graphs
        if layer_graphs is not None:
            layer_graphs = spread(layer_graphs, absent.expand(len(layer_graphs), -1, -1))
        return Aggregate(models, spread(part.graph, absent), info, layer_graphs, own)


def _filler(upload: Upload, mask: Tensor, columns: slice) -> Tensor:
    """Return what stands where nothing arrived, for some columns: (P, c) or (1, c)."""
    if upload.previous is not None:
        return upload.previous[:, columns]
    return column_means(upload.received[:, columns], mask[:, columns], upload.weights).to(upload.received.dtype)


def complete(upload: Upload) -> Tensor:
    """Return (P, d) models without gaps, in own memory: what arrived; elsewhere what was sent last round.

    Without `previous`, a gap takes the weighted mean of those who delivered that coordinate, or zero where nobody did.
    """
    mask = upload.mask
    if mask is None:
        return upload.received.clone()
    models = torch.empty_like(upload.received, memory_format=torch.contiguous_format)
    for _, columns in chunks(models.shape[1:], len(models), models.device):
        filler = _filler(upload, mask, columns)
        models[:, columns] = torch.where(mask[:, columns], upload.received[:, columns], filler)
    return models


def kept(upload: Upload) -> Own:
    """Return that every client's own model is all of what it makes of what it is sent."""
    return Own(torch.ones(1, len(upload.clients), dtype=torch.float64), complete(upload))


def mix(upload: Upload, mixing: Tensor) -> Tensor:
    """Return (P, d) row averages ``sum_j a_kj x_j`` over what arrived, in own memory, summed in float64.

    With a mask, each coordinate is averaged over the clients that delivered it, weights renormalised; where none with
    a positive weight did, client k keeps its previous value (or, without `previous`, the coordinate's overall mean, or
    zero where nobody delivered it).

    Args:
        upload: the round.
        mixing: (P, P) float64, non-negative, rows summing to one. Rows that are equal are computed once.
    """
    received, mask = upload.received, upload.mask
    distinct, which = torch.unique(mixing.cpu(), dim=0, return_inverse=True)
    distinct, which = distinct.to(received.device, torch.float64), which.to(received.device)

    def per_client(rows: Tensor) -> Tensor:
        return rows if len(rows) == 1 else rows[which]  # a single row broadcasts without a copy

    models = torch.empty_like(received, memory_format=torch.contiguous_format)
    for _, columns in chunks(models.shape[1:], 2 * len(models), models.device):
        if mask is None:
            models[:, columns] = per_client((distinct @ received[:, columns].to(torch.float64)).to(models.dtype))
            continue
        arrived = torch.where(mask[:, columns], received[:, columns], 0)
        total = distinct @ mask[:, columns].to(torch.float64)
        average = distinct @ arrived.to(torch.float64) / total.clamp_min(torch.finfo(torch.float64).tiny)
        part = per_client(average.to(models.dtype))
        if bool((total <= 0).any()):
            part = torch.where(per_client(total) > 0, part, _filler(upload, mask, columns))
        models[:, columns] = part
    return models


def note_self_weights(aggregator: Aggregator, mixing: Tensor, info: dict[str, Any]) -> None:
    """Warn, once in the log and each round in `info`, where every client keeps more than 0.999 of its own model.

    Settings can turn a method into `local` without an error; a result that rests on such settings should say so.
    """
    weights = mixing.diagonal()
    info["self_weight"] = float(weights.mean())
    if len(weights) > 1 and float(weights.min()) > 0.999:
        info["warning"] = f"{aggregator.name}: every client's own model weighs more than 0.999; nothing is shared"
        if not aggregator.warned:
            logger.warning("%s", info["warning"])
            aggregator.warned = True
