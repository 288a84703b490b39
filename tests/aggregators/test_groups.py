"""Groups of clients against brute force, least squares and sums written out; and what the methods do with them."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.aggregators.base import Upload
from jgesr_lightning.aggregators.groups import ROUNDS, Grouping, partition
from jgesr_lightning.graph import pairwise_sq_distances
from jgesr_lightning.graph.problem import APART, Problem
from tests.aggregators.sharding import run_sharded

NAMES = ("jgesr", "two_step", "graph_filter")
ROBUST = {"fidelity": "uniform", "mu": 0.001, "groups": 0.65}
LAYERS = (100, 0, 200)


def noise_of(clients, seed):
    """Symmetric likenesses without any groups."""
    each = torch.randn(clients, clients, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (each + each.T) / 2


def blocks(labels, seed=0, noise=0.1):
    """Likenesses that are larger within groups than across."""
    group = torch.as_tensor(labels)
    return (group[:, None] == group) + noise * noise_of(len(group), seed)


def numbered(labels):
    """Groups numbered in the order of their first members."""
    order = list(dict.fromkeys(labels))
    return [order.index(label) for label in labels]


def explained(likeness, labels):
    """R^2 of "one likeness within, another across", pair by pair."""
    kinds = {True: [], False: []}
    for m, n in itertools.combinations(range(len(labels)), 2):
        kinds[labels[m] == labels[n]].append(float(likeness[m, n]))
    everything = [value for kind in kinds.values() for value in kind]
    means = {kind: sum(values) / len(values) for kind, values in kinds.items() if values}
    left = sum((value - means[kind]) ** 2 for kind, values in kinds.items() for value in values)
    mean = sum(everything) / len(everything)
    return 1 - left / sum((value - mean) ** 2 for value in everything)


def adjusted(share, clients):
    pairs = clients * (clients - 1) // 2
    return 1 - (1 - share) * (pairs - 1) / (pairs - clients - 1)


def admissible(clients):
    """All partitions into two groups or more that have three members or more on average."""
    found = {tuple(numbered(each)) for each in itertools.product(range(clients // 3), repeat=clients)}
    return [labels for labels in found if max(labels) > 0]


@pytest.mark.parametrize("labels", [(0, 0, 0, 1, 1, 1), (0, 1, 1, 0, 0, 1, 1), (0, 1, 2, 0, 1, 2, 0, 1, 2)])
def test_planted_blocks_are_the_best_of_all_partitions_and_are_found(labels):
    for seed in range(5):
        likeness = blocks(labels, seed)
        best = max(admissible(len(labels)), key=lambda each, likeness=likeness: explained(likeness, each))
        groups, share = partition(likeness)
        assert groups.tolist() == list(best) == list(labels)
        assert share == pytest.approx(adjusted(explained(likeness, best), len(labels)), rel=1e-12)


@pytest.mark.parametrize("clients", [6, 9])
def test_no_partition_explains_less_than_it_says_or_more_than_the_best(clients):
    possible = admissible(clients)
    for seed in range(5):
        likeness = noise_of(clients, seed)
        groups, share = partition(likeness)
        if bool(groups.any()):
            assert tuple(groups.tolist()) in possible
            assert share == pytest.approx(adjusted(explained(likeness, groups.tolist()), clients), rel=1e-12)
        best = max(explained(likeness, each) for each in possible)
        assert share <= adjusted(best, clients) + 1e-12


def test_what_groups_explain_is_what_least_squares_explains_adjusted():
    labels = torch.arange(20) % 4
    likeness = blocks(labels, noise=0.4)
    groups, share = partition(likeness)
    upper = np.triu_indices(20, 1)
    y = likeness.numpy()[upper]
    X = np.stack([np.ones_like(y), (groups[:, None] == groups).numpy()[upper]], 1)
    _, (left,), *_ = np.linalg.lstsq(X, y, rcond=None)
    assert share == pytest.approx(1 - left / np.square(y - y.mean()).sum() * (190 - 1) / (190 - 20 - 1), rel=1e-12)
    assert torch.equal(groups, labels)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(12)), st.floats(1e-3, 1e3), st.floats(-10, 10))
def test_neither_the_order_of_clients_nor_scale_and_shift_of_likenesses_matter(seed, order, scale, shift):
    likeness = blocks([0, 1, 2] * 4, seed, noise=0.5)
    groups, share = partition(likeness)
    again, same = partition((scale * likeness + shift)[order][:, order])
    assert again.tolist() == numbered(groups[list(order)].tolist())
    assert same == pytest.approx(share, abs=1e-9)


def test_of_noise_little_is_explained():
    shares = [partition(noise_of(20, seed))[1] for seed in range(200)]
    assert max(shares) < 0.3 and sum(shares) / 200 < 0.15


def test_pairs_not_known_count_as_the_mean():
    likeness = blocks([0, 0, 0, 0, 1, 1, 1, 1], noise=0.2)
    likeness[0, 5] = likeness[5, 0] = math.nan
    groups, share = partition(likeness)
    known = likeness[tuple(np.triu_indices(8, 1))]
    filled = likeness.nan_to_num(float(known[~known.isnan()].mean()))
    assert groups.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert share == pytest.approx(adjusted(explained(filled, groups.tolist()), 8), rel=1e-12)


@pytest.mark.parametrize(
    "likeness",
    [*(blocks([0, 1] * 3)[:few, :few] for few in range(2, 6)), torch.full((8, 8), 0.3), torch.full((8, 8), math.nan)],
)
def test_where_nothing_can_be_told_all_are_one_group(likeness):
    groups, share = partition(likeness)
    assert groups.tolist() == [0] * len(likeness) and share == 0


def upload(updates, clients=None, num_clients=None, missing=0.0, seed=0):
    """A round in which these updates arrived, of all clients or some."""
    draw = torch.Generator().manual_seed(seed)
    previous = torch.randn(updates.shape, dtype=torch.float64, generator=draw)
    mask = torch.rand(updates.shape, generator=draw) >= missing if missing else None
    received = previous + updates
    if mask is not None:
        received[~mask] = math.nan  # what stands there is never read
    there = torch.arange(len(updates)) if clients is None else torch.as_tensor(clients)
    shares = torch.full((len(updates),), 1 / len(updates), dtype=torch.float64)
    return Upload(received, shares, mask, previous, None, there, num_clients or len(updates))


def grouped(labels, seed, own=0.5, size=60):
    """Updates that the members of a group have in common, and some of their own."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(max(labels) + 1, size, dtype=torch.float64, generator=draw)
    return common[torch.as_tensor(labels)] + own * torch.randn(len(labels), size, dtype=torch.float64, generator=draw)


