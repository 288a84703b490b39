"""The configuration of a run: typed sections, read from YAML files with a base and from ``key=value`` arguments.

Later layers win: the defaults below, the files named by ``base:``, the file itself, the arguments. Every key is known,
typed and checked before any work starts, and a wrong one is a `ConfigError` of one line. Nothing here needs torch until
the names of models, data sets and methods are looked up, which comes last.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jgesr_lightning import parsing
from jgesr_lightning.checks import nearest, number, one_of, whole

logger = logging.getLogger(__name__)

CONFIGS = Path("configs")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line that names the key, the value and what would do."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))


@dataclass(frozen=True)
class DataConfig:
    """The data set and how it is shared out.

    Attributes:
        name: a data set of `jgesr_lightning.data`.
        root: folder that holds the data; None: the environment variable JGESR_DATA, else ``data``.
        kappa: concentration of the Dirichlet partition by class; small: one to three classes a client.
        fraction: part of the training data that is used, above 0 and at most 1.
        min_samples: fewest samples of a client, its test share included.
        test_share: part of each client's samples kept for its local test, between 0 and 1.
    """

    name: str = "mnist"
    root: str | None = None
    kappa: float = 0.05
    fraction: float = 1.0
    min_samples: int = 20
    test_share: float = 0.25

    def __post_init__(self) -> None:
        number("data.kappa", self.kappa, above=0)
        number("data.fraction", self.fraction, above=0, at_most=1)
        whole("data.min_samples", self.min_samples, at_least=2)
        _share("data.test_share", self.test_share, zero=False)

    @property
    def folder(self) -> Path:
        """The folder to look for data in."""
        return Path(self.root or os.environ.get("JGESR_DATA") or "data").expanduser()


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Attributes:
        name: a network of `jgesr_lightning.models`.
    """

    name: str = "lenet"


@dataclass(frozen=True)
class LocalConfig:
    """Training at the clients, by SGD.

    Attributes:
        epochs: passes over a client's training samples in each round.
        batch_size: samples a step; the paper gives none, 32 is our choice.
        lr: learning rate.
        momentum: at least 0 and below 1.
        proximal_mu: weight of mu/2 ||x - x_sent||^2 in the loss; None leaves it to the method (0.01 for fedprox).
    """

    epochs: int = 5
    batch_size: int = 32
    lr: float = 0.01
    momentum: float = 0.0
    proximal_mu: float | None = None

    def __post_init__(self) -> None:
        whole("local.epochs", self.epochs, at_least=1)
        whole("local.batch_size", self.batch_size, at_least=1)
        number("local.lr", self.lr, above=0)
        _share("local.momentum", self.momentum)
        if self.proximal_mu is not None:
            number("local.proximal_mu", self.proximal_mu, at_least=0)


@dataclass(frozen=True)
class ChannelConfig:
    """The uplink from the clients to the server.

    Attributes:
        noise: s; the noise on client k has the deviation s * mean|psi_k^(0)| of its initial parameters.
        missing_rate: probability that an entry does not arrive, at least 0 and below 1.
    """

    noise: float = 0.1
    missing_rate: float = 0.0

    def __post_init__(self) -> None:
        number("channel.noise", self.noise, at_least=0)
        _share("channel.missing_rate", self.missing_rate)


@dataclass(frozen=True)
class AggregatorConfig:
    """The aggregation method at the server.

    Attributes:
        name: a method of `jgesr_lightning.aggregators`.
        settings: the method's own settings; inside a `Config`, all of them, defaults filled in.
    """

    name: str = "jgesr"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationConfig:
    """When accuracies are measured.

    Attributes:
        every: rounds from one evaluation to the next; the first and the last round are always measured.
    """

    every: int = 1

    def __post_init__(self) -> None:
        whole("evaluation.every", self.every, at_least=1)


