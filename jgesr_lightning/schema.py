"""What a run can be told: typed sections with their defaults, each checking its own values.

Every key has a type, a default, a meaning and a check here, once. Nothing here needs torch until the names of models,
data sets and methods are looked up, which comes last.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from jgesr_lightning.checks import flag, number, one_of, whole


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
        batch_size: samples a step; the paper gives none, 128 is what brings FedAvg's row nearest to the paper's.
        lr: learning rate.
        momentum: at least 0 and below 1.
        proximal_mu: weight of mu/2 ||x - x_sent||^2 in the loss; None leaves it to the method.
    """

    epochs: int = 5
    batch_size: int = 128
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
        flag("logging.csv", self.csv)
        flag("logging.wandb", self.wandb)
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
        flag("deterministic", self.deterministic)
        one_of("nonfinite", self.nonfinite, ("drop", "raise"))
        self._check_registries()

    def _check_registries(self) -> None:
        """Check names and the method's settings where they are defined, and fill in the method's defaults."""
        from jgesr_lightning.aggregators import build_aggregator
        from jgesr_lightning.models import MODELS

        one_of("model.name", self.model.name, MODELS)
        known = method_settings(self.aggregator.name)
        try:
            method = build_aggregator(self.aggregator.name, **self.aggregator.settings)
        except (TypeError, ValueError) as error:
            message = str(error)
            raise ValueError(f"aggregator{'.' if message.split(' ')[0] in known else ': '}{message}") from None
        if self.clients < method.min_clients:
            raise ValueError(
                f"clients is {self.clients}; {self.aggregator.name} needs at least {method.min_clients} clients"
            )
        from jgesr_lightning.data import DATASETS  # the slowest import, so the last check

        one_of("data.name", self.data.name, DATASETS)
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


def method_settings(name: str) -> dict[str, Any]:
    """Return the settings of a method with their defaults."""
    from jgesr_lightning.aggregators import aggregator_names, aggregator_settings

    one_of("aggregator.name", name, aggregator_names())
    return dict(aggregator_settings(name))


def setting_types_of(name: str) -> dict[str, Any]:
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
