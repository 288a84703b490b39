"""Graphs between clients: Laplacian algebra, objective, prox, graph learning, filtering."""

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
from jgesr_lightning.graph.learning import learn_graph
from jgesr_lightning.graph.objective import (
    Split,
    Terms,
    difference_of_convex,
    gradient_graph,
    gradient_signals,
    objective,
    objective_terms,
    smoothness,
)
from jgesr_lightning.graph.prox import prox_log_degree

__all__ = [
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
