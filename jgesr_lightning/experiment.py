"""From a configuration to a finished run: builds the parts, runs the federation, leaves a run folder."""

from __future__ import annotations

import json
import os
import platform
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jgesr_lightning import __version__
from jgesr_lightning.aggregators import build_aggregator
from jgesr_lightning.callbacks.checkpoint import Checkpoint
from jgesr_lightning.callbacks.files import ResultFiles, partition_table, write_partition
from jgesr_lightning.callbacks.orchestrator import RoundOrchestrator
from jgesr_lightning.callbacks.progress import Progress
from jgesr_lightning.callbacks.wandb_log import WandbLog
from jgesr_lightning.channel import Uplink, noise_std_for
from jgesr_lightning.client import ClientModule
from jgesr_lightning.config import Config, ConfigError, load_config, to_dict, to_yaml
from jgesr_lightning.data import FederatedDataModule
from jgesr_lightning.federation import Federation, FederationState, NonFiniteError
from jgesr_lightning.identity import group_name
from jgesr_lightning.layout import ParameterLayout
from jgesr_lightning.models import build_model
from jgesr_lightning.paths import user_path
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.runtime.files import InUseError, locked, move_aside, say, write_text
from jgesr_lightning.runtime.launch import (
    OURSELVES,
    Launch,
    LaunchError,
    build_fabric,
    first_process,
    plan,
    started_by_fabric_run,
)
from jgesr_lightning.runtime.sharding import PeerLostError, Sharding, assign, talking
from jgesr_lightning.runtime.signals import StopRequest
from jgesr_lightning.training import ClientData, build_engine, precision_remark
from jgesr_lightning.wandb_names import PROJECT, Labels, labels

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.float32, "64-true": torch.float64}
FREE_ON_RESUME = (
    *("name", "output_dir", "resume", "rounds"),
    *("engine", "deterministic", "runtime", "checkpoint", "logging", "metric"),
)
"""Keys that may differ between a checkpoint and the run that goes on from it: they do not change what is computed."""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: "finished", "stopped", or, on the other processes of a run that the first one accounts for, "failed".
        folder: where its files are.
        rounds_done: rounds completed.
        reason: the signal that stopped it, or an empty string.
    """

    status: str
    folder: Path
    rounds_done: int
    reason: str = ""


@dataclass(frozen=True)
class Opening:
    """What the first process found when it opened the run's folder, for all processes.

    Attributes:
        source: checkpoint to go on from, or None.
        finished: whether there is nothing left to do.
        refusal: why the run cannot be, or an empty string.
    """

    source: Path | None = None
    finished: bool = False
    refusal: str = ""


def run(config: Config) -> Result:
    """Run the federation that `config` describes.

    Every process of a run calls this; the first one alone writes files and speaks.

    Raises:
        ConfigError: the folder is in use, or what is to be resumed is not there or was run with other settings.
        DataError: the data cannot be had, or cannot be partitioned as asked.
        NonFiniteError: an upload or an aggregate was not finite; what was reached is saved.
        CheckpointError: a checkpoint could not be written or read; the former one is kept.
        PeerLostError: another process of the run is gone.
    """
    try:
        launch = plan(config.runtime.accelerator, config.runtime.devices, config.runtime.num_nodes, config.clients)
    except LaunchError as error:
        if not first_process():  # which says it for all
            return Result("failed", run_folder(config), 0)
        raise ConfigError(error) from error
    folder = run_folder(config)
    _labels(config, folder)  # refused before any work
    data = _data(config)
    if not first_process():
        try:
            return _run(config, folder, data, None, launch)
        except (ConfigError, NonFiniteError, checkpoint.CheckpointError, PeerLostError):
            # the first process has the same error, or is the one that was lost: one line is enough
            return Result("failed", folder, 0)
    with ExitStack() as held:
        opening = _open(config, folder, held)
        if launch.launcher != OURSELVES:
            return _run(config, folder, data, opening, launch)
        early = _outcome(opening, config, folder)  # before the other processes are started
        return early or _run(config, folder, data, opening, launch)


def _open(config: Config, folder: Path, held: ExitStack) -> Opening:
    """Lock the run's folder for as long as `held` lasts, and make it ready; refusals are returned, not raised."""
    try:
        if not folder.parent.exists():  # where a refusal should not make it
            _resumable(config, folder)
        held.enter_context(locked(folder.parent / f".{folder.name}.lock"))
        resumed = _resumable(config, folder)
        if resumed is not None and resumed[1]["round"] == config.rounds and _is_finished(folder, resumed[0]):
            return Opening(finished=True)
        _prepare_folder(config, folder, resumed)
    except InUseError as error:
        return Opening(refusal=f"{folder} is in use by another run ({error}); choose another name=")
    except (ConfigError, OSError) as error:
        return Opening(refusal=str(error))
    return Opening(None if resumed is None else resumed[0])


