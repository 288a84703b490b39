"""The prox against an independent convex solver, its optimality conditions, and the properties every prox has."""

import itertools

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.graph import prox_log_degree
from jgesr_lightning.graph.interior_point import minimise_each
from jgesr_lightning.graph.prox import prox

SIX_DECADES = list(itertools.product((1e-3, 1.0, 1e3), repeat=3))
THETAS = ("random", "negative", "equal", "zero", "huge", "tiny", "one edge")


def theta_of(kind: str, nodes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(nodes, nodes, dtype=torch.float64, generator=generator)
    theta = (theta + theta.T) / 2
    if kind == "negative":
        theta = -10 * theta.abs() - 1
    elif kind == "equal":
        theta = torch.full_like(theta, 0.37)
    elif kind == "zero":
        theta = torch.zeros_like(theta)
    elif kind == "huge":
        theta = theta * 1e6
    elif kind == "tiny":
        theta = theta * 1e-9
    elif kind == "one edge":
        theta = torch.full_like(theta, -50.0)
        theta[0, 1] = theta[1, 0] = 50
    return theta


def violation(W: torch.Tensor, theta: torch.Tensor, beta: float, gamma: float, rho: float) -> float:
    """Return how far the optimality conditions fail, relative to the size of their terms."""
    inverse = 1 / W.sum(-1)
    barrier = beta * (inverse[..., :, None] + inverse[..., None, :])
    gradient = -barrier + gamma + rho * (W - theta)
    size = barrier + gamma + rho * (W + theta.abs())
    off = ~torch.eye(W.shape[-1], dtype=torch.bool)
    failed = torch.where(W > 0, gradient.abs(), (-gradient).clamp_min(0)) / size
    return float(failed[..., off].max())


def value(W: torch.Tensor, theta: torch.Tensor, beta: float, gamma: float, rho: float) -> float:
    total = -beta * W.sum(-1).log().sum() + gamma * W.sum() / 2
    off = (W - theta) - torch.diag((W - theta).diagonal())
    return float(total + rho / 4 * off.square().sum())


@pytest.mark.parametrize("nodes", [2, 3, 8, 20])
@pytest.mark.parametrize("kind", THETAS)
def test_optimality_conditions_over_six_decades(kind: str, nodes: int) -> None:
    theta = theta_of(kind, nodes)
    for beta, gamma, rho in SIX_DECADES:
        W = prox_log_degree(theta, beta, gamma, rho)
        assert torch.equal(W, W.T)
        assert float(W.min()) >= 0
        assert float(W.diagonal().abs().max()) == 0
        assert float(W.sum(-1).min()) > 0
        assert violation(W, theta, beta, gamma, rho) < 1e-10, (beta, gamma, rho)


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
@pytest.mark.parametrize("nodes", [2, 5, 9])
@pytest.mark.parametrize("kind", ["random", "negative", "equal", "one edge"])
@pytest.mark.parametrize(("beta", "gamma", "rho"), [(1, 1, 1), (0.05, 2, 3), (4, 0, 0.2), (30, 0.1, 10)])
def test_agrees_with_an_independent_solver(kind: str, nodes: int, beta: float, gamma: float, rho: float) -> None:
    theta = theta_of(kind, nodes)
    rows, columns = np.triu_indices(nodes, 1)
    w = cvxpy.Variable(len(rows), nonneg=True)
    degree = np.zeros((nodes, len(rows)))
    degree[rows, np.arange(len(rows))] = degree[columns, np.arange(len(rows))] = 1
    cost = -beta * cvxpy.sum(cvxpy.log(degree @ w)) + gamma * cvxpy.sum(w)
    cost += rho / 2 * cvxpy.sum_squares(w - theta.numpy()[rows, columns])
    cvxpy.Problem(cvxpy.Minimize(cost)).solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    W = prox_log_degree(theta, beta, gamma, rho)
    theirs = torch.zeros(nodes, nodes, dtype=torch.float64)
    theirs[rows, columns] = torch.from_numpy(np.maximum(w.value, 0))
    theirs = theirs + theirs.T
    assert float((W - theirs).abs().max()) < 1e-5 * max(1.0, float(W.max()))
    assert value(W, theta, beta, gamma, rho) <= value(theirs, theta, beta, gamma, rho) + 1e-9


def test_two_nodes_in_closed_form() -> None:
    theta, beta, gamma, rho = -3.0, 0.7, 1.1, 2.0
    # -2 beta / w + gamma + rho (w - theta) = 0
    b = rho * theta - gamma
    expected = (b + (b * b + 8 * beta * rho) ** 0.5) / (2 * rho)
    W = prox_log_degree(torch.tensor([[0.0, theta], [theta, 0.0]]), beta, gamma, rho)
    assert float(W[0, 1]) == pytest.approx(expected, rel=1e-13)


def test_batch_equals_loop() -> None:
    theta = torch.stack([theta_of(kind, 6) for kind in THETAS[:6]]).reshape(2, 3, 6, 6)
    together = prox_log_degree(theta, 0.5, 1.0, 2.0)
    for i, j in itertools.product(range(2), range(3)):
        alone = prox_log_degree(theta[i, j], 0.5, 1.0, 2.0)
        torch.testing.assert_close(together[i, j], alone, rtol=1e-12, atol=1e-12 * float(alone.max()))


def test_neither_diagonal_nor_orientation_nor_type_matters() -> None:
    theta = theta_of("random", 5)
    W = prox_log_degree(theta, 1.0, 1.0, 1.0)
    assert torch.equal(prox_log_degree(theta + torch.diag(torch.full((5,), torch.inf)), 1.0, 1.0, 1.0), W)
    assert torch.equal(prox_log_degree(theta.T.contiguous().T, 1.0, 1.0, 1.0), W)
    assert prox_log_degree(theta.float(), 1.0, 1.0, 1.0).dtype == torch.float64


def test_warm_starts_change_the_steps_and_not_the_result() -> None:
    rng = np.random.default_rng(0)
    saved = 0
    for seed in range(20):
        theta = theta_of("random", 20, seed).numpy()[None] * 10.0 ** rng.integers(-2, 3)
        cold, _, _, cold_steps = prox(theta, 1.0, 1.0, 1.0)
        dual = prox(theta + 1e-4 * theta**2, 1.0, 1.0, 1.0).dual
        warm, _, _, warm_steps = prox(theta, 1.0, 1.0, 1.0, dual)
        wild = prox(theta, 1.0, 1.0, 1.0, np.exp(rng.normal(0, 5, (1, 20)))).W
        scale = max(1.0, float(cold.max()))
        assert np.abs(warm - cold).max() < 1e-12 * scale
        assert np.abs(wild - cold).max() < 1e-12 * scale
        saved += cold_steps - warm_steps
    assert saved > 0


@pytest.mark.parametrize("level", [10.0, 50.0, 150.0])
def test_the_costs_of_strong_noise_are_solved_to_the_last_digits_in_few_steps(level: float) -> None:
    rng = np.random.default_rng(0)
    for nodes in (3, 8, 20):
        costs = level * (1 + 0.05 * rng.random((nodes, nodes)))
        costs = np.triu(costs, 1) + np.triu(costs, 1).T
        costs[0, 1] = costs[1, 0] = -0.9
        near = prox(-costs[None] * (1 + 1e-3 * rng.random()), 1.0, 0.0, 1.0)
        W, dual, _, steps = prox(-costs[None], 1.0, 0.0, 1.0, near.dual)
        assert steps <= 10  # an interior point takes thirty
        expected = minimise_each(costs[None], 1.0)[0]
        assert np.abs(W - expected).max() < 1e-9 * expected.max()
        assert np.abs(W.sum(-1) * dual - 1).max() < 1e-13  # lam = 1 / deg
        assert violation(*map(torch.from_numpy, (W, -costs[None])), 1.0, 0.0, 1.0) < 1e-13


def test_edges_that_cost_nearly_the_same_are_told_apart() -> None:
    for seed in (*range(40), 1233):
        theta = np.random.default_rng(seed).normal(size=(20, 20)) * 0.02
        if seed == 1233:  # a step goes from one kink of the dual to the next, twenty times and more
            theta = np.random.RandomState(seed).randn(20, 20) * 0.02
        theta = (theta + theta.T) / 2 - 3000.0
        W = torch.from_numpy(prox(theta[None], 1.0, 0.0, 1.0).W[0])
        assert violation(W, torch.from_numpy(theta), 1.0, 0.0, 1.0) < 1e-10


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_start_far_too_small_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X = 3 * rng.normal(size=(3, 5))[rng.integers(3, size=63)] + rng.normal(size=(63, 5))
    theta = -np.square(X[:, None] - X[None]).sum(-1) * 10.0 ** (2 + seed)
    cold = prox(theta[None], 1.0, 0.0, 1.0).W
    wild, _, _, steps = prox(theta[None], 1.0, 0.0, 1.0, np.ones((1, 63)))
    assert steps < 200
    np.testing.assert_allclose(wild, cold, rtol=1e-8, atol=1e-12 * cold.max())


def test_the_order_in_memory_does_not_matter() -> None:
    theta = theta_of("random", 5).numpy()
    expected = prox(theta[None], 1.0, 1.0, 1.0).W
    turned = prox(np.asfortranarray(theta)[None], 1.0, 1.0, 1.0).W
    np.testing.assert_array_equal(turned, expected)


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(2, 7),
    seed=st.integers(0, 2**31),
    beta=st.floats(1e-3, 1e3),
    gamma=st.floats(0, 1e3),
    rho=st.floats(1e-3, 1e3),
    spread=st.sampled_from([1e-2, 1.0, 1e2]),
)
def test_firmly_non_expansive_and_moreau(
    nodes: int, seed: int, beta: float, gamma: float, rho: float, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    first, second = (spread * rng.normal(size=(2, nodes, nodes)) for _ in range(2))
    a, b = (torch.from_numpy(x[0] + x[0].T) for x in (first, second))
    p, q = prox_log_degree(a, beta, gamma, rho), prox_log_degree(b, beta, gamma, rho)
    off = ~torch.eye(nodes, dtype=torch.bool)
    moved, given_ = (p - q)[off], (a - b)[off]
    slack = 1e-9 * (1 + float(given_.abs().max()) ** 2)
    assert float(moved @ moved) <= float(moved @ given_) + slack

    # Moreau: theta - prox(theta) is the prox of the conjugate, so it is a subgradient of g / rho at prox(theta):
    # g(q) >= g(p) + rho <theta - p, q - p> for every feasible q.
    def g(W: torch.Tensor) -> float:
        return float(-beta * W.sum(-1).log().sum() + gamma * W.sum() / 2)

    inner = rho * float(((a - p)[off] * (q - p)[off]).sum()) / 2
    assert g(q) >= g(p) + inner - 1e-8 * (1 + abs(g(q)) + abs(g(p)) + abs(inner))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), nodes=st.integers(2, 9))
