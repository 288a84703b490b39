"""What a run can be told: every key once, with its type, default, bounds and meaning; each section checks itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from jgesr_lightning import names
from jgesr_lightning.aggregators import min_clients
from jgesr_lightning.config.methods import checked_link, checked_settings
from jgesr_lightning.config.section import STORED, Section
from jgesr_lightning.paths import CONTROLS, absolute, user_path
from jgesr_lightning.schedules import Schedule, check_optimizer
from jgesr_lightning.wandb_names import refusal


def _path(text: str) -> str:
    """Return a path as it stands; ValueError where it names no place."""
    user_path(text)
    return text


def _folder_name(name: str) -> str:
    fits = len(name) <= 200 and len(name.encode()) <= 240  # file systems take 255 bytes, those of a lock's ending, too
    if not fits or not re.fullmatch(r"[^\s/\\.][^/\\]*", name) or name != name.strip() or CONTROLS.search(name):
        raise ValueError(
            "it names a folder: up to 200 characters (240 bytes), no slash, no leading dot, no control character"
        )
    return name


def _taken_by_wandb(text: str | None, info: ValidationInfo) -> str | None:
    if reason := refusal(str(info.field_name), text):
        raise ValueError(reason)
    return text


def _tags_taken_by_wandb(tags: tuple[str, ...]) -> tuple[str, ...]:
    for reason in filter(None, (refusal("tag", tag) for tag in tags)):
        raise ValueError(reason.replace("it must", "each must", 1))
    return tags


def _known(kind: str) -> AfterValidator:
    """Return the check that a part of that kind stands behind a name."""

    def check(name: str, info: ValidationInfo) -> str:
        return name if info.context == STORED else names.check(kind, name)

    return AfterValidator(check)


def _is_elsewhere(kind: str, name: str, info: ValidationInfo) -> bool:
    """Return whether a part has to be imported to be asked, and must not be."""
    return info.context == STORED and not names.is_builtin(kind, name)


PathText = Annotated[str, AfterValidator(_path)]
Label = Annotated[str | None, AfterValidator(_taken_by_wandb)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Metric = Literal[
    "accuracy/received", "accuracy/received_weighted", "accuracy/received_std", "accuracy/received_worst",
    "accuracy/received_worst_decile", "accuracy/trained", "accuracy/trained_weighted", "accuracy/trained_std",
    "accuracy/trained_worst", "accuracy/trained_worst_decile",
]  # fmt: skip


class DataConfig(Section):
    """The data set and how it is shared out."""

    name: Annotated[str, _known("data")] = "mnist"
    """A data set of `jgesr_lightning.data`."""
    root: PathText | None = None
    """Folder of the data, seen from the current one; None: the variable JGESR_DATA, else ``data``."""
    verify: bool = True
    """Whether files of a published set must have the published checksums."""
    label: str = Field("label", pattern=r"\S")
    """Column of labels in tables (.csv)."""
    partition: Annotated[str, Field(pattern=r"\S"), _known("partitions")] | None = None
    """How samples are shared out, or a file of lists; None: as the data are."""
    classes_per_client: Positive = 2
    """Shards of one class that a client is dealt (partition shards)."""
    planted: Literal["labels", "rotations"] | None = None
    """Clients are in groups, told apart by renamed classes or turned images; None: no groups."""
    groups: int = Field(4, ge=2)
    """Number of planted groups."""
    kappa: float = Field(0.05, gt=0)
    """Concentration of the partitions dirichlet and quantity."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Part of the training data that is used."""
    min_samples: int = Field(20, ge=2)
    """Fewest training samples of a client, with those that become its test share."""
    test_share: float = Field(0.25, gt=0, lt=1)
    """Part of a client's samples kept for its local test."""

    @field_validator("root")
    @classmethod
    def _root_in_full(cls, root: str | None, info: ValidationInfo) -> str | None:
        """Return the root in full where it tells data apart, however it was written; a published set's as it stands."""
        return absolute(root) if root and info.data.get("name") not in names.FIXED_DATA else root


