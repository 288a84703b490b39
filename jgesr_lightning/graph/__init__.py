r"""Graphs between clients: Laplacian algebra, the joint problem, its prox, graph learning, filtering.

Functions of tensors: float64 inside, any leading batch dimensions, no knowledge of clients, networks or rounds. The
equations behind them, and where the paper's constants disagree, are told in docs/mathematics.md.

=================  ==================================================================================================
X_r, M (K x d)     what arrived, one row a client, M * X + noise; M is 1 where an entry arrived
Psi (K x d)        restored models, one row a client
Z = diag(z)        fidelity weights; in the paper the clients' shares of the training samples
W (K x K), w       adjacency: symmetric, non-negative, zero diagonal; w its upper triangle, one number an edge
deg = W 1, L       degrees; Laplacian diag(deg) - W
D(Psi), d          squared distances ||psi_m - psi_n||^2 of rows; d their upper triangle
alpha beta gamma   weights of smoothness, log barrier and sum of the edges
mu, rho            weight of the fidelity; inverse step
=================  ==================================================================================================

.. math:: J(\Psi, w) = \tfrac\mu2 \|M * \Psi - X_r\|_Z^2 + \alpha \textstyle\sum_e w_e d_e(\Psi)
          - \beta \sum_k \log \deg_k(w) + \gamma \sum_e w_e, \qquad w \ge 0

"""

from jgesr_lightning.graph.filtering import filter_signals
from jgesr_lightning.graph.gram import cosine_from_gram, distances_from_gram, gram, pairwise_sq_distances
from jgesr_lightning.graph.laplacian import laplacian
from jgesr_lightning.graph.learning import GraphNotConverged, learn_graph
from jgesr_lightning.graph.problem import gradient_graph, gradient_signals, objective
from jgesr_lightning.graph.prox import prox_log_degree

__all__ = [
    "GraphNotConverged", "cosine_from_gram", "distances_from_gram", "filter_signals", "gradient_graph",
    "gradient_signals", "gram", "laplacian", "learn_graph", "objective", "pairwise_sq_distances", "prox_log_degree",
]  # fmt: skip
