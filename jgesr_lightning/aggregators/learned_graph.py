"""What the methods share that learn a graph between the clients and smooth their models over it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import OWNS, Aggregate, Aggregator, Own, Upload, mix, no_reduce
from jgesr_lightning.aggregators.distances import (
    KINDS,
    LAYER_WEIGHTS,
    compared,
    noise_of_pairs,
    noise_shares,
    products,
    remembered,
    snr_weights,
    widths_of,
)
from jgesr_lightning.aggregators.groups import Grouping
from jgesr_lightning.checks import number, one_of, whole
from jgesr_lightning.graph import distances_from_gram
from jgesr_lightning.graph.arrays import enter
from jgesr_lightning.graph.gram import chunks, work_dtype
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.regularisers import Regulariser
from jgesr_lightning.solvers import PDCA, Alternating, Models, Solution

FIDELITIES = ("shares", "scaled", "uniform")
INITS = ("received", "previous")
SCOPES = ("model", "layer")
STOPS = ("step", "stationarity")
NOISE_CORRECTIONS = ("none", "known", "estimated")
_OF_MODELS: dict[str, Any] = {"distances": "models", "layer_weights": "columns", "memory": 0}
"""Settings with which distances are those of a round's models, all columns alike."""


class Aim(NamedTuple):
    """What a graph is learnt from at the start.

    Attributes:
        distances: (G, P, P) non-negative, zero diagonal.
        plain: (G, P, P) Gram matrices of the models, where they were computed on the way.
    """

    distances: Tensor
    plain: Tensor | None


