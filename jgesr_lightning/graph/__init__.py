r"""Graphs between clients: Laplacian algebra, the joint objective, its prox, graph learning, filtering.

Pure functions of tensors: float64 inside, any leading batch dimensions, no knowledge of clients, networks or rounds.

**Symbols** (as in "Joint Graph Estimation and Signal Restoration for Robust Federated Learning", arXiv 2505.11648)

=================  ==================================================================================================
X_r (K x d)        what arrived, one row a client: M * X + noise
M (K x d)          1 where an entry arrived
Psi (K x d)        restored models, one row a client
Z = diag(z)        fidelity weights; in the paper the clients' shares of the training samples
W (K x K), w       adjacency: symmetric, non-negative, zero diagonal; w its upper triangle, one number an edge
deg = W 1, L       degrees; Laplacian diag(deg) - W
D(Psi), d          squared distances ||psi_m - psi_n||^2 of rows; d their upper triangle
alpha beta gamma   weights of smoothness, log barrier and sum of the edges
mu, rho            weight of the fidelity; inverse step
=================  ==================================================================================================

**The objective** (`objective_terms`, term by term)

.. math:: J(\Psi, w) = \tfrac\mu2 \|M * \Psi - X_r\|_Z^2 + \alpha \textstyle\sum_e w_e d_e(\Psi)
          - \beta \sum_k \log \deg_k(w) + \gamma \sum_e w_e, \qquad w \ge 0

with the identities (tested) :math:`\sum_e w_e d_e = \mathrm{tr}(\Psi^\top L \Psi) = \frac12 \mathrm{tr}(W D(\Psi))`
(`smoothness`), :math:`\langle L(w), G \rangle = \langle w, d(G) \rangle` for a Gram matrix G (`laplacian` and
`distances_from_gram` are adjoint), and :math:`\langle W 1, \lambda\rangle = \sum_e w_e (\lambda_m + \lambda_n)`
(`degrees` and `degrees_adjoint` are adjoint).

**Its gradients** (`gradient_signals`, `gradient_graph`)

.. math:: \partial_\Psi J = \mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi, \qquad
          \partial_{w_{mn}} J = \alpha d_{mn} - \beta (1/\deg_m + 1/\deg_n) + \gamma

**Its split into convex functions**, J = f + g - h (`difference_of_convex`)

.. math:: f = \tfrac\mu2 \|M * \Psi - X_r\|_Z^2 + \tfrac\alpha2 \|w + d\|^2, \quad
          g = -\beta \textstyle\sum_k \log \deg_k + \gamma 1^\top w + [w \ge 0], \quad
          h = \tfrac\alpha2 (\|w\|^2 + \|d\|^2)

**Algorithm 1, one step** (`solvers.PDCA`; as printed, in d-space: `solvers.pdca_as_printed`)

.. math:: \Psi^+ = \Psi - \tfrac1\rho \big(\mu M * (Z (M * \Psi - X_r)) + 2 \alpha L \Psi\big), \qquad
          w^+ = \mathrm{prox}_{g/\rho}\big(w - \tfrac\alpha\rho d(\Psi)\big)

where both right-hand sides use the old (Psi, w): f and h are linearised at the same point, so that
:math:`\partial_w (f - h) = \alpha d` and :math:`\partial_\Psi (f - h)` is the gradient above.

**The prox** (`prox_log_degree`; its dual in K unknowns is derived in `graph.prox`)

.. math:: \mathrm{prox}_{g/\rho}(\theta) = \arg\min_{w \ge 0} -\beta \textstyle\sum_k \log \deg_k(w) + \gamma 1^\top w
          + \tfrac\rho2 \|w - \theta\|^2

**Each argument alone**: `filter_signals` is the minimiser over Psi for fixed W,
:math:`(Z + \frac{2\alpha}{\mu} L)^{-1} Z X_r` where all arrived, and `learn_graph` the one over w for fixed Psi
(Kalofolias' log-degree model). The two-step baseline alternates them.

**Where the paper's constants disagree.** Read literally, its equations do not belong to one objective: whether the
smoothness is :math:`\mathrm{tr}(\Psi^\top L \Psi)`, :math:`\mathrm{tr}(W D)` (twice as much) or a sum over edges, and
whether the fidelity carries a half, differs from one to the next by factors of two. What a user runs is Algorithm 1, so
its operators are taken at their word: the J above is the one whose gradients are exactly the two operators printed
there, and whose minimiser over Psi is exactly the printed closed form :math:`(Z + \frac{2\alpha}{\mu} L)^{-1} Z X`.
Norms and sums of w, in g, h and the prox, run over edges (each pair once), not over the entries of W; over entries,
beta and gamma would mean half of what they mean here. With that choice everything above holds at once, and the tests
check each line by autograd, finite differences or an independent convex solver.

The paper's Z holds shares that sum to one. At K = 20 the average client's fidelity is then 0.05 beside a smoothing of
about :math:`2 \alpha \deg = 0.2`, and a small client is handed its neighbours' model. Functions here take Z as given;
the choice is `fidelity` of the aggregation.
"""

from jgesr_lightning.graph.filtering import filter_matrix, filter_signals
from jgesr_lightning.graph.gram import (
    cosine_from_gram,
    distances_from_gram,
    gram,
    pairwise_sq_distances,
)
from jgesr_lightning.graph.laplacian import (
    degrees,
    degrees_adjoint,
    from_upper_triangle,
    laplacian,
    normalized_adjacency,
    upper_triangle,
)
from jgesr_lightning.graph.learning import GraphNotConverged, learn_graph
from jgesr_lightning.graph.objective import (
    Split,
    difference_of_convex,
    gradient_graph,
    gradient_signals,
    objective,
    objective_terms,
    smoothness,
)
from jgesr_lightning.graph.problem import Terms
from jgesr_lightning.graph.prox import prox_log_degree

__all__ = [
    "GraphNotConverged",
    "Split",
    "Terms",
    "cosine_from_gram",
    "degrees",
    "degrees_adjoint",
    "difference_of_convex",
    "distances_from_gram",
    "filter_matrix",
    "filter_signals",
    "from_upper_triangle",
    "gradient_graph",
    "gradient_signals",
    "gram",
    "laplacian",
    "learn_graph",
    "normalized_adjacency",
    "objective",
    "objective_terms",
    "pairwise_sq_distances",
    "prox_log_degree",
    "smoothness",
    "upper_triangle",
]
