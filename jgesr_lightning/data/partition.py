"""Who holds what: class-skewed shares of a training set, and each client's split into train and test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from jgesr_lightning import checks, seeding

Indices: TypeAlias = npt.NDArray[np.int64]
Labels: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[int]"

ATTEMPTS = 50  # draws before the best one is repaired; a draw is one K x classes table, no sample is touched
SPLIT = "train/test split"


def dirichlet_partition(
    labels: Labels, num_clients: int, kappa: float, seed: int = 0, min_samples: int = 10
) -> list[Indices]:
    """Split a labelled set into client shares whose class mixtures differ, the more so the smaller `kappa`.

    For every class the shares of the clients are drawn from a symmetric Dirichlet distribution with concentration
    `kappa` (Yurochkin et al., ICML 2019; after Hsu et al., arXiv 1909.06335, who draw per client), without a cap on a
    client's total. When a draw leaves a client fewer than `min_samples`, another is made, at most `ATTEMPTS` in all;
    after that the draw that lacks least is repaired: the largest clients give samples to those that lack some, of
    classes these already hold where there are any. So it always ends, however small `kappa` is.

    Args:
        labels: (n,) integer class labels.
        num_clients: number of clients K.
        kappa: Dirichlet concentration, above 0.
        seed: the partition depends on it and on the other arguments, on nothing else.
        min_samples: fewest samples a client may hold.

    Returns:
        K int64 arrays of indices into `labels`, sorted, disjoint, together covering all of them.

    Raises:
        ValueError: a setting is out of range, or there are fewer than K * min_samples samples.

    """
    y = label_array(labels)
    checks.whole("num_clients", num_clients, at_least=1)
    checks.number("kappa", kappa, above=0)
    checks.whole("min_samples", min_samples)
    if len(y) < num_clients * min_samples:
        raise ValueError(
            f"{len(y)} samples cannot be split (kappa={kappa:g}) over {num_clients} clients with at least "
            f"{min_samples} each: {num_clients * min_samples} would be needed; use fewer clients, a smaller "
            "data.min_samples or more data"
        )
    rng = np.random.default_rng(seeding.derive(seed, seeding.PARTITION))
    classes, class_sizes = np.unique(y, return_counts=True)
    counts = _draw_counts(rng, class_sizes, num_clients, kappa, min_samples)
    _repair(counts, min_samples)

    shares: list[list[Indices]] = [[] for _ in range(num_clients)]
    for column, label in enumerate(classes):
        members = rng.permutation(np.flatnonzero(y == label))
        for share, piece in zip(shares, np.split(members, np.cumsum(counts[:, column])[:-1]), strict=True):
            share.append(piece)
    return [np.sort(np.concatenate([*share, np.empty(0, np.int64)])).astype(np.int64) for share in shares]


def split_train_test(
    indices: Indices, labels: Labels, test_share: float = 0.25, seed: int = 0, client: int = 0
) -> tuple[Indices, Indices]:
    """Shuffle one client's samples and split them into local train and local test, class by class.

    The test part holds round(test_share * n) samples (at least one, at most n - 1), shared out over the classes in
    proportion to their sizes by largest remainder: a class with n_c samples gets test_share * n_c of them, rounded up
    or down (classes of two or three samples may have none). A class keeps at least one sample for training, so that
    nothing is tested that was not trained on, unless every class of the client has a single sample.

    Args:
        indices: (n,) the client's indices into `labels`, n >= 2.
        labels: labels of the whole set.
        test_share: share of test samples, between 0 and 1.
        seed: seed of the experiment's partition.
        client: number of the client; every client has its own stream.

    Returns:
        Sorted train and test indices.

    Raises:
        ValueError: fewer than two samples, or a test share outside (0, 1).

    """
    checks.number("test_share", test_share, above=0)
    if test_share >= 1:
        raise ValueError(f"test_share is {test_share!r}; it must be below 1")
    own = np.asarray(indices, dtype=np.int64)
    if len(own) < 2:
        raise ValueError(f"client {client} has {len(own)} samples; it needs at least 2, one to train and one to test")
    rng = np.random.default_rng(seeding.derive(seed, SPLIT, client=client))
    own = rng.permutation(own)
    classes, of_class, sizes = np.unique(label_array(labels)[own], return_inverse=True, return_counts=True)
    total = int(np.clip(round(test_share * len(own)), 1, len(own) - 1))
    quota = _largest_remainder(rng, (sizes * (total / len(own))).astype(np.float64), np.maximum(sizes - 1, 0), total)
    if (lacking := total - int(quota.sum())) > 0:  # more classes than training samples: singletons must be tested too
        quota[rng.permutation(np.flatnonzero(quota < sizes))[:lacking]] += 1
    test = np.concatenate([own[of_class == c][: quota[c]] for c in range(len(classes))])
    return np.sort(np.setdiff1d(own, test)), np.sort(test)


def stratified_subset(labels: Labels, fraction: float, seed: int = 0) -> Indices:
    """Return sorted indices of a seeded subset with round(fraction * n_c) samples of each class (at least one).

    Raises:
        ValueError: `fraction` is not in (0, 1].

    """
    checks.number("fraction", fraction, above=0, at_most=1)
    y = label_array(labels)
    if fraction == 1:
        return np.arange(len(y), dtype=np.int64)
    rng = np.random.default_rng(seeding.derive(seed, seeding.SUBSET))
    members = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    kept = [ids[: max(1, round(fraction * len(ids)))] for ids in members]
    return np.sort(np.concatenate([*kept, np.empty(0, np.int64)])).astype(np.int64)


def class_table(labels: Labels, parts: Sequence[Indices], num_classes: int) -> npt.NDArray[np.int64]:
    """Return the (K, num_classes) table of how many samples of each class each part holds."""
    y = label_array(labels)
    return np.stack([np.bincount(y[part], minlength=num_classes) for part in parts]).astype(np.int64)


def label_array(labels: Labels) -> npt.NDArray[np.int64]:
    """Return labels as one int64 array; ValueError where they are not one integer a sample."""
    y = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if y.ndim != 1 or not (np.issubdtype(y.dtype, np.integer) or y.size == 0):
        raise ValueError(f"labels is {y.dtype} of shape {y.shape}; it must be one integer a sample")
    return y.astype(np.int64)


def _draw_counts(
    rng: np.random.Generator, class_sizes: npt.NDArray[np.int64], K: int, kappa: float, min_samples: int
) -> npt.NDArray[np.int64]:
    """Return the first drawn (K, classes) table in which no client lacks samples, else the one that lacks fewest."""
    best, least = np.zeros((K, len(class_sizes)), np.int64), np.inf
    for _ in range(ATTEMPTS):
        shares = rng.dirichlet(np.full(K, kappa), size=len(class_sizes))  # (classes, K)
        ends = np.rint(np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(np.int64)
        ends[:, -1] = class_sizes
        counts = np.diff(np.minimum(ends, class_sizes[:, None]), axis=1, prepend=0).T
        lacking = int(np.maximum(min_samples - counts.sum(axis=1), 0).sum())
        if lacking < least:
            best, least = counts.copy(), lacking
        if lacking == 0:
            break
    return best


def _repair(counts: npt.NDArray[np.int64], min_samples: int) -> None:
    """Move samples (in place) from the largest clients to those with fewer than `min_samples`, keeping label skew.

    A client in need takes of its own most frequent class first, from the largest client that has some to spare; a
    client without any takes the main class of the largest one.
    """
    totals = counts.sum(axis=1)
    for needy in np.argsort(totals, kind="stable"):
        while totals[needy] < min_samples:
            spare = np.maximum(totals - min_samples, 0)
            giver, label = -1, -1
            for own in np.argsort(-counts[needy], kind="stable"):
                if counts[needy, own] == 0:
                    break
                able = np.where(counts[:, own] > 0, spare, 0)
                if able.max() > 0:
                    giver, label = int(able.argmax()), int(own)
                    break
            if giver < 0:
                giver = int(spare.argmax())
                label = int(counts[giver].argmax())
            moved = min(min_samples - totals[needy], spare[giver], counts[giver, label])
            counts[giver, label] -= moved
            counts[needy, label] += moved
            totals[giver] -= moved
            totals[needy] += moved


def _largest_remainder(
    rng: np.random.Generator, ideal: npt.NDArray[np.float64], limit: npt.NDArray[np.int64], total: int
) -> npt.NDArray[np.int64]:
    """Round `ideal` to whole numbers of sum `total`, none above `limit` (short of `total` only if the limits are)."""
    quota = np.minimum(np.floor(ideal).astype(np.int64), limit)
    while quota.sum() < min(total, int(limit.sum())):
        open_ = np.flatnonzero(quota < limit)
        order = np.lexsort((rng.random(len(open_)), quota[open_] - ideal[open_]))  # furthest below its ideal first
        quota[open_[order[: total - int(quota.sum())]]] += 1
    return quota