def test_likenesses_are_the_mean_cosine_of_the_updates_over_the_rounds_that_a_pair_shared():
    grouping, vectors = Grouping(0.5), {}
    for number, there in enumerate([(0, 1, 2), (0, 2, 3), (0, 1, 2, 3), (1, 2)]):
        each = upload(0.5**number * grouped([0, 0, 1, 1], number)[list(there)], there, 5, missing=0.2, seed=number)
        grouping.follow(each)
        for row, client in enumerate(there):
            arrived = [x - p if m else 0.0 for x, p, m in zip(*(t[row].tolist() for t in
                       (each.received, each.previous, each.mask)), strict=True)]  # fmt: skip
            vectors[number, client] = arrived
    found = grouping.likeness()
    assert torch.equal(found.isnan(), found.T.isnan()) and bool(found[4].isnan().all())
    for m, n in itertools.combinations(range(4), 2):
        both = [(vectors[r, m], vectors[r, n]) for r in range(4) if (r, m) in vectors and (r, n) in vectors]
        cosines = [
            sum(a * b for a, b in zip(ours, theirs, strict=True)) / math.hypot(*ours) / math.hypot(*theirs)
            for ours, theirs in both
        ]
        assert float(found[m, n]) == pytest.approx(sum(cosines) / len(cosines), rel=1e-10)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4))
def test_how_long_a_rounds_updates_are_does_not_matter(lengths):
    plain, longer = Grouping(0.6), Grouping(0.6)
    for number, length in enumerate(lengths):
        updates = grouped([0, 1, 2] * 3, number)
        plain.follow(upload(updates))
        longer.follow(upload(length * updates))
    torch.testing.assert_close(longer.likeness(), plain.likeness(), rtol=1e-8, atol=1e-10)