def _outcome(opening: Opening, config: Config, folder: Path) -> Result | None:
    """Return the result where there is nothing to do, None where there is; raises where the run cannot be."""
    if opening.refusal:
        raise ConfigError(opening.refusal)
    if not opening.finished:
        return None
    if first_process():
        say(f"{folder} is finished already ({config.rounds} rounds); nothing to do")
    return Result("finished", folder, config.rounds)


def _is_finished(folder: Path, found: Path) -> bool:
    """Whether the checkpoint `found` is this folder's and its run said that it had ended."""
    try:
        status = json.loads((folder / "summary.json").read_text())["status"]
    except (OSError, ValueError, KeyError):
        return False
    return status == "finished" and _lies_in(found, folder)


def _lies_in(path: Path, folder: Path) -> bool:
    return folder.resolve() in path.resolve().parents


def run_folder(config: Config) -> Path:
    """Return the run's folder; under a W&B sweep agent, whose runs share one configuration, the run's id is added."""
    if os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"):
        return config.folder.with_name(f"{config.folder.name}-{os.environ['WANDB_RUN_ID']}")
    return config.folder


def _data(config: Config) -> FederatedDataModule:
    data = FederatedDataModule(
        name=config.data.name,
        root=config.data.root,
        num_clients=config.clients,
        kappa=config.data.kappa,
        fraction=config.data.fraction,
        min_samples=config.data.min_samples,
        test_share=config.data.test_share,
        seed=config.seed_of("partition"),
    )
    try:
        data.prepare_data()
        data.setup("fit")
    except ValueError as error:  # a partition that cannot be had, or no data: either way nothing was started
        raise ConfigError(error) from error
    return data


def _resumable(config: Config, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to go on from and what its processes share, or None to start anew."""
    if config.resume is None:
        return None
    source = folder if config.resume == "auto" else user_path(config.resume)
    found = checkpoint.newest(source / "checkpoint") or checkpoint.newest(source)
    if found is None and (source / "state.pt").is_file():
        found = source
    if found is None:
        if config.resume == "auto":
            _check_unsaved(config, folder)
            return None
        raise ConfigError(f"resume is {config.resume!r}, but there is no checkpoint in it")
    try:
        shared = checkpoint.read_shared(found)
    except checkpoint.CheckpointError as error:
        raise ConfigError(error) from error
    _check_same(shared["config"], config, found)
    if shared["round"] > config.rounds:
        raise ConfigError(f"rounds is {config.rounds}, but {found} has had {shared['round']} already")
    return found, shared


def _check_unsaved(config: Config, folder: Path) -> None:
    """Raise ConfigError where a run of other settings began in `folder` but saved nothing yet."""
    if (folder / "config.yaml").is_file():
        _check_same(to_dict(load_config(folder / "config.yaml")), config, folder)


def _check_same(former: dict[str, Any], config: Config, where: Path) -> None:
    differing = _differences(former, to_dict(config))
    if differing:
        raise ConfigError(
            f"{where} was written with other settings ({'; '.join(differing)}); "
            f"use the same ones, or choose another name= and leave out resume"
        )


def _differences(former: dict[str, Any], present: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the keys that differ, with both values, save those that a resumed run may change."""
    lines = []
    for key in sorted(former.keys() | present.keys()):
        old, new = former.get(key), present.get(key)
        if (not prefix and key in FREE_ON_RESUME and key != "runtime") or f"{prefix}{key}" in ("data.root",):
            continue
        if not prefix and key == "runtime":
            old, new = ({"precision": section["precision"]} for section in (old, new))  # type: ignore[index]
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key} was {old}, is {new}")
    return lines


