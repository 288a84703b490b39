import numpy as np
import pytest
import torch

from jgesr_lightning.data import FederatedDataModule
from jgesr_lightning.data.planted import transforms


def ready(**settings):
    data = FederatedDataModule("synthetic", num_clients=6, partition="iid", **settings)
    data.setup()
    return data


@pytest.fixture(scope="module")
def plain():
    return ready()


def test_groups_name_the_classes_by_permutations_of_their_own(plain):
    data = ready(planted="labels", groups=3)
    assert data.client_groups == (0, 1, 2, 0, 1, 2)
    assert data.facts()["groups"] == [0, 1, 2, 0, 1, 2] and plain.facts()["groups"] == []
    names = {}
    for k in range(6):
        for part in ("train_tensors", "test_tensors"):
            (x, y), (same, before) = getattr(data, part)(k), getattr(plain, part)(k)
            assert torch.equal(x, same)
            for old, new in zip(before.tolist(), y.tolist(), strict=True):
                assert names.setdefault((k % 3, old), new) == new  # one name for all clients of a group
        both = torch.cat([data.train_tensors(k)[1], data.test_tensors(k)[1]])
        assert torch.equal(torch.bincount(both, minlength=10), data.class_counts[k])
    found = [tuple(names[group, c] for c in range(10)) for group in range(3)]
    assert found[0] == tuple(range(10)) and len(set(found)) == 3
    assert all(sorted(permutation) == list(range(10)) for permutation in found)


@pytest.mark.parametrize(("groups", "turns"), [(4, [0, 1, 2, 3, 0, 1]), (2, [0, 2, 0, 2, 0, 2])])
def test_groups_see_turned_images(plain, groups, turns):
    data = ready(planted="rotations", groups=groups)
    for k in range(6):
        x, y = data.train_tensors(k)
        same, labels = plain.train_tensors(k)
        assert x.is_contiguous() and torch.equal(y, labels)
        assert np.array_equal(x.numpy(), np.rot90(same.numpy(), turns[k], (2, 3)))
    assert torch.equal(data.class_counts, plain.class_counts)


def test_the_seed_decides_the_names():
    def renamed(seed):
        return [t(torch.zeros(10, 1), torch.arange(10))[1].tolist() for t in transforms("labels", 4, 10, (1,), seed)]

    assert renamed(0) == renamed(0) != renamed(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("labels", 3, 2, (1, 4, 4)), "data.groups is 3; 2 classes cannot be renamed in so many ways"),
        (("rotations", 5, 10, (1, 4, 4)), "data.groups is 5; there are 4 rotations"),
        (("rotations", 4, 10, (1, 4, 5)), r"needs square images; a sample here has the shape \(1, 4, 5\)"),
        (("rotations", 4, 10, (7,)), "needs square images"),
        (("labels", 1, 10, (1, 4, 4)), "data.groups is 1; it must be at least 2"),
        (("turns", 4, 10, (1, 4, 4)), r"data.planted is 'turns'.*known: labels, rotations"),
    ],
)
def test_groups_that_cannot_be_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        transforms(*arguments)