def test_permuting_the_nodes_permutes_the_result(seed: int, nodes: int) -> None:
    rng = np.random.default_rng(seed)
    theta = torch.from_numpy(rng.normal(size=(nodes, nodes)))
    theta = theta + theta.T
    order = torch.from_numpy(rng.permutation(nodes))
    W = prox_log_degree(theta, 1.0, 0.5, 2.0)
    permuted = prox_log_degree(theta[order][:, order], 1.0, 0.5, 2.0)
    torch.testing.assert_close(permuted, W[order][:, order], rtol=1e-11, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.integers(2, 12), decades=st.floats(0, 30), alike=st.booleans(), seed=st.integers(0, 2**31),
    gamma=st.sampled_from([0.0, 1.0]), rho=st.floats(-3, 3),
)  # fmt: skip
def test_clients_that_came_apart(nodes: int, decades: float, alike: bool, seed: int, gamma: float, rho: float) -> None:
    random = np.random.default_rng(seed)
    far = random.random((nodes, 1)) < 0.3 if alike else random.random((nodes, 1))
    x = random.standard_normal((nodes, 4)) * 10 ** (decades / 2 * far)
    theta = torch.from_numpy(random.random() - 0.05 / 10**rho * ((x[:, None] - x) ** 2).sum(-1))
    W = prox_log_degree(theta, 1.0, gamma, 10**rho)
    assert violation(W, theta, 1.0, gamma, 10**rho) < 1e-9
    assert float(W.sum(-1).min()) > 0


