"""What a graph is learnt from, against sums over entries written out and closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.aggregators.base import Upload
from jgesr_lightning.aggregators.distances import compared, noise_shares, products, remembered, snr_weights
from jgesr_lightning.graph import distances_from_gram

P, LAYERS = 4, (3, 0, 5, 2)


def upload(missing=0.3, noise=0.5, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    mask = torch.rand(P, 10, generator=draw) >= missing if missing else None
    received = some(P, 10)
    if mask is not None:
        received[~mask] = math.nan  # what stands there is never read
    std = noise * torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64) if noise else None
    return Upload(received, torch.full((P,), 0.25).double(), mask, some(P, 10), some(10), torch.arange(P), P, LAYERS,
                  noise_std=std)  # fmt: skip


def vector(given, kind, client):
    """One client's vector, entry by entry."""
    entries = []
    for j in range(10):
        there = given.mask is None or bool(given.mask[client, j])
        sent = float(given.previous[client, j])
        value = float(given.received[client, j]) if there else sent
        entries.append({"models": value, "updates": value - sent, "directions": value - float(given.initial[j])}[kind])
    return entries


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("layers", [None, LAYERS])
@pytest.mark.parametrize("kind", ["models", "updates", "directions"])
def test_distances_are_those_of_the_vectors_written_out(kind, layers, missing):
    given = upload(missing)
    found = compared(kind, products(given, kind, layers), torch.zeros(len(layers or [1]), P, dtype=torch.float64))
    begin = 0
    for layer, width in enumerate(layers or (10,)):
        vectors = [vector(given, kind, k)[begin : begin + width] for k in range(P)]
        begin += width
        lengths = [math.sqrt(sum(v * v for v in each)) for each in vectors]
        for m in range(P):
            for n in range(P):
                if kind == "directions" and width:
                    cosine = sum(a * b for a, b in zip(vectors[m], vectors[n], strict=True)) / lengths[m] / lengths[n]
                    expected = 2 * sum(length**2 for length in lengths) / P * (1 - cosine)
                else:
                    expected = sum((a - b) ** 2 for a, b in zip(vectors[m], vectors[n], strict=True))
                assert float(found[layer, m, n]) == pytest.approx(expected if m != n else 0, rel=1e-9, abs=1e-12)


def test_directions_do_not_depend_on_lengths_but_in_their_unit():
    given = upload(0.0, 0.0)
    moved = given.received - given.initial
    longer = Upload(given.initial + moved * torch.tensor([[1.0], [5.0], [0.2], [3.0]]).double(), given.weights, None,
                    given.previous, given.initial, given.clients, P)  # fmt: skip
    zeros = torch.zeros(1, P, dtype=torch.float64)
    D, other = (compared("directions", products(u, "directions", None), zeros) for u in (given, longer))
    torch.testing.assert_close(D / D[0, 0, 1], other / other[0, 0, 1])
    assert torch.equal(D, D.mT) and torch.equal(other, other.mT)


def test_a_client_that_has_not_moved_has_no_direction():
    given = upload(0.0, 0.0)
    given.received[2] = given.initial
    D = compared("directions", products(given, "directions", None), torch.zeros(1, P, dtype=torch.float64))[0]
    squares = (given.received - given.initial).square().sum(1)
    torch.testing.assert_close(D[2, [0, 1, 3]], (2 * squares.mean()).expand(3))


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("layers", [None, LAYERS])
def test_noise_shares_count_what_arrived(layers, missing):
    given = upload(missing)
    shares = noise_shares(given, layers)
    begin = 0
    for layer, width in enumerate(layers or (10,)):
        for k in range(P):
            arrived = width if given.mask is None else sum(given.mask[k, begin : begin + width].tolist())
            assert float(shares[layer, k]) == pytest.approx(arrived * float(given.noise_std[k]) ** 2)
        begin += width
    assert not noise_shares(upload(missing, noise=0.0), layers).any()