def _prepare_folder(config: Config, folder: Path, resumed: tuple[Path, dict[str, Any]] | None) -> None:
    """Make the run's folder; a former run that is not to be continued is kept beside it."""
    # with nothing saved, resume=auto begins again where it left off: at the start, in the same folder
    continued = config.resume == "auto" or (resumed is not None and _lies_in(resumed[0], folder))
    if not continued and any((folder / name).exists() for name in ("config.yaml", "summary.json", "checkpoint")):
        aside = move_aside(folder)
        say(f"{folder} held a run already; it is kept as {aside}")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.yaml", to_yaml(config))


def _run(config: Config, folder: Path, data: FederatedDataModule, opening: Opening | None, launch: Launch) -> Result:
    if config.deterministic:
        _make_deterministic()
    dtype = DTYPES[config.runtime.precision]
    net = build_model(
        config.model.name, data.in_channels, data.image_size, data.num_classes, config.seed_of("initial")
    ).to(dtype)
    layout = ParameterLayout.of(net)
    initial = layout.flatten(net.state_dict())
    sizes, test_sizes = data.sizes.tolist(), data.test_sizes.tolist()
    owners = assign([config.local.epochs * size for size in sizes], launch.world_size)

    deviation = noise_std_for(initial[: layout.num_parameters], config.channel.noise)
    files = ResultFiles(folder, _facts(config, folder, float(deviation)), config.logging.csv)
    saver = Checkpoint(folder / "checkpoint", config.checkpoint.every, to_dict(config))
    # the orchestrator goes first and alone writes; saving goes last, when everything else has been told
    table = partition_table(data.classes, data.class_counts, sizes, test_sizes)
    wandb_log = _wandb(config, folder, table, files)
    observers = [Progress(), files, wandb_log, saver]
    orchestrator = RoundOrchestrator(layout, observers)
    fabric = build_fabric(launch, config.runtime.precision, [orchestrator, *observers])
    with StopRequest() as stop:
        if not started_by_fabric_run():
            fabric.launch()
        with talking():
            agreed = fabric.broadcast(opening)
        assert agreed is not None  # the first process sent its own
        early = _outcome(agreed, config, folder)
        if early:
            return early
        sharding = Sharding(owners, layout.size, fabric.global_rank, fabric.device)
        aggregator = build_aggregator(config.aggregator.name, **config.aggregator.settings).to(fabric.device)
        client = ClientModule(
            net,
            lr=config.local.lr,
            momentum=config.local.momentum,
            terms=aggregator.client_terms(config.local.proximal_mu),
        )
        own = [
            ClientData(
                *data.train_tensors(k, device=fabric.device, dtype=dtype),
                *data.test_tensors(k, device=fabric.device, dtype=dtype),
            )
            for k in sharding.clients
        ]
        engine, reason = build_engine(
            config.engine,
            fabric,
            client,
            own,
            sharding.clients,
            data.num_classes,
            config.local.epochs,
            config.local.batch_size,
            config.seed_of("batches"),
        )
        federation = Federation(
            fabric=fabric,
            orchestrator=orchestrator,
            engine=engine,
            uplink=Uplink(deviation, config.channel.missing_rate, config.seed_of("channel")),
            aggregator=aggregator,
            sharding=sharding,
            layout=layout,
            initial=initial.to(fabric.device),
            sizes=sizes,
            test_sizes=test_sizes,
            rounds=config.rounds,
            participation=config.participation,
            evaluation_every=config.evaluation.every,
            graph_every=config.logging.graph_every,
            nonfinite=config.nonfinite,
            seed=config.seed,
            stop=stop,
        )
        if fabric.is_global_zero:
            write_partition(folder / "partition.csv", *table)
            _announce(config, folder, launch, engine.name, reason, layout)
        try:
            return _drive(config, folder, federation, agreed.source, files, saver)
        finally:
            wandb_log.close(exit_code=1)  # where the run has not ended it in order


