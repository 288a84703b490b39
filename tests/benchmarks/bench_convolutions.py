"""Ways to train many small convolutional networks, each on samples of its own: what the engines were chosen among.

    python -m tests.benchmarks.bench_convolutions [--quick] [--device cuda] [--no-compile]

A step is forward, backward and SGD of 20 networks. Every way is checked to take the same step; each shows its best
time, as a rate and as a ratio to the loop over modules. Our engines train for a round of eight steps, and all that
belongs to one. On a CPU one thread, and `torch.compile` needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, unfold

from jgesr_lightning.client import ClientModule
from jgesr_lightning.models import build_model
from jgesr_lightning.runtime.launch import Launch, build_fabric
from jgesr_lightning.training import ClientData, build_engine

CLIENTS, LR, ROUND = 20, 0.01, 8
Params = dict[str, Tensor]
Step = Callable[[], None]
Way = Callable[[nn.Module, Params, Tensor, Tensor], Step]
"""(network, stacked parameters (K, ...), images (K, B, 1, 28, 28), labels (K, B)) -> takes a step, in place."""


def descend(params: Params, grads: Params) -> None:
    torch._foreach_add_(list(params.values()), [grads[name] for name in params], alpha=-LR)


def loop(channels_last: bool) -> Way:
    def build(net: nn.Module, params: Params, x: Tensor, y: Tensor) -> Step:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        batches = [part.contiguous(memory_format=layout) for part in x]
        if channels_last:
            net.to(memory_format=torch.channels_last)
        named = dict(net.named_parameters())

        def step() -> None:
            for client, (images, labels) in enumerate(zip(batches, y, strict=True)):
                with torch.no_grad():
                    for name, parameter in named.items():
                        parameter.copy_(params[name][client])
                net.zero_grad()
                cross_entropy(net(images), labels).backward()
                with torch.no_grad():
                    for name, parameter in named.items():
                        assert parameter.grad is not None
                        torch.add(parameter, parameter.grad, alpha=-LR, out=params[name][client])

        return step

    return build


def functional(wrap: Callable[[Callable[..., Params]], Callable[..., Params]], one_by_one: bool) -> Way:
    def build(net: nn.Module, params: Params, x: Tensor, y: Tensor) -> Step:
        def loss(own: Params, images: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(torch.func.functional_call(net, own, (images,)), labels)

        gradient = wrap(torch.func.grad(loss))

        def step() -> None:
            if not one_by_one:
                descend(params, gradient(params, x, y))
                return
            for client in range(len(x)):
                own = {name: value[client] for name, value in params.items()}
                descend(own, gradient(own, x[client], y[client]))

        return step

    return build


def stacked_layers(convolve: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Way:
    """Autograd through layers that take all networks at once; `convolve` maps (K, B, C, H, W) and stacked filters."""

    def build(net: nn.Module, params: Params, x: Tensor, y: Tensor) -> Step:
        clients, batch = y.shape
        leaves = {name: value.requires_grad_() for name, value in params.items()}

        def step() -> None:
            out = x
            for position, layer in enumerate(net):  # type: ignore[arg-type]
                weight, bias = leaves.get(f"{position}.weight"), leaves.get(f"{position}.bias")
                if isinstance(layer, nn.Conv2d):
                    out = convolve(out, weight, bias)
                elif isinstance(layer, nn.Linear):
                    out = torch.baddbmm(bias[:, None], out, weight.mT)
                elif isinstance(layer, nn.MaxPool2d):
                    out = layer(out.flatten(0, 1)).unflatten(0, (clients, batch))
                else:
                    out = out.flatten(2) if isinstance(layer, nn.Flatten) else layer(out)
            losses = cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum") / batch
            grads = torch.autograd.grad(losses, list(leaves.values()))
            with torch.no_grad():
                descend(leaves, dict(zip(leaves, grads, strict=True)))

        return step

    return build


def grouped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    clients = len(x)
    merged = x.transpose(0, 1).flatten(1, 2)
    out = conv2d(merged, weight.flatten(0, 1), bias.flatten(), groups=clients)
    return out.unflatten(1, (clients, -1)).transpose(0, 1)


def unfolded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    clients, batch, _, height, width = x.shape
    kernel = weight.shape[-1]
    patches = unfold(x.flatten(0, 1), kernel)  # (K B, C k k, places)
    patches = patches.unflatten(0, (clients, batch)).transpose(1, 2).flatten(2)
    out = torch.baddbmm(bias[:, :, None], weight.flatten(2), patches)
    out = out.unflatten(2, (batch, height - kernel + 1, width - kernel + 1))
    return out.transpose(1, 2)


def engine(name: str, device: str, batch: int) -> Way:
    def build(net: nn.Module, params: Params, x: Tensor, y: Tensor) -> Step:
        fabric = build_fabric(Launch(device, 1, 1), "32-true", [])
        client = ClientModule(net, 0.0, LR)
        data = [ClientData(images, labels, images[:1], labels[:1]) for images, labels in zip(x, y, strict=True)]
        made, _ = build_engine(name, fabric, client, data, range(len(x)), 10, 1, batch, 0)
        rows = torch.stack([client.layout.flatten({n: p[k] for n, p in params.items()}) for k in range(len(x))])

        def deliver(row: int, model: Tensor) -> None:
            for parameter, value in client.layout.restore(model).items():
                params[parameter][row] = value

        def step() -> None:
            made.train(1, range(len(x)), rows, deliver)

        return step

    return build


def ways(device: str, batch: int, compiled: bool) -> dict[str, Way]:
    listed: dict[str, Way] = {
        "loop over modules": loop(False),
        "loop over modules, channels last": loop(True),
        "vmap": functional(lambda f: torch.vmap(f), one_by_one=False),
        "grouped convolution, bmm": stacked_layers(grouped),
        "unfold, bmm": stacked_layers(unfolded),
    }
    if compiled:
        listed["loop over one compiled step"] = functional(lambda f: torch.compile(f), one_by_one=True)
        listed["vmap, compiled"] = functional(lambda f: torch.compile(torch.vmap(f)), one_by_one=False)
    listed["our sequential engine"] = engine("sequential", device, batch)
    listed["our stacked engine"] = engine("stacked", device, batch)
    return listed


def best(step: Step, device: str, seconds: float) -> float:
    """Return the shortest time of a step, from as many as fit into `seconds`."""
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or shortest == float("inf"):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def compare(network: str, batch: int, device: str, seconds: float, compiled: bool) -> None:
    """Print a row a way."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, batch, 1, 28, 28, generator=generator).to(device)
    y = torch.randint(10, (CLIENTS, batch), generator=generator).to(device)
    nets = [build_model(network, 1, 28, 10, seed) for seed in range(CLIENTS)]
    start = {name: torch.stack([dict(net.named_parameters())[name] for net in nets]).detach()
             for name, _ in nets[0].named_parameters()}  # fmt: skip
    expected: Params = {}
    reference = None
    for name, way in ways(device, batch, compiled).items():
        params = {key: value.clone().to(device) for key, value in start.items()}
        step = way(build_model(network, 1, 28, 10).to(device), params, x, y)
        step()
        after = {key: value.detach().clone() for key, value in params.items()}
        expected = expected or after
        worst = max(float((after[key] - expected[key]).abs().max()) for key in after)
        assert worst < 1e-4, f"{name} takes another step: {worst:.1e} away"
        steps = 1
        if name.startswith("our"):
            steps = ROUND
            step = way(
                build_model(network, 1, 28, 10).to(device), params, torch.cat([x] * steps, 1), y.repeat(1, steps)
            )
            step()
        taken = best(step, device, seconds) / steps
        reference = reference or taken
        rate = CLIENTS * batch / taken
        print(f"| {network} | {batch} | {name} | {rate:,.0f} | {reference / taken:.2f}x |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one network and batch, less time each")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    options = parser.parse_args()
    print(f"{CLIENTS} networks; PyTorch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads\n")
    print("| network | batch | way | samples/s | against the loop |\n|---|---:|---|---:|---:|")
    cases = [("lenet", 64)] if options.quick else [("lenet", 64), ("lenet", 10), ("fedavg_cnn", 64), ("fedavg_cnn", 10)]
    for network, batch in cases:
        compare(network, batch, options.device, 0.3 if options.quick else 1.0, not options.no_compile)


if __name__ == "__main__":
    main()
