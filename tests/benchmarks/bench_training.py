"""Local training against a plain PyTorch loop and against what the processor can do: prints one Markdown table.

    python -m tests.benchmarks.bench_training [--quick] [--one-thread] [--no-rounds] [--only NETWORK:BATCH]

Work: one round of all 20 clients (Dirichlet 0.05) on part of MNIST, or on random images of its shape where there is
none; fewer epochs and samples than an experiment has, the same in all rows of a block. Rows of a block are measured in
turn, several times over, after a warm-up; each shows its best time, as a rate and as a ratio to the plain loop's. The
plain loop is what published code mostly has: a DataLoader over a TensorDataset, a deep copy of the model for each
client, the penalty as a loop over `parameters()`.

Like is compared with like: every row has all cores, the plain loop by PyTorch's default of one thread a core. Of the
ways to share them out, processes are what `runtime.devices=auto` takes, threads what `runtime.devices=1` takes.
`--one-thread` compares everything on a single thread instead.
"""

from __future__ import annotations

import argparse
import copy
import csv
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from jgesr_lightning.client import ClientModule
from jgesr_lightning.data import DataError, FederatedDataModule
from jgesr_lightning.models import build_model
from jgesr_lightning.runtime.launch import Launch, build_fabric
from jgesr_lightning.runtime.sharding import assign
from jgesr_lightning.training import ClientData, build_engine
from jgesr_lightning.training.batches import BatchSize, part_size

CLIENTS, KAPPA, LR = 20, 0.05, 0.01
ENGINES = (("sequential", "sequential"), ("stacked", "stacked"))
PARTS = ("train", "uplink", "aggregate", "evaluate", "log", "checkpoint")
CASES: list[tuple[str, BatchSize, float]] = [  # network, batch size, mu of the proximal term
    ("lenet", 64, 0.0),
    ("lenet", 32, 0.0),
    ("lenet", 10, 0.0),
    ("lenet", 10, 0.01),
    ("lenet", "full", 1.0),
    ("fedavg_cnn", 64, 0.0),
    ("fedavg_cnn", 10, 0.0),
    ("fedavg_cnn", "full", 1.0),
]
FRACTIONS = {"lenet": 0.25, "fedavg_cnn": 0.08}
"""Of MNIST, such that the fastest row takes about a second."""
QUICK_CASES, QUICK_FRACTION = (CASES[0], CASES[2], CASES[4]), 0.02


def load(fraction: float) -> tuple[list[ClientData], str]:
    """Return the clients' data and what they are."""
    for name in ("mnist", "synthetic"):
        data = FederatedDataModule(name, num_clients=CLIENTS, kappa=KAPPA, fraction=fraction)
        try:
            data.setup()
        except DataError:
            continue
        return [ClientData(*data.train_tensors(k), *data.test_tensors(k)) for k in range(CLIENTS)], name
    raise SystemExit("no data")


def plain_loop(data: list[ClientData], model: torch.nn.Module, batch: BatchSize, mu: float, epochs: int) -> None:
    """Train each client as published code does."""
    criterion = torch.nn.CrossEntropyLoss()
    for own in data:
        net = copy.deepcopy(model)
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        size = own.size if batch == "full" else batch
        loader = DataLoader(TensorDataset(own.train_inputs, own.train_labels), batch_size=size, shuffle=True)
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(net(x), y)
                if mu:
                    proximal = 0.0
                    for w, w_sent in zip(net.parameters(), model.parameters(), strict=True):
                        proximal += (w - w_sent.detach()).norm(2) ** 2
                    loss = loss + mu / 2 * proximal
                loss.backward()
                optimizer.step()


def peak_flops(seconds: float = 0.5) -> float:
    """Return the operations a second of the best of several large matrix products."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def flops_per_sample(name: str, batch: BatchSize) -> float:
    """Return the operations of a forward and backward pass, the first layer's input needing no gradient."""
    net = build_model(name, 1, 28, 10)
    batch = part_size(batch, "cpu")
    with FlopCounterMode(display=False) as counter:
        net(torch.randn(batch, 1, 28, 28)).sum().backward()
    return counter.get_total_flops() / batch


