"""How long the steps are that clients train in a round, and how alike: what there is to share, beside the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


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