@dataclass(eq=False, repr=False, kw_only=True)
class LearnedGraph(Aggregator):
    """Base of `jgesr`, `two_step` and `graph_filter`: the settings of their joint objective J, and its weights Z.

    Args:
        alpha: weight of the smoothness over the graph.
        beta: weight of the log barrier on the degrees.
        gamma: weight of the sum of the edges; it may be 0 where alpha is not, and distances are those of the models as
            they are.
        mu: weight of the fidelity to what arrived; and of the proximal term of the clients' local training, as the
            paper prints it, unless the run's `local.proximal_mu` says otherwise.
        fidelity: what Z holds: "shares" (zeta, as printed), "scaled" (P zeta for P participants: mean one; the
            fixed step diverges where mu Z + 2 alpha L has an eigenvalue above 2 rho), "uniform".
        neighbours: about how many edges a client is to have when the graph is first learnt, at any size and scale of
            the models; gamma has then no part in J. None: as alpha, beta and gamma have it. See `neighbour_scale`.
        noise_correction: what is taken from the distances before the graph is learnt, never below zero: "none";
            "known": sigma_m^2 + sigma_n^2 for each entry that arrived, from `noise_std`; "estimated":
            the least of all distances, the closest pair being taken to differ by noise alone.
        fidelity_power: p, from 1 (as `fidelity` says) to 0 (uniform): Z holds zeta^p, or the same of mean one.
        distances: what of the clients is compared: their "models", as printed; "updates", since the models sent last,
            whose likeness CFL judges by (Sattler et al., IEEE TNNLS 2021); "directions", cosines of updates since the
            initial model, as in pFedGraph (Ye et al., ICML 2023). (Plain differences of updates since the initial
            model are those of models.) See `distances.compared`.
        layer_weights: how layers count in these distances: by their "columns", as they come, or by their
            signal-to-noise ratio, "snr", which needs `noise_std`, too; see `distances.snr_weights`. For one graph of
            the whole model.
        memory: share of the former rounds in the distances, from 0 (this round's alone) to below 1: an exponential
            average, before anything below zero is cut, in which the noise of rounds averages out.
        own: "received", or "clean": see `own_parts`.
        groups: share, from 0 to 1, of what tells pairs of clients' updates apart that groups have to explain before the
            graph is confined to them, see `groups.partition`; a grouping stands until another explains as much. Where
            none does, all are one group: with a small `mu` they then get one model, as from FedAvg. None: no groups.

    The solvers learn the graph anew from what they have smoothed. Where what is compared is not the models as they are,
    the excess of the uploads' distances over those at the start is taken from the distances throughout, as noise is.

    Raises:
        ValueError: a setting out of range, with its name.
    """

    mixing: ClassVar[bool] = False
    min_clients: ClassVar[int] = 2

    alpha: float = 0.05
    beta: float = 1.0
    gamma: float = 1.0
    mu: float = 1.0
    fidelity: str = "shares"
    neighbours: int | None = None
    noise_correction: str = "none"
    fidelity_power: float = 1.0
    distances: str = "models"
    layer_weights: str = "columns"
    memory: float = 0.0
    own: str = "received"
    groups: float | None = None

    def __post_init__(self) -> None:
        super().__init__()
        number("alpha", self.alpha, at_least=0)
        number("beta", self.beta, above=0)
        number("gamma", self.gamma, at_least=0)
        number("mu", self.mu, above=0)
        one_of("fidelity", self.fidelity, FIDELITIES)
        if self.neighbours is not None:
            whole("neighbours", self.neighbours, at_least=1)
            number("alpha", self.alpha, above=0)
        one_of("noise_correction", self.noise_correction, NOISE_CORRECTIONS)
        number("fidelity_power", self.fidelity_power, at_least=0, at_most=1)
        if self.fidelity == "uniform" and self.fidelity_power != 1:
            raise ValueError("fidelity_power has no part where fidelity is 'uniform'; use 'shares' or 'scaled'")
        one_of("distances", self.distances, KINDS)
        one_of("layer_weights", self.layer_weights, LAYER_WEIGHTS)
        number("memory", self.memory, at_least=0)
        if not self.memory < 1:
            raise ValueError(f"memory is {self.memory!r}; it must be below 1, or nothing new is ever seen")
        one_of("own", self.own, OWNS)
        if self.groups is not None:
            number("groups", self.groups, at_least=0, at_most=1)
            number("alpha", self.alpha, above=0)
            if self.neighbours is not None:
                raise ValueError("neighbours and groups both say who is joined; leave one of them null")
        as_they_are = self.of_models and self.noise_correction == "none" and self.groups is None
        if self.neighbours is None and (self.alpha == 0 or not as_they_are):
            number("gamma", self.gamma, above=0)  # distances may come out as zero, and such an edge would cost nothing
        if self.noise_correction == "known" or self.layer_weights == "snr":
            self.needs = (*self.needs, "noise_std")
        self.former: Tensor | None = None
        self.grouping = None if self.groups is None else Grouping(self.groups)
        self.problem = Problem(self.alpha, self.beta, self.gamma, self.mu, neighbours=self.neighbours)

    @property
    def of_models(self) -> bool:
        """Whether distances are those of this round's models, all columns alike."""
        return all(getattr(self, name) == value for name, value in _OF_MODELS.items())

    def client_terms(self, proximal_mu: float | None = None) -> tuple[Regulariser, ...]:
        """Return the proximal term ``mu/2 ||x - psi_k||^2``; `proximal_mu` None means the server's own `mu`."""
        return super().client_terms(self.problem.mu if proximal_mu is None else proximal_mu)

    def noise(self, upload: Upload, layers: Sequence[int] | None = None) -> Tensor | float | None:
        """Return the noise's share of the squared distances, (G, P, P) float64; None where it is to be estimated."""
        if self.noise_correction == "estimated":
            return None
        if self.noise_correction == "none":
            return 0.0
        return noise_of_pairs(noise_shares(upload, layers))

    def state(self) -> dict[str, Any]:
        """Return the distances of former rounds, where they are remembered, and the groups with what they rest on."""
        state: dict[str, Any] = {} if self.former is None else {"distances": self.former}
        return state | ({} if self.grouping is None else {"grouping": self.grouping.state()})

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`; ValueError for what are no distances, or no groups."""
        former = state.get("distances") if self.memory else None
        if former is not None and not (isinstance(former, Tensor) and former.ndim == 3):
            raise ValueError("the distances of former rounds must be (layers, clients, clients)")
        self.former = None if former is None else former.to("cpu", torch.float64)
        if self.groups is not None:
            self.grouping = Grouping(self.groups)
            if "grouping" in state:  # not in that of a run without
                self.grouping.load_state(state["grouping"])

    def aimed(self, upload: Upload, layers: Sequence[int] | None = None) -> Aim | None:
        """Return the distances that the graph is learnt from at the start; None: those of the models as they are.

        Where they are remembered, this round's are from now on; and where there may be groups, these are found anew.
        """
        if self.grouping is not None:
            self.grouping.follow(upload)
        if self.of_models:
            return None
        by_snr = self.layer_weights == "snr"
        parts = upload.layers if by_snr else layers
        if by_snr and parts is None:
            raise ValueError("layer_weights is 'snr', which needs `layers`: the number of columns of each layer")
        found, shares = products(upload, self.distances, parts), noise_shares(upload, parts).cpu()
        plain = found if self.distances == "models" else None
        if by_snr:
            plain = None if plain is None else plain.sum(0, keepdim=True)
            weights = snr_weights(found, shares)
            found = (weights[:, None, None] * found).sum(0, keepdim=True)
            shares = (weights[:, None] * shares).sum(0, keepdim=True)
        aim = compared(self.distances, found, shares if self.noise_correction == "known" else 0 * shares)
        if self.memory:
            self.former = remembered(self.former, aim, upload.clients, upload.num_clients, self.memory)
            aim = self.former[:, upload.clients[:, None], upload.clients]
        everyone = torch.eye(aim.shape[-1], dtype=torch.bool)
        if self.noise_correction == "estimated":
            aim = aim - aim.masked_fill(everyone, torch.inf).amin((-1, -2), keepdim=True)
        return Aim(aim.clamp_min(0).masked_fill(everyone, 0), plain)

    def posed(self, upload: Upload, noise: Tensor | float | None, device: torch.device) -> Problem:
        """Return the problem of this round, to be solved on a device.

        Nobody can have more neighbours than there are, and groups stay apart.
        """
        wanted = self.problem.neighbours
        few = None if wanted is None else min(wanted, len(upload.clients) - 1)
        together = None if self.grouping is None else enter(self.grouping.together(upload.clients).to(device))
        noise = enter(noise.to(device)) if isinstance(noise, Tensor) else noise
        return self.problem.but(noise=noise, neighbours=few, together=together)

    def weights(self, upload: Upload) -> Tensor:
        """Return the diagonal of Z, (P,) float64 on the device of what arrived."""
        zeta = upload.weights.to(upload.received.device, torch.float64)
        if self.fidelity == "uniform":
            return torch.ones_like(zeta)
        if self.fidelity_power != 1:
            powers = zeta.pow(self.fidelity_power)
            return powers / powers.mean() if self.fidelity == "scaled" else powers
        return zeta * len(zeta) if self.fidelity == "scaled" else zeta

    def with_own(self, out: Aggregate, upload: Upload, graphs: Tensor, layers: Sequence[int] | None) -> Aggregate:
        """Return the result with what clients are sent who put in models of their own, if they do; see `own_parts`."""
        if self.own == "received":
            return out
        pulls = self.problem.mu * self.weights(upload).cpu()
        weights, shares = own_parts(self.problem.operator(graphs.cpu()), pulls)
        rest, models = torch.empty_like(out.models), torch.empty_like(out.models)
        dtype = work_dtype(rest)
        kept, others = weights[..., None].to(rest.device, dtype), shares.to(rest.device, dtype)
        for layer, columns in chunks(widths_of(upload, layers), len(rest), rest.device):
            mean = others[layer] @ out.models[:, columns].to(dtype)
            arrived = torch.lerp(mean, upload.received[:, columns].to(dtype), kept[layer])
            rest[:, columns] = mean
            models[:, columns] = arrived if upload.mask is None else torch.where(upload.mask[:, columns], arrived, mean)
        info = {**out.info, "self_weight": float(weights.mean())}
        return replace(out, models=models, info=info, own=Own(weights, rest))


def own_parts(S: Tensor, pulls: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return each client's weight of its own model, (G, P), and those of the others' in the rest, (G, P, P).

    J by one client's model alone, all others' as they are restored, is least at

    .. math:: \psi_k = q_k x_k + (1 - q_k) \frac{\sum_j w_{kj} \psi_j}{\sum_j w_{kj}}, \qquad
              q_k = \frac{\mu z_k}{\mu z_k + 2 \alpha \sum_j w_{kj}}

    for an x_k without gaps. Where all arrived, a minimiser of J has this form with the x_k that arrived. The client
    knows the clean one: it is sent q_k and the mean of its neighbours, and puts in its own, also where entries of it
    were lost. What is left of its own noise is what came back by way of the neighbours.

    Args:
        S: of the gradient's smoothing part, (G, P, P): 2 alpha L.
        pulls: (P,) mu z.
    """
    degrees = S.diagonal(dim1=-2, dim2=-1)
    weights = pulls / (pulls + degrees)
    alone = torch.eye(S.shape[-1], dtype=S.dtype)
    others = -S * (1 - alone) / torch.where(degrees > 0, degrees, 1)[..., None]
    return weights, torch.where(degrees[..., None] > 0, others, alone)


@dataclass(eq=False, repr=False, kw_only=True)
class JointlySolved(LearnedGraph):
    """Base of `jgesr` and `two_step`, which minimise J by a solver. Their other settings: see `LearnedGraph`.

    Args:
        eps: what the stopping rule compares with.
        max_iter: stop after that many steps; not to have converged by then is reported, not an error.
        stop: "step": when ||Psi+ - Psi||_F < eps, as printed, which may be far from a stationary point;
            "stationarity": when the optimality conditions of J fail by less than eps of their terms, in both blocks.
        init: start from what was "received", or from the "previous" models (those received where there are none).
        graph_scope: one graph for the "model", or one for each "layer".

    Attributes:
        repeated: settings that `info` repeats.
    """

    repeated: ClassVar[tuple[str, ...]] = ("stop", "fidelity", "init", "graph_scope")

    eps: float = 1e-3
    max_iter: int = 500
    stop: str = "step"
    init: str = "received"
    graph_scope: str = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        number("eps", self.eps, at_least=0)
        whole("max_iter", self.max_iter, at_least=1)
        one_of("stop", self.stop, STOPS)
        one_of("init", self.init, INITS)
        if self.init == "previous" and (word := self._of_arrivals()):
            raise ValueError(f"{word} goes by the distances at the start, of what arrived; it needs init=received")
        one_of("graph_scope", self.graph_scope, SCOPES)
        if self.layer_weights == "snr" and self.graph_scope == "layer":
            raise ValueError("layer_weights=snr weighs the layers of one graph; it needs graph_scope=model")

    def _of_arrivals(self) -> str:
        """Return the name of a setting that only has a meaning for what arrived, or ""."""
        plain = {"neighbours": None, "noise_correction": "none", **_OF_MODELS}
        return next((name for name, value in plain.items() if getattr(self, name) != value), "")

    @abstractmethod
    def solver(self) -> PDCA | Alternating:
        """Return the solver that the settings ask for."""

    def aggregate(self, upload: Upload) -> Aggregate:
        """See `Aggregator`; `graph` is the learnt adjacency, its mean over layers by columns for one graph a layer."""
        if self.graph_scope == "layer" and upload.layers is None:
            raise ValueError("graph_scope is 'layer', which needs `layers`: the number of columns of each layer")
        layers = upload.layers if self.graph_scope == "layer" else None
        aim, weights, start = self.aimed(upload, layers), self.weights(upload), upload.previous
        if self.grouping is not None and upload.mask is not None:
            # A small mu takes 1 / mu steps to bring the members of a group from another start to their mean.
            upload = replace(upload, previous=mix(upload, self.grouping.averaging(upload.clients, weights.cpu())))
            aim = None if aim is None else aim._replace(plain=None)
        if aim is None:
            noise = self.noise(upload, layers)
        else:
            plain = products(upload, "models", layers) if aim.plain is None else aim.plain
            noise = distances_from_gram(plain) - aim.distances
        problem = self.posed(upload, noise, upload.received.device)
        models = Models(
            problem.pulled(upload.received, weights, upload.mask),
            layers,
            None if upload.reduce is no_reduce else upload.reduce,
            start=start if self.init == "previous" else None,
            previous=upload.previous,
        )
        (solution,) = self.solver().solve(models)
        graphs = torch.from_numpy(solution.graphs)
        graph = graphs[0] if layers is None else mean_graph(graphs, layers, upload)
        info = {**{name: getattr(self, name) for name in self.repeated}, **described(solution, graph)}
        info |= {} if self.grouping is None else self.grouping.info()
        out = Aggregate(models.result(), graph, info, None if layers is None else graphs)
        return self.with_own(out, upload, graphs, layers)


def mean_graph(graphs: Tensor, layers: Sequence[int], upload: Upload) -> Tensor:
    """Return the mean of one graph a layer, weighted by their columns, over all processes."""
    widths = upload.reduce(torch.tensor(layers, dtype=torch.float64, device=upload.received.device)).cpu()
    shares = widths / widths.sum() if float(widths.sum()) > 0 else torch.full_like(widths, 1 / len(widths))
    graph = (shares[:, None, None] * graphs).sum(0)
    return (graph + graph.T) / 2  # the order of a sum may differ between its entries


def edges(graph: Tensor) -> int:
    """Return the number of edges of a graph."""
    return int((graph.triu(1) > 0).sum())


def described(solution: Solution, graph: Tensor) -> dict[str, Any]:
    """Return how J was minimised, and by which graph, as plain numbers."""
    info = {
        "iterations": solution.iterations,
        "converged": solution.converged,
        "reason": solution.reason,
        "step_norm": solution.step_norm,
        "objective": solution.objective,
        "objective_rose": solution.rose,
        "stationarity_models": solution.stationarity[0],
        "stationarity_graph": solution.stationarity[1],
        "edges": edges(graph),
        "newton_steps": solution.newton_steps,
        "solver_seconds": solution.seconds,
    }
    if solution.rho == solution.rho:  # alternating minimisation has no step
        info.update(rho=solution.rho, backtracks=solution.backtracks, restarts=solution.restarts)
    return info
