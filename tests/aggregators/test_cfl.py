"""Clustered federated learning: planted groups, thresholds, and clusters as state."""

import itertools

import pytest
import torch

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.aggregators.cfl import bipartition
from tests.aggregators.sharding import run_sharded


def planted(groups, size=40, noise=0.1, seed=0):
    """Return (previous, received): members of a group move the same way, groups in orthogonal ways that cancel."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.eye(size)[: max(groups) + 1]
    directions = directions - directions.mean(0)  # they sum to nothing
    previous = torch.randn(1, size, generator=generator).repeat(len(groups), 1)
    updates = directions[torch.tensor(groups)] + noise * torch.randn(len(groups), size, generator=generator) / size**0.5
    return previous, previous + updates


def test_two_planted_groups_are_found_and_averaged_apart():
    groups = [0, 1, 1, 0, 0, 1]
    previous, received = planted(groups)
    weights = torch.tensor([3.0, 1.0, 2.0, 1.0, 2.0, 3.0])
    out = build_aggregator("cfl", warmup_rounds=0)(received, weights, previous=previous)
    assert out.info["clusters"] == [[0, 3, 4], [1, 2, 5]] and out.info["splits"] == 1
    for members in ([0, 3, 4], [1, 2, 5]):
        mean = (weights[members, None] * received[members]).sum(0) / weights[members].sum()
        torch.testing.assert_close(out.models[members], mean.expand(3, -1))


def test_four_planted_groups_take_two_rounds():
    groups = [0, 1, 2, 3] * 3
    previous, received = planted(groups)
    # Two groups of a pair are at cosine -1/3, so their mean is sqrt(1/3) as long as each.
    cfl = build_aggregator("cfl", warmup_rounds=0, eps1_rel=0.7)
    sizes = [len(cfl(received, torch.ones(12), previous=previous).info["clusters"]) for _ in range(4)]
    assert sizes == [2, 4, 4, 4]
    assert cfl.clusters == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_no_split_before_the_warmup_is_over_and_none_when_all_agree():
    previous, received = planted([0, 1, 1, 0, 0, 1])
    cfl = build_aggregator("cfl", warmup_rounds=2)
    found = [len(cfl(received, torch.ones(6), previous=previous).info["clusters"]) for _ in range(4)]
    assert found == [1, 1, 2, 2]
    agreeing = previous + torch.ones(6, 1) * torch.randn(1, 40)
    out = build_aggregator("cfl", warmup_rounds=0)(agreeing, torch.ones(6), previous=previous)
    assert out.info["clusters"] == [list(range(6))]


def test_before_any_split_it_is_fedavg():
    torch.manual_seed(0)
    received, previous, weights = torch.randn(5, 9), torch.randn(5, 9), torch.rand(5) + 0.1
    mask = torch.rand(5, 9) < 0.7
    cfl, fedavg = (build_aggregator(name)(received, weights, mask, previous) for name in ("cfl", "fedavg"))
    torch.testing.assert_close(cfl.models, fedavg.models)
    torch.testing.assert_close(cfl.graph, fedavg.graph)


@pytest.mark.parametrize(
    ("eps1", "eps2", "splits"), [(0.4, 0.6, 1), (0.4, 0.8, 0), (1e-3, 0.6, 0), (1e9, 0.0, 1), (0.0, 0.0, 0)]
)
def test_absolute_thresholds(eps1, eps2, splits):
    previous, received = planted([0, 1, 1, 0, 0, 1])  # every update is about sqrt(1/2) long, their mean about 0.04
    out = build_aggregator("cfl", eps1=eps1, eps2=eps2, warmup_rounds=0)(received, torch.ones(6), previous=previous)
    assert out.info["splits"] == splits


def test_mean_update_is_weighted():
    previous = torch.zeros(3, 2)
    received = torch.tensor([[1.0, 0.0], [-1.0, 0.1], [-1.0, -0.1]])
    opposed = {"warmup_rounds": 0, "eps1_rel": 0.1}
    for sizes, splits in (((2, 1, 1), 1), ((1, 1, 1), 0)):
        out = build_aggregator("cfl", **opposed)(received, torch.tensor(sizes), previous=previous)
        assert out.info["splits"] == splits


def test_small_clusters_are_left_alone():
    previous, received = planted([0, 1])
    assert build_aggregator("cfl", warmup_rounds=0)(received, torch.ones(2), previous=previous).info["splits"] == 0
    pairs = build_aggregator("cfl", warmup_rounds=0, min_cluster_size=1)(received, torch.ones(2), previous=previous)
    assert pairs.info["clusters"] == [[0], [1]]
    torch.testing.assert_close(pairs.models, received)


def test_no_update_no_split():
    previous, _ = planted([0, 1, 0, 1])
    out = build_aggregator("cfl", warmup_rounds=0, eps1_rel=10)(previous, torch.ones(4), previous=previous)
    assert out.info["splits"] == 0
    torch.testing.assert_close(out.models, previous)


def test_clusters_are_saved_and_restored():
    previous, received = planted([0, 1, 1, 0, 0, 1])
    first = build_aggregator("cfl", warmup_rounds=0)
    first(received, torch.ones(6), previous=previous)
    assert first.state() == {"rounds": 1, "clusters": [[0, 3, 4], [1, 2, 5]]}
    second = build_aggregator("cfl", warmup_rounds=100)
    second.load_state(first.state())
    still = second(previous + torch.randn(6, 40), torch.ones(6), previous=previous)
    assert still.info["clusters"] == [[0, 3, 4], [1, 2, 5]]
    assert first.state()["rounds"] == 1, "what was loaded is a copy"


@pytest.mark.parametrize("clusters", [[[0, 1], [1, 2]], [[0], [2]], [[1, 2]]])
def test_clusters_that_are_none_are_refused(clusters):
    with pytest.raises(ValueError, match="each client exactly once"):
        build_aggregator("cfl").load_state({"rounds": 1, "clusters": clusters})


def test_clusters_of_another_federation_are_refused():
    cfl = build_aggregator("cfl")
    cfl.load_state({"rounds": 1, "clusters": [[0, 1], [2]]})
    with pytest.raises(ValueError, match="3 clients, not 6"):
        cfl(torch.randn(6, 4), torch.ones(6), previous=torch.randn(6, 4))


def test_absent_clients_stay_in_their_cluster():
    previous, received = planted([0, 1, 1, 0, 0, 1, 0, 1])
    cfl = build_aggregator("cfl", warmup_rounds=0)
    present = torch.tensor([True, True, True, True, True, False, False, False])
    out = cfl(received, torch.ones(8), previous=previous, present=present)
    # Present: three of one group, two of the other; the absent three stay with the larger part.
    assert out.info["clusters"] == [[0, 3, 4, 5, 6, 7], [1, 2]]
    assert torch.equal(out.models[5:], previous[5:])
    absent_part = cfl(received, torch.ones(8), previous=previous, present=~present)
    assert [1, 2] in absent_part.info["clusters"]


def test_sharded_over_several_rounds():
    groups = [0, 1, 2, 3] * 3
    previous, received = planted(groups)
    whole = build_aggregator("cfl", warmup_rounds=1, eps1_rel=0.7)
    parts = [build_aggregator("cfl", warmup_rounds=1, eps1_rel=0.7) for _ in range(2)]
    for _ in range(4):
        supply = iter(parts)
        out = run_sharded(lambda supply=supply: next(supply), received, torch.ones(12), previous=previous)
        expected = whole(received, torch.ones(12), previous=previous)
        torch.testing.assert_close(out.models, expected.models)
        assert parts[0].state() == parts[1].state() == whole.state()
    assert len(whole.clusters) == 4


def agglomerated(similarity):
    """Return the two groups left by merging, time and again, those whose least similar members are the most alike."""
    groups = [[i] for i in range(len(similarity))]
    while len(groups) > 2:
        first, second = max(
            itertools.combinations(groups, 2), key=lambda pair: min(similarity[i, j] for i in pair[0] for j in pair[1])
        )
        groups = [group for group in groups if group not in (first, second)] + [first + second]
    return {frozenset(group) for group in groups}


def across(similarity, groups):
    first, second = groups
    return max(float(similarity[i, j]) for i in first for j in second)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [2, 3, 6, 8])
def test_bipartitions_are_those_of_a_loop_and_of_trying_all(seed, count):
    points = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)).double()
    similarity = torch.nn.functional.cosine_similarity(points[:, None], points[None], dim=-1)
    assert set(map(frozenset, bipartition(similarity))) == agglomerated(similarity)
    everyone = set(range(count))
    halves = [set(half) | {0} for n in range(count - 1) for half in itertools.combinations(range(1, count), n)]
    best = min(across(similarity, (half, everyone - half)) for half in halves)
    found = bipartition(similarity, "single")
    assert sorted(found[0] + found[1]) == sorted(everyone)
    assert across(similarity, found) == best


def test_clients_that_are_all_alike_are_still_split_in_two():
    assert all(bipartition(torch.ones(4, 4), linkage)[k] for linkage in ("complete", "single") for k in (0, 1))
