"""How well a graph between clients joins those who belong together, where it is known who does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 1e-6
"""An edge lighter than this is none: less than a millionth of a model passes over it."""


def edge_scores(graph: Tensor, groups: Sequence[int]) -> dict[str, float]:
    """Return how the edges of a graph agree with groups of clients.

    An edge joins two clients if either takes anything from the other (so that mixing matrices count, too).

    Args:
        graph: (K, K) adjacency or mixing matrix, non-negative; its diagonal is not read.
        groups: group of each client.

    Returns:
        ``graph/precision``: share of the edges that join clients of one group; not a number where there is no edge.
        ``graph/recall``: share of the pairs within groups that are joined; not a number where no group has two clients.
        ``graph/within``: share of the edges' weight that lies within groups; not a number where there is no edge.

    >>> edge_scores(torch.tensor([[0.0, 3.0, 1.0], [3.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), [0, 0, 1])
    {'graph/precision': 0.5, 'graph/recall': 1.0, 'graph/within': 0.75}
    """
    of = torch.as_tensor(groups)
    upper = torch.ones(len(of), len(of)).triu(1) > 0
    together = (of[:, None] == of[None, :])[upper]
    weights = (graph.to("cpu", torch.float64) + graph.to("cpu", torch.float64).T)[upper]
    joined = weights > LEAST
    right = float((joined & together).sum())
    return {
        "graph/precision": _share(right, float(joined.sum())),
        "graph/recall": _share(right, float(together.sum())),
        "graph/within": _share(float(weights[joined & together].sum()), float(weights[joined].sum())),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
