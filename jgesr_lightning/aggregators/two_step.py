"""Two steps in turn: learn the clients' graph, filter their models over it."""

from __future__ import annotations

from typing import ClassVar

import torch

from jgesr_lightning.aggregators.base import Aggregate, Upload
from jgesr_lightning.aggregators.jgesr import (
    FIDELITIES,
    INITS,
    SCOPES,
    deliver,
    fidelity_weights,
    hold,
    scopes,
)
from jgesr_lightning.aggregators.learned_graph import LearnedGraph
from jgesr_lightning.checks import number, one_of, whole
from jgesr_lightning.solvers import Alternating


class TwoStep(LearnedGraph):
    """Alternate graph learning (to convergence) and graph filtering (in closed form) until the models stand still.

    The paper's two-step baseline: the same joint objective as `JGESR`, minimised over one of its arguments at a time.

    Args:
        alpha: weight of the smoothness over the graph.
        beta: weight of the log barrier on the degrees.
        gamma: weight of the sum of the edges; positive, or an edge between equal models would cost nothing.
        mu: weight of the fidelity to what arrived, and of the clients' proximal term unless the run sets its own.
        eps: stop when ||Psi+ - Psi||_F < eps.
        max_iter: stop after that many rounds of both steps; not to have converged is reported, not an error.
        fidelity: what Z holds: "shares" (zeta), "scaled" (P zeta for P participants: mean one), "uniform".
        init: start from what was "received", or from the "previous" models (those received where there are none).
        graph_scope: one graph for the "model", or one for each "layer".

    Raises:
        ValueError: a setting out of range, with its name.
    """

    name: ClassVar[str] = "two_step"

    def __init__(
        self,
        alpha: float = 0.05,
        beta: float = 1.0,
        gamma: float = 1.0,
        mu: float = 1.0,
        eps: float = 1e-3,
        max_iter: int = 100,
        fidelity: str = "shares",
        init: str = "received",
        graph_scope: str = "model",
    ) -> None:
        super().__init__(alpha, beta, gamma, mu)
        number("gamma", gamma, above=0)
        number("eps", eps, at_least=0)
        whole("max_iter", max_iter, at_least=1)
        one_of("fidelity", fidelity, FIDELITIES)
        one_of("init", init, INITS)
        one_of("graph_scope", graph_scope, SCOPES)
        self.solver = Alternating(self.penalties, eps, max_iter)
        self.fidelity, self.init, self.graph_scope = fidelity, init, graph_scope

    @torch.no_grad()
    def aggregate(self, upload: Upload) -> Aggregate:
        """See `Aggregator`; `graph` is the last learnt adjacency."""
        weights = fidelity_weights(upload.weights, self.fidelity)
        layers = scopes(upload, self.graph_scope)
        signals = hold(upload, weights, layers, self.init)
        solution = self.solver.solve(signals, weights)
        settings = {"fidelity": self.fidelity, "init": self.init, "graph_scope": self.graph_scope}
        return deliver(upload, signals, solution, layers, self.graph_scope, settings)
