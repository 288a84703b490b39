import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.data import class_table, dirichlet_partition, split_train_test, stratified_subset
from jgesr_lightning.data.partition import SPLIT

MNIST_LIKE = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))


def assert_partition(parts, n):
    assert all(part.dtype == np.int64 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@settings(max_examples=150, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=120),
    K=st.integers(1, 12),
    kappa=st.sampled_from([1e-300, 1e-3, 0.05, 0.5, 1.0, 100.0, 1e9]),
    min_samples=st.integers(0, 12),
    seed=st.integers(0, 5),
)
def test_disjoint_complete_and_never_too_small(labels, K, kappa, min_samples, seed):
    labels = np.array(labels)
    if len(labels) < K * min_samples:
        with pytest.raises(ValueError, match=rf"kappa=.* over {K} clients with at least {min_samples} each"):
            dirichlet_partition(labels, K, kappa, seed, min_samples)
        return
    parts = dirichlet_partition(labels, K, kappa, seed, min_samples)
    assert len(parts) == K
    assert_partition(parts, len(labels))
    assert min(map(len, parts)) >= min_samples


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("K", "kappa"), [(100, 0.001), (100, 1e-6), (20, 0.05)])
def test_ends_for_tiny_kappa(K, kappa):
    parts = dirichlet_partition(MNIST_LIKE, K, kappa, seed=0, min_samples=10)
    assert_partition(parts, len(MNIST_LIKE))
    assert min(map(len, parts)) >= 10


def test_repair_keeps_the_skew():
    parts = dirichlet_partition(MNIST_LIKE, 100, 0.001, seed=0, min_samples=10)
    classes_held = (class_table(MNIST_LIKE, parts, 10) > 0).sum(axis=1)
    assert np.median(classes_held) == 1  # most clients here owe all they have to the repair


def test_every_client_gets_exactly_the_minimum_when_there_is_no_more():
    parts = dirichlet_partition(np.arange(60) % 4, 6, 0.01, seed=1, min_samples=10)
    assert [len(part) for part in parts] == [10] * 6


