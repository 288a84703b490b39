"""What a run can be told: every key once, with its type, default, bounds and meaning; each section checks itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from jgesr_lightning import names
from jgesr_lightning.aggregators import min_clients
from jgesr_lightning.config.methods import checked_settings
from jgesr_lightning.config.section import Section
from jgesr_lightning.paths import user_path
from jgesr_lightning.schedules import Schedule, check_optimizer
from jgesr_lightning.wandb_names import refusal


def _path(text: str) -> str:
    """Return a path as it stands; ValueError where it names no place."""
    user_path(text)
    return text


PathText = Annotated[str, AfterValidator(_path)]
Positive = Annotated[int, Field(ge=1)]
Metric = Literal[
    "accuracy/received", "accuracy/received_weighted", "accuracy/received_std", "accuracy/received_worst",
    "accuracy/received_worst_decile", "accuracy/trained", "accuracy/trained_weighted", "accuracy/trained_std",
    "accuracy/trained_worst", "accuracy/trained_worst_decile",
]  # fmt: skip
Seed = Annotated[int, Field(ge=0)]


class DataConfig(Section):
    """The data set and how it is shared out."""

    section = "data"

    name: str = Field("mnist", description="a data set of `jgesr_lightning.data`")
    root: PathText | None = Field(None, description="folder of the data; None: the variable JGESR_DATA, else ``data``")
    verify: bool = Field(True, description="whether files of a published set must have the published checksums")
    label: str = Field("label", pattern=r"\S", description="column of labels in tables (.csv)")
    partition: str | None = Field(
        None,
        pattern=r"\S",
        description="how samples are shared out, or a file of lists; None: as the data are",
    )
    classes_per_client: int = Field(
        2, ge=1, description="shards of one class that a client is dealt (partition shards)"
    )
    planted: Literal["labels", "rotations"] | None = Field(
        None, description="clients are in groups, told apart by renamed classes or turned images; None: no groups"
    )
    groups: int = Field(4, ge=2, description="number of planted groups")
    kappa: float = Field(0.05, gt=0, description="concentration of the partitions dirichlet and quantity")
    fraction: float = Field(1.0, gt=0, le=1, description="part of the training data that is used")
    min_samples: int = Field(20, ge=2, description="fewest samples of a client, its test share included")
    test_share: float = Field(0.25, gt=0, lt=1, description="part of a client's samples kept for its local test")

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return names.check("data", name)

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, name: str | None) -> str | None:
        return name and names.check("partitions", name)


class ModelConfig(Section):
    """The network."""

    section = "model"

    name: str = Field("lenet", description="a network of `jgesr_lightning.models`")

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return names.check("models", name)


class LocalConfig(Section):
    """Training at the clients. The paper gives no batch size: 128 brings FedAvg's row nearest to its own."""

    section = "local"

    epochs: int = Field(5, ge=1, description="passes over a client's training samples in each round")
    batch_size: Positive | Literal["full"] = Field(128, description="samples a step; full: all of a client's, one step")
    lr: float = Field(0.01, gt=0, description="learning rate")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="rule of a step, begun anew each visit")
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.0, ge=0, description="of the optimizer")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a step's gradient; None: any")
    schedule: Literal["constant", "cosine", "step"] = Field("constant", description="of the learning rate over rounds")
    schedule_rounds: Positive | None = Field(None, description="rounds of the cosine, or from step to step")
    schedule_factor: float = Field(0.1, ge=0, le=1, description="what the cosine ends at, or a step multiplies by")
    proximal_mu: float | None = Field(
        None, ge=0, description="weight of mu/2 ||x - x_sent||^2; None: the method's own; 0: none"
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        check_optimizer(self.optimizer, self.momentum, self.weight_decay, self.clip_norm)
        Schedule(self.schedule, self.schedule_rounds, self.schedule_factor)
        return self


class ChannelConfig(Section):
    """The uplink from the clients to the server."""

    section = "channel"

    noise: float = Field(0.1, ge=0, description="s; the noise on client k has the deviation s * mean|psi_k^(0)|")
    missing_rate: float = Field(0.0, ge=0, lt=1, description="probability that an entry does not arrive")


class AggregatorConfig(Section):
    """The aggregation method at the server, with all its settings: what is not given is filled in."""

    section = "aggregator"

    name: str = Field("jgesr", description="a method of `jgesr_lightning.aggregators`")
    settings: dict[str, Any] = Field(default_factory=dict, description="the method's own settings")

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        self.__dict__["settings"] = checked_settings(self.name, self.settings)
        return self


class EvaluationConfig(Section):
    """When accuracies are measured; the first and the last round always are."""

    section = "evaluation"

    every: int = Field(1, ge=1, description="rounds from one evaluation to the next")


class RuntimeConfig(Section):
    """Where the run computes; the words are those of Lightning Fabric."""

    section = "runtime"

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = Field("auto", description="kind of device")
    devices: Positive | Literal["auto"] = Field("auto", description="number of devices on each node")
    num_nodes: int = Field(1, ge=1, description="number of machines")
    precision: Literal["32-true", "bf16-mixed", "64-true"] = Field("32-true", description="of training")


class CheckpointConfig(Section):
    """When the run is saved; the last round always is."""

    section = "checkpoint"

    every: int = Field(1, ge=1, description="rounds from one checkpoint to the next")
    keep_trained: bool = Field(True, description="whether the last round's trained models are kept too; twice the size")


class LoggingConfig(Section):
    """What is written beside summary.json and graphs.npz, and how much of it goes to W&B."""

    section = "logging"

    csv: bool = Field(True, description="whether metrics.csv and clients.csv are written")
    wandb: bool = Field(True, description="whether W&B is used at all")
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto", description="auto: online with a key and a network, else offline"
    )
    project: str | None = Field(None, description="W&B project; None: WANDB_PROJECT, else jgesr_lightning")
    group: str | None = Field(
        None, description="W&B group; None: WANDB_RUN_GROUP, else one for all seeds of this configuration"
    )
    entity: str | None = Field(None, description="user or team that owns the project; None: WANDB_ENTITY, else yours")
    job_type: str | None = Field(None, description="kind of work within a group; None: WANDB_JOB_TYPE, else none")
    notes: str | None = Field(None, description="free text; None: WANDB_NOTES, else none")
    tags: tuple[str, ...] = Field((), strict=False, description="W&B tags; none: those of WANDB_TAGS")
    artifacts: bool = Field(False, description="whether W&B keeps the final models and graph as an artifact")
    save_code: bool = Field(False, description="whether W&B keeps the code of this package")
    graph_every: int = Field(5, ge=1, description="rounds from one picture of the graph to the next")

    @field_validator("project", "group", "entity", "job_type")
    @classmethod
    def _taken_by_wandb(cls, text: str | None, info: ValidationInfo) -> str | None:
        if reason := refusal(str(info.field_name), text):
            raise ValueError(reason)
        return text

    @field_validator("tags")
    @classmethod
    def _tags_taken_by_wandb(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        for reason in filter(None, (refusal("tag", tag) for tag in tags)):
            raise ValueError(reason.replace("it must", "each must", 1))
        return tags


class SeedsConfig(Section):
    """Seeds of single sources of randomness, so that each can be varied alone; None: the run's `seed`."""

    section = "seeds"

    partition: Seed | None = Field(None, description="which client holds which samples")
    initial: Seed | None = Field(None, description="the initial model")
    channel: Seed | None = Field(None, description="noise and missing entries")
    batches: Seed | None = Field(None, description="order of the samples in local training")


class Config(Section):
    """Everything that decides a run.

    Raises:
        ConfigError: a value that cannot be used, with its key and what would do.
    """

    name: str = Field("run", description="name of the run's folder; in a file, by default, the file's own name")
    seed: int = Field(0, ge=0, description="seed of all randomness that `seeds` does not set apart")
    rounds: int = Field(30, ge=1, description="R, rounds of training, upload and aggregation")
    clients: int = Field(20, ge=1, description="K")
    participation: float = Field(1.0, gt=0, le=1, description="part of the clients that take part in a round")
    output_dir: PathText = Field("runs", pattern=r"\S", description="folder of all runs")
    resume: PathText | None = Field(
        None, description='None: start afresh; "auto": continue the run in its folder; or the folder of another run'
    )
    engine: Literal["auto", "sequential", "stacked"] = Field(
        "auto", description="local training one client at a time, all at once, or the faster of the two"
    )
    deterministic: bool = Field(True, description="whether only operations that give the same bits are allowed")
    nonfinite: Literal["drop", "drop_all", "raise"] = Field(
        "drop",
        description="broken uploads are left out (drop: where others are left), or end the run",
    )
    metric: Metric = Field("accuracy/received", description="what results lead with")
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    local: LocalConfig = Field(default_factory=LocalConfig)
    channel: ChannelConfig = Field(default_factory=ChannelConfig)
    aggregator: AggregatorConfig = Field(default_factory=AggregatorConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    seeds: SeedsConfig = Field(default_factory=SeedsConfig)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[^\s/\\.][^/\\\x00-\x1f]{0,199}", name) or name != name.strip():
            raise ValueError("it names the run's folder: up to 200 characters, no slash, no leading dot")
        return name

    @model_validator(mode="after")
    def _enough_clients(self) -> Self:
        needed = min_clients(self.aggregator.name, self.aggregator.settings)
        if self.clients < needed:
            method = names.label(self.aggregator.name)
            raise ValueError(f"clients is {self.clients}; {method} needs at least {needed} clients")
        return self

    @property
    def named(self) -> bool:
        """Whether the name was given, rather than taken from the configuration file's own."""
        return "name" in self.model_fields_set

    @property
    def folder(self) -> Path:
        """The folder of this run, ``output_dir/name``."""
        return user_path(self.output_dir) / self.name

    def seed_of(self, purpose: str) -> int:
        """Return the seed of one source of randomness: partition, initial, channel or batches."""
        seed: int | None = getattr(self.seeds, purpose)
        return self.seed if seed is None else seed


SECTIONS: dict[str, type[Section]] = {
    key: field.annotation
    for key, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
KEYS: dict[str, Any] = {
    **{key: field.annotation for key, field in Config.model_fields.items() if key not in SECTIONS},
    "name": str | None,
    **{
        f"{section}.{key}": field.annotation
        for section, model in SECTIONS.items()
        for key, field in model.model_fields.items()
        if f"{section}.{key}" != "aggregator.settings"
    },
}
"""Every key, dotted, with its type; the settings of the aggregation methods are known to the methods alone."""
