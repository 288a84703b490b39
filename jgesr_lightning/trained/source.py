"""Where trained models lie: in the checkpoint of a run's folder, or in a folder that `export` wrote."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from jgesr_lightning import names
from jgesr_lightning.checks import is_count, nearest, number, one_of, whole
from jgesr_lightning.config import Config, ConfigError
from jgesr_lightning.data.dataset import printable
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.models import build_model, shape_arguments
from jgesr_lightning.paths import PathError, user_path
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.summary import DamagedSummaryError, read_summary

logger = logging.getLogger(__name__)

CARD = "card.json"
SCHEMA = 1
KINDS = ("received", "trained")
"""What the clients had after the last round, see `FederationState.models`, and what they had trained in it."""

DATA = {"normalisation", "input_shape", "classes", "sizes", "test_sizes"}  # what a summary has to say of the data
SMALL = 4  # of numbers from 0 to 1, -1 to 1, or of deviation 1, mean and deviation together are less; of bytes more
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class ClientModel(nn.Module):
    """A client's network, ready for data as they come: it normalises them as they were in training.

    Args:
        net: the network, weights loaded.
        card: see `Trained.card`.
        client: whose it is.
        kind: "received" or "trained".

    Attributes:
        classes: name of each class, in the order of the scores.
        features: name of each feature, in the order in which it takes them, where the clients' data named them.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, card: dict[str, Any], client: int, kind: str) -> None:
        super().__init__()
        self.net, self.client, self.kind = net, client, kind
        self.classes: tuple[str, ...] = tuple(card["classes"])
        self.input_shape: tuple[int, ...] = tuple(card["network"]["input_shape"])
        self.features: tuple[str, ...] = tuple(card["network"].get("features", ()))
        self.dtype = DTYPES[card["network"]["dtype"]]
        numbers = card["normalisation"]
        self.scale = float(numbers["scale"])
        lead = (-1, *[1] * (len(self.input_shape) - 1))
        # as in training, where the scale is taken into mean and deviation: inputs are the same to the last bit
        for name in ("mean", "std"):
            number = self.scale * torch.tensor(numbers[name], dtype=torch.float64)
            self.register_buffer(name, number.to(self.dtype).view(lead), persistent=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores (B, classes) of samples as they come: bytes of images (B, C, H, W), or features (B, n).

        Raises:
            ValueError: samples of another shape or scale.
        """
        scores: Tensor = self.net(self.normalised(x))
        return scores

    def normalised(self, x: Tensor) -> Tensor:
        """Return samples as the network itself takes them.

        Raises:
            ValueError: samples of another shape, from 0 to 1 where the network was trained on bytes, or the reverse.
        """
        if tuple(x.shape[1:]) != self.input_shape:
            raise ValueError(f"samples have shape {tuple(x.shape[1:])}; this network takes {self.input_shape}")
        fractions = x.is_floating_point() and self.scale == 255 and bool((x != x.round()).any())
        if fractions and float(x.min()) >= 0 and float(x.max()) <= 1:  # as many loaders of images give them
            raise ValueError("samples lie between 0 and 1; this network takes bytes, 0 to 255: multiply them by 255")
        bright = x.dtype == torch.uint8 and x.ndim == 4 and self.scale == 1 and float(x.double().mean()) > SMALL
        if bright and float((self.mean.abs() + self.std).max()) < SMALL:
            raise ValueError(
                f"samples are bytes, 0 to 255; this network was trained on numbers about {self.mean.mean():.2g}: "
                "scale them alike, and give a file with x"
            )
        return (x.to(self.mean) - self.mean) / self.std


@dataclass(frozen=True, repr=False)
class Trained:
    """The models of a run.

    Attributes:
        place: the folder they came from.
        card: what one needs to know of them, as plain values: `network` (name, input_shape, num_classes, seed, dtype),
            `normalisation` (x -> (x / scale - mean) / std), `classes`, `clients` (samples and accuracies of each) and
            `run` (name, method, rounds, ...).
        kinds: which kinds are there.
        tensors: (client, kind) -> the state dict of the client's network.
        config: configuration of the run, parts of its own not imported; None where only an export is at hand.
        found: its checkpoint; None where only an export is at hand.
    """

    place: Path
    card: dict[str, Any]
    kinds: tuple[str, ...]
    tensors: Callable[[int, str], dict[str, Tensor]]
    config: Config | None = None
    found: checkpoint.Found | None = None

    def __repr__(self) -> str:
        return f"Trained({str(self.place)!r}: {' and '.join(self.kinds)} models of {self.num_clients} clients)"

    @property
    def num_clients(self) -> int:
        """K."""
        return len(self.card["clients"])

    def best_kind(self, kind: str | None = None) -> str:
        """Return `kind`, or where it is None the trained models, which fit their clients' data best, if they were kept.

        Raises:
            ConfigError: such models were not kept.
        """
        if kind is None:
            return "trained" if "trained" in self.kinds else self.kinds[0]
        try:
            one_of("what", kind, KINDS)
        except ValueError as error:
            raise ConfigError(error) from None
        if kind not in self.kinds:
            raise ConfigError(
                f"{self.place} holds no {kind} models, only {', '.join(self.kinds)}; "
                "checkpoint.keep_trained=true keeps them"
            )
        return kind

    def number_of(self, client: int | str) -> int:
        """Return a client's number, 0 to K - 1.

        Args:
            client: the number, or a text: a number, or else the client's name in the card. What is both is the number;
                01 is first of all a name.

        Raises:
            ConfigError: no such client.
        """
        if isinstance(client, str):
            text = printable(client)  # as the names of a run are kept
            called = [printable(str(entry.get("name", k))) for k, entry in enumerate(self.card["clients"])]
            for known in (list(map(str, range(self.num_clients))), called):
                if text in known:
                    return known.index(text)
            if not is_count(text.removeprefix("-")):
                near = nearest(text, called)
                raise ConfigError(f"client is {text!r}{near}; {self.place} has clients 0 to {self.num_clients - 1}")
            client = int(text)
        try:
            whole("client", client)
        except ValueError as error:
            raise ConfigError(error) from None
        number = int(client)  # NumPy's, too
        if number >= self.num_clients:
            raise ConfigError(f"client is {number}; {self.place} has clients 0 to {self.num_clients - 1}")
        return number

    def client(self, client: int | str, kind: str | None = None) -> ClientModel:
        """Return a client's network with its weights, in evaluation mode; see `number_of`.

        Raises:
            ConfigError: no such client or kind, or a network that cannot be built or does not fit the weights.
        """
        kind = self.best_kind(kind)
        client = self.number_of(client)
        net = network(self.card)
        try:
            net.load_state_dict(self.tensors(client, kind))
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ConfigError(f"{self.place}: weights of client {client} do not fit the network: {reason}") from None
        return ClientModel(net, self.card, client, kind)


def network(card: dict[str, Any]) -> nn.Module:
    """Build the network that a card describes, with its initial weights.

    Raises:
        ConfigError: it cannot be built.
    """
    about = card["network"]
    try:
        net = build_model(
            about["name"], *shape_arguments(about["input_shape"]), num_classes=about["num_classes"], seed=about["seed"]
        )
    except ValueError as error:
        raise ConfigError(error) from None
    return net.to(DTYPES[about["dtype"]])


def load_client(run: str | os.PathLike[str], client: int | str, what: str | None = None) -> ClientModel:
    """Return one client's trained network, ready for data as they come.

    Args:
        run: a run's folder, or one that `export` wrote.
        client: its number, 0 to K - 1, or the name of its file where clients have files of their own: "oslo". A text
            that is a number, "3", is the number, unless only a name is such.
        what: "trained" or "received"; None: the trained one, if it was kept.

    Raises:
        ConfigError: there are no such models, in one line.
    """
    return open_trained(run).client(client, what)


def open_trained(run: str | os.PathLike[str]) -> Trained:
    """Find the models of a run.

    What an export left in the run's own folder does not stand for the run, which may have gone on since.

    Args:
        run: a run's folder, or one that `export` wrote.

    Raises:
        ConfigError: there are none, or what is there is damaged.
    """
    try:
        place = user_path(run)
    except PathError as error:
        raise ConfigError(error) from None
    if not place.is_dir():
        raise ConfigError(f"there is no folder {place}; name the folder of a run, such as runs/mnist_s01")
    if (place / CARD).is_file() and checkpoint.newest(place / "checkpoint") is None:
        return _exported(place)
    return _of_run(place)


def _of_run(place: Path) -> Trained:
    try:
        found = checkpoint.find(place / "checkpoint")
        if found is None:
            if origin := read_summary(place).get("copied_from"):
                raise ConfigError(f"{place} was copied without its checkpoint; name the folder of the run, {origin}")
            raise ConfigError(f"{place} holds no checkpoint, and no {CARD} of an export; name a run's folder")
        summary = read_summary(place)
        config = Config.stored(found.shared["config"])
    except checkpoint.CheckpointError as error:
        raise ConfigError(error) from None  # which names the file
    except (DamagedSummaryError, ValueError) as error:
        raise ConfigError(error if isinstance(error, ConfigError) else f"{place}: {error}") from None
    for reason in found.passed_over:
        logger.warning("%s: passed over, %s is used", reason.split("; ")[0], found.folder)
    data = summary.get("data")
    if not isinstance(data, dict) or not data.keys() >= DATA:
        raise ConfigError(f"{place}/summary.json does not say how the data were normalised; run it again")
    kept = checkpoint.rows(found)
    rows = {kind: kept[name] for kind, name in (("received", "models"), ("trained", "trained")) if name in kept}
    try:
        card = _card(place, config, found, data, str(rows["received"].dtype).removeprefix("torch."))
        _check_card(card)
    except (LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{place}/summary.json is damaged: data do not fit the models ({reason})") from None
    initial = network(card)
    layout, entries = ParameterLayout.of(initial), initial.state_dict(keep_vars=True)
    if layout.size != rows["received"].shape[1]:
        raise ConfigError(
            f"{place} holds models of {rows['received'].shape[1]} parameters; "
            f"model.name={config.model.name} has {layout.size} now"
        )

    # an entry that two layers share stands in the row once
    shared = {id(tensor): name for name, tensor in entries.items() if name in layout.names}

    def tensors(client: int, kind: str) -> dict[str, Tensor]:
        own = {**initial.state_dict(), **layout.restore(rows[kind][client])}
        return {name: own[shared.get(id(tensor), name)] for name, tensor in entries.items()}

    return Trained(place, card, tuple(rows), tensors, config, found)


def _card(place: Path, config: Config, found: checkpoint.Found, data: dict[str, Any], dtype: str) -> dict[str, Any]:
    records = found.shared["records"]
    last = records[-1]
    called = data.get("clients") or []
    clients: list[dict[str, Any]] = []
    for k in range(found.shared["num_clients"]):
        accuracies = {kind: last["clients"].get(f"accuracy/{kind}", [None] * (k + 1))[k] for kind in KINDS}
        samples, tests = (data[key][k] for key in ("sizes", "test_sizes"))
        name = called[k] if called else str(k)
        clients.append({"client": k, "name": name, "samples": samples, "tests": tests, "accuracy": accuracies})
    return {
        "schema": SCHEMA,
        "network": {
            "name": config.model.name,
            "input_shape": list(data["input_shape"]),
            "features": list(data.get("features", ())),  # runs of before do not say
            "num_classes": len(data["classes"]),
            "seed": config.seed_of("initial"),
            "dtype": dtype,
            "how_to_build": (
                "jgesr_lightning.models.build_model(name, *shape_arguments(input_shape), num_classes, seed); then "
                "load_state_dict of a client's file. jgesr_lightning.load_client(folder, k) does both"
            ),
        },
        "normalisation": {
            **data["normalisation"],
            "formula": "(x / scale - mean) / std, a channel or feature at a time",
        },
        "classes": list(data["classes"]),
        "clients": clients,
        "run": {
            "name": place.name,
            "method": names.label(config.aggregator.name),
            "dataset": names.label(config.data.name),
            "channel": names.label(config.channel.name),
            "noise": config.channel.noise,
            "missing_rate": config.channel.missing_rate,
            "downlink": dict(config.downlink),
            "seed": config.seed,
            "round": found.shared["round"],
            "rounds": config.rounds,
        },
    }


def _check_card(card: dict[str, Any]) -> None:
    """Raise ValueError, TypeError or LookupError unless a card says what `ClientModel` and `Trained` read in it."""
    about, numbers, classes = card["network"], card["normalisation"], card["classes"]
    shape = about["input_shape"]
    if not isinstance(about["name"], str):
        raise TypeError(f"network.name is {about['name']!r}")
    if not isinstance(shape, list) or len(shape) not in (1, 3):
        raise ValueError(f"network.input_shape is {shape!r}")
    for size in shape:
        whole("network.input_shape", size, at_least=1)
    whole("network.seed", about["seed"])
    one_of("network.dtype", about["dtype"], DTYPES)
    features = about.get("features", [])
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise TypeError("network.features is no list of names")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise TypeError("classes is no list of names")
    if about["num_classes"] != len(classes):
        raise ValueError(f"network.num_classes is {about['num_classes']!r}; there are {len(classes)} classes")
    number("normalisation.scale", numbers["scale"], above=0)
    for name, lowest in (("mean", -math.inf), ("std", 0.0)):
        if len(numbers[name]) not in (1, shape[0]):
            raise ValueError(f"normalisation.{name} has {len(numbers[name])} entries for inputs of shape {shape}")
        for value in numbers[name]:
            number(f"normalisation.{name}", value, above=lowest)
    if not isinstance(card["clients"], list) or not card["clients"]:
        raise ValueError("clients is empty")


def card_in(folder: Path) -> dict[str, Any]:
    """Return the card that a folder holds, empty where there is none of ours."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return card if isinstance(card, dict) and card.keys() >= {"schema", "network", "clients"} else {}


def refuse_another(folder: Path, attached: str | None = None) -> set[str]:
    """Raise ConfigError where what is written next would take the place of something else: the same is made anew.

    Args:
        folder: where to.
        attached: data of the new client that goes there; None: the models of a run.

    Returns:
        The names of the files of models that are the same's, and may be replaced.
    """
    card = card_in(folder)
    if not card and os.path.lexists(folder / CARD):
        raise foreign(folder / CARD)
    client = card.get("attached")
    former = client.get("data") if isinstance(client, dict) else None
    if card and former != attached:
        held = "the models of a run, an export" if former is None else f"the client of {former}"
        raise ConfigError(f"{folder} holds {held}; name another folder with --out")
    try:
        files = {str(about["file"]) for entry in card.get("clients", []) for about in entry["files"].values()}
    except (LookupError, TypeError, AttributeError):  # changed by hand
        files = set()
    return {name for name in files if name == Path(name).name and name.endswith(".safetensors")}


def foreign(path: Path) -> ConfigError:
    """Return the error for a file that would be replaced and is none of ours."""
    return ConfigError(f"{path} is no file of this program's; name another folder with --out")


def _exported(place: Path) -> Trained:
    try:
        card = json.loads((place / CARD).read_text(encoding="utf-8"))
        if card["schema"] != SCHEMA:
            raise ConfigError(f"{place / CARD} has schema {card['schema']}; this program reads {SCHEMA}")
        _check_card(card)
        card["network"]["name"] = names.resolve(card["network"]["name"], place)  # a file beside the card
        files = {
            (k, kind): (str(about["file"]), str(about.get("prefix", "")))
            for k, entry in enumerate(card["clients"])
            for kind, about in entry["files"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{place / CARD} is damaged ({reason}); export the run again") from None

    def tensors(client: int, kind: str) -> dict[str, Tensor]:
        file, prefix = files[client, kind]
        path = place / file
        try:
            with safe_open(path, framework="pt") as content:
                return {
                    name.removeprefix(prefix): content.get_tensor(name)
                    for name in content.keys()  # noqa: SIM118 - not a dictionary
                    if name.startswith(prefix)
                }
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); export the run again") from None

    kinds = tuple(kind for kind in KINDS if all((k, kind) in files for k in range(len(card["clients"]))))
    if not kinds:
        raise ConfigError(f"{place / CARD} names no files that all clients have; export the run again")
    return Trained(place, card, kinds, tensors)