@dataclass(frozen=True)
class RuntimeConfig:
    """Where the run computes; the words are those of Lightning Fabric.

    Attributes:
        accelerator: auto, cpu, gpu, cuda or mps.
        devices: number of devices on each node, or "auto".
        num_nodes: number of machines.
        precision: 32-true, bf16-mixed or 64-true.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: int = 1
    precision: str = "32-true"

    def __post_init__(self) -> None:
        one_of("runtime.accelerator", self.accelerator, ("auto", "cpu", "gpu", "cuda", "mps"))
        if self.devices != "auto":
            if not isinstance(self.devices, int):
                raise ValueError(f"runtime.devices is {self.devices!r}; it must be a whole number or auto")
            whole("runtime.devices", self.devices, at_least=1)
        whole("runtime.num_nodes", self.num_nodes, at_least=1)
        one_of("runtime.precision", self.precision, ("32-true", "bf16-mixed", "64-true"))


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved.

    Attributes:
        every: rounds from one checkpoint to the next; the last round is always saved.
    """

    every: int = 1

    def __post_init__(self) -> None:
        whole("checkpoint.every", self.every, at_least=1)


@dataclass(frozen=True)
class LoggingConfig:
    """What is written beside summary.json and graphs.npz, and how much of it goes to W&B.

    Attributes:
        csv: whether metrics.csv and clients.csv are written.
        wandb: whether W&B is used at all.
        wandb_mode: auto (online with a key and a network, else offline), online, offline or disabled.
        project: W&B project.
        group: W&B group; None: one group for all seeds of this configuration.
        tags: W&B tags.
        graph_every: rounds from one picture of the graph to the next.
    """

    csv: bool = True
    wandb: bool = True
    wandb_mode: str = "auto"
    project: str = "jgesr_lightning"
    group: str | None = None
    tags: tuple[str, ...] = ()
    graph_every: int = 5

    def __post_init__(self) -> None:
        one_of("logging.wandb_mode", self.wandb_mode, ("auto", "online", "offline", "disabled"))
        if not self.project.strip():
            raise ValueError(f"logging.project is {self.project!r}; it must name a W&B project")
        whole("logging.graph_every", self.graph_every, at_least=1)


@dataclass(frozen=True)
class SeedsConfig:
    """Seeds of single sources of randomness, so that each can be varied alone; None: the run's `seed`.

    Attributes:
        partition: which client holds which samples.
        initial: the initial model.
        channel: noise and missing entries.
        batches: order of the samples in local training.
    """

    partition: int | None = None
    initial: int | None = None
    channel: int | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        for purpose, seed in asdict(self).items():
            if seed is not None:
                whole(f"seeds.{purpose}", seed)


@dataclass(frozen=True)
class Config:
    """Everything that decides a run.

    Attributes:
        name: name of the run's folder; in a file, by default, the file's own name.
        seed: seed of all randomness that `seeds` does not set apart.
        rounds: R, rounds of training, upload and aggregation.
        clients: K.
        participation: part of the clients that take part in a round, above 0 and at most 1.
        output_dir: folder of all runs.
        resume: None starts afresh, "auto" continues the run in its own folder, a path continues the run found there.
        engine: local training one client at a time ("sequential"), all at once ("stacked"), or the faster ("auto").
        deterministic: whether only operations that give the same bits every time are allowed.
        nonfinite: an upload with NaN or infinity is left out of its round ("drop") or ends the run ("raise").
        data, model, local, channel, aggregator, evaluation, runtime, checkpoint, logging, seeds: see the classes.

    Raises:
        ValueError: a value that cannot be used, with its key and what would do.
    """

    name: str = "run"
    seed: int = 0
    rounds: int = 30
    clients: int = 20
    participation: float = 1.0
    output_dir: str = "runs"
    resume: str | None = None
    engine: str = "auto"
    deterministic: bool = True
    nonfinite: str = "drop"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    channel: ChannelConfig = field(default_factory=ChannelConfig)
    aggregator: AggregatorConfig = field(default_factory=AggregatorConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    seeds: SeedsConfig = field(default_factory=SeedsConfig)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^\s/\\.][^/\\\x00-\x1f]{0,199}", self.name) or self.name != self.name.strip():
            raise ValueError(
                f"name is {self.name!r}; it names the run's folder: up to 200 characters, no slash, no leading dot"
            )
        whole("seed", self.seed)
        whole("rounds", self.rounds, at_least=1)
        whole("clients", self.clients, at_least=1)
        number("participation", self.participation, above=0, at_most=1)
        if not self.output_dir.strip():
            raise ValueError(f"output_dir is {self.output_dir!r}; it must name a folder")
        one_of("engine", self.engine, ("auto", "sequential", "stacked"))
        one_of("nonfinite", self.nonfinite, ("drop", "raise"))
        self._check_registries()

    def _check_registries(self) -> None:
        """Check names and the method's settings where they are defined, and fill in the method's defaults."""
        from jgesr_lightning.aggregators import build_aggregator
        from jgesr_lightning.data import DATASETS
        from jgesr_lightning.models import MODELS

        one_of("data.name", self.data.name, DATASETS)
        one_of("model.name", self.model.name, MODELS)
        known = _method_settings(self.aggregator.name)
        try:
            method = build_aggregator(self.aggregator.name, **self.aggregator.settings)
        except (TypeError, ValueError) as error:
            message = str(error)
            raise ValueError(f"aggregator{'.' if message.split(' ')[0] in known else ': '}{message}") from None
        if self.clients < method.min_clients:
            raise ValueError(
                f"clients is {self.clients}; {self.aggregator.name} needs at least {method.min_clients} clients"
            )
        settings = {**known, **self.aggregator.settings}
        object.__setattr__(self, "aggregator", AggregatorConfig(self.aggregator.name, settings))

    @property
    def folder(self) -> Path:
        """The folder of this run, ``output_dir/name``."""
        return Path(self.output_dir).expanduser() / self.name

    def seed_of(self, purpose: str) -> int:
        """Return the seed of one source of randomness: partition, initial, channel or batches."""
        seed: int | None = getattr(self.seeds, purpose)
        return self.seed if seed is None else seed