def worker(orders: multiprocessing.Queue, done: multiprocessing.Queue) -> None:
    """Serve orders: (what, threads, case, fraction, own clients, whether to train the first alone)."""
    default_threads = torch.get_num_threads()
    fabric = build_fabric(Launch("cpu", 1, 1), "32-true", [])
    loaded: dict[float, list[ClientData]] = {}
    engines: dict[tuple, tuple] = {}
    while True:
        order = orders.get()
        if order is None:
            return
        what, threads, case, fraction, own, warm_up = order
        torch.set_num_threads(threads or default_threads)
        result = None
        if what == "load":
            loaded[fraction], name = load(fraction)
            result = name, [d.size for d in loaded[fraction]], default_threads
        elif what == "peak":
            result = peak_flops()
        elif what == "plain":
            network, batch, mu = case
            plain_loop([loaded[fraction][k] for k in own], build_model(network, 1, 28, 10), batch, mu, 1)
        else:
            key = (what, *case, tuple(own))
            if key not in engines:
                network, batch, mu = case
                client = ClientModule(build_model(network, 1, 28, 10), mu, LR)
                mine = [loaded[fraction][k] for k in own]
                engines[key] = build_engine(what, fabric, client, mine, own, 10, 1, batch, 0)[0], client
            engine, client = engines[key]
            row = client.layout.flatten(client.net.state_dict()).clone()
            engine.train(1, range(1 if warm_up else len(own)), row.expand(len(own), -1), lambda _row, _state: None)
        done.put(result)


class Pool:
    """Worker processes that hold the data, and the time they take together."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.done = context.Queue()
        self.orders = [context.Queue() for _ in range(size)]
        self.processes = [context.Process(target=worker, args=(q, self.done), daemon=True) for q in self.orders]
        for process in self.processes:
            process.start()

    def everywhere(self, what: str, fraction: float = 0.0) -> list:
        """Return what all processes answer, one thread each."""
        for queue in self.orders:
            queue.put((what, 1, None, fraction, [], False))
        return [self.done.get(timeout=600) for _ in self.orders]

    def run(
        self, row: tuple, case: tuple[str, BatchSize, float], fraction: float, sizes: list[int], warm_up: bool = False
    ) -> float:
        """Return the seconds in which the processes of a row do the work of one round, or a warm-up."""
        _, what, processes, threads = row
        owners = assign(sizes, processes)
        start = time.perf_counter()
        for queue, own in zip(self.orders, owners, strict=False):
            queue.put((what, threads, case, fraction, own, warm_up))
        for _ in owners:
            self.done.get(timeout=600)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the processes."""
        for queue in self.orders:
            queue.put(None)
        for process in self.processes:
            process.join(10)


def rows_for(cores: int, one_thread: bool) -> list[tuple[str, str, int, int]]:
    """Return (label, what, processes, threads; 0: PyTorch's default) of the rows of a block, the plain loop first."""
    if one_thread:
        return [(f"{label}, 1 thread", what, 1, 1) for label, what in (("plain PyTorch loop", "plain"), *ENGINES)]
    rows = [("plain PyTorch loop", "plain", 1, 0)]
    rows += [(f"{engine}, processes: {cores}", engine, cores, 1) for engine, _ in ENGINES]
    if cores > 1:
        rows += [(f"{engine}, threads: {cores}", engine, 1, cores) for engine, _ in ENGINES]
    return rows


