"""From a configuration to the parts of a run; the only place where settings are handed to constructors."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from jgesr_lightning.aggregators import Aggregator, build_aggregator
from jgesr_lightning.callbacks.checkpoint import Checkpoint
from jgesr_lightning.callbacks.files import ResultFiles
from jgesr_lightning.callbacks.own import Plain
from jgesr_lightning.callbacks.progress import Progress
from jgesr_lightning.callbacks.wandb_log import WandbLog
from jgesr_lightning.channel import Downlink, OwnUplink, Uplink, build_uplink, noise_std_for
from jgesr_lightning.client import ClientModule
from jgesr_lightning.config import Config, ConfigError, to_dict
from jgesr_lightning.data import FederatedDataModule
from jgesr_lightning.identity import group_name
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.models import build_model, check_sizes, shape_arguments
from jgesr_lightning.names import code_of, label
from jgesr_lightning.orchestrator import RoundOrchestrator
from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.regularisers import Proximal
from jgesr_lightning.runtime.sharding import Sharding, assign
from jgesr_lightning.runtime.signals import StopRequest
from jgesr_lightning.schedules import Schedule
from jgesr_lightning.training import ClientData, Engine, build_engine, choose_engine
from jgesr_lightning.version import __version__
from jgesr_lightning.wandb_names import PROJECT, Labels, labels

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.float32, "64-true": torch.float64}


@dataclass(frozen=True)
class Start:
    """What everybody starts from.

    Attributes:
        aggregator: the server's method, at its beginning.
        net: the network, with the initial weights.
        layout: order of the columns.
        initial: (d,) the initial model.
        uplink: the channel, the deviation of its noise fixed for the run.
        downlink: the way back, likewise.
    """

    aggregator: Aggregator
    net: nn.Module
    layout: ParameterLayout
    initial: Tensor
    uplink: Uplink
    downlink: Downlink


@dataclass(frozen=True)
class Watchers:
    """The callbacks of a run, as `in_order`; `own` are those of whoever started it from Python."""

    orchestrator: RoundOrchestrator
    progress: Progress
    files: ResultFiles
    wandb: WandbLog
    saver: Checkpoint
    own: tuple[object, ...] = ()

    @property
    def in_order(self) -> list[object]:
        """The orchestrator goes first and alone writes; saving goes last, when everything else has been told.

        What somebody's own add to a round's record is there when it is written.
        """
        own = [*self.own, Plain()] if self.own else []
        return [self.orchestrator, *own, self.progress, self.files, self.wandb, self.saver]


def data_module(config: Config) -> FederatedDataModule:
    """Return the data, read and partitioned.

    Raises:
        ConfigError: they cannot be had, or cannot be partitioned as asked.
    """
    data = FederatedDataModule(num_clients=config.clients, seed=config.seed_of("partition"), **dict(config.data))
    try:
        data.setup("fit")
    except ValueError as error:  # a partition that cannot be had, or no data: either way nothing was started
        raise ConfigError(error) from error
    return data


def start(config: Config, data: FederatedDataModule, device_type: str) -> Start:
    """Return the method, the initial model and what is derived from it.

    Raises:
        ConfigError: the network does not fit the data, or the clients' sizes, or the engine that was asked for;
            or a link of one's own returns no model.
    """
    local, precision = config.local, config.runtime.precision
    aggregator = build_aggregator(config.aggregator.name, **config.aggregator.settings)
    try:
        net = build_model(
            config.model.name, *shape_arguments(data.input_shape), data.num_classes, config.seed_of("initial")
        ).to(DTYPES[precision])
        check_sizes(net, local.batch_size, dict(enumerate(data.sizes.tolist())))
        choose_engine(config.engine, device_type, net, local.batch_size, precision, data.input_shape)
    except ValueError as error:
        raise ConfigError(error) from error
    layout = ParameterLayout.of(net)
    initial = layout.flatten(net.state_dict())
    channel = config.channel
    parameters = initial[: layout.num_parameters]
    noise_std = noise_std_for(parameters, channel.noise)
    down = config.downlink
    downlink = Downlink(noise_std_for(parameters, down.noise), down.missing_rate, config.seed_of("channel"))
    try:
        uplink = build_uplink(
            channel.name, channel.settings, noise_std, channel.missing_rate, config.seed_of("channel")
        )
        if isinstance(uplink, OwnUplink):
            _check_together(uplink, aggregator, downlink)
            uplink.try_out(initial, config.clients)  # before any work
    except ValueError as error:
        raise ConfigError(error) from error
    return Start(aggregator, net, layout, initial, uplink, downlink)


def _check_together(link: OwnUplink, aggregator: Aggregator, downlink: Downlink) -> None:
    """Raise ValueError for a method, or a way back, that does not go with a link of somebody's own."""
    what, name = label(link.name), aggregator.name
    doubt = "" if downlink.is_perfect else "a downlink that is not perfect"
    doubt = "own=clean" if aggregator.own == "clean" else doubt
    if doubt and "previous" in link.named:
        raise ValueError(
            f"channel.name is {what!r}, which asks for `previous`; with {doubt} the server does not know what a client "
            "goes on from"
        )
    if "noise_std" in aggregator.needs and link.known_noise(1) is None:
        raise ValueError(
            f"channel.name is {what!r}, which does not ask for noise_std: its noise is not known, which {name} needs "
            "as it is set"
        )


