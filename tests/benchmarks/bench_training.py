"""Local training against a plain PyTorch loop and against what the processor can do: prints one Markdown table.

    python -m tests.benchmarks.bench_training [--quick] [--no-rounds]

Work: one round of all 20 clients (Dirichlet 0.05) on part of MNIST, or on random images of its shape where there is
none; fewer epochs and samples than an experiment has, the same in all rows of a block. Rows of a block are measured in
turn, several times over; each shows its best time, as a rate and as a ratio to the plain loop's. The plain loop is what
published code mostly has: a DataLoader over a TensorDataset, a deep copy of the model for each client, the penalty as a
loop over `parameters()`, PyTorch's default number of threads.
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
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from jgesr_lightning.client import ClientModule
from jgesr_lightning.data import DataError, FederatedDataModule
from jgesr_lightning.models import build_model
from jgesr_lightning.runtime.sharding import assign
from jgesr_lightning.training import ClientData, build_engine

CLIENTS, KAPPA, LR = 20, 0.05, 0.01
PARTS = ("train", "uplink", "aggregate", "evaluate", "log", "checkpoint")
CASES = [  # network, batch size, mu of the proximal term
    ("lenet", 64, 0.0),
    ("lenet", 10, 0.0),
    ("lenet", 32, 0.0),
    ("lenet", 10, 0.01),
    ("fedavg_cnn", 64, 0.0),
    ("fedavg_cnn", 10, 0.0),
]


def load(fraction: float) -> tuple[list[ClientData], str]:
    """Return the clients' data and what they are."""
    for name in ("mnist", "synthetic"):
        data = FederatedDataModule(name, num_clients=CLIENTS, kappa=KAPPA, fraction=fraction)
        try:
            data.prepare_data()
            data.setup()
        except DataError:
            continue
        return [ClientData(*data.train_tensors(k), *data.test_tensors(k)) for k in range(CLIENTS)], name
    raise SystemExit("no data")


def plain_loop(data: list[ClientData], model: torch.nn.Module, batch: int, mu: float, epochs: int) -> None:
    """Train each client as published code does."""
    criterion = torch.nn.CrossEntropyLoss()
    for own in data:
        net = copy.deepcopy(model)
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        loader = DataLoader(TensorDataset(own.train_inputs, own.train_labels), batch_size=batch, shuffle=True)
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


def flops_per_sample(name: str, batch: int) -> float:
    """Return the operations of a forward and backward pass, the first layer's input needing no gradient."""
    net = build_model(name, 1, 28, 10)
    with FlopCounterMode(display=False) as counter:
        net(torch.randn(batch, 1, 28, 28)).sum().backward()
    return counter.get_total_flops() / batch


def worker(rank: int, world: int, fraction: float, orders: multiprocessing.Queue, done: multiprocessing.Queue) -> None:
    """Serve orders: (what, threads, network, batch, mu, epochs, own clients)."""
    data, name = load(fraction)
    default_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    engines: dict[tuple, object] = {}
    done.put((name, [d.size for d in data], default_threads))
    while True:
        order = orders.get()
        if order is None:
            return
        what, threads, name, batch, mu, epochs, own = order
        torch.set_num_threads(threads or default_threads)
        model = build_model(name, 1, 28, 10)
        result = None
        if what == "peak":
            result = peak_flops()
        elif what == "plain":
            plain_loop([data[k] for k in own], model, batch, mu, epochs)
        else:
            key = (what, name, batch, mu, epochs, tuple(own))
            client = ClientModule(model, mu, LR)
            if key not in engines:
                mine = [data[k] for k in own]
                engines[key], _ = build_engine(what, fabric, client, mine, own, 10, epochs, batch, 0)
            row = client.layout.flatten(model.state_dict())
            engines[key].train(1, range(len(own)), row.expand(len(own), -1), lambda _row, _state: None)
        done.put(result)