def table(
    pool: Pool, cases: list[tuple[str, BatchSize, float]], fractions: dict[str, float], options: argparse.Namespace
) -> None:
    """Print one block of rows a case."""
    rows = rows_for(len(pool.processes), options.one_thread)
    sizes = {}
    for network in dict.fromkeys(case[0] for case in cases):
        name, sizes[network], threads = pool.everywhere("load", fractions[network])[0]
        print(
            f"{network}: {sum(sizes[network]):,} samples of {name}, {min(sizes[network])} to "
            f"{max(sizes[network]):,} a client"
        )
    print(
        f"{CLIENTS} clients, Dirichlet {KAPPA}, 1 epoch; {len(pool.processes)} cores, PyTorch {torch.__version__}, "
        f"the plain loop with {1 if options.one_thread else threads} threads\n"
    )
    print("| network | batch | mu | training | samples/s | against the plain loop | of the floor |")
    print("|---|---:|---:|---|---:|---:|---:|", flush=True)
    for case in cases:
        name, batch, mu = case
        best = dict.fromkeys(rows, float("inf"))
        peak = 0.0
        for row in rows[1:]:  # makes the engines
            pool.run(row, case, fractions[name], sizes[name], warm_up=True)
        for _ in range(1 if options.quick else 2):
            peaks = pool.everywhere("peak")
            peak = max(peak, peaks[0] if options.one_thread else sum(peaks))
            for row in rows:
                best[row] = min(best[row], pool.run(row, case, fractions[name], sizes[name]))
        samples = sum(sizes[name])
        floor = peak / flops_per_sample(name, batch)
        plain = best[rows[0]]
        for row in rows:
            rate, ratio = samples / best[row], plain / best[row]
            print(f"| {name} | {batch} | {mu:g} | {row[0]} | {rate:,.0f} | {ratio:.2f}x | {rate / floor:.0%} |")
        print(
            f"| {name} | {batch} | {mu:g} | arithmetic floor at {peak / 1e9:.0f} Gflop/s | {floor:,.0f} "
            f"| {floor * plain / samples:.2f}x | 100% |",
            flush=True,
        )


def round_shares(quick: bool) -> None:
    """Run the product for two rounds and print where the time of the second went, and of the first one's saving."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"output_dir={folder}", "name=bench", "rounds=2", "logging.wandb=false"]
        settings += ["evaluation.every=1", "checkpoint.every=1"]
        settings += ["data.fraction=0.05"] if quick else []
        config = Path(__file__).parents[2] / "configs" / "mnist_s01.yaml"
        command = [sys.executable, "-m", "jgesr_lightning", "train", str(config), *settings]
        done = subprocess.run(command, capture_output=True, text=True, cwd=config.parents[1], check=False)
        if done.returncode:
            print(f"\nno shares of a round: {done.stderr.strip().splitlines()[-1:]}")
            return
        with open(Path(folder) / "bench" / "metrics.csv", newline="") as file:
            line = list(csv.DictReader(file))[-1]
    seconds = {part: float(line[f"seconds/{part}"]) for part in PARTS}
    total = sum(seconds.values())
    rest = total - seconds["train"] - seconds["evaluate"]
    what = "5 % of MNIST" if quick else "all of MNIST"
    print(f"\nA round of mnist_s01 on {what}: {total:.1f} s, all but training and evaluation {rest / total:.1%}")
    print("| " + " | ".join(seconds) + " |\n|" + "---:|" * len(seconds))
    print("| " + " | ".join(f"{value / total:.1%}" for value in seconds.values()) + " |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute: less work, one repetition")
    parser.add_argument("--one-thread", action="store_true", help="everything on one thread, the plain loop too")
    parser.add_argument("--no-rounds", action="store_true", help="leave out the shares of a round")
    parser.add_argument("--only", metavar="NETWORK:BATCH", help="one case alone")
    options = parser.parse_args()
    cases = [c for c in CASES if options.only in (None, f"{c[0]}:{c[1]}")]
    if options.quick and not options.only:
        cases = [case for case in cases if case in QUICK_CASES]
    if not cases:
        parser.error(f"--only takes one of {', '.join(dict.fromkeys(f'{c[0]}:{c[1]}' for c in CASES))}")
    fractions = dict.fromkeys(FRACTIONS, QUICK_FRACTION) if options.quick else FRACTIONS
    start = time.perf_counter()
    pool = Pool(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    table(pool, cases, fractions, options)
    pool.close()
    if not options.no_rounds:
        round_shares(options.quick)
    print(f"\nall of this took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