def _share(name: str, value: float, *, zero: bool = True) -> None:
    """Raise ValueError unless `value` lies in [0, 1), or in (0, 1) where `zero` is False."""
    number(name, value)
    if not 0 <= value < 1 or (value == 0 and not zero):
        raise ValueError(f"{name} is {value!r}; it must be {'at least' if zero else 'above'} 0 and below 1")


def _method_settings(name: str) -> dict[str, Any]:
    """Return the settings of a method with their defaults."""
    from jgesr_lightning.aggregators import aggregator_names, aggregator_settings

    one_of("aggregator.name", name, aggregator_names())
    return dict(aggregator_settings(name))


def _setting_types(name: str) -> dict[str, Any]:
    """Return the settings of a method, dotted, with their types."""
    from jgesr_lightning.aggregators import setting_types

    return {f"aggregator.{key}": hint for key, hint in setting_types(name).items()}


SECTIONS: dict[str, Any] = {
    key: hint for key, hint in get_type_hints(Config).items() if isinstance(hint, type) and hint.__module__ == __name__
}
KEYS: dict[str, Any] = {
    **{key: hint for key, hint in get_type_hints(Config).items() if key not in SECTIONS},
    "name": str | None,
    **{
        f"{section}.{key}": hint
        for section, cls in SECTIONS.items()
        for key, hint in get_type_hints(cls).items()
        if f"{section}.{key}" != "aggregator.settings"
    },
}
"""Every key, dotted, with its type; the settings of the aggregation methods are known to the methods alone."""


class Entry(NamedTuple):
    """One setting as it was written, and where."""

    node: yaml.Node
    where: str


Layer = dict[str, Entry]


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Return the checked configuration of a YAML file under overrides.

    Args:
        path: a YAML file, or the bare name of one in ``configs/`` (``mnist_s01``).
        overrides: ``key=value`` or ``--key=value`` in any order; the last of two for one key wins. Those of the key
            ``_wandb``, which W&B's agents may add, are passed over.

    Raises:
        ConfigError: anything wrong with the file, a key or a value, in one line.
    """
    try:
        path = find_config(path)
        return _merge(_file_layers(path), parse_overrides(overrides), path.stem)
    except ConfigError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        raise ConfigError(error) from None


def from_dict(values: Mapping[str, Any]) -> Config:
    """Return the configuration of nested plain values, as `to_dict` gives them."""
    values = {key: value for key, value in values.items() if key not in SECTIONS} | {
        key: _section(key, dict(values[key])) for key in SECTIONS if key in values
    }
    return Config(**values)


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested plain values, the settings of the method beside its name."""
    values = asdict(config)
    values["aggregator"] = {"name": config.aggregator.name, **config.aggregator.settings}
    values["logging"]["tags"] = list(config.logging.tags)
    return values


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML text; `load_config` reads it back as an equal `Config`."""
    return parsing.dump(to_dict(config))


def find_config(name: str | Path) -> Path:
    """Return the YAML file that `name` stands for: a path, or the bare name of a file in ``configs/``."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    folders = [CONFIGS, Path(__file__).parent.parent / CONFIGS]
    if not path.is_absolute():
        for folder in folders:
            for candidate in (folder / path, folder / f"{path}.yaml"):
                if candidate.is_file():
                    return candidate
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a configuration file")
    known = [str(file) for folder in [path.parent, *folders] for file in sorted(folder.rglob("*.yaml"))]
    stems = {Path(file).stem: file for file in reversed(known)}
    close = nearest(path.stem, stems)
    hint = f" (did you mean {stems[close.split(chr(39))[1]]}?)" if close else ""
    raise ConfigError(f"no configuration file {path}{hint}")


