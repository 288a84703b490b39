"""Engines and aggregators on a CUDA device: checked against the CPU, then timed. Without one it says so and ends.

    python -m tests.benchmarks.bench_gpu [--rounds 30] [--skip-run]

Takes a few minutes: the checks in double precision, the table of `bench_training` on the device, and the whole
MNIST experiment by the command line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lightning.fabric import Fabric

from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.client import ClientModule
from jgesr_lightning.models import build_model
from jgesr_lightning.regularisers import CosineDissimilarity
from jgesr_lightning.training import ClientData, build_engine
from tests.benchmarks.bench_training import CASES, CLIENTS, KAPPA, LR, flops_per_sample, load, plain_loop

AGGREGATORS = ("local", "fedavg", "fedprox", "cfl", "fedamp", "pfedgraph", "two_step", "jgesr")


def move(data: list[ClientData], device: torch.device, dtype: torch.dtype = torch.float32) -> list[ClientData]:
    """Return the data on a device."""
    return [
        ClientData(
            d.train_inputs.to(device, dtype),
            d.train_labels.to(device),
            d.test_inputs.to(device, dtype),
            d.test_labels.to(device),
        )
        for d in data
    ]


def train(
    engine_name: str, accelerator: str, precision: str, data: list[ClientData], network: str, rounds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the models (on the CPU) and their accuracies after `rounds` rounds without aggregation."""
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    client = ClientModule(build_model(network, 1, 28, 10).to(dtype), 0.1, LR, 0.5, [CosineDissimilarity(0.1)])
    rows = range(len(data))
    engine, _ = build_engine(engine_name, fabric, client, move(data, fabric.device, dtype), rows, 10, 2, 32, 0)
    start = client.layout.flatten(client.net.state_dict())
    models = start.expand(len(data), -1).clone()
    for number in range(1, rounds + 1):
        trained = models.clone()

        def deliver(row: int, model: torch.Tensor, trained: torch.Tensor = trained) -> None:
            trained[row] = model

        engine.train(number, rows, models, deliver)
        models = trained
    return models.double().cpu(), engine.evaluate(models)[0]


def check_engines(accelerator: str, data: list[ClientData]) -> None:
    """Compare both engines on the device with the sequential one on the CPU."""
    few = sorted(data, key=lambda d: d.size)[:4]
    for network in ("lenet", "fedavg_cnn"):
        expected, accuracy = train("sequential", "cpu", "64-true", few, network, 2)
        for engine in ("sequential", "stacked"):
            models, ours = train(engine, accelerator, "64-true", few, network, 2)
            worst = (models - expected).abs().max().item()
            print(f"{network}, {engine}, float64: largest difference of a parameter {worst:.1e}")
            assert worst < 1e-9, "the device trains other models than the CPU"
            assert (accuracy - ours).abs().max() < 1e-6
        for precision in ("32-true", "bf16-mixed"):
            models, _ = train("stacked", accelerator, precision, few, network, 2)
            start = build_model(network, 1, 28, 10).double()
            moved = (expected - torch.nn.utils.parameters_to_vector(start.parameters()).detach()).norm()
            share = ((models - expected).norm() / moved).item()
            print(f"{network}, stacked, {precision}: off by {share:.1e} of the distance trained")
            assert share < (1e-3 if precision == "32-true" else 0.2)