def test_depends_on_the_seed_alone():
    first = dirichlet_partition(MNIST_LIKE, 20, 0.05, seed=4)
    np.random.seed(0)  # noqa: NPY002 - the global state must not matter
    again = dirichlet_partition(torch.from_numpy(MNIST_LIKE), 20, 0.05, seed=4)
    other = dirichlet_partition(MNIST_LIKE, 20, 0.05, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_settings_and_labels_may_come_from_numpy_or_a_list():
    plain = dirichlet_partition(MNIST_LIKE, 5, 0.5, 1, 20)
    scalars = dirichlet_partition(list(MNIST_LIKE), np.int64(5), np.float32(0.5), np.int64(1), np.int32(20))
    assert all(np.array_equal(a, b) for a, b in zip(plain, scalars, strict=True))


def test_concentration_moves_from_one_class_to_all():
    def largest_share(kappa):
        parts = dirichlet_partition(MNIST_LIKE, 20, kappa, seed=0)
        table = class_table(MNIST_LIKE, parts, 10)
        return (table.max(axis=1) / table.sum(axis=1)).mean()

    shares = [largest_share(kappa) for kappa in (0.02, 0.2, 2.0, 1000.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.7 and shares[-1] < 0.13


def test_shares_have_the_moments_of_the_dirichlet_distribution():
    # Share of one client in one class: mean 1/K, variance (1/K)(1 - 1/K)/(K kappa + 1). No minimum, so no selection.
    K, kappa = 5, 0.5
    shares = np.concatenate(
        [
            class_table(MNIST_LIKE, dirichlet_partition(MNIST_LIKE, K, kappa, seed, min_samples=0), 10).ravel() / 600
            for seed in range(60)
        ]
    )
    variance = (1 / K) * (1 - 1 / K) / (K * kappa + 1)
    assert shares.mean() == pytest.approx(1 / K)  # exactly, as the shares of a class sum to one
    assert shares.var() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((MNIST_LIKE, 0, 0.5), "num_clients is 0"),
        ((MNIST_LIKE, 20, 0.0), "kappa is 0.0; it must be above 0"),
        ((MNIST_LIKE, 20, float("inf")), "kappa is inf"),
        ((MNIST_LIKE, 20, 0.5, 0, -1), "min_samples is -1"),
        ((MNIST_LIKE.reshape(2, -1), 2, 0.5), "one integer a sample"),
        ((MNIST_LIKE / 2, 2, 0.5), "one integer a sample"),
        (([], 2, 0.5, 0, 1), "0 samples cannot be split"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        dirichlet_partition(*arguments)


@settings(max_examples=150, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=2, max_size=80),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 3),
)
def test_split_is_a_partition_that_follows_the_training_labels(labels, share, seed):
    labels = np.array([9, *labels])  # a sample of somebody else's
    indices = np.arange(1, len(labels))
    train, test = split_train_test(indices, labels, share, seed, client=2)
    assert np.array_equal(np.sort(np.concatenate([train, test])), indices)
    total = min(max(round(share * len(indices)), 1), len(indices) - 1)
    assert len(test) == total
    sizes = np.bincount(labels[indices], minlength=7)
    in_test = np.bincount(labels[test], minlength=7)
    room = np.maximum(sizes - 1, 0)
    if room.sum() >= total:
        assert set(labels[test]) <= set(labels[train])
    if (in_test < room).all():  # no class ran out of samples: every class is within one of its share
        assert (np.abs(in_test - sizes * total / len(indices)) < 1).all()


def test_split_of_the_paper():
    labels = np.repeat([0, 3, 7], [400, 40, 4])
    train, test = split_train_test(np.arange(444), labels, 0.25, seed=0, client=0)
    assert np.bincount(labels[test], minlength=8).tolist() == [100, 0, 0, 10, 0, 0, 0, 1]
    assert len(train) == 333


@pytest.mark.parametrize(("n", "share"), [(2, 0.01), (2, 0.99), (3, 0.99), (100, 0.001)])
def test_both_sides_hold_something(n, share):
    train, test = split_train_test(np.arange(n), np.zeros(n, int), share)
    assert len(train) >= 1 and len(test) >= 1


def test_split_is_shuffled_and_depends_on_seed_and_client():
    indices, labels = np.arange(200), np.zeros(200, int)
    tests = [tuple(split_train_test(indices, labels, 0.25, seed, k)[1]) for seed in (0, 1) for k in (0, 1)]
    assert len(set(tests)) == 4
    assert tests[0] == tuple(split_train_test(indices, labels, 0.25, 0, 0)[1])
    assert tests[0] != tuple(range(50)) and tests[0] != tuple(range(150, 200))
    assert SPLIT not in ("partition", "subset")  # a stream of its own


@pytest.mark.parametrize(
    ("n", "share", "message"), [(1, 0.25, "client 4 has 1"), (9, 0.0, "above 0"), (9, 1, "below 1")]
)
def test_splits_that_cannot_be(n, share, message):
    with pytest.raises(ValueError, match=message):
        split_train_test(np.arange(n), np.zeros(n, int), share, 0, client=4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0.001, 1.0))
def test_subset_keeps_the_class_balance(labels, fraction):
    labels = np.array(labels)
    subset = stratified_subset(labels, fraction, seed=1)
    assert np.array_equal(subset, np.unique(subset))
    for label in np.unique(labels):
        size = (labels == label).sum()
        assert (labels[subset] == label).sum() == max(1, round(fraction * size))


def test_subset_of_everything_and_of_nothing():
    assert np.array_equal(stratified_subset(MNIST_LIKE, 1.0), np.arange(len(MNIST_LIKE)))
    assert not np.array_equal(stratified_subset(MNIST_LIKE, 0.5, 0), stratified_subset(MNIST_LIKE, 0.5, 1))
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match="fraction"):
            stratified_subset(MNIST_LIKE, fraction)


def test_class_table_counts():
    table = class_table([0, 2, 2, 1], [np.array([0, 1]), np.array([2, 3])], 4)
    assert table.tolist() == [[1, 0, 1, 0], [0, 1, 1, 0]]