class ModelConfig(Section):
    """The network."""

    name: Annotated[str, _known("models")] = "lenet"
    """A network of `jgesr_lightning.models`."""


class LocalConfig(Section):
    """Training at the clients. The paper gives no batch size: 128 brings FedAvg's row nearest to its own."""

    epochs: Positive = 5
    """Passes over a client's training samples in each round."""
    batch_size: Positive | Literal["full"] = 128
    """Samples a step; full: all of a client's, one step."""
    lr: float = Field(0.01, gt=0)
    """Learning rate."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Rule of a step, begun anew each visit."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Of sgd."""
    weight_decay: float = Field(0.0, ge=0)
    """Of the optimizer."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest norm of a step's gradient; None: any."""
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """Of the learning rate over rounds."""
    schedule_rounds: Positive | None = None
    """Rounds of the cosine, or from step to step."""
    schedule_factor: float = Field(0.1, ge=0, le=1)
    """What the cosine ends at, or a step multiplies by."""
    proximal_mu: float | None = Field(None, ge=0)
    """Weight of mu/2 ||x - x_sent||^2; None: the method's own; 0: none."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        check_optimizer(self.optimizer, self.momentum, self.weight_decay, self.clip_norm)
        Schedule(self.schedule, self.schedule_rounds, self.schedule_factor)
        return self


class PartSection(Section):
    """A section that names a part, with that part's own settings beside the keys that all have."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Which part."""

    @property
    def settings(self) -> dict[str, Any]:
        """The part's own settings."""
        return dict(self.model_extra or {})

    def _take(self, settings: dict[str, Any]) -> None:
        """Have these for settings, in their order: that of the part's arguments."""
        own = self.model_extra
        assert own is not None  # keys of any name are allowed
        own.clear()
        own.update(settings)

    def replace(self, **values: Any) -> Self:
        """Return a copy with some values changed; another part has its own settings, from their defaults on."""
        named = names.resolve(str(values.get("name", self.name)))  # a file may be written in several ways
        if named == names.resolve(self.name):
            return super().replace(**values)
        return type(self)(**{**{key: getattr(self, key) for key in type(self).model_fields}, **values})


class ChannelConfig(PartSection):
    """The uplink from the clients to the server, with the settings of a link of one's own."""

    name: Annotated[str, _known("channels")] = "gaussian"
    """Noise and lost entries as below, or a function of one's own."""
    noise: float = Field(0.1, ge=0)
    """Level s: the noise on client k has the deviation s * mean|psi_k^(0)|."""
    missing_rate: float = Field(0.0, ge=0, lt=1)
    """Probability that an entry does not arrive."""

    @model_validator(mode="after")
    def _fill_in(self, info: ValidationInfo) -> Self:
        if not _is_elsewhere("channels", self.name, info):
            self._take(checked_link(self.name, self.noise, self.missing_rate, self.model_extra or {}))
        return self


class DownlinkConfig(Section):
    """The way back from the server to the clients; perfect, as the paper has it, unless told otherwise."""

    noise: float = Field(0.0, ge=0)
    """Level of its noise, as `channel.noise`."""
    missing_rate: float = Field(0.0, ge=0, lt=1)
    """Probability that an entry does not arrive, and stays as the client holds it."""


class AggregatorConfig(PartSection):
    """The aggregation method at the server, with all its settings: what is not given is filled in."""

    name: str = "jgesr"
    """A method of `jgesr_lightning.aggregators`."""

    @model_validator(mode="after")
    def _fill_in(self, info: ValidationInfo) -> Self:
        if not _is_elsewhere("aggregators", self.name, info):
            self._take(checked_settings(self.name, self.model_extra or {}))
        return self


class EvaluationConfig(Section):
    """When accuracies are measured; the first and the last round always are."""

    every: Positive = 1
    """Rounds from one evaluation to the next."""