def _drive(
    config: Config,
    folder: Path,
    federation: Federation,
    source: Path | None,
    files: ResultFiles,
    saver: Checkpoint,
) -> Result:
    """Load what is resumed, run, and account for failures."""
    zero = federation.fabric.is_global_zero
    state = federation.fresh_state()
    if source is not None:
        shared = checkpoint.read_shared(source)
        state = checkpoint.load(source, shared, federation.sharding, federation.fabric.device)
        federation.aggregator.load_state(shared["aggregator"])
        if zero:
            say(f"going on from {source}, after round {state.round}")
    try:
        status = federation.run(state)
    except NonFiniteError as error:
        if state.round > 0:
            saver.save(federation, state)
        if zero:
            files.write_summary(config.rounds, state, "failed", str(error))
        raise
    except (PeerLostError, checkpoint.CheckpointError) as error:
        if zero:
            _try_summary(files, config.rounds, state, str(error))
        raise
    except OSError as error:
        remedy = "make room, then go on with resume=auto" if folder.is_dir() else "the folder is gone"
        reason = f"could not write the results in {folder}: {error}; {remedy}"
        if zero:
            _try_summary(files, config.rounds, state, reason)
        raise OSError(reason) from error
    if zero:
        if status == "stopped":
            say(
                f"stopped by {federation.stop.received or 'another process'} after round {state.round} of "
                f"{config.rounds}, saved; go on with resume=auto"
            )
        say(f"results: {folder}")
    return Result(status, folder, state.round, federation.stop.received or "")


def _try_summary(files: ResultFiles, rounds: int, state: FederationState, reason: str) -> None:
    try:
        files.write_summary(rounds, state, "failed", reason)
    except OSError as error:  # the disk may be full; the failure itself is on its way to the user
        say(f"summary.json could not be written: {error}")


def _facts(config: Config, folder: Path, deviation: float) -> dict[str, Any]:
    """Return what summary.json says of the run besides its outcome."""
    return {
        "name": folder.name,
        "method": config.aggregator.name,
        "dataset": config.data.name,
        "model": config.model.name,
        "noise": config.channel.noise,
        "noise_std": deviation,
        "missing_rate": config.channel.missing_rate,
        "seed": config.seed,
        "fidelity": config.aggregator.settings.get("fidelity"),
        "versions": {
            "jgesr_lightning": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "config": to_dict(config),
    }


def _wandb(config: Config, folder: Path, table: tuple[list[str], list[list[Any]]], files: ResultFiles) -> WandbLog:
    return WandbLog(
        folder=folder,
        labels=_labels(config, folder),
        config=to_dict(config),
        mode=config.logging.wandb_mode if config.logging.wandb else "disabled",
        graph_every=config.logging.graph_every,
        class_table=table,
        artifacts=config.logging.artifacts,
        save_code=config.logging.save_code,
        announce=lambda facts: files.facts.update(wandb=dict(facts)),
    )


def _labels(config: Config, folder: Path) -> Labels:
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


def _announce(config: Config, folder: Path, launch: Launch, engine: str, reason: str, layout: ParameterLayout) -> None:
    say(
        f"{config.aggregator.name} on {config.data.name}: {config.clients} clients, {config.rounds} rounds, "
        f"noise {config.channel.noise:g}, missing {config.channel.missing_rate:g}, seed {config.seed}; "
        f"{config.model.name} of {layout.size:,} parameters"
    )
    say(f"{launch.world_size} x {launch.accelerator}, engine {engine} ({reason}); results go to {folder}")
    remark = precision_remark(launch.accelerator, config.runtime.precision)
    if remark:
        say(remark)


def _make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # filling fresh memory guards against reading it uninitialised, which nothing here does; it costs a pass a tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
