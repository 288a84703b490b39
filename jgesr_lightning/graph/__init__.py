"""Graphs between clients: Laplacian algebra, objective, prox, graph learning, filtering."""

from jgesr_lightning.graph.gram import cosine_from_gram, distances_from_gram, gram, pairwise_sq_distances

__all__ = ["cosine_from_gram", "distances_from_gram", "gram", "pairwise_sq_distances"]
