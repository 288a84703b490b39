"""Groups of clients that train alike: found in what their updates have in common, or not found."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.cluster import hierarchy
from torch import Tensor

from jgesr_lightning.aggregators.base import Upload
from jgesr_lightning.aggregators.distances import products
from jgesr_lightning.graph.gram import cosine_from_gram

ROUNDS = 8
"""So many rounds come before the first grouping: first steps from one model tell the labels apart, and a round in which
clients jump, too long a step, weighs little among eight."""
KEPT = ("groups", "cosines", "rounds")


class Grouping:
    """The groups of K clients, found anew each round from the updates of all rounds so far.

    All are one group until some grouping explains more than `threshold` of what tells pairs apart (see `partition`),
    and that grouping stands until another does.

    Under ``own="clean"`` what the server counts an update from is off by its weight of the client's own model times the
    noise on that one: next to nothing under a small mu; and, as all noise, in the lengths rather than the products.

    Args:
        threshold: from 0 to 1.

    Attributes:
        groups: (K,) int64, the group of each client.
        cosines: (K, K) float64, cosines of the updates, added up over the rounds in which both took part.
        rounds: (K, K) float64, how many rounds these are.
        explained: by the grouping that explains most, whether or not it was taken.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold, self.explained = threshold, 0.0
        self.groups = torch.zeros(0, dtype=torch.int64)
        self.cosines = self.rounds = torch.zeros(0, 0, dtype=torch.float64)

    def follow(self, upload: Upload) -> None:
        """Take in a round's updates; ValueError where `previous` is missing, or for another number of clients."""
        if not len(self.groups):
            self.groups = torch.zeros(upload.num_clients, dtype=torch.int64)
            self.cosines, self.rounds = torch.zeros(2, *2 * [upload.num_clients], dtype=torch.float64)
        if len(self.groups) != upload.num_clients:
            raise ValueError(f"the groups are those of {len(self.groups)} clients, not {upload.num_clients}")
        if upload.previous is None:
            raise ValueError("groups needs `previous`, which updates are counted from")
        at, new = (upload.clients[:, None], upload.clients), products(upload, "updates", None)[0]
        self.cosines, self.rounds = self.cosines.clone(), self.rounds.clone()  # since `state` gave them away
        self.cosines[at] += cosine_from_gram(new)
        self.rounds[at] += 1
        found, self.explained = partition(self.likeness())
        if self.explained > self.threshold and float(self.rounds.max()) >= ROUNDS:
            self.groups = found

    def likeness(self) -> Tensor:
        """Return the cosines of the clients' updates, the mean over the rounds that a pair shared; (K, K).

        Every round counts alike, however long its updates: first updates are the longest, and one round in which
        clients jump, too long a step, would else decide by itself. A pair that never met is NaN, a client that did not
        move like nobody. Noise on what arrived is in the lengths, which takes all cosines nearer to zero alike.
        """
        return self.cosines / self.rounds

    def together(self, clients: Tensor) -> Tensor:
        """Return which pairs are of one group, (P, P) float64: 1.0 or 0.0, that on the diagonal, too."""
        groups = self.groups[clients]
        return (groups[:, None] == groups).double().fill_diagonal_(0)

    def averaging(self, clients: Tensor, weights: Tensor) -> Tensor:
        """Return what takes these clients' models to the means of their groups by `weights`, (P, P), rows of one."""
        shares = (self.together(clients) + torch.eye(len(clients), dtype=torch.float64)) * weights
        return shares / shares.sum(1, keepdim=True)

    def info(self) -> dict[str, Any]:
        """Return what there is to report."""
        groups = self.groups.tolist()
        return {"groups": groups, "num_groups": len(set(groups)), "groups_explain": self.explained}

    def state(self) -> dict[str, Any]:
        """Return what the next round goes on from."""
        return {key: getattr(self, key) for key in KEPT}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`; ValueError for what is none."""
        groups, *others = (state.get(key) if isinstance(state, dict) else None for key in KEPT)
        if not (isinstance(groups, Tensor) and groups.ndim == 1 and groups.dtype == torch.int64):
            raise ValueError("the groups must be one whole number a client")
        shape, sums = (len(groups), len(groups)), [each for each in others if isinstance(each, Tensor)]
        if len(sums) < len(others) or not all(each.shape == shape and bool(each.isfinite().all()) for each in sums):
            raise ValueError(f"what the groups of {len(groups)} clients rest on must be finite, and {shape} each")
        self.groups = groups.cpu()
        self.cosines, self.rounds = (each.to("cpu", torch.float64) for each in sums)


def partition(likeness: Tensor) -> tuple[Tensor, float]:
    r"""Return the groups that explain the likenesses best, and how much of them they explain.

    Groups explain as much as the model "one likeness within groups, another across" does: with c the likeness of pair e
    and :math:`\bar c_e` the mean of its kind, within or across,

    .. math:: R^2 = 1 - \frac{\sum_e (c_e - \bar c_e)^2}{\sum_e (c_e - \bar c)^2}, \qquad
              \bar R^2 = 1 - (1 - R^2) \frac{n - 1}{n - K - 1}

    over the n pairs; the second, adjusted for as many choices as there are clients (Ezekiel 1930), is what counts.
    Of noise alone little more than a tenth is explained. The groups tried are those of average linkage (Sokal and
    Michener 1958) that have three members or more on average.

    Args:
        likeness: (K, K) symmetric; NaN where not known, which counts as the mean. The diagonal is not read.

    Returns:
        The group of each client, (K,) int64, numbered in the order of their first members; and adjusted R^2, at most 1;
        all in group 0 and 0.0 where nothing can be told: fewer than six clients, or all alike.
    """
    count = len(likeness)
    one = torch.zeros(count, dtype=torch.int64)
    if count < 6:
        return one, 0.0
    pairs = count * (count - 1) // 2
    matrix = likeness.to("cpu", torch.float64).numpy()
    upper = np.triu_indices(count, 1)
    found = matrix[upper]
    if np.isnan(found).all():
        return one, 0.0
    found = np.where(np.isnan(found), np.nanmean(found), found)
    spread = np.square(found - found.mean()).sum()
    if not spread > 1e-20 * pairs:
        return one, 0.0
    tree = hierarchy.linkage(found.max() - found, "average")
    best, explained = one, 0.0
    for labels in hierarchy.cut_tree(tree, n_clusters=range(2, count // 3 + 1)).T:
        within = (labels[:, None] == labels)[upper]
        means = np.where(within, found[within].mean(), found[~within].mean())
        share = 1 - float(np.square(found - means).sum() / spread)
        if share > explained:
            best, explained = torch.from_numpy(labels.astype(np.int64)), share
    return best, 1 - (1 - explained) * (pairs - 1) / (pairs - count - 1)