def test_one_round_in_which_clients_jump_makes_no_groups():
    """As steps that are too long have it: rounds alike, and then one ten times as long, in two directions."""
    grouping = Grouping(0.6)
    for number in range(ROUNDS):
        jump = number == ROUNDS - 1
        grouping.follow(upload((10 if jump else 1) * grouped([0, 1] * 6 if jump else [0] * 12, number, own=1.0)))
    assert grouping.explained < 0.6 and not bool(grouping.groups.any())


def test_pairs_that_never_met_are_not_known_and_who_never_moved_is_like_nobody():
    updates = grouped([0] * 4, 1)
    updates[1] = 0
    grouping = Grouping(0.5)
    grouping.follow(upload(updates[:2], [0, 1], 4))
    grouping.follow(upload(updates[2:], [2, 3], 4))
    found = grouping.likeness()
    assert float(found[0, 1]) == float(found[1, 1]) == 0
    assert bool(found[:2, 2:].isnan().all()) and 0 < float(found[2, 3]) <= 1


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.9])
def test_who_was_there_for_the_long_first_updates_makes_no_group(share):
    draw = torch.Generator().manual_seed(1)
    grouping, most = Grouping(0.6), 0.0
    for number in range(20):
        there = torch.randperm(20, generator=draw)[: int(share * 20)].sort().values
        grouping.follow(upload(0.6**number * grouped([0] * 20, number, own=1.0, size=500)[there], there, 20))
        most = max(most, grouping.explained if float(grouping.rounds.max()) >= ROUNDS else 0.0)
    assert most < 0.3 and not bool(grouping.groups.any())


def test_groups_are_found_though_half_of_the_clients_sit_out():
    draw, labels = torch.Generator().manual_seed(1), [0, 1, 2] * 5
    grouping = Grouping(0.6)
    for number in range(12):
        there = torch.randperm(15, generator=draw)[:8].sort().values
        grouping.follow(upload(0.6**number * grouped(labels, number)[there], there, 15))
    assert grouping.groups.tolist() == labels


def test_a_grouping_waits_for_some_rounds_and_stands_until_another_explains_as_much():
    labels, others, grouping = [0, 1] * 4, [0, 0, 0, 0, 1, 1, 1, 1], Grouping(0.6)
    for number in range(ROUNDS):
        assert not bool(grouping.groups.any())
        grouping.follow(upload(grouped(labels, number)))
        assert grouping.explained > 0.6  # all along
    assert grouping.groups.tolist() == labels
    stood = 0
    for number in range(20):
        grouping.follow(upload(grouped(others, 200 + number)))
        expected = others if number > ROUNDS and grouping.explained > 0.6 else labels
        assert grouping.groups.tolist() == expected
        stood += grouping.explained < 0.6
    assert stood > 0 and expected == others
    assert grouping.info() == {"groups": others, "num_groups": 2, "groups_explain": grouping.explained}


def test_what_is_given_away_as_state_does_not_change():
    grouping = Grouping(0.6)
    grouping.follow(upload(grouped([0, 1] * 4, 0)))
    state = grouping.state()
    kept = {key: value.clone() for key, value in state.items()}
    grouping.follow(upload(grouped([0, 1] * 4, 1)))
    assert all(torch.equal(state[key], value) for key, value in kept.items())


def with_groups(labels, threshold=0.6):
    """Groups as they are told."""
    grouping, clients = Grouping(threshold), len(labels)
    sums = dict.fromkeys(("cosines", "rounds"), torch.zeros(clients, clients))
    grouping.load_state({"groups": torch.tensor(labels), **sums})
    return grouping


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 0, 2], [0] * 6, [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4, 5], [0, 1, 3, 5]])
def test_edges_within_cost_alike_and_those_across_a_million_times_as_much(labels, clients):
    D = torch.stack([pairwise_sq_distances(grouped([0] * len(clients), seed)) for seed in range(2)])
    together = with_groups(labels).together(torch.tensor(clients))
    problem = Problem(0.2, 1.0, 1.5, together=together.numpy()).scaled_to(D[None].numpy())
    costs, pairs = problem.costs(D[None].numpy())[0], list(itertools.permutations(range(len(clients)), 2))
    alike = {(m, n): labels[clients[m]] == labels[clients[n]] for m, n in pairs}
    for layer in range(2):
        typical = (0.2 * D[layer] + 1.5).mean()
        for m, n in pairs:
            same = [float(D[layer, i, j]) for i, j in pairs if alike[i, j]]
            distance = sum(same) / len(same) if alike[m, n] else float(D[layer, m, n])
            extra = 0.0 if alike[m, n] else APART * float(typical)
            assert float(costs[layer, m, n]) == pytest.approx(0.2 * distance + 1.5 + extra, rel=1e-12)


