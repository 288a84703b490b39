"""What the methods share that learn a graph between the clients and smooth their models over it."""

from __future__ import annotations

from typing import ClassVar

from jgesr_lightning.aggregators.base import Aggregator
from jgesr_lightning.checks import number
from jgesr_lightning.regularisers import Regulariser
from jgesr_lightning.solvers import Penalties


class LearnedGraph(Aggregator):
    """Base of `jgesr`, `two_step` and `graph_filter`: the constants of their joint objective J.

    Args:
        alpha: weight of the smoothness over the graph.
        beta: weight of the log barrier on the degrees.
        gamma: weight of the sum of the edges.
        mu: weight of the fidelity to what arrived; and of the proximal term of the clients' local training, as the
            paper prints it, unless the run's `local.proximal_mu` says otherwise.

    Raises:
        ValueError: a setting out of range, with its name.
    """

    mixing: ClassVar[bool] = False
    min_clients: ClassVar[int] = 2

    def __init__(self, alpha: float, beta: float, gamma: float, mu: float) -> None:
        super().__init__()
        number("alpha", alpha, at_least=0)
        number("beta", beta, above=0)
        number("gamma", gamma, at_least=0)
        number("mu", mu, above=0)
        self.penalties = Penalties(alpha, beta, gamma, mu)

    def client_terms(self, proximal_mu: float | None = None) -> tuple[Regulariser, ...]:
        """Return the proximal term ``mu/2 ||x - psi_k||^2``; `proximal_mu` None means the server's own `mu`."""
        return super().client_terms(self.penalties.mu if proximal_mu is None else proximal_mu)