class Pool:
    """Worker processes that hold the data, and the time they take together."""

    def __init__(self, size: int, fraction: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.done = context.Queue()
        self.orders = [context.Queue() for _ in range(size)]
        self.processes = [
            context.Process(target=worker, args=(r, size, fraction, self.orders[r], self.done), daemon=True)
            for r in range(size)
        ]
        for process in self.processes:
            process.start()
        facts = [self.done.get(timeout=300) for _ in self.processes]
        self.data, self.sizes, self.threads = facts[0]

    def run(self, what: str, processes: int, threads: int, case: tuple[str, int, float], epochs: int) -> float:
        """Return the seconds in which `processes` processes do the work of one round."""
        owners = assign([epochs * n for n in self.sizes], processes)
        start = time.perf_counter()
        for rank, own in enumerate(owners):
            self.orders[rank].put((what, threads, *case, epochs, own))
        for _ in owners:
            self.done.get(timeout=600)
        return time.perf_counter() - start

    def peak(self) -> float:
        """Return the summed peak of all processes at once, one thread each."""
        for queue in self.orders:
            queue.put(("peak", 1, "lenet", 1, 0.0, 1, []))
        return sum(self.done.get(timeout=600) for _ in self.orders)

    def close(self) -> None:
        """End the processes."""
        for queue in self.orders:
            queue.put(None)
        for process in self.processes:
            process.join(10)


def table(pool: Pool, cases: list[tuple[str, int, float]], epochs: int, repeats: int) -> None:
    """Print one block of rows a case."""
    cores = len(pool.processes)
    rows = [("plain PyTorch loop", "plain", 1, 0)]
    for engine in ("sequential", "stacked"):
        rows.append((f"{engine}, 1 process x 1 thread", engine, 1, 1))
        if cores > 1:
            rows.append((f"{engine}, 1 process x {cores} threads", engine, 1, cores))
            rows.append((f"{engine}, {cores} processes x 1 thread", engine, cores, 1))
    print("| network | batch | mu | training | samples/s | against the plain loop | of the floor |")
    print("|---|---:|---:|---|---:|---:|---:|", flush=True)
    for case in cases:
        name, batch, mu = case
        best = dict.fromkeys(rows, float("inf"))
        peak = 0.0
        for _ in range(repeats):
            peak = max(peak, pool.peak())
            for row in rows:
                best[row] = min(best[row], pool.run(*row[1:], case, epochs))
        samples = epochs * sum(pool.sizes)
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
    """Run the product for a round or two and print where the time of the last one went."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"output_dir={folder}", "name=bench", "rounds=2", "logging.wandb=false", "evaluation.every=1"]
        settings += ["data.fraction=0.05"] if quick else []
        config = Path(__file__).parents[2] / "configs" / "mnist_s01.yaml"
        command = [sys.executable, "-m", "jgesr_lightning", "train", str(config), *settings]
        done = subprocess.run(command, capture_output=True, text=True, cwd=config.parents[1], check=False)
        if done.returncode:
            print(f"\nno shares of a round: {done.stderr.strip().splitlines()[-1:]}")
            return
        with open(Path(folder) / "bench" / "metrics.csv", newline="") as file:
            lines = list(csv.DictReader(file))
    last = {part: float(lines[-1][f"seconds/{part}"]) for part in PARTS}
    total = sum(last.values())
    what = "5 % of MNIST" if quick else "all of MNIST"
    print(f"\nA round of mnist_s01 on {what}: {total:.1f} s")
    print("| " + " | ".join(last) + " |\n|" + "---:|" * len(last))
    print("| " + " | ".join(f"{value / total:.1%}" for value in last.values()) + " |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under half a minute: less work, one repetition")
    parser.add_argument("--no-rounds", action="store_true", help="leave out the shares of a round")
    parser.add_argument("--only", help="network:batch, for one case alone")
    options = parser.parse_args()
    cases = [c for c in CASES if options.only in (None, f"{c[0]}:{c[1]}")]
    pool = Pool(os.cpu_count() or 1, 0.01 if options.quick else 0.1)
    print(
        f"{CLIENTS} clients, Dirichlet {KAPPA}, {pool.data}, {sum(pool.sizes):,} training samples "
        f"({min(pool.sizes)} to {max(pool.sizes):,} a client), 1 epoch; {len(pool.processes)} cores, "
        f"PyTorch {torch.__version__} with {pool.threads} threads by default\n"
    )
    if options.quick:
        cases = [c for c in cases if c[0] == "lenet"][:2] + [c for c in cases if c[0] != "lenet"][:1]
    table(pool, cases, epochs=1, repeats=1 if options.quick else 3)
    pool.close()
    if not options.no_rounds:
        round_shares(options.quick)


if __name__ == "__main__":
    main()