DAMAGED = [
    ({"groups": [0, 1]}, "the groups must be one whole number a client"),
    ({"groups": torch.zeros(8)}, "the groups must be one whole number a client"),
    ({"groups": torch.zeros(2, 4, dtype=torch.int64)}, "the groups must be one whole number a client"),
    ({"cosines": None}, "what the groups of 8 clients rest on"),
    ({"cosines": torch.zeros(7, 8)}, "what the groups of 8 clients rest on"),
    ({"rounds": torch.full((8, 8), math.nan)}, "what the groups of 8 clients rest on"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGED)
@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_none_is_refused(name, change, message):
    method = build_aggregator(name, groups=0.6)
    whole = with_groups([0, 1] * 4).state()
    method.load_state({"grouping": whole})
    with pytest.raises(ValueError, match=message):
        method.load_state({"grouping": whole | change})
    for other in (None, [1], {}):
        with pytest.raises(ValueError, match="the groups must be"):
            method.load_state({"grouping": other})
    method.load_state({})  # of a run without groups
    assert len(method.state()["grouping"]["groups"]) == 0


def rounds_of(count, labels, missing=0.0, present=1.0, noise=0.1, seed=0):
    """Arguments of some rounds of clients whose models move apart by group."""
    draw, clients, size = torch.Generator().manual_seed(seed), len(labels), sum(LAYERS)

    def some(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    initial = 0.1 * some(size)
    previous = initial.expand(clients, -1)
    for _ in range(count):
        updates = 0.1 * (some(max(labels) + 1, size)[torch.as_tensor(labels)] + some(size) + 0.5 * some(clients, size))
        received = previous + updates + noise * 0.1 * some(clients, size)
        there = torch.rand(clients, generator=draw) < present
        there[:2] = True
        yield {
            "received": received,
            "weights": torch.rand(clients, dtype=torch.float64, generator=draw) + 0.1,
            "mask": torch.rand(received.shape, generator=draw) >= missing if missing else None,
            "previous": previous,
            "initial": initial,
            "present": there,
            "layers": LAYERS,
            "noise_std": torch.full((clients,), noise * 0.1, dtype=torch.float64),
        }
        previous = previous + 0.5 * updates


PLANTED = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2, 0]


@pytest.mark.parametrize(("name", "spread"), [("jgesr", 0.006), ("two_step", 0.006), ("graph_filter", 0.04)])
@pytest.mark.parametrize("labels", [PLANTED, [0] * 12])
def test_under_a_small_mu_members_get_the_plain_mean_of_their_group(name, spread, labels):
    method = build_aggregator(name, **ROBUST)
    for number, each in enumerate(rounds_of(ROUNDS + 2, labels)):
        out = method(**each)
        found = labels if number >= ROUNDS - 1 else [0] * 12
        assert out.info["groups"] == found and out.info["num_groups"] == max(found) + 1
        within = torch.as_tensor(found)[:, None] == torch.as_tensor(found)
        mean = (within / within.sum(1, keepdim=True)).double() @ each["received"]
        apart = (each["received"] - each["received"].mean(0)).norm()
        assert float((out.models - mean).norm()) < spread * float(apart)
        assert float(out.graph[~within].sum()) < 1e-4 * float(out.graph.sum())


@pytest.mark.parametrize(("name", "spread"), [("jgesr", 0.01), ("two_step", 0.01), ("graph_filter", 0.05)])
@pytest.mark.parametrize("labels", [PLANTED, [0] * 12])
@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_with_gaps_members_get_the_plain_mean_of_what_arrived_of_their_group(name, spread, labels, noise):
    method = build_aggregator(name, **ROBUST)
    for each in rounds_of(ROUNDS + 4, labels, missing=0.3, noise=noise):
        out = method(**each)
        found, mask = torch.tensor(out.info["groups"]), each["mask"].double()
        within = (found[:, None] == found).double()
        arrived = torch.where(each["mask"], each["received"], 0.0)
        delivered = within @ mask  # of a column that none of its members did a group learns from the others, or not
        away = (out.models - within @ arrived / delivered.clamp_min(1))[delivered > 0].norm()
        apart = ((each["received"] - each["received"].mean(0)) * mask).norm()
        assert float(away) < spread * float(apart) and out.info.get("converged", True)
    assert found.tolist() == labels


OPTIONS = [
    {"own": "clean"},
    {"distances": "updates", "memory": 0.5, "noise_correction": "known"},
    {"noise_correction": "estimated", "fidelity": "shares"},
    {"distances": "directions", "layer_weights": "snr", "noise_correction": "known", "own": "clean"},
    {"graph_scope": "layer", "memory": 0.3},
    {"init": "previous"},
]


def cases():
    found = []
    for name, options in itertools.product(NAMES, OPTIONS):
        if name != "graph_filter":
            found.append((name, {**ROBUST, **options, "max_iter": 30}))
        elif not options.keys() & {"graph_scope", "init"}:
            found.append((name, {**ROBUST, **options}))
    return found


@pytest.mark.parametrize(("name", "options"), cases())
def test_groups_go_with_every_other_option_with_gaps_and_absences_over_processes_too(name, options):
    shards = [build_aggregator(name, **options) for _ in range(3)]
    whole = build_aggregator(name, **options)
    for each in rounds_of(ROUNDS + 2, PLANTED, missing=0.1, present=0.8):
        order = iter(shards)
        expected = whole(**each)
        out = run_sharded(lambda order=order: next(order), **each, bounds=(0, 50, 210, 300))
        assert out.info["groups"] == expected.info["groups"]
        torch.testing.assert_close(out.models, expected.models, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(out.graph, expected.graph, rtol=1e-5, atol=1e-6)
    assert expected.info["groups"] == PLANTED
    group, there = torch.as_tensor(PLANTED), each["present"]
    across = group[:, None] != group
    assert bool(expected.models.isfinite().all()) and 0 < int(there.sum()) < 12
    assert float(expected.graph[across].sum()) < 1e-4 * float(expected.graph.sum())
    assert torch.equal(expected.models[~there], each["previous"][~there])


@pytest.mark.parametrize("name", NAMES)
def test_a_member_that_is_there_alone_keeps_its_own_model(name):
    method = build_aggregator(name, **ROBUST)
    for each in rounds_of(ROUNDS + 1, PLANTED):
        method(**each)
    alone = torch.as_tensor(PLANTED) != 0
    alone[0] = True
    out = method(**each | {"present": alone})
    moved = float((out.models[0] - each["received"][0]).norm())
    assert moved < 0.02 * float((each["received"][0] - each["received"][alone].mean(0)).norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clients", [2, 3, 5])
def test_few_clients_are_one_group(name, clients):
    method = build_aggregator(name, **ROBUST)
    for each in rounds_of(ROUNDS + 1, [0, 1, 0, 1, 0][:clients]):
        out = method(**each)
    assert out.info["groups"] == [0] * clients and out.info["groups_explain"] == 0
    torch.testing.assert_close(out.models, each["received"].mean(0).expand(clients, -1), rtol=0, atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_clients_that_never_move_or_of_whom_nothing_arrives_do_no_harm(name):
    method = build_aggregator(name, **ROBUST | {"groups": 0.3})
    for each in rounds_of(ROUNDS + 1, PLANTED, noise=0.0):
        received, mask = each["received"].clone(), torch.ones(each["received"].shape, dtype=torch.bool)
        received[3], mask[5], received[5] = each["previous"][3], False, math.nan
        out = method(**each | {"received": received, "mask": mask})
        assert bool(out.models.isfinite().all()) and math.isfinite(out.info["groups_explain"])
    assert torch.equal(out.models[5], each["previous"][5])
    assert not bool(out.graph[5].any())
    groups = out.info["groups"]
    there = [k for k in range(12) if k not in (3, 5)]
    assert numbered([groups[k] for k in there]) == numbered([PLANTED[k] for k in there])
    with pytest.raises(ValueError, match="received holds values that are not finite"):
        method(**each | {"received": each["received"] / 0})


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_run_goes_on_with_the_same_bits(name):
    options = {**ROBUST, "memory": 0.5}
    first, second = build_aggregator(name, **options), build_aggregator(name, **options)
    for number, each in enumerate(rounds_of(ROUNDS + 4, PLANTED, present=0.8)):
        out = first(**each)
        if number in (1, ROUNDS - 1, ROUNDS + 3):  # before, when and after groups are found
            again = second(**each)
            assert torch.equal(again.models, out.models) and torch.equal(again.graph, out.graph)
            assert again.info["groups"] == out.info["groups"]
        file = io.BytesIO()
        torch.save(first.state(), file)
        file.seek(0)
        second = build_aggregator(name, **options)
        second.load_state(torch.load(file, weights_only=True))
    assert out.info["num_groups"] == 3
    with pytest.raises(ValueError, match="the groups are those of 12 clients, not 6"):
        second(**next(rounds_of(1, [0] * 6)))


@pytest.mark.parametrize("name", ["jgesr", "two_step"])
@pytest.mark.parametrize("clients", [12, 60])
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_members_end_at_one_model_however_strong_the_noise_and_however_many_they_are(name, clients, noise):
    """Distances then differ from pair to pair by more than gamma / alpha: in every step they count at their mean."""
    draw = torch.Generator().manual_seed(clients)
    received = 1 + noise * torch.randn(clients, 4000, dtype=torch.float64, generator=draw)
    method = build_aggregator(name, **ROBUST)
    out = method(received, torch.ones(clients), previous=torch.ones_like(received))
    assert out.info["converged"] and out.info["edges"] == clients * (clients - 1) // 2
    mean = received.mean(0)
    assert float((out.models - mean).norm()) < 0.006 * float((received - mean).norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lone", [False, True])
def test_what_edges_between_groups_cost_is_in_the_objective_and_in_its_conditions(name, lone):
    """Who is alone in a group has edges all the same, dear ones, which the barrier asks for."""
    labels = [3 if lone and client == 5 else group for client, group in enumerate(PLANTED)]
    options = {"max_iter": 60, "eps": 0.0} if name != "graph_filter" else {}
    method = build_aggregator(name, groups=1.0, fidelity="uniform", **options)
    method.load_state({"grouping": with_groups(labels).state()})
    (each,) = rounds_of(1, PLANTED)
    out = method(**each)
    W, D, D0 = out.graph, pairwise_sq_distances(out.models), pairwise_sq_distances(each["received"])
    total, unmet, terms = 0.5 * float((out.models - each["received"]).square().sum()), 0.0, 0.0
    alike = [(m, n) for m in range(12) for n in range(12) if m != n and labels[m] == labels[n]]
    pooled = sum(float(D[pair]) for pair in alike) / len(alike)
    for m in range(12):
        total -= math.log(float(W[m].sum()))
        for n in range(m):
            distance = pooled if (m, n) in alike else float(D[m, n])
            extra = 0.0 if labels[m] == labels[n] else APART * float((0.05 * D0 + 1).mean())
            assert (float(W[m, n]) > 0) <= (not extra or lone)
            cost, gain = 0.05 * distance + 1 + extra, float(1 / W[m].sum() + 1 / W[n].sum())
            total += float(W[m, n]) * cost
            unmet, terms = unmet + float(W[m, n]) * abs(cost - gain), terms + float(W[m, n]) * (cost + gain)
    if lone:
        assert 0 < float(W[5].sum()) < 1e-5 and out.info["stationarity_graph"] < 0.2
    if name != "graph_filter":
        assert out.info["objective"][-1] == pytest.approx(total, rel=1e-7)
    assert out.info["stationarity_graph"] >= unmet / terms - 1e-6


def test_without_groups_nothing_is_kept_or_reported():
    method = build_aggregator("jgesr", memory=0.5)
    (each,) = rounds_of(1, PLANTED)
    assert "groups" not in method(**each).info and "grouping" not in method.state()


def test_groups_that_cannot_be_are_refused():
    for given_, message in (
        ({"groups": 1.1}, "groups"),
        ({"groups": -0.1}, "groups"),
        ({"groups": 0.5, "alpha": 0}, "alpha"),
        ({"groups": 0.5, "neighbours": 3}, "neighbours and groups both say who is joined"),
    ):
        for name in NAMES:
            with pytest.raises(ValueError, match=message):
                build_aggregator(name, **given_)
    (each,) = rounds_of(1, PLANTED)
    with pytest.raises(ValueError, match="groups needs `previous`"):
        build_aggregator("jgesr", groups=0.5)(each["received"], each["weights"])