def _file_layers(path: Path, read: dict[Path, bool] | None = None) -> list[Layer]:
    """Return the layers of a file's bases, then its own; a file that several others build on is applied once, first."""
    read = {} if read is None else read  # False while a file's bases are being read, then True
    read[path.resolve()] = False
    layer: Layer = {}
    layers: list[Layer] = []
    for key, node in parsing.leaves(parsing.read_tree(path), SECTIONS.__contains__, path):
        where = parsing.place(path, node)
        if key != "base":
            layer[_known(key, where)] = Entry(node, where)
            continue
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for name in (parsing.typed("base", entry, str) for entry in nodes):
            base = path.parent / name
            if not base.is_file():
                options = [str(file.relative_to(path.parent)) for file in sorted(path.parent.glob("*.yaml"))]
                raise ConfigError(f"{where}: no base file {base}{nearest(name, options)}")
            if read.get(base.resolve()) is False:
                raise ConfigError(f"{where}: base {name} leads back to {base}, which builds on this file")
            if base.resolve() not in read:
                layers += _file_layers(base, read)
    read[path.resolve()] = True
    return [*layers, layer]


def parse_overrides(overrides: Iterable[str]) -> Layer:
    """Return the layer of ``key=value`` arguments."""
    layer: Layer = {}
    for override in overrides:
        key, equals, value = override.removeprefix("--").partition("=")
        if key == "_wandb" or key.startswith("_wandb."):
            continue
        if not equals or not key:
            raise ConfigError(f"{override!r} is no setting: write key=value, such as local.lr=0.05")
        layer[_known(key, "")] = Entry(parsing.argument(value), "")
    return layer


def _known(key: str, where: str) -> str:
    """Return `key` if it is one, a method's setting included; ConfigError with the nearest otherwise."""
    at = f"{where}: " if where else ""
    if key in KEYS or (key.startswith("aggregator.") and key.count(".") == 1 and not key.endswith(".")):
        return key
    if key in SECTIONS:
        keys = [known for known in KEYS if known.startswith(f"{key}.")]
        more = " and the method's settings" if key == "aggregator" else ""
        raise ConfigError(f"{at}{key} is a section; give its keys: {', '.join(keys)}{more}")
    if key == "base":
        raise ConfigError("base belongs into a file")
    leaf = key.rpartition(".")[2]
    same = [known for known in KEYS if known.rpartition(".")[2] == leaf]
    hint = f" (did you mean {same[0]!r}?)" if same else nearest(key, KEYS)
    tops = [known for known in KEYS if "." not in known]
    known = f"; known: {', '.join([*tops, *(f'{section}.*' for section in SECTIONS)])}" if not hint else ""
    raise ConfigError(f"{at}unknown key {key!r}{hint}{known}")


