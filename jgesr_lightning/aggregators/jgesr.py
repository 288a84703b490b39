"""Joint graph estimation and signal restoration: learn the clients' graph and smooth their models over it, at once."""

from __future__ import annotations

from typing import ClassVar

from jgesr_lightning.aggregators.learned_graph import STOPS, JointlySolved
from jgesr_lightning.checks import flag, number, one_of, whole
from jgesr_lightning.graph.problem import SMOOTHINGS
from jgesr_lightning.solvers import PDCA

STEPS = ("fixed", "backtracking")


class JGESR(JointlySolved):
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
        eps: what the stopping rule compares with.
        max_iter: stop after that many steps; not to have converged by then is reported, not an error.
        fidelity: what Z holds: "shares" (zeta, as printed), "scaled" (P zeta for P participants: mean one; a weight
            above 2 rho / mu makes the fixed step diverge), "uniform".
        step: "fixed" (as printed) or "backtracking" (rho grows until J cannot rise).
        accelerated: extrapolate, with restart.
        init: start from what was "received", or from the "previous" models (those received where there are none).
        graph_scope: one graph for the "model", or one for each "layer".
        stop: "step": when ||Psi+ - Psi||_F < eps, as printed, which may be far from a stationary point;
            "stationarity": when the optimality conditions of J fail by less than eps of their terms, in both blocks.
        smoothing: "full": models descend along the gradient of J, 2 alpha L Psi; "printed": along alpha L Psi, the
            operator that the paper prints for them, half of what its closed form implies: an ablation.
        neighbours: about how many edges a client is to have, at any size and scale of the models; see `LearnedGraph`.
        noise_correction: what is taken from the distances before the graph is learnt: "none", the "known" noise of what
            arrived, or the "estimated"; see `LearnedGraph`.

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
        stop: str = "step",
        smoothing: str = "full",
        neighbours: int | None = None,
        noise_correction: str = "none",
    ) -> None:
        number("rho", rho, above=0)
        number("eps", eps, at_least=0)
        whole("max_iter", max_iter, at_least=1)
        one_of("step", step, STEPS)
        flag("accelerated", accelerated)
        one_of("stop", stop, STOPS)
        one_of("smoothing", smoothing, SMOOTHINGS)
        solver = PDCA(rho, eps, max_iter, step == "backtracking", accelerated, stop)
        constants = (alpha, beta, gamma, mu, fidelity, init, graph_scope, neighbours, noise_correction)
        super().__init__(*constants, solver, {"step": step, "stop": stop, "smoothing": smoothing})
        self.problem = self.problem.but(smoothing=smoothing)