class RuntimeConfig(Section):
    """Where the run computes; the words are those of Lightning Fabric."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    """Kind of device."""
    devices: Positive | Literal["auto"] = "auto"
    """Number of devices on each node."""
    num_nodes: Positive = 1
    """Number of machines."""
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    """Of training."""


class CheckpointConfig(Section):
    """When the run is saved; the last round always is."""

    every: Positive = 1
    """Rounds from one checkpoint to the next."""
    keep_trained: bool = True
    """Whether the last round's trained models are kept too; twice the size."""


class LoggingConfig(Section):
    """What is written beside summary.json and graphs.npz, and how much of it goes to W&B."""

    csv: bool = True
    """Whether metrics.csv and clients.csv are written."""
    wandb: bool = True
    """Whether W&B is used at all."""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Where runs go; auto: online with a key and a network, else offline."""
    project: Label = None
    """W&B project; None: WANDB_PROJECT, else jgesr_lightning."""
    group: Label = None
    """W&B group; None: WANDB_RUN_GROUP, else one for all seeds of this configuration."""
    entity: Label = None
    """User or team that owns the project; None: WANDB_ENTITY, else yours."""
    job_type: Label = None
    """Kind of work within a group; None: WANDB_JOB_TYPE, else none."""
    notes: str | None = None
    """Free text; None: WANDB_NOTES, else none."""
    tags: Annotated[tuple[str, ...], AfterValidator(_tags_taken_by_wandb)] = Field((), strict=False)
    """W&B tags; none: those of WANDB_TAGS."""
    artifacts: bool = False
    """Whether W&B keeps the final models and graph as an artifact."""
    save_code: bool = False
    """Whether W&B keeps the code of this package."""
    graph_every: Positive = 5
    """Rounds from one picture of the graph to the next."""


class SeedsConfig(Section):
    """Seeds of single sources of randomness, so that each can be varied alone; None: the run's `seed`."""

    partition: Seed | None = None
    """Which client holds which samples."""
    initial: Seed | None = None
    """The initial model."""
    channel: Seed | None = None
    """Noise and missing entries, of the downlink, too."""
    batches: Seed | None = None
    """Order of the samples in local training."""


class Config(Section):
    """Everything that decides a run.

    Raises:
        ConfigError: a value that cannot be used, with its key and what would do.
    """

    name: Annotated[str, AfterValidator(_folder_name)] = "run"
    """Name of the run's folder; in a file, by default, the file's own name."""
    seed: Seed = 0
    """Seed of all randomness that `seeds` does not set apart."""
    rounds: Positive = 30
    """R, rounds of training, upload and aggregation."""
    clients: Positive = 20
    """K, their number."""
    participation: float = Field(1.0, gt=0, le=1)
    """Part of the clients that take part in a round."""
    output_dir: PathText = Field("runs", pattern=r"\S")
    """Folder of all runs."""
    resume: Annotated[PathText, Field(pattern=r"\S")] | None = None
    """Where to go on from; None: afresh; "auto": continue the run in its folder; or the folder of another run."""
    engine: Literal["auto", "sequential", "stacked"] = "auto"
    """Local training one client at a time, all at once, or the faster of the two."""
    deterministic: bool = True
    """Whether only operations that give the same bits are allowed."""
    nonfinite: Literal["drop", "drop_all", "raise"] = "drop"
    """Broken uploads are left out (drop: where others are left), or end the run."""
    metric: Metric = "accuracy/received"
    """What results lead with."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    local: LocalConfig = LocalConfig()
    channel: ChannelConfig = ChannelConfig()
    downlink: DownlinkConfig = DownlinkConfig()
    aggregator: AggregatorConfig = AggregatorConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    seeds: SeedsConfig = SeedsConfig()

    @model_validator(mode="after")
    def _enough_clients(self, info: ValidationInfo) -> Self:
        if _is_elsewhere("aggregators", self.aggregator.name, info):
            return self
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
    key: type(field.default) for key, field in Config.model_fields.items() if isinstance(field.default, Section)
}
for name, model in SECTIONS.items():
    model.section = name

KEYS = (
    *(key for key in Config.model_fields if key not in SECTIONS),
    *(f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields),
)
"""Every key, dotted; the settings of the aggregation methods are known to the methods alone."""
