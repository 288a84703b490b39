"""Apply trained models to new data: `predict` classifies samples, `evaluate` scores every client's model."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from jgesr_lightning.arguments import CommandParser
from jgesr_lightning.config import ConfigError
from jgesr_lightning.paths import user_path
from jgesr_lightning.summary import data_digest, read_summary
from jgesr_lightning.trained.samples import Samples, add_options, labelled, unlabelled
from jgesr_lightning.trained.source import ClientModel, Trained, open_trained
from jgesr_lightning.training.base import answers

BATCH = 512


@torch.inference_mode()
def scores(model: ClientModel, inputs: Tensor) -> Tensor:
    """Return class scores (n, classes) of samples (n, *input_shape) as they come; ConfigError where they do not fit."""
    try:
        return torch.cat([model(part) for part in inputs.split(BATCH)])
    except ValueError as error:
        raise ConfigError(error) from None


def accuracy(model: ClientModel, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of samples (n, *input_shape) whose highest score is that of their label (n,)."""
    return float(_right(scores(model, inputs), labels).double().mean())


def own_accuracies(trained: Trained, kind: str) -> list[float]:
    """Return each client's accuracy on its own local test samples, recomputed from weights and data.

    Raises:
        ConfigError: only an export is at hand, which does not know the clients' data; or the data are not there, or
            are others than those of the run.
    """
    from jgesr_lightning import build

    if trained.config is None:
        raise ConfigError(f"{trained.place} is an export; name the run's own folder, or give --data")
    trained.config.data.replace()  # checks them: the run's own functions are wanted from here on
    data = build.data_module(trained.config)
    if (held := data_digest(read_summary(trained.place))) and held != data.digest():
        raise ConfigError(f"the data of {trained.place} are others by now; put them back, or give --data to score on")
    results = []
    for k in range(trained.num_clients):
        model = trained.client(k, kind)
        inputs, labels = data.test_tensors(k, dtype=model.dtype)
        with torch.inference_mode():
            hits = [_right(model.net(x), y) for x, y in zip(inputs.split(BATCH), labels.split(BATCH), strict=True)]
        results.append(float(torch.cat(hits).double().mean()))
    return results


def new_samples(trained: Trained, path: Path, label: str | None) -> Samples:
    """Read new data for a run's models, see `labelled`; without a `label`, that of the run's own data."""
    about = trained.card["network"]
    if label is None:
        label = "label" if trained.config is None else trained.config.data.label
    return labelled(path, tuple(about["input_shape"]), tuple(trained.card["classes"]), label, about.get("features", ()))


def _right(found: Tensor, labels: Tensor) -> Tensor:
    return answers(found, labels).argmax(1) == labels


def _parser(name: str, description: str, example: str) -> CommandParser:
    """Return the parser of a command that applies a run's models."""
    parser = CommandParser(name, description, example)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of an export")
    parser.add_argument("--what", help="received or trained (default: trained, if it was kept)")
    return parser


def predict_main(arguments: Sequence[str]) -> int:
    """Run the command `predict`."""
    parser = _parser(
        "predict",
        "Classify samples by a client's model; prints a table: sample, class, probability.",
        "predict runs/mnist_s01 --client 3 digit.png",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="images, .pt or .npz with x, or .csv of features")
    parser.add_argument(
        "--client",
        required=True,
        help="whose model: its number, 0 to K - 1, or the name of its file (oslo of oslo.csv)",
    )
    given = parser.parse_args(list(arguments))
    model = open_trained(given.run).client(given.client, given.what)
    read = [unlabelled(user_path(file), model.input_shape, model.features) for file in given.files]
    found = [(names, scores(model, inputs).double().softmax(1).max(1)) for inputs, names in read]
    if any(bool(best.values.isnan().any()) for _, best in found):
        raise ConfigError(f"the model of client {given.client} gives no numbers as scores: it diverged in training")
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["sample", "class", "probability"])
    for names, best in found:
        for name, value, place in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
            out.writerow([name, model.classes[place], f"{value:.4f}"])
    return 0


def evaluate_main(arguments: Sequence[str]) -> int:
    """Run the command `evaluate`."""
    parser = _parser(
        "evaluate",
        "Score every client's model, on new data or on the client's own test samples; prints a table.",
        "evaluate runs/mnist_s01 --data new/",
    )
    add_options(parser, otherwise="each client's own tests")
    given = parser.parse_args(list(arguments))
    trained = open_trained(given.run)
    kind = trained.best_kind(given.what)
    if given.data is None:
        results = own_accuracies(trained, kind)
    else:
        samples = new_samples(trained, user_path(given.data), given.label)
        results = [
            accuracy(trained.client(k, kind), samples.inputs, samples.labels) for k in range(trained.num_clients)
        ]
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["client", f"accuracy/{kind}"])
    for k, value in enumerate(results):
        out.writerow([k, f"{value:.6f}"])
    out.writerow(["mean", f"{sum(results) / len(results):.6f}"])
    return 0
