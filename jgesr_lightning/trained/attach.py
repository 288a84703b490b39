"""A new client joins a run that is over: trained from the mean of the received models, then joined to the graph."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from safetensors.torch import save
from torch import Tensor, nn

from jgesr_lightning import build
from jgesr_lightning.aggregators import Aggregator, build_aggregator
from jgesr_lightning.aggregators.base import Upload
from jgesr_lightning.aggregators.learned_graph import LearnedGraph
from jgesr_lightning.arguments import CommandParser
from jgesr_lightning.checks import whole
from jgesr_lightning.config import Config, ConfigError
from jgesr_lightning.data import split_train_test
from jgesr_lightning.files import say, write_bytes, write_text
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.paths import user_folder, user_path
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.trained.export import portable
from jgesr_lightning.trained.joining import edge_weights, joined_model
from jgesr_lightning.trained.samples import Samples, add_options
from jgesr_lightning.trained.scoring import accuracy, new_samples
from jgesr_lightning.trained.source import CARD, ClientModel, Trained, foreign, network, open_trained, refuse_another
from jgesr_lightning.training import ClientData

MODEL = "model.safetensors"


@dataclass(frozen=True)
class Attached:
    """What became of a new client.

    Attributes:
        accuracies: on its test samples: "before" (the mean of the received models), "trained" (after local training)
            and, where the method learns a graph, "joined" (smoothed over its new edges).
        edges: (K,) its weights to the others; (layers, K) where there is a graph a layer; None without a graph.
        state_dict: of its network: joined, else trained.
        sizes: number of its training and its test samples.
        alone: why it was not joined to a graph, empty where it was.
    """

    accuracies: dict[str, float]
    edges: Tensor | None
    state_dict: dict[str, Tensor]
    sizes: tuple[int, int]
    alone: str = ""


def attach(trained: Trained, samples: Samples, rounds: int = 1) -> Attached:
    """Train a new client on part of its samples, as the run's clients were, and join it to the run's last graph.

    Args:
        trained: a run, with its checkpoint.
        samples: of the new client, with labels; the run's `data.test_share` of them is for testing.
        rounds: how often it trains its local epochs, each time with its own last model as start and anchor, at the
            learning rates of the run's first rounds: its last may be next to nothing.

    Raises:
        ConfigError: only an export is at hand, the method's own file is gone, there are too few samples, its training
            diverged, or it cannot be joined.
    """
    config, found = trained.config, trained.found
    if config is None or found is None:
        raise ConfigError(f"{trained.place} is an export; a new client needs the run's own folder")
    labels = samples.labels.numpy()
    try:
        whole("rounds", rounds, at_least=1)
        everything, seed = torch.arange(len(labels)).numpy(), config.seed_of("partition")
        parts = split_train_test(everything, labels, config.data.test_share, seed, trained.num_clients)
        train, test = map(torch.from_numpy, parts)
    except ValueError as error:
        raise ConfigError(error) from None
    received = checkpoint.rows(found)["models"]
    start = received.to(torch.float64).mean(0).to(received.dtype)
    net = network(trained.card)
    layout = ParameterLayout.of(net)
    model = ClientModel(net, trained.card, trained.num_clients, "trained")

    def score(row: Tensor) -> float:
        net.load_state_dict(layout.restore(row), strict=False)
        model.eval()
        return accuracy(model, samples.inputs[test], samples.labels[test])

    try:
        inputs = model.normalised(samples.inputs)
    except ValueError as error:
        raise ConfigError(error) from None
    accuracies = {"before": score(start)}
    method = config.aggregator.replace()  # checks it: a method of one's own is wanted from here on
    aggregator = build_aggregator(method.name, **method.settings)
    data = ClientData(inputs[train], samples.labels[train], inputs[test], samples.labels[test])
    row = _trained(config, trained, net, aggregator, data, start, rounds)
    accuracies["trained"] = score(row)
    edges = None
    alone = _alone(aggregator)
    if isinstance(aggregator, LearnedGraph) and not alone:
        try:
            row, edges = _joined(trained, aggregator, layout, received, row, len(train))
        except ValueError as error:
            raise ConfigError(error) from None
        accuracies["joined"] = score(row)
    state = {**net.state_dict(), **layout.restore(row)}
    return Attached(accuracies, edges, state, (len(train), len(test)), alone)


def _trained(
    config: Config,
    trained: Trained,
    net: nn.Module,
    aggregator: Aggregator,
    data: ClientData,
    start: Tensor,
    rounds: int,
) -> Tensor:
    """Return the model, (d,), that the newcomer makes of `start` in so many rounds."""
    fabric = Fabric(  # one process, whatever launchers' variables are set
        accelerator="cpu", devices=1, precision=config.runtime.precision, plugins=[LightningEnvironment()]
    )
    classes, shape = len(trained.card["classes"]), trained.card["network"]["input_shape"]
    try:
        engine, _ = build.engine(config, fabric, net, aggregator, {trained.num_clients: data}, classes, shape)
    except ValueError as error:
        raise ConfigError(error) from None
    row = start.clone()

    def take(_: int, made: Tensor) -> None:
        row.copy_(made)

    for number in range(1, rounds + 1):
        sent = row.clone()[None]
        engine.train(number, [0], sent, take)
    if not bool(row.isfinite().all()):
        whose = "the newcomer's training diverged" if bool(start.isfinite().all()) else "the run's own models diverged"
        raise ConfigError(
            f"{whose} (NaN or infinity in the model); check that features have the units of the other clients', or run "
            "with a smaller local.lr"
        )
    return row


def _alone(aggregator: Aggregator) -> str:
    """Return why a newcomer cannot be joined to a method's graph, or an empty string."""
    if not isinstance(aggregator, LearnedGraph):
        return f"{aggregator.name} learns no graph to join"
    usual = {"neighbours": None, "groups": None, "distances": "models", "layer_weights": "columns"}
    other = [f"{key}={getattr(aggregator, key)}" for key, value in usual.items() if getattr(aggregator, key) != value]
    if other:
        return (
            f"not joined: under {', '.join(other)} the graph rests on what the run does not keep of its clients' "
            "uploads; a newcomer is joined by alpha, beta and gamma alone"
        )
    return ""


