"""Timings of the mathematics, as ratios within one run: the prox, the solver in both forms, memory, growth.

Run from the root of the repository: ``python -m tests.benchmarks.bench_math [--quick]`` or ``make bench``. Prints one
Markdown table; every row says what is compared with what, and both were timed in this run. The clock is this
process's processor time, all its threads together, so that a busy machine changes ratios little; one thread unless
OMP_NUM_THREADS says otherwise. With a CUDA device the rows that touch d are measured there as well, beside the time
their bytes take at the card's bandwidth (as measured by a copy), and by the clock on the wall, which alone sees it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cvxpy
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jgesr_lightning.aggregators.base import Aggregate  # noqa: E402
from jgesr_lightning.aggregators.groups import ROUNDS  # noqa: E402
from jgesr_lightning.aggregators.jgesr import JGESR  # noqa: E402
from jgesr_lightning.graph.arrays import enter, leave  # noqa: E402
from jgesr_lightning.graph.gram import self_product  # noqa: E402
from jgesr_lightning.graph.problem import Problem  # noqa: E402
from jgesr_lightning.graph.prox import prox, prox_log_degree  # noqa: E402
from jgesr_lightning.solvers import PDCA, Models  # noqa: E402

CLIENTS, SIZE = 20, 582_026


def median(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of `run`, after one run that is not counted."""
    return in_turn(device, repeats, run)[0]


def in_turn(device: torch.device, repeats: int, *runs: Callable[[], object], times: int = 1) -> list[float]:
    """Return the median seconds of each of `runs`, in turn, `times` of each at once; the first do not count."""
    seen: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, taken in zip(runs, seen, strict=True):
            begin = clock(device)
            for _ in range(times):
                run()
            taken.append((clock(device) - begin) / times)
    return [statistics.median(taken[1:]) for taken in seen]