def _merge(files: Sequence[Layer], overrides: Layer, stem: str) -> Config:
    """Merge the layers over the defaults, resolve ``${...}``, and check the result."""
    merged = OmegaConf.create(
        {key: asdict(SECTIONS[key]()) for key in SECTIONS if key != "aggregator"}
        | {"aggregator": {"name": AggregatorConfig.name}}
        | {item.name: item.default for item in fields(Config) if item.name not in SECTIONS}
        | {"name": None}
    )
    origins: dict[str, str] = {}
    settings: Layer = {}
    for layer in (*files, overrides):
        own = {key: entry for key, entry in layer.items() if key not in KEYS}
        before = str(OmegaConf.select(merged, "aggregator.name"))
        for key in layer.keys() - own.keys():
            origins[key] = layer[key].where
            OmegaConf.update(merged, key, _value(key, layer[key], KEYS[key]))
        after = str(OmegaConf.select(merged, "aggregator.name"))
        try:
            settings = {**_carried(settings, before, after), **own}
            if settings or layer is overrides:
                _check_settings(settings, after)
        except ValueError as error:
            raise ConfigError(_located(str(error), origins)) from None
    if OmegaConf.is_missing(merged, "name") or merged["name"] is None:
        merged["name"] = stem
    defaults = _method_settings(after)
    hints = KEYS | _setting_types(after)
    for key, default in defaults.items():
        OmegaConf.update(merged, f"aggregator.{key}", default)
    for key, entry in settings.items():
        origins[key] = entry.where
        OmegaConf.update(merged, key, _value(key, entry, hints[key]))
    try:
        return from_dict(_resolved(merged, hints, origins))
    except ValueError as error:
        raise ConfigError(_located(str(error), origins)) from None


def _value(key: str, entry: Entry, hint: Any) -> Any:
    try:
        return parsing.typed(key, entry.node, hint)
    except ValueError as error:
        raise ConfigError(_located(str(error), {key: entry.where})) from None


def _resolved(merged: DictConfig, hints: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """Return plain values with every ``${...}`` replaced and read as the type of its key."""
    values: Any = OmegaConf.to_container(merged, resolve=False)
    for key, hint in hints.items():
        section, _, leaf = key.rpartition(".")
        place = values[section] if section else values
        if not parsing.is_interpolation(place[leaf]):
            continue
        try:
            found = OmegaConf.select(merged, key)
            found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except OmegaConfBaseException as error:
            raise ConfigError(_located(f"{key} is {place[leaf]!r}; {str(error).splitlines()[0]}", origins)) from None
        if isinstance(found, dict) or parsing.is_interpolation(found):
            raise ConfigError(_located(f"{key} is {place[leaf]!r}; this gives {found!r}, which is no value", origins))
        place[leaf] = _value(key, Entry(parsing.scalar(found), origins.get(key, "")), hint)
    return dict(values)


def _carried(settings: Layer, before: str, after: str) -> Layer:
    """Return the settings of one method that hold for another that takes its place in a later layer.

    A setting is carried over where both methods have it with the same default, and so the same meaning; the others
    belong to the method that was left. What is dropped although it had been changed is named in a note.
    """
    if before == after or not settings:
        return settings
    old, new, hints = _method_settings(before), _method_settings(after), _setting_types(before)

    def values(keys: Iterable[str]) -> str:
        changed = []
        for key in keys:
            leaf = key.removeprefix("aggregator.")
            value = _value(key, settings[key], hints[key])
            if value != old[leaf]:
                changed.append(f"{leaf}={value}")
        return ", ".join(changed)

    missing = object()
    kept = {
        key: entry
        for key, entry in settings.items()
        if new.get(key.removeprefix("aggregator."), missing) == old[key.removeprefix("aggregator.")]
    }
    dropped, still = values(settings.keys() - kept.keys()), values(kept)
    if dropped:
        source = settings[next(key for key in settings if key not in kept)].where.partition(", line")[0]
        logger.warning(
            "aggregator.name=%s: settings of %s from %s not used: %s%s",
            after,
            before,
            source,
            dropped,
            f"; kept: {still}" if still else "",
        )
    return kept


def _check_settings(settings: Iterable[str], method: str) -> None:
    """Raise ValueError for a setting that the method does not have."""
    known = _method_settings(method)
    for key in settings:
        leaf = key.removeprefix("aggregator.")
        if leaf not in known:
            options = ", ".join(known) or "none"
            raise ValueError(f"{key} is no setting of {method}{nearest(leaf, known)}; its settings: {options}")


def _located(message: str, origins: Mapping[str, str]) -> str:
    """Return the message with the place where its key, the first word, was written."""
    where = origins.get(message.split(" ", 1)[0], "")
    return f"{message} ({where})" if where else message


def _section(name: str, values: dict[str, Any]) -> Any:
    if name == "aggregator":
        return AggregatorConfig(values.pop("name"), values)
    if name == "logging":
        values["tags"] = tuple(values["tags"])
    return SECTIONS[name](**values)