def _joined(
    trained: Trained, aggregator: LearnedGraph, layout: ParameterLayout, received: Tensor, row: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Return the newcomer's smoothed model, and its edges: (K,), or (layers, K)."""
    assert trained.found is not None
    shared, problem = trained.found.shared, aggregator.problem
    if not shared["graphs"]:
        raise ConfigError(
            f"{trained.place} was stopped after round {shared['round']} and has kept no graph yet to join; "
            "go on with resume=auto"
        )
    last = max(shared["graphs"])
    layered = last in shared["layer_graphs"]
    graphs = shared["layer_graphs"][last] if layered else shared["graphs"][last][None]
    widths = layout.layers if layered else (layout.size,)
    share = _share(aggregator, [size, *(entry["samples"] for entry in trained.card["clients"])])
    smoothing = problem.alpha if problem.smoothing == "full" else problem.alpha / 2  # as `Problem.operator` has it
    joined, edges, begin = row.clone(), [], 0
    for graph, width in zip(graphs, widths, strict=True):
        columns = slice(begin, begin + width)
        others, own = received[:, columns].to(torch.float64), row[columns].to(torch.float64)
        distances = (others - own).square().sum(1)
        weights = edge_weights(distances, graph.sum(1), problem.alpha, problem.beta, problem.gamma)
        joined[columns] = joined_model(row[columns], weights, others, smoothing, problem.mu, share)
        edges.append(weights)
        begin += width
    return joined, torch.stack(edges) if layered else edges[0]


def _share(aggregator: LearnedGraph, sizes: Sequence[int]) -> float:
    """Return the newcomer's entry of Z, from the numbers of all clients' training samples, its own first."""
    of = torch.tensor(sizes, dtype=torch.float64)
    upload = Upload(of[:, None], of / of.sum(), None, None, None, torch.arange(len(of)), len(of))
    return float(aggregator.weights(upload)[0])


def main(arguments: Sequence[str]) -> int:
    """Run the command `attach`."""
    parser = CommandParser(
        "attach",
        "Let a new client join a run: it trains from the mean of the received models, joins the learned graph by one\n"
        "more node (the others stay as they are), and its accuracies before and after are reported.",
        "attach runs/mnist_s01 --data new_client.npz",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=1, help="how often it trains its local epochs (default: 1)")
    parser.add_argument("--out", metavar="FOLDER", help="where its model goes (default: RUN/attached/NAME OF THE DATA)")
    given = parser.parse_args(list(arguments))
    trained = open_trained(given.run)
    path = user_path(given.data)
    samples = new_samples(trained, path, given.label)
    folder = user_folder(given.out or trained.place / "attached" / _name(path))
    if MODEL not in refuse_another(folder, os.path.abspath(path)) and os.path.lexists(folder / MODEL):
        raise foreign(folder / MODEL)
    result = attach(trained, samples, given.rounds)
    _write(folder, trained, result, path)
    say(f"a new client of {result.sizes[0]} training and {result.sizes[1]} test samples; accuracy on the latter:")
    words = {
        "before": "before, the mean of the received models",
        "trained": "after training",
        "joined": "after joining the graph",
    }
    for key, value in result.accuracies.items():
        say(f"  {words[key]}: {100 * value:.2f} %")
    if result.alone:
        say(f"  {result.alone}")
    say(f"its model: {folder}")
    return 0


def _name(path: Path) -> str:
    """Return what a client of the data at `path` is called, be it "." or ".."."""
    return Path(os.path.abspath(path)).stem


def _write(folder: Path, trained: Trained, result: Attached, path: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    of_run = portable(trained.card, folder)
    content = save({name: tensor.clone() for name, tensor in result.state_dict.items()}, metadata={"format": "pt"})
    write_bytes(folder / MODEL, content)
    card: dict[str, Any] = {
        **of_run,
        "clients": [{"client": 0, "name": _name(path), "accuracy": {}, "files": {"trained": {"file": MODEL}}}],
        "attached": {
            "data": os.path.abspath(path),
            "samples": list(result.sizes),
            "accuracy": result.accuracies,
            "edges": None if result.edges is None else result.edges.tolist(),
        },
    }
    write_text(folder / CARD, json.dumps(card, indent=1))
