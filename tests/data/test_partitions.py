"""Every partition: disjoint, complete or said to be not, the same for a seed, and what its publication says."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning import names
from jgesr_lightning.data import DataError, FederatedDataModule, class_table, dirichlet_partition, make_dataset
from jgesr_lightning.data.partitions import make_partition
from jgesr_lightning.data.synthetic import make_synthetic

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
CLIENTS = np.random.default_rng(1).integers(0, 7, 600)
OWN = tuple("abcdefg")


def parts_of(name, labels=LABELS, K=7, seed=0, kappa=0.5, min_samples=2, classes_per_client=2, **options):
    settings = {"seed": seed, "kappa": kappa, "min_samples": min_samples, "classes_per_client": classes_per_client}
    clients = CLIENTS if labels is LABELS else None
    return make_partition(name, labels, K, clients=clients, client_names=OWN, **settings, **options)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(names.BUILTIN["partitions"])),
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120),
    K=st.integers(1, 12),
    kappa=st.sampled_from([1e-3, 0.05, 1.0, 1e6]),
    per_client=st.integers(1, 5),
    seed=st.integers(0, 5),
    fraction=st.sampled_from([1.0, 0.5]),
)
def test_disjoint_complete_and_never_too_small(name, labels, K, kappa, per_client, seed, fraction):
    labels = np.array(labels)
    clients = np.arange(len(labels)) % K
    subset = np.flatnonzero(np.random.default_rng(seed).random(len(labels)) < fraction) if fraction < 1 else None
    used = np.arange(len(labels)) if subset is None else subset
    options = {"seed": seed, "kappa": kappa, "min_samples": 2, "classes_per_client": per_client}

    def make():
        return make_partition(name, labels, K, subset=subset, clients=clients, client_names="x" * K, **options)

    enough = len(used) >= max(2 * K, K * per_client if name == "shards" else 0)
    if name == "natural":
        enough = np.bincount(clients[used], minlength=K).min() >= 2
    if name == "shards" and enough:
        enough = len(used) // (K * per_client) * per_client >= 2 or len(used) == 2 * K
        if not enough:  # some deals give a client two samples, and some do not
            return
    if not enough:
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            make()
        return
    parts = make()
    assert len(parts) == K and all(len(part) >= 2 and part.dtype == np.int64 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), used)
    assert all(np.array_equal(a, b) for a, b in zip(parts, make(), strict=True))


@pytest.mark.parametrize("name", ["dirichlet", "iid", "shards", "quantity"])
def test_another_seed_is_another_partition(name):
    first, other = parts_of(name), parts_of(name, seed=1)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_dirichlet_is_the_one_it_was():
    expected = dirichlet_partition(LABELS, 7, 0.5, 3, 5)
    assert all(map(np.array_equal, parts_of("dirichlet", seed=3, min_samples=5), expected))


def test_iid_shares_are_equal_in_size_and_alike_in_mixture():
    parts = parts_of("iid", K=6)
    assert [len(part) for part in parts] == [100] * 6
    table = class_table(LABELS, parts, 10)
    assert table.min() >= 1 and abs(table - 10).max() <= 12  # hypergeometric: 10 +- 2.8


def test_shards_hold_whole_classes():
    parts = parts_of("shards", K=10, classes_per_client=2)  # 20 shards of 30: each half a class
    table = class_table(LABELS, parts, 10)
    assert [len(part) for part in parts] == [60] * 10
    assert set(np.unique(table)) <= {0, 30, 60} and (table > 0).sum(axis=1).max() == 2
    assert np.array_equal(table.sum(axis=0), [60] * 10)
    assert set(np.unique(class_table(LABELS, parts_of("shards", K=10, classes_per_client=1), 10))) == {0, 60}


def test_quantity_skews_sizes_and_not_mixtures():
    labels = np.arange(40_000) % 4
    sizes = np.array([len(part) for part in parts_of("quantity", labels, K=5, kappa=0.3)])
    assert sizes.max() > 3 * sizes.min()
    assert sizes.sum() == 40_000
    parts = parts_of("quantity", labels, K=5, kappa=1e9)
    assert np.abs(np.array([len(part) for part in parts]) - 8000).max() <= 2
    shares = class_table(labels, parts, 4) / 8000
    assert np.abs(shares - 0.25).max() < 0.03


def test_quantity_follows_its_distribution():
    labels = np.zeros(10_000, int)
    shares = [len(parts_of("quantity", labels, K=4, kappa=1.0, seed=s)[0]) / 10_000 for s in range(300)]
    # the first coordinate of Dir(1, 1, 1, 1) is Beta(1, 3): mean 1/4, variance 3/80
    assert abs(np.mean(shares) - 0.25) < 4 * (3 / 80 / 300) ** 0.5
    assert abs(np.var(shares) - 3 / 80) < 0.01


def test_natural_is_what_the_data_say():
    parts = parts_of("natural")
    assert all(set(CLIENTS[part]) == {k} for k, part in enumerate(parts))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("natural", {"K": 3}, "clients is 3, but the data are those of 7 clients; set clients=7"),
        ("natural", {"min_samples": 90}, r"client \d \([a-g]\) has \d+ samples and data.min_samples is 90; lower it"),
        (
            "shards",
            {"classes_per_client": 100},
            "600 samples cannot be cut into 700 shards, data.classes_per_client=100",
        ),
        ("iid", {"min_samples": 100}, "client 0 has 86 samples and data.min_samples is 100"),
        ("dirichlett", {}, r"data.partition is 'dirichlett' \(did you mean 'dirichlet'"),
    ],
)
def test_what_cannot_be_had_is_said(name, options, message):
    with pytest.raises(ValueError, match=message):
        parts_of(name, **options)


def test_natural_without_clients_is_said():
    with pytest.raises(ValueError, match="the data do not say which client a sample is of"):
        make_partition("natural", LABELS, 7)


def test_a_function_of_ones_own_gets_what_it_names():
    def halves(labels, num_clients, seed):
        assert num_clients == 2 and seed == 9
        return [np.flatnonzero(labels < 5), np.flatnonzero(labels >= 5)]

    assert [len(part) for part in parts_of(halves, K=2, seed=9)] == [300, 300]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([[0], [1], [2]], "gave 3 lists; it must give one list of sample numbers for each of clients=2"),
        (None, "gave a NoneType"),
        ([[0, 1], [600]], "client 1 is given sample 600; there are 600 samples, 0 to 599"),
        ([[0, -1], [5]], "client 0 is given sample -1"),
        ([[0, 1, 2], [3, 1]], "sample 1 is given to client 0 and to client 1; shares must be disjoint"),
        ([[0, 0], [1]], "sample 0 is given to client 0 and to client 0"),
        ([[0.5, 1], [2]], "what it gives client 0 is no list of whole numbers"),
        ([[0], ["a"]], "what it gives client 1 is no list of whole numbers"),
        ([[0], [[1], [2, 3]]], "what it gives client 1 is no list of whole numbers"),
        ([[True, False], [2]], "what it gives client 0 is no list of whole numbers"),
        ([[0, 1], []], "client 1 has 0 samples and data.min_samples is 2; use more data"),
    ],
)
@pytest.mark.parametrize("from_file", [True, False])
def test_wrong_lists_are_named(tmp_path, returned, message, from_file):
    def mine(labels, num_clients):
        return returned

    if from_file:
        (tmp_path / "parts.json").write_text(json.dumps(returned))
        message = message if isinstance(returned, list) else "must hold a list of lists"
    with pytest.raises(ValueError, match=message) as caught:
        parts_of(str(tmp_path / "parts.json") if from_file else mine, K=2)
    assert ("parts.json" if from_file else "data.partition=mine") in str(caught.value)


def test_files_of_lists(tmp_path):
    lists = [[3, 1, 2], [10, 20], [599, 0]]
    (tmp_path / "parts.json").write_text(json.dumps(lists))
    np.savez(tmp_path / "parts.npz", *[np.array(one) for one in lists])
    for name in ("parts.json", "parts.npz"):
        parts = parts_of(str(tmp_path / name), K=3)
        assert [part.tolist() for part in parts] == [sorted(one) for one in lists]
    subset = np.array([0, 1, 2, 10, 20, 599])
    assert parts_of(str(tmp_path / "parts.json"), K=3, subset=subset)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.json", None),
        ("bad.json", b"[[1, 2"),
        ("deep.json", b"[" * 100_000),
        ("text.json", b"\xff\xfe"),
        ("dict.json", b"{}"),
        ("missing.npz", None),
        ("bad.npz", b"PK\x03\x04" + bytes(50)),
        ("text.npz", b"hello"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as caught:
        parts_of(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_arrays_of_objects_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "parts.npz", np.array([[1], [2, 3]], dtype=object))
    with pytest.raises(DataError, match="holds Python objects"):
        parts_of(str(tmp_path / "parts.npz"))


@pytest.mark.parametrize("name", ["dirichlet", "iid", "shards", "quantity", "natural", "file"])
def test_the_data_module_takes_every_partition(tmp_path, monkeypatch, name):
    toy = make_synthetic()
    owners = np.arange(4000) % 4

    def with_clients(root):
        import torch

        own = {"clients": tuple("abcd"), "train_clients": torch.from_numpy(owners)}
        train, test = (toy.train_inputs, toy.train_labels), (toy.test_inputs, toy.test_labels)
        return make_dataset("toy", train, test, toy.classes, **own)

    monkeypatch.setitem(names.BUILTIN["data"], "toy", with_clients)
    lists = [list(range(k, 3000, 4)) for k in range(4)]
    (tmp_path / "parts.json").write_text(json.dumps(lists))
    chosen = str(tmp_path / "parts.json") if name == "file" else name
    data = FederatedDataModule("toy", num_clients=4, partition=chosen, kappa=0.5)
    data.setup()
    used = 3000 if name == "file" else 4000
    assert int(data.class_counts.sum()) == int((data.sizes + data.test_sizes).sum()) == used
    assert data.partition_name == chosen
    assert data.client_names == (tuple("abcd") if name == "natural" else ())
    assert ("leaves out 1000 of 4000 samples" in data.left_out) == (name == "file")
    if name == "natural":
        assert all(set(owners[data.train_indices(k)]) | set(owners[data.test_indices(k)]) == {k} for k in range(4))


@pytest.mark.parametrize("clients", [0, -1, 2.5])
def test_a_number_of_clients_that_is_none_is_named(clients):
    with pytest.raises(ValueError, match="num_clients"):
        make_partition("iid", LABELS, clients)
