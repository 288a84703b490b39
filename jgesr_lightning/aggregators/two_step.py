"""Two steps in turn: learn the clients' graph, filter their models over it."""

from __future__ import annotations

from typing import ClassVar

from jgesr_lightning.aggregators.learned_graph import STOPS, JointlySolved
from jgesr_lightning.checks import number, one_of, whole
from jgesr_lightning.solvers import Alternating


class TwoStep(JointlySolved):
    """Alternate graph learning (to convergence) and graph filtering (in closed form) until the models stand still.

    The paper's two-step baseline: the same joint objective as `JGESR`, minimised over one of its arguments at a time.

    Args:
        alpha: weight of the smoothness over the graph.
        beta: weight of the log barrier on the degrees.
        gamma: weight of the sum of the edges; positive, or an edge between equal models would cost nothing.
        mu: weight of the fidelity to what arrived, and of the clients' proximal term unless the run sets its own.
        eps: what the stopping rule compares with.
        max_iter: stop after that many rounds of both steps, 1 being one graph and one filtering; not to have converged
            is reported, not an error.
        fidelity: what Z holds: "shares" (zeta), "scaled" (P zeta for P participants: mean one), "uniform".
        init: start from what was "received", or from the "previous" models (those received where there are none).
        graph_scope: one graph for the "model", or one for each "layer".
        stop: "step": when ||Psi+ - Psi||_F < eps; "stationarity": when the optimality conditions of J fail by less than
            eps of their terms, in both blocks.
        neighbours: about how many edges a client is to have, at any size and scale of the models; see `LearnedGraph`.
        noise_correction: what is taken from the distances before the graph is learnt: "none", the "known" noise of what
            arrived, or the "estimated"; see `LearnedGraph`.

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
        stop: str = "step",
        neighbours: int | None = None,
        noise_correction: str = "none",
    ) -> None:
        number("gamma", gamma, above=0)
        number("eps", eps, at_least=0)
        whole("max_iter", max_iter, at_least=1)
        one_of("stop", stop, STOPS)
        solver = Alternating(eps, max_iter, stop)
        super().__init__(
            alpha, beta, gamma, mu, fidelity, init, graph_scope, neighbours, noise_correction, solver, {"stop": stop}
        )