def watchers(
    config: Config, folder: Path, data: FederatedDataModule, begin: Start, labels: Labels, own: Sequence[object] = ()
) -> Watchers:
    """Return the callbacks of a run whose files go to `folder`, and which W&B files under `labels`."""
    table = data.table()
    facts = _facts(config, folder, data, begin)
    files = ResultFiles(folder, facts, config.logging.csv, table, config.metric)
    wandb_log = WandbLog(
        folder=folder,
        labels=labels,
        config=to_dict(config),
        mode=config.logging.wandb_mode if config.logging.wandb else "disabled",
        graph_every=config.logging.graph_every,
        class_table=table,
        artifacts=config.logging.artifacts,
        save_code=config.logging.save_code,
        announce=lambda facts: files.add_facts(wandb=dict(facts)),
    )
    observers = (
        Progress(),
        files,
        wandb_log,
        Checkpoint(
            folder / "checkpoint",
            config.checkpoint.every,
            to_dict(config),
            config.checkpoint.keep_trained,
            facts["code"],
        ),
    )
    return Watchers(RoundOrchestrator(begin.layout, (*own, *observers)), *observers, tuple(own))


def wandb_labels(config: Config, folder: Path) -> Labels:
    """Return what W&B files the run under; ConfigError for what it would refuse."""
    logging = config.logging
    if not logging.wandb:
        return Labels(folder.name, PROJECT, "")
    keys = ("project", "group", "entity", "job_type", "notes")
    given = {"name": folder.name if config.named else None, **{key: getattr(logging, key) for key in keys}}
    defaults = {"name": folder.name, "group": group_name(to_dict(config))}
    try:
        return labels(given, logging.tags, defaults, os.environ)
    except ValueError as error:
        raise ConfigError(error) from None


def round_plan(
    config: Config,
    fabric: Fabric,
    data: FederatedDataModule,
    begin: Start,
    orchestrator: RoundOrchestrator,
    stop: StopRequest,
) -> tuple[RoundPlan, str]:
    """Return what the rounds are made of, and why the engine in it was taken; needs a launched Fabric."""
    owners = assign([config.local.epochs * size for size in data.sizes.tolist()], fabric.world_size)
    sharding = Sharding(owners, begin.layout.size, fabric.global_rank, fabric.device)
    aggregator = begin.aggregator.to(fabric.device)
    device, dtype = fabric.device, begin.initial.dtype
    own = {
        k: ClientData(*data.train_tensors(k, device, dtype), *data.test_tensors(k, device, dtype))
        for k in sharding.clients
    }
    taken, reason = engine(config, fabric, begin.net, aggregator, own, data.num_classes, data.input_shape)
    plan = RoundPlan(
        fabric=fabric,
        collector=orchestrator,
        engine=taken,
        uplink=begin.uplink,
        downlink=begin.downlink,
        aggregator=aggregator,
        sharding=sharding,
        layout=begin.layout,
        initial=begin.initial.to(fabric.device),
        weights=data.sizes.double(),
        test_weights=data.test_sizes.double(),
        rounds=config.rounds,
        participation=config.participation,
        evaluation_every=config.evaluation.every,
        graph_every=config.logging.graph_every,
        nonfinite=config.nonfinite,
        seed=config.seed,
        stop=stop,
        groups=data.client_groups,
    )
    return plan, reason


def engine(
    config: Config,
    fabric: Fabric,
    net: nn.Module,
    aggregator: Aggregator,
    data: Mapping[int, ClientData],
    num_classes: int,
    input_shape: Sequence[int],
) -> tuple[Engine, str]:
    """Return what trains clients, `data` by their numbers, as the configuration and the method have it; and why that.

    Raises:
        ValueError: the engine that was asked for cannot train the network.
    """
    local = config.local
    client = ClientModule(
        net,
        lr=local.lr,
        momentum=local.momentum,
        terms=aggregator.client_terms(local.proximal_mu),
        optimizer=local.optimizer,
        weight_decay=local.weight_decay,
        clip_norm=local.clip_norm,
        schedule=Schedule(local.schedule, local.schedule_rounds, local.schedule_factor),
    )
    return build_engine(
        config.engine,
        fabric,
        client,
        list(data.values()),
        list(data),
        num_classes,
        local.epochs,
        local.batch_size,
        config.seed_of("batches"),
        input_shape,
    )


def _facts(config: Config, folder: Path, data: FederatedDataModule, begin: Start) -> dict[str, Any]:
    """Return what summary.json says of the run besides its outcome."""
    terms = begin.aggregator.client_terms(config.local.proximal_mu)
    return {
        "name": folder.name,
        "method": label(config.aggregator.name),
        "dataset": label(config.data.name),
        "data": data.facts(),
        "model": label(config.model.name),
        "channel": label(config.channel.name),
        "noise": config.channel.noise,
        "noise_std": float(begin.uplink.noise_std),
        "missing_rate": config.channel.missing_rate,
        "seed": config.seed,
        "fidelity": config.aggregator.settings.get("fidelity"),
        "proximal_mu": sum(term.mu for term in terms if isinstance(term, Proximal)),
        "client_terms": [repr(term) for term in terms],
        "versions": {
            "jgesr_lightning": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "code": code_of(to_dict(config)),
        "config": to_dict(config),
    }