def check_aggregators(device: torch.device) -> None:
    """Compare every aggregation on the device with itself on the CPU."""
    draw = torch.Generator().manual_seed(0)
    K, d = 12, 5000
    initial = torch.randn(d, generator=draw, dtype=torch.float64)
    received = initial + 0.3 * torch.randn(K, d, generator=draw, dtype=torch.float64)
    previous = initial.expand(K, -1).clone()
    mask = torch.rand(K, d, generator=draw) < 0.95
    weights = torch.arange(1.0, K + 1)
    for name in AGGREGATORS:
        for missing in (None, mask):
            outs = []
            for where in (torch.device("cpu"), device):
                there = None if missing is None else missing.to(where)
                outs.append(
                    build_aggregator(name)(
                        received.to(where), weights, mask=there, previous=previous.to(where), initial=initial.to(where)
                    )
                )
            models = (outs[0].models - outs[1].models.cpu()).abs().max().item()
            graph = (outs[0].graph - outs[1].graph.cpu()).abs().max().item()
            print(f"{name}{'' if missing is None else ', entries missing'}: models {models:.1e}, graph {graph:.1e}")
            assert models < 1e-8 and graph < 1e-8, f"{name} differs between CPU and device"


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(accelerator: str, device: torch.device, data: list[ClientData], repeats: int) -> None:
    """Print rates of the plain loop and of both engines, and what the device could do."""
    a = torch.randn(4096 if device.type == "cuda" else 512, 4096 if device.type == "cuda" else 512, device=device)
    seconds = float("inf")
    for _ in range(10):
        wait(device)
        start = time.perf_counter()
        torch.mm(a, a)
        wait(device)
        seconds = min(seconds, time.perf_counter() - start)
    peak = 2 * len(a) ** 3 / seconds
    own = move(data, device)
    samples = sum(d.size for d in own)
    print("\n| network | batch | mu | training | samples/s | against the plain loop | of the floor |")
    print("|---|---:|---:|---|---:|---:|---:|", flush=True)
    for network, batch, mu in CASES:
        model = build_model(network, 1, 28, 10).to(device)
        rows = {"plain PyTorch loop": lambda model=model, batch=batch, mu=mu: plain_loop(own, model, batch, mu, 1)}
        for name, precision in (("sequential", "32-true"), ("stacked", "32-true"), ("stacked", "bf16-mixed")):
            fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
            client = ClientModule(build_model(network, 1, 28, 10), mu, LR)
            engine, _ = build_engine(name, fabric, client, own, range(len(own)), 10, 1, batch, 0)
            sent = client.layout.flatten(client.net.state_dict()).expand(len(own), -1)
            rows[f"{name}, {precision}"] = lambda engine=engine, sent=sent: engine.train(
                1, range(len(own)), sent, lambda _row, _state: None
            )
        best = dict.fromkeys(rows, float("inf"))
        for _ in range(repeats + 1):  # the first warms up
            for name, work in rows.items():
                wait(device)
                start = time.perf_counter()
                work()
                wait(device)
                best[name] = min(best[name], time.perf_counter() - start)
        floor = peak / flops_per_sample(network, batch)
        plain = best["plain PyTorch loop"]
        for name, seconds in best.items():
            rate = samples / seconds
            ratio = plain / seconds
            print(f"| {network} | {batch} | {mu:g} | {name} | {rate:,.0f} | {ratio:.2f}x | {rate / floor:.1%} |")
        print(
            f"| {network} | {batch} | {mu:g} | arithmetic floor at {peak / 1e12:.1f} Tflop/s | {floor:,.0f} "
            f"| {floor * plain / samples:.0f}x | 100% |",
            flush=True,
        )


def whole_run(accelerator: str, rounds: int) -> None:
    """Time the MNIST experiment by the command line."""
    config = Path(__file__).parents[2] / "configs" / "mnist_s01.yaml"
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"output_dir={folder}", "name=gpu", f"rounds={rounds}", "logging.wandb=false"]
        settings += [f"runtime.accelerator={accelerator}", "runtime.devices=1"]
        start = time.perf_counter()
        command = [sys.executable, "-m", "jgesr_lightning", "train", str(config), *settings]
        done = subprocess.run(command, cwd=config.parents[1], check=False, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"the experiment failed:\n{done.stderr[-2000:]}")
    print(f"\nmnist_s01, {rounds} rounds, start and end included: {seconds:.0f} s")
    print("\n".join(done.stderr.splitlines()[-5:]))


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="of the timed experiment")
    parser.add_argument("--skip-run", action="store_true", help="leave out the timed experiment")
    parser.add_argument("--fraction", type=float, default=0.2, help="of MNIST, for the table")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, to try this very script")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("no CUDA device here: nothing to check or to time")
        return
    accelerator = "cpu" if options.rehearse else "cuda"
    device = torch.device(accelerator)
    what = torch.cuda.get_device_name() if accelerator == "cuda" else "the CPU"
    data, name = load(options.fraction)
    print(
        f"{what}, PyTorch {torch.__version__}; {CLIENTS} clients, Dirichlet {KAPPA}, {options.fraction:g} of {name}\n"
    )
    start = time.perf_counter()
    check_engines(accelerator, data)
    check_aggregators(device)
    table(accelerator, device, data, repeats=1 if options.rehearse else 3)
    if not options.skip_run:
        whole_run(accelerator, options.rounds)
    print(f"\nall of this took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
