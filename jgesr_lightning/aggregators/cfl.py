"""Clustered federated learning: split a cluster whose members pull in different directions, average inside each."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import torch
from scipy.cluster import hierarchy
from torch import Tensor

from jgesr_lightning.aggregators.base import Aggregate, Aggregator, Upload, mix, note_self_weights
from jgesr_lightning.aggregators.geometry import summed
from jgesr_lightning.checks import number, one_of, whole
from jgesr_lightning.graph import cosine_from_gram, gram

LINKAGES = ("complete", "single")


class CFL(Aggregator):
    r"""Clustered federated learning (Sattler, Müller and Samek, IEEE TNNLS 2021, arXiv 1910.01991, Algorithm 3).

    All clients start in one cluster. With :math:`\Delta_k = x_k - \psi_k` (what a client's training changed), a cluster
    C is split in two when its mean update is small, so that it is near a stationary point of the common objective,
    while a member's is not:

    .. math:: \|\sum_{k \in C} \zeta_k \Delta_k\| < \epsilon_1 \;\text{and}\; \max_{k \in C} \|\Delta_k\| > \epsilon_2

    (zeta normalised inside C). The publication's two parts are those whose largest cosine similarity of updates across
    is the least possible, which `linkage` "single" gives; its authors' code takes the last two groups of
    complete-linkage clustering, and so does the default. ``psi`` is the weighted mean inside each cluster.

    The absolute thresholds depend on the model and the step size. The default is the relative form
    ``||mean|| < eps1_rel max ||.||``, which does not: the mean of n unrelated updates of equal length is 1/sqrt(n)
    times as long, so 0.4 splits clusters whose members agree less than six unrelated clients would. (0.25, the ratio of
    the authors' 0.4 and 1.6, is rarely reached with a few tens of clients of unequal size: what is left is FedAvg.)

    Clusters carry over from round to round: `state` holds them. Only participants decide on a split; members that are
    absent from it stay with the larger part (the one of larger share where equal).

    Args:
        eps1, eps2: absolute thresholds, both or neither; given, they replace `eps1_rel`.
        eps1_rel: relative threshold.
        warmup_rounds: aggregations before the first split. The authors wait for 20 of some 100 rounds.
        min_cluster_size: clusters with no more participants than this are not split (2 in the authors' code).
        linkage: how a cluster is split: "complete" (the authors' code) or "single" (the publication's optimum).
    """

    name: ClassVar[str] = "cfl"
    needs: tuple[str, ...] = ("previous",)

    def __init__(
        self,
        eps1: float | None = None,
        eps2: float | None = None,
        eps1_rel: float = 0.4,
        warmup_rounds: int = 10,
        min_cluster_size: int = 2,
        linkage: str = "complete",
    ) -> None:
        super().__init__()
        for name, value in (("eps1", eps1), ("eps2", eps2)):
            if value is not None:
                number(name, value, at_least=0)
        if (eps1 is None) != (eps2 is None):
            raise ValueError("eps1 and eps2 go together: give both (absolute thresholds) or neither (eps1_rel holds)")
        number("eps1_rel", eps1_rel, at_least=0)
        whole("warmup_rounds", warmup_rounds)
        whole("min_cluster_size", min_cluster_size, at_least=1)
        one_of("linkage", linkage, LINKAGES)
        self.linkage = linkage
        self.eps1, self.eps2, self.eps1_rel = eps1, eps2, eps1_rel
        self.warmup_rounds, self.min_cluster_size = warmup_rounds, min_cluster_size
        self.rounds = 0
        self.clusters: list[list[int]] = []

    def state(self) -> dict[str, Any]:
        """Return the number of rounds aggregated and the clusters (lists of client indices)."""
        return {"rounds": self.rounds, "clusters": [list(cluster) for cluster in self.clusters]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`; ValueError if its clusters do not hold each client once."""
        clusters = [[int(client) for client in cluster] for cluster in state["clusters"]]
        members = sorted(itertools.chain.from_iterable(clusters))
        if members != list(range(len(members))):
            raise ValueError(f"clusters must hold each client exactly once; got {clusters}")
        whole("rounds", state["rounds"])
        self.rounds, self.clusters = state["rounds"], clusters

    def aggregate(self, upload: Upload) -> Aggregate:
        """Split what has come apart, then average inside each cluster."""
        self.clusters = self.clusters or [list(range(upload.num_clients))]
        if sum(map(len, self.clusters)) != upload.num_clients:
            raise ValueError(
                f"the clusters are those of {sum(map(len, self.clusters))} clients, not {upload.num_clients}"
            )
        products = summed(gram(upload.received, minus=upload.previous, mask=upload.mask), upload.reduce)
        row_of = {client: row for row, client in enumerate(upload.clients.tolist())}
        clusters: list[list[int]] = []
        for cluster in self.clusters:
            rows = [row_of[client] for client in cluster if client in row_of]
            if self.rounds < self.warmup_rounds or not self._incongruent(products, upload.weights, rows):
                clusters.append(cluster)
                continue
            halves = bipartition(cosine_from_gram(products[rows][:, rows]), self.linkage)
            parts = [[rows[i] for i in half] for half in halves]
            parts.sort(key=lambda part: (len(part), float(upload.weights[part].sum())), reverse=True)
            leaving = {int(upload.clients[row]) for row in parts[1]}
            clusters.append([client for client in cluster if client not in leaving])
            clusters.append(sorted(leaving))
        splits = len(clusters) - len(self.clusters)
        self.clusters, self.rounds = sorted(clusters), self.rounds + 1

        mixing = torch.zeros_like(products)
        for cluster in self.clusters:
            rows = [row_of[client] for client in cluster if client in row_of]
            shares = upload.weights[rows]
            mixing[torch.tensor(rows, dtype=torch.long)[:, None], rows] = shares / shares.sum()
        info = {"clusters": self.state()["clusters"], "splits": splits}
        note_self_weights(self, mixing, info)
        return Aggregate(mix(upload, mixing), mixing, info)

    def _incongruent(self, products: Tensor, weights: Tensor, rows: list[int]) -> bool:
        """Say whether the cluster's mean update is small while a member's is large."""
        if len(rows) <= self.min_cluster_size:
            return False
        inside = products[rows][:, rows]
        shares = weights[rows] / weights[rows].sum()
        norm_of_mean = float((shares @ inside @ shares).clamp_min(0).sqrt())
        largest_norm = float(inside.diagonal().max().sqrt())
        if self.eps1 is not None and self.eps2 is not None:
            return norm_of_mean < self.eps1 and largest_norm > self.eps2
        return norm_of_mean < self.eps1_rel * largest_norm


def bipartition(similarity: Tensor, linkage: str = "complete") -> tuple[list[int], list[int]]:
    """Return the last two groups of an agglomeration of (n, n) similarities, n >= 2.

    Single linkage leaves the two groups whose largest similarity across is the least possible; complete linkage keeps
    the least similar members of a group alike.
    """
    upper = similarity[tuple(torch.triu_indices(len(similarity), len(similarity), 1))]
    tree = hierarchy.linkage((1 - upper.to("cpu", torch.float64)).numpy(), linkage)
    second = hierarchy.cut_tree(tree, n_clusters=2)[:, 0] == 1
    return (~second).nonzero()[0].tolist(), second.nonzero()[0].tolist()