def clock(device: torch.device) -> float:
    """Return seconds of this process's processor time; of a card's, on the wall."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def row(what: str, compared: str, measured: float, floor: float, demand: str) -> None:
    print(f"| {what} | {compared} | {seconds(measured)} | {seconds(floor)} | {measured / floor:.3g} | {demand} |")


def seconds(value: float) -> str:
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def federation(clients: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    received = 0.03 * torch.randn(size, generator=generator) + 0.006 * torch.randn(clients, size, generator=generator)
    weights = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.05
    return received.to(device), weights / weights.sum()


def theta_of(nodes: int, seed: int = 0) -> np.ndarray:
    theta = np.random.default_rng(seed).normal(size=(1, nodes, nodes))
    return (theta + theta.swapaxes(1, 2)) / 2


def bench_prox(quick: bool) -> None:
    cpu = torch.device("cpu")
    rows, columns = np.triu_indices(CLIENTS, 1)
    theta = cvxpy.Parameter(len(rows))
    w = cvxpy.Variable(len(rows), nonneg=True)
    degree = np.zeros((CLIENTS, len(rows)))
    degree[rows, np.arange(len(rows))] = degree[columns, np.arange(len(rows))] = 1
    cost = -cvxpy.sum(cvxpy.log(degree @ w)) + cvxpy.sum(w) + 0.5 * cvxpy.sum_squares(w - theta)
    problem = cvxpy.Problem(cvxpy.Minimize(cost))

    def value(edges: np.ndarray) -> float:
        return float(-np.log(degree @ edges).sum() + edges.sum() + 0.5 * np.square(edges - theta.value).sum())

    theta.value = theta_of(CLIENTS)[0][rows, columns]

    def anew() -> None:
        cvxpy.Problem(cvxpy.Minimize(cost)).solve(solver="CLARABEL")

    ready = theta_of(CLIENTS)
    given = torch.from_numpy(ready[0])
    theirs, kept = in_turn(cpu, 3 if quick else 11, anew, lambda: problem.solve(solver="CLARABEL"))
    ours, wrapped = in_turn(
        cpu, 50, lambda: prox(ready, 1.0, 1.0, 1.0), lambda: prox_log_degree(given, 1.0, 1.0, 1.0), times=10
    )
    many = np.concatenate([theta_of(CLIENTS, seed) for seed in range(64)])
    batch = median(lambda: prox(many, 1.0, 1.0, 1.0), cpu, 5 if quick else 20) / len(many)
    problem.solve(solver="CLARABEL")
    W = prox(ready, 1.0, 1.0, 1.0).W
    gain = value(np.maximum(w.value, 0)) - value(W[0][rows, columns])
    print(f"| objective of cvxpy less ours, prox, K = {CLIENTS} | | | | {gain:.1e} | >= 0 |")
    name = f"cvxpy (CLARABEL), prox, K = {CLIENTS}"
    row(f"{name}, problem built anew", "ours from afar", theirs, ours, "")
    row(f"{name}, problem kept, new parameter", "ours from afar", kept, ours, "")
    row(f"{name}, problem built anew", "ours from tensor to tensor, checks included", theirs, wrapped, "")
    row(f"{name}, problem built anew", "ours, one of a batch of 64", theirs, batch, "")
    for nodes in (CLIENTS, 100) if quick else (CLIENTS, 100, 500):
        bench_prox_of(nodes, 20 if nodes == CLIENTS else 2, 3 if nodes > 100 else 20)


def bench_prox_of(nodes: int, instances: int, repeats: int) -> None:
    """From afar, and from a neighbour's solution as in the solver, beside Newton's method and nothing else."""
    thetas = [theta_of(nodes, seed) for seed in range(instances)]
    duals = [prox(theta, 1.0, 1.0, 1.0).dual for theta in thetas]
    for what, scale, starts in (("afar", 1.0, [None] * instances), ("a neighbour's solution", 1.001, duals)):

        def of_all(
            solve: Callable[..., object], scale: float = scale, starts: list[np.ndarray | None] = starts
        ) -> Callable[[], object]:
            given = [scale * theta for theta in thetas]
            return lambda: [solve(theta, start) for theta, start in zip(given, starts, strict=True)]

        ours, plain = of_all(lambda theta, start: prox(theta, 1.0, 1.0, 1.0, start)), of_all(plain_newton)
        for (W, *_), expected in zip(ours(), plain(), strict=True):  # type: ignore[call-overload]
            np.testing.assert_allclose(W[0], expected, rtol=1e-9, atol=1e-11)
        times = (taken / instances for taken in in_turn(torch.device("cpu"), repeats, ours, plain))
        row(
            f"prox from {what}, K = {nodes}, mean of {instances}",
            "damped Newton in 20 lines",
            *times,
            "<= 0.5" if nodes == CLIENTS else "",
        )


def plain_newton(theta: np.ndarray, start: np.ndarray | None) -> np.ndarray:
    """Return the prox at beta = gamma = rho = 1, (K, K), as a textbook would find it: what ours has to be worth."""
    t = theta[0] - 1.0
    np.fill_diagonal(t, -np.inf)
    y = np.ones(len(t)) if start is None else start[0]

    def dual(y: np.ndarray) -> float:
        return float(np.log(y).sum() - np.square(np.maximum(t + y[:, None] + y, 0)).sum() / 4)

    for _ in range(100):
        v = np.maximum(t + y[:, None] + y, 0)
        gradient = 1 / y - v.sum(1)
        if np.abs(y * gradient).max() < 2e-14:
            break
        active = (v > 0).astype(float)
        step = np.linalg.solve(np.diag(1 / y**2 + active.sum(1)) + active, gradient)
        size = min(1.0, 0.9 / max(0.9, float((-step / y).max())))
        while size > 1e-6 and dual(y + size * step) < dual(y) + 1e-4 * size * gradient @ step - 1e-13 * abs(dual(y)):
            size /= 2
        y = y + size * step
    return v


def bench_complete(clients: int, size: int, device: torch.device, repeats: int, name: str) -> None:
    """Everything arrived: the parts that touch d beside the weighted mean, and the K x K loop beside the whole."""
    received, weights = federation(clients, size, device)
    usual = (clients, size) == (CLIENTS, SIZE)
    shares = weights.to(device, torch.float32)

    def mean() -> torch.Tensor:
        return (shares @ received).expand(clients, -1).contiguous()

    problem = Problem().pulled(received, weights)

    def begun() -> Models:
        models = Models(problem)
        models.start()
        return models

    floor, reading, both = in_turn(device, repeats, mean, begun, lambda: begun().result())
    max_iter = 500 if clients <= 100 else 10
    begin = clock(device)
    (solution,) = PDCA(max_iter=max_iter).solve(Models(problem))
    loop, iterations = clock(device) - begin - reading, solution.iterations
    aggregator = JGESR(max_iter=max_iter)
    whole = median(lambda: aggregator(received, weights), device, max(1, repeats // 2))
    row(
        f"{name}: both passes over d",
        "weighted mean of the same matrix, written K times",
        both,
        floor,
        "<= 4" if usual else "",
    )
    row(f"{name}: the first pass, Gram matrix", "the same", reading, floor, "")
    row(f"{name}: the second pass, C X", "the same", both - reading, floor, "")
    row(f"{name}: a whole aggregation, {iterations} steps", "the same", whole, floor, "")
    row(f"{name}: the K x K loop", "the whole aggregation", loop, whole, "")
    row(f"{name}: one K x K step", "0.5 ms", loop / iterations, 5e-4, "<= 1" if usual else "")
    if usual:
        far = JGESR(step="backtracking", accelerated=True, stop="stationarity", eps=1e-5, max_iter=20_000)
        begin = clock(device)
        solved = far(received, weights).info
        taken = clock(device) - begin
        what = f"{name}: to stationarity 1e-5, {solved['iterations']} steps, {solved['reason']}"
        row(what, "a second", taken, 1.0, "<= 1")
    if device.type == "cuda":
        bandwidth_row(name, received, both, 3)


def bench_groups(clients: int, size: int, repeats: int) -> None:
    """The setting of robust.yaml beside jgesr as printed, on uploads of four groups, without gaps and with."""
    draw = torch.Generator().manual_seed(3)
    _, weights = federation(clients, size, torch.device("cpu"))
    sent = 0.05 * torch.randn(1, size, generator=draw).expand(clients, -1)
    shared = 0.003 * torch.randn(4, size, generator=draw)[torch.arange(clients) % 4]
    received = sent + shared + 0.02 * torch.randn(clients, size, generator=draw)
    for rate in (0.0, 0.1):
        mask = torch.rand(received.shape, generator=draw) >= rate if rate else None
        printed, grouped = JGESR(), JGESR(fidelity="uniform", mu=0.001, groups=0.65)

        def aggregate(method: JGESR, mask: torch.Tensor | None = mask) -> Aggregate:
            return method(received, weights, mask=mask, previous=sent)

        for _ in range(ROUNDS):
            found = aggregate(grouped).info["num_groups"]
        repeats = repeats if mask is None else max(1, repeats // 5)
        both = in_turn(torch.device("cpu"), repeats, partial(aggregate, grouped), partial(aggregate, printed))
        what = f"jgesr in groups, as in robust.yaml ({found} found), {rate:.0%} missing"
        row(f"{what}: a whole aggregation", "jgesr as printed, the same uploads", *both, "<= 2")


def bench_masked(clients: int, size: int, device: torch.device, repeats: int, name: str) -> None:
    """Entries missing: one step beside a pass that reads three arrays and writes one."""
    received, weights = federation(clients, size, device)
    other, third, out = received.clone(), received.clone(), torch.empty_like(received)
    floor = median(lambda: torch.addcmul(received, other, third, out=out), device, repeats)
    against = "torch.addcmul(A, B, C, out=D): three arrays read, one written"
    smooth = enter(torch.from_numpy(0.01 * (clients * np.eye(clients) - 1)[None, None]).to(device))
    whole = enter(torch.ones(1, 1, 1, 1, dtype=torch.float64, device=device))
    for rate in (0.05, 0.1, 0.3):
        mask = (torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > rate).to(device)

        def held(least: int | None = None, mask: torch.Tensor = mask) -> Models:
            models = Models(Problem().pulled(received, weights, mask), least=least)
            models.start()
            return models

        what = f"{name}, {rate:.0%} missing"
        signals, single = held(), held(least=size + 1)
        step = median(lambda s=signals: s.propose(smooth, whole), device, repeats)
        in_d = median(lambda s=single: s.propose(smooth, whole), device, repeats)
        row(f"{what}: one step", against, step, floor, "<= 3" if rate <= 0.1 else "")
        row(f"{what}: one step with what backtracking asks for", against,
            median(lambda s=signals: s.propose(smooth, whole, details=True), device, repeats), floor, "")  # fmt: skip
        row(f"{what}: one step of all columns in d-space", against, in_d, floor, "")
        filtered = median(lambda s=signals: s.filter(smooth), device, max(1, repeats // 5))
        row(f"{what}: one filtering of the two-step baseline", against, filtered, floor, "")
        if device.type == "cuda":
            bandwidth_row(what, received, step, 3.25)
        ends = median(lambda h=held: h().result(), device, max(1, repeats // 5))
        row(f"{what}: start and result, once an aggregation", against, ends, floor, "")
    square = received[:, :25_600].contiguous()  # in the cache: what the arithmetic of the products alone takes
    into, S = torch.empty_like(square), leave(smooth)[0, 0].to(square.dtype)

    def products() -> None:
        torch.mm(S, square, out=into)
        self_product(into)

    arithmetic = median(products, device, repeats) * size / square.shape[1]
    row(f"{name}, d-space: the two products of a step alone, from the cache", against, arithmetic, floor, "")


def bench_many_masked(clients: int, size: int, repeats: int) -> None:
    """Nearly every column has gaps of its own: a step beside the two products that no step can do without."""
    received, weights = federation(clients, size, torch.device("cpu"))
    mask = torch.rand(received.shape, generator=torch.Generator().manual_seed(1)) > 0.1
    models = Models(Problem().pulled(received, weights, mask))
    models.start()
    S, one = 0.01 * (clients * np.eye(clients) - 1)[None, None], np.ones((1, 1, 1, 1))
    dense, out = torch.from_numpy(S[0, 0]).float(), torch.empty_like(received)

    def products() -> None:
        torch.mm(dense, received, out=out)
        torch.mm(out, out.T)

    step, floor = in_turn(torch.device("cpu"), repeats, lambda: models.propose(S, one), products)
    row(
        f"K = {clients}, d = {size:.0e}, 10% missing: one step",
        "S X and X X', two matrix products",
        step,
        floor,
        "<= 2",
    )


def bandwidth_row(name: str, matrix: torch.Tensor, measured: float, matrices: float) -> None:
    copy = torch.empty_like(matrix)
    per_matrix = median(lambda: copy.copy_(matrix), matrix.device, 20) / 2
    row(f"{name}: the part that touches d", f"{matrices} matrices at the bandwidth of a copy", measured,
        matrices * per_matrix, "")  # fmt: skip


MEMORY = """
import sys, torch
sys.path.insert(0, {root!r})
from tests.benchmarks.bench_math import federation
from jgesr_lightning.aggregators.jgesr import JGESR
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
small, weights = federation({clients}, 1000, torch.device("cpu"))
masked = {masked}
agg = JGESR(max_iter=3)
agg(small, weights, mask=torch.ones_like(small, dtype=torch.bool) if masked else None)
received, weights = federation({clients}, {size}, torch.device("cpu"))
mask = torch.rand(received.shape) > 0.05 if masked else None
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
out = agg(received, weights, mask=mask, previous=received if masked else None)
print((status("VmHWM") - before) / (received.numel() * 4))
"""


def bench_memory(clients: int, size: int) -> None:
    for masked, demand in ((False, "<= 1.5"), (True, "<= 3")):
        code = MEMORY.format(root=str(ROOT), clients=clients, size=size, masked=masked)
        try:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"| peak extra memory | not measured here ({error}) | | | | {demand} |")
            return
        what = "masked" if masked else "all arrived"
        print(f"| peak extra memory, {what}, result included | the matrix | | | {float(done.stdout):.3g} | {demand} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    quick = parser.parse_args().quick
    cpu = torch.device("cpu")
    size = 100_000 if quick else SIZE
    repeats = 5 if quick else 15
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; float32, K = {CLIENTS}, d = {size}\n")
    print("| measured | compared with | time | time compared | ratio | demand |")
    print("| --- | --- | --- | --- | --- | --- |")
    bench_prox(quick)
    bench_complete(CLIENTS, size, cpu, repeats, "jgesr")
    bench_masked(CLIENTS, size, cpu, repeats, "jgesr")
    bench_groups(CLIENTS, size, repeats)
    bench_many_masked(100, 50_000, 3 if quick else 7)
    bench_memory(CLIENTS, size)
    for clients in (100,) if quick else (100, 500):
        bench_complete(clients, 50_000, cpu, 1 if clients > 100 else 3, f"K = {clients}, d = 5e4")
    for width in (10**4,) if quick else (10**4, 10**5, 10**6, 10**7):
        bench_complete(CLIENTS, width, cpu, 1 if width > 10**6 else 3, f"K = 20, d = {width:.0e}")
    if torch.cuda.is_available():
        cuda = torch.device("cuda")
        print(f"| *{torch.cuda.get_device_name()}* | | | | | |")
        bench_complete(CLIENTS, size, cuda, repeats, "jgesr, CUDA")
        bench_masked(CLIENTS, size, cuda, repeats, "jgesr, CUDA")
        for width in (10**4, 10**6) if quick else (10**4, 10**5, 10**6, 10**7):
            bench_complete(CLIENTS, width, cuda, 3, f"CUDA, K = 20, d = {width:.0e}")


if __name__ == "__main__":
    main()
