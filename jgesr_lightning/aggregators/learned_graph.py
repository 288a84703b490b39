"""What the methods share that learn a graph between the clients and smooth their models over it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregate, Aggregator, Upload, no_reduce
from jgesr_lightning.checks import number, one_of, whole
from jgesr_lightning.graph.arrays import enter
from jgesr_lightning.graph.problem import Problem
from jgesr_lightning.regularisers import Regulariser
from jgesr_lightning.solvers import PDCA, Alternating, Models, Solution

FIDELITIES = ("shares", "scaled", "uniform")
INITS = ("received", "previous")
SCOPES = ("model", "layer")
STOPS = ("step", "stationarity")
NOISE_CORRECTIONS = ("none", "known", "estimated")


@dataclass(eq=False, repr=False, kw_only=True)
class LearnedGraph(Aggregator):
    """Base of `jgesr`, `two_step` and `graph_filter`: the settings of their joint objective J, and its weights Z.

    Args:
        alpha: weight of the smoothness over the graph.
        beta: weight of the log barrier on the degrees.
        gamma: weight of the sum of the edges.
        mu: weight of the fidelity to what arrived; and of the proximal term of the clients' local training, as the
            paper prints it, unless the run's `local.proximal_mu` says otherwise.
        fidelity: what Z holds: "shares" (zeta, as printed), "scaled" (P zeta for P participants: mean one; a weight
            above 2 rho / mu makes the fixed step diverge), "uniform".
        neighbours: about how many edges a client is to have when the graph is first learnt, at any size and scale of
            the models; gamma has then no part in J. None: as alpha, beta and gamma have it. See `neighbour_scale`.
        noise_correction: what is taken from the distances before the graph is learnt, never below zero: "none";
            "known": sigma_m^2 + sigma_n^2 for each entry that arrived, where the deviations are known; "estimated":
            the least of all distances, the closest pair being taken to differ by noise alone.

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
        self.problem = Problem(self.alpha, self.beta, self.gamma, self.mu, neighbours=self.neighbours)

    def client_terms(self, proximal_mu: float | None = None) -> tuple[Regulariser, ...]:
        """Return the proximal term ``mu/2 ||x - psi_k||^2``; `proximal_mu` None means the server's own `mu`."""
        return super().client_terms(self.problem.mu if proximal_mu is None else proximal_mu)

    def noise(self, upload: Upload, layers: Sequence[int] | None = None) -> Tensor | float | None:
        """Return the noise's share of the squared distances, (G, P, P) float64; None where it is to be estimated."""
        if self.noise_correction == "estimated":
            return None
        if self.noise_correction == "none" or upload.noise_std is None:
            return 0.0
        widths = [upload.received.shape[1]] if layers is None else list(layers)
        entries = torch.tensor(widths, dtype=torch.float64, device=upload.received.device)[:, None]
        entries = entries.expand(-1, len(upload.clients))
        if upload.mask is not None:
            entries = torch.stack([part.sum(1) for part in upload.mask.split(widths, 1)]).double()
        share = upload.reduce(entries.contiguous()) * upload.noise_std.to(entries.device).square()
        pairs = share[:, :, None] + share[:, None, :]
        return pairs.masked_fill(torch.eye(len(upload.clients), dtype=torch.bool, device=pairs.device), 0)

    def posed(self, upload: Upload, noise: Any) -> Problem:
        """Return the problem of this round, in which nobody can have more neighbours than there are."""
        wanted = self.problem.neighbours
        few = None if wanted is None else min(wanted, len(upload.clients) - 1)
        return self.problem.but(noise=noise, neighbours=few)

    def weights(self, upload: Upload) -> Tensor:
        """Return the diagonal of Z, (P,) float64 on the device of what arrived."""
        zeta = upload.weights.to(upload.received.device, torch.float64)
        if self.fidelity == "uniform":
            return torch.ones_like(zeta)
        return zeta * len(zeta) if self.fidelity == "scaled" else zeta


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
        one_of("graph_scope", self.graph_scope, SCOPES)

    @abstractmethod
    def solver(self) -> PDCA | Alternating:
        """Return the solver that the settings ask for."""

    @torch.no_grad()
    def aggregate(self, upload: Upload) -> Aggregate:
        """See `Aggregator`; `graph` is the learnt adjacency, its mean over layers by columns for one graph a layer."""
        if self.graph_scope == "layer" and upload.layers is None:
            raise ValueError("graph_scope is 'layer', which needs `layers`: the number of columns of each layer")
        layers = upload.layers if self.graph_scope == "layer" else None
        noise = self.noise(upload, layers)
        problem = self.posed(upload, enter(noise) if isinstance(noise, Tensor) else noise)
        models = Models(
            problem.pulled(upload.received, self.weights(upload), upload.mask),
            layers,
            None if upload.reduce is no_reduce else upload.reduce,
            start=upload.previous if self.init == "previous" else None,
            previous=upload.previous,
        )
        (solution,) = self.solver().solve(models)
        graphs = torch.from_numpy(solution.graphs)
        info = {**{name: getattr(self, name) for name in self.repeated}, **described(solution)}
        if layers is None:
            return Aggregate(models.result(), graphs[0], info)
        graph = mean_graph(graphs, layers, upload)
        info["edges"] = edges(graph)
        return Aggregate(models.result(), graph, info, graphs)


def mean_graph(graphs: Tensor, layers: Sequence[int], upload: Upload) -> Tensor:
    """Return the mean of one graph a layer, weighted by their columns, over all processes."""
    widths = upload.reduce(torch.tensor(layers, dtype=torch.float64, device=upload.received.device)).cpu()
    shares = widths / widths.sum() if float(widths.sum()) > 0 else torch.full_like(widths, 1 / len(widths))
    graph = (shares[:, None, None] * graphs).sum(0)
    return (graph + graph.T) / 2  # the order of a sum may differ between its entries


def edges(graph: Tensor) -> int:
    """Return the number of edges of a graph."""
    return int((graph.triu(1) > 0).sum())


def described(solution: Solution) -> dict[str, Any]:
    """Return how J was minimised, as plain numbers."""
    info = {
        "iterations": solution.iterations,
        "converged": solution.converged,
        "reason": solution.reason,
        "step_norm": solution.step_norm,
        "objective": solution.objective,
        "objective_rose": solution.rose,
        "stationarity_models": solution.stationarity[0],
        "stationarity_graph": solution.stationarity[1],
        "edges": edges(torch.from_numpy(solution.graphs[0])),
        "newton_steps": solution.newton_steps,
        "solver_seconds": solution.seconds,
    }
    if solution.rho == solution.rho:  # alternating minimisation has no step
        info.update(rho=solution.rho, backtracks=solution.backtracks, restarts=solution.restarts)
    return info
