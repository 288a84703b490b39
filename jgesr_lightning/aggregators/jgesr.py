"""Joint graph estimation and signal restoration: learn the clients' graph and smooth their models over it, at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregate, Upload
from jgesr_lightning.aggregators.learned_graph import LearnedGraph
from jgesr_lightning.checks import flag, number, one_of, whole
from jgesr_lightning.solvers import PDCA, Coefficients, Masked, Signals, Solution

FIDELITIES = ("shares", "scaled", "uniform")
STEPS = ("fixed", "backtracking")
INITS = ("received", "previous")
SCOPES = ("model", "layer")


class JGESR(LearnedGraph):
    """The method of "Joint Graph Estimation and Signal Restoration for Robust Federated Learning" (MLSP 2025).

    Minimises J(Psi, w) of `jgesr_lightning.graph` over models and graph by `jgesr_lightning.solvers.PDCA`. Where every
    entry arrived the iteration is K x K and the parameters are read twice in all; with gaps it is so for the columns of
    common patterns of gaps, and one pass a step over the others.

    Args:
        alpha: weight of the smoothness over the graph.
        beta: weight of the log barrier on the degrees.
        gamma: weight of the sum of the edges.
        mu: weight of the fidelity to what arrived, and of the clients' proximal term unless the run sets its own.
        rho: inverse step (the first one, under backtracking).
        eps: stop when ||Psi+ - Psi||_F < eps.
        max_iter: stop after that many steps; not to have converged by then is reported, not an error.
        fidelity: what Z holds: "shares" (zeta, as printed), "scaled" (P zeta for P participants: mean one; a weight
            above 2 rho / mu makes the fixed step diverge), "uniform".
        step: "fixed" (as printed) or "backtracking" (rho grows until J cannot rise).
        accelerated: extrapolate, with restart.
        init: start from what was "received", or from the "previous" models (those received where there are none).
        graph_scope: one graph for the "model", or one for each "layer".

    Raises:
        ValueError: a setting out of range, with its name.
    """

    name: ClassVar[str] = "jgesr"

    def __init__(
        self,
        alpha: float = 0.05,
        beta: float = 1.0,
        gamma: float = 1.0,
        mu: float = 1.0,
        rho: float = 1.0,
        eps: float = 1e-3,
        max_iter: int = 500,
        fidelity: str = "shares",
        step: str = "fixed",
        accelerated: bool = False,
        init: str = "received",
        graph_scope: str = "model",
    ) -> None:
        super().__init__(alpha, beta, gamma, mu)
        number("rho", rho, above=0)
        number("eps", eps, at_least=0)
        whole("max_iter", max_iter, at_least=1)
        one_of("fidelity", fidelity, FIDELITIES)
        one_of("step", step, STEPS)
        flag("accelerated", accelerated)
        one_of("init", init, INITS)
        one_of("graph_scope", graph_scope, SCOPES)
        self.solver = PDCA(self.penalties, rho, eps, max_iter, step == "backtracking", accelerated)
        self.fidelity, self.step, self.init, self.graph_scope = fidelity, step, init, graph_scope

    @torch.no_grad()
    def aggregate(self, upload: Upload) -> Aggregate:
        """See `Aggregator`; `graph` is the learnt adjacency, its mean over layers by columns for one graph a layer."""
        weights = fidelity_weights(upload.weights, self.fidelity)
        layers = scopes(upload, self.graph_scope)
        signals = hold(upload, weights, layers, self.init)
        solution = self.solver.solve(signals, weights)
        settings = {"step": self.step, "fidelity": self.fidelity, "init": self.init, "graph_scope": self.graph_scope}
        return deliver(upload, signals, solution, layers, self.graph_scope, settings)


def fidelity_weights(shares: Tensor, fidelity: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the diagonal of Z, (P,): the shares, P times the shares, or ones."""
    zeta = shares.to("cpu", torch.float64).numpy()
    if fidelity == "uniform":
        return np.ones_like(zeta)
    return zeta * len(zeta) if fidelity == "scaled" else zeta.copy()


def scopes(upload: Upload, graph_scope: str) -> Sequence[int]:
    """Return the widths of the groups of columns that have a graph of their own."""
    if graph_scope == "model":
        return (upload.received.shape[1],)
    if upload.layers is None:
        raise ValueError("graph_scope is 'layer', which needs `layers`: the number of columns of each layer")
    return upload.layers


def hold(upload: Upload, weights: np.ndarray[Any, np.dtype[np.float64]], layers: Sequence[int], init: str) -> Signals:
    """Return the models as a solver sees them, in the form that suits what arrived."""
    start = None
    if init == "previous" and upload.previous is not None:
        start = upload.previous.to(upload.received.device)
    if upload.mask is None:
        return Coefficients(upload.received, weights, layers, upload.reduce, start)
    return Masked(
        upload.received,
        weights,
        layers,
        upload.reduce,
        mask=upload.mask,
        previous=upload.previous,
        start=start,
    )


def deliver(
    upload: Upload,
    signals: Signals,
    solution: Solution,
    layers: Sequence[int],
    graph_scope: str,
    settings: dict[str, Any],
) -> Aggregate:
    """Return models, graph and diagnostics."""
    graphs = torch.from_numpy(solution.graphs)
    widths = torch.tensor(layers, dtype=torch.float64, device=upload.received.device)
    if graph_scope == "layer":
        widths = upload.reduce(widths)
    widths = widths.cpu()
    shares = widths / widths.sum() if float(widths.sum()) > 0 else torch.full_like(widths, 1 / len(widths))
    graph = (shares[:, None, None] * graphs).sum(0)
    graph = (graph + graph.T) / 2  # the order of a sum may differ between its entries
    info = {
        **settings,
        "iterations": solution.iterations,
        "converged": solution.converged,
        "reason": solution.reason,
        "step_norm": solution.step_norm,
        "objective": solution.objective,
        "objective_rose": solution.rose,
        "edges": int((graph.triu(1) > 0).sum()),
        "newton_steps": solution.newton_steps,
        "solver_seconds": solution.seconds,
    }
    if solution.rho == solution.rho:  # alternating minimisation has no step
        info.update(rho=solution.rho, backtracks=solution.backtracks, restarts=solution.restarts)
    return Aggregate(signals.models(), graph, info, graphs if graph_scope == "layer" else None)
