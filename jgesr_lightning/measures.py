"""What is measured of a round: accuracies over clients, how alike their updates are, what joins in a graph.

The updates say what there is to share, beside the noise; the edges, whether those are joined who belong together, where
it is known who does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

LEAST = 1e-6
"""An edge lighter than this is none: less than a millionth of a model passes over it."""


def summarise(prefix: str, values: Tensor, weights: Tensor) -> dict[str, float]:
    """Return the means, spread and tail of a client-wise figure of merit.

    Args:
        prefix: name of the unweighted mean; the others append to it.
        values: (K,) one number a client.
        weights: (K,) non-negative, number of samples behind each.

    Returns:
        Mean over clients, sample-weighted mean (``_weighted``), population standard deviation (``_std``), worst client
        (``_worst``) and mean of the worst tenth of the clients, at least one (``_worst_decile``).
    """
    values = values.to(torch.float64)
    tail = values.sort().values[: math.ceil(len(values) / 10)]
    return {
        prefix: float(values.mean()),
        f"{prefix}_weighted": float((values * weights).sum() / weights.sum()),
        f"{prefix}_std": float(values.std(unbiased=False)),
        f"{prefix}_worst": float(values.min()),
        f"{prefix}_worst_decile": float(tail.mean()),
    }


def likeness(
    updates: Iterable[Tensor], size: int, device: torch.device, reduce: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    r"""Return how long and how alike the clients' updates of a round are, before the channel.

    The mean cosine of all pairs of n updates is that of their sum brought to one length,
    :math:`(\|\sum_k u_k / \|u_k\|\|^2 - n) / (n (n - 1))`: one pass over each, nothing of size K x K x d.

    Args:
        updates: each (d,), of this process's clients; one that is not finite or zero does not count.
        size: d.
        device: where they lie.
        reduce: sums over the processes that hold the other clients.

    Returns:
        ``updates/length``: root mean square of their lengths, in the unit of the parameters; beside it stands the
        length of the channel's noise, its deviation times the root of d. Not a number where there is none.
        ``updates/cosine``: mean cosine over pairs of clients; not a number where there are fewer than two.

    >>> steps = torch.tensor([[3.0, 0.0], [0.0, 4.0], [-1.0, 0.0]])
    >>> likeness(steps, 2, steps.device, lambda part: part)["updates/cosine"]
    -0.3333333333333333
    """
    units = torch.zeros(size, dtype=torch.float64, device=device)
    counted = torch.zeros(2, dtype=torch.float64, device=device)  # squares of the lengths, and how many
    for update in updates:
        step = update.double()
        square = step.square().sum()
        counts = torch.isfinite(square) & (square > 0)
        units += torch.where(counts, step * torch.where(counts, square, 1).rsqrt(), 0)
        counted += torch.where(counts, torch.stack([square, torch.ones_like(square)]), 0)
    together = reduce(torch.cat([units, counted]))
    units, (squares, count) = together[:-2], together[-2:].tolist()
    cosine = (float(units.square().sum()) - count) / (count * (count - 1)) if count > 1 else math.nan
    return {"updates/length": math.sqrt(squares / count) if count else math.nan, "updates/cosine": cosine}


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