@pytest.mark.parametrize("kind", ["models", "directions"])
def test_known_noise_taken_out_leaves_what_there_was_on_average(kind):
    draw = torch.Generator().manual_seed(3)
    clean = torch.randn(3, 1, dtype=torch.float64, generator=draw) + torch.randn(
        3, 20_000, dtype=torch.float64, generator=draw
    )
    std = torch.tensor([1.0, 2.0, 0.5]).double()
    noisy = clean + std[:, None] * torch.randn(3, 20_000, dtype=torch.float64, generator=draw)
    initial, weights, clients = torch.zeros(20_000).double(), torch.ones(3).double() / 3, torch.arange(3)
    truth, seen = (Upload(x, weights, None, x, initial, clients, 3, noise_std=std) for x in (clean, noisy))
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    target = compared(kind, products(truth, kind, None), zeros)
    freed = compared(kind, products(seen, kind, None), noise_shares(seen, None))
    plain = compared(kind, products(seen, kind, None), zeros)
    assert float((freed - target).abs().max()) < 0.05 * float(target.max())
    assert float((plain - target).abs().max()) > 0.3 * float(target.max())


def test_layers_weigh_as_the_least_variance_has_it():
    """Layers that tell one distance on scales a_l in n_l entries: weights go with a_l / n_l, by Lagrange's rule."""
    truth = torch.randn(P, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a, n, sigma = torch.tensor([4.0, 1.0, 0.1]).double(), torch.tensor([50.0, 400.0, 100.0]).double(), 0.3
    shares = (n * sigma**2)[:, None].expand(-1, P)
    found = a[:, None, None] * (truth @ truth.T) + torch.diag_embed(shares)
    weights = snr_weights(found, shares)
    torch.testing.assert_close(weights / weights[0], (a / n) / (a / n)[0])
    signal = distances_from_gram(a[:, None, None] * (truth @ truth.T)).sum((-1, -2))
    torch.testing.assert_close((weights * signal).sum(), signal.sum())


def test_layers_weigh_alike_where_there_is_no_noise_or_nothing_else():
    found = torch.eye(P).double().expand(3, -1, -1)
    assert torch.equal(snr_weights(found, torch.zeros(3, P).double()), torch.ones(3).double())
    assert torch.equal(snr_weights(found, torch.ones(3, P).double()), torch.ones(3).double())


@settings(max_examples=30, deadline=None)
@given(
    memory=st.floats(0.01, 0.99),
    rounds=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_the_average_of_a_pair_is_over_the_rounds_that_both_took_part_in(memory, rounds, seed):
    draw = torch.Generator().manual_seed(seed)
    former, seen = None, {}
    for present in rounds:
        clients = torch.tensor(present).nonzero().squeeze(1)
        new = torch.rand(2, len(clients), len(clients), dtype=torch.float64, generator=draw)
        former = remembered(former, new, clients, 5, memory)
        for g in range(2):
            for i, m in enumerate(clients.tolist()):
                for j, n in enumerate(clients.tolist()):
                    seen.setdefault((g, m, n), []).append(float(new[g, i, j]))
    for g in range(2):
        for m in range(5):
            for n in range(5):
                values = seen.get((g, m, n))
                if values is None:
                    assert math.isnan(float(former[g, m, n]))
                    continue
                weights = [memory ** (len(values) - 1)] + [
                    (1 - memory) * memory ** (len(values) - 1 - t) for t in range(1, len(values))
                ]
                expected = sum(w * v for w, v in zip(weights, values, strict=True))
                assert float(former[g, m, n]) == pytest.approx(expected, rel=1e-9)


def test_what_is_missing_is_named():
    given = upload(0.0)
    bare = Upload(given.received, given.weights, None, None, None, given.clients, P)
    for kind, needed in (("updates", "previous"), ("directions", "initial")):
        with pytest.raises(ValueError, match=f"distances is '{kind}', which needs `{needed}`"):
            products(bare, kind, None)
    with pytest.raises(ValueError, match="shape \\(1, 4, 4\\), not \\(1, 5, 5\\)"):
        remembered(torch.zeros(1, 4, 4).double(), torch.zeros(1, 5, 5).double(), torch.arange(5), 5, 0.5)
    huge = Upload(given.received * 1e200, given.weights, None, None, None, given.clients, P)
    with pytest.raises(ValueError, match="squares are not"):
        products(huge, "models", None)