@pytest.mark.parametrize("dear", [1e3, 1e8])
@pytest.mark.parametrize("wanted", [1.0, 1e6, 1e15, 1e20])
def test_edges_that_are_wanted_beside_dear_ones(wanted: float, dear: float) -> None:
    theta = torch.tensor([[0, wanted, -dear], [wanted, 0, -dear], [-dear, -dear, 0]], dtype=torch.float64)
    W = prox_log_degree(theta, 1.0, 0.0, 1.0)
    assert W[0, 1].item() == pytest.approx(wanted, rel=1.0 if wanted == 1 else 1e-6)
    assert W[0, 2].item() == pytest.approx(0.5 / dear, rel=1e-2)  # of the third node: lam = dear, but for its own w
    assert violation(W, theta, 1.0, 0.0, 1.0) < 1e-9


@pytest.mark.parametrize("level", [-1.0, -1e2, -1e4, -1e8, -1e20])
def test_rounding_does_not_choose_among_equal_edges(level: float) -> None:
    random = np.random.default_rng(0)
    error = np.triu(1e-16 * random.integers(-4, 5, (8, 8)), 1)
    found = [
        prox_log_degree(torch.from_numpy(level * e), 1.0, 0.0, 1.0) for e in (np.ones((8, 8)), 1 + error + error.T)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=0)


@pytest.mark.parametrize("nodes", [70, 120])
def test_larger_graphs(nodes: int) -> None:
    theta = theta_of("random", nodes)
    assert violation(prox_log_degree(theta, 1.0, 1.0, 1.0), theta, 1.0, 1.0, 1.0) < 1e-10


@pytest.mark.parametrize(
    ("theta", "constants", "message"),
    [
        (torch.zeros(1, 1), (1, 1, 1), "at least 2 nodes"),
        (torch.zeros(2, 3), (1, 1, 1), "shape"),
        (torch.full((2, 2), torch.nan), (1, 1, 1), "finite"),
        (torch.zeros(2, 2), (0, 1, 1), "positive"),
        (torch.zeros(2, 2), (1, 1, 0), "positive"),
        (torch.zeros(2, 2), (1, -1, 1), "non-negative"),
    ],
)
def test_wrong_values_are_named(theta: torch.Tensor, constants: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prox_log_degree(theta, *constants)
