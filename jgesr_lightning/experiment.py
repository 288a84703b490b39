"""From a configuration to a finished run: opens the run's folder, runs the federation, accounts for how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jgesr_lightning import build
from jgesr_lightning.callbacks.own import check
from jgesr_lightning.callbacks.wandb_log import FAILED_SECONDS
from jgesr_lightning.closing import closing_lines
from jgesr_lightning.config import Config, ConfigError, to_dict
from jgesr_lightning.data import FederatedDataModule
from jgesr_lightning.failure import RunError, account, account_for_lost, forget
from jgesr_lightning.federation import Federation, NonFiniteError
from jgesr_lightning.files import say
from jgesr_lightning.names import is_builtin, label
from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.reporting.sources import UNREADABLE, Folder
from jgesr_lightning.run_folder import Opening, changed_code, open_folder, run_folder
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.runtime.environment import OURSELVES, LaunchError, is_first, seat
from jgesr_lightning.runtime.launch import Launch, build_fabric, meet_early, started_by_fabric_run
from jgesr_lightning.runtime.launch import plan as plan_launch
from jgesr_lightning.runtime.libraries import set_for_a_run
from jgesr_lightning.runtime.method_state import StateError, restore
from jgesr_lightning.runtime.sharding import PeerLostError, talking
from jgesr_lightning.runtime.signals import StopRequest
from jgesr_lightning.runtime.strategy import last_words, leave_at_exit
from jgesr_lightning.seeding import deterministic
from jgesr_lightning.summary import DamagedSummaryError, read_summary
from jgesr_lightning.trained import Trained, open_trained
from jgesr_lightning.training import precision_remark

if TYPE_CHECKING:
    from pandas import DataFrame


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

    @property
    def metrics(self) -> DataFrame:
        """One row a round, one column a metric, as in metrics.csv."""
        return self._table("metrics.csv")

    @property
    def clients(self) -> DataFrame:
        """One row a client and round, as in clients.csv."""
        return self._table("clients.csv")

    @property
    def graph(self) -> Tensor:
        """(K, K) float64: the graph, or the mixing matrix, of the last round."""
        path = self.folder / "graphs.npz"
        try:
            kept = Folder(self.folder).last_graph()
        except UNREADABLE as error:
            raise ConfigError(f"{path} cannot be read ({error})") from None
        if kept is None:
            raise ConfigError(f"there is no graph in {path}; a run keeps one every logging.graph_every rounds")
        return torch.from_numpy(kept[1])

    @property
    def models(self) -> Trained:
        """The clients' models; ``models.client(3)`` is a network ready for data as they come."""
        return open_trained(self.folder)

    def _table(self, name: str) -> DataFrame:
        import pandas as pd  # slow to import, and not needed by a run

        path = self.folder / name
        if not path.is_file():
            raise ConfigError(f"there is no {path}; logging.csv=true writes it")
        try:
            return pd.read_csv(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error})") from None


STOPPING = "stopping at the next point from which the run can go on; Ctrl-C again: at once"


@set_for_a_run()
def run(config: Config, callbacks: Sequence[object] = ()) -> Result:
    """Run the federation that `config` describes.

    Every process of a run calls this; the first one alone writes files and speaks.

    Args:
        config: the run.
        callbacks: objects with some of the hooks of `Federation`. What they add to the `metrics` of a round's record
            in ``on_round_end`` is written with it. They see what this process has: its clients alone.

    Raises:
        ConfigError: the folder is in use, or what is to be resumed is not there or was run with other settings.
        DataError: the data cannot be had, or cannot be partitioned as asked.
        NonFiniteError: an upload or an aggregate was not finite; what was reached is saved.
        CheckpointError: a checkpoint could not be written or read; the former one is kept.
        PeerLostError: another process of the run is gone.
        MeetingError: the processes of the run did not come together.
        OSError: the results could not be written.
        RunError: anything else that went wrong once the run had begun.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"run takes a configuration, as load_config returns one; got a {type(config).__name__}")
    check(callbacks)
    try:
        wanted = config.runtime
        launch = plan_launch(wanted.accelerator, wanted.devices, wanted.num_nodes, config.clients)
    except LaunchError as error:
        if not is_first():  # which says it for all
            return Result("failed", run_folder(config), 0)
        raise ConfigError(error) from error
    folder = run_folder(config)
    if launch.world_size == 1 and not is_first():
        return _of_the_first(folder)
    labels = build.wandb_labels(config, folder)  # refused before any work
    meet_early(launch)
    data = build.data_module(config)
    begin = build.start(config, data, launch.accelerator)
    watchers = build.watchers(config, folder, data, begin, labels, callbacks)
    go = partial(_run, config, folder, launch, data, begin, watchers)
    if not is_first():
        try:
            return go(None)
        except (ConfigError, NonFiniteError, checkpoint.CheckpointError, PeerLostError):
            # the first process has the same error, or is the one that was lost: one line is enough
            return Result("failed", folder, 0)
        except RunError as error:  # the first process has it, too, or says what this one wrote of it
            if error.where is None:
                raise
            return Result("failed", folder, 0)
    with ExitStack() as held:
        opening = open_folder(config, folder, held, data.digest())
        if launch.launcher != OURSELVES:
            return go(opening)
        early = _outcome(opening, config, folder)  # before the other processes are started
        return early or go(opening)


def _of_the_first(folder: Path) -> Result:
    """Return how a run ended that the first process had alone, before it started this one for a later run."""
    found: dict[str, Any] = {}
    with suppress(DamagedSummaryError):
        found = read_summary(folder)
    return Result(found.get("status", "failed"), folder, found.get("rounds_done", 0), found.get("reason", ""))


def _outcome(opening: Opening, config: Config, folder: Path) -> Result | None:
    """Return the result where there is nothing to do, None where there is; raises where the run cannot be."""
    if opening.refusal:
        raise ConfigError(opening.refusal)
    if not opening.finished:
        return None
    if is_first():
        say(f"{folder} is finished already ({config.rounds} rounds); nothing to do")
    return Result("finished", folder, config.rounds)


def _run(
    config: Config,
    folder: Path,
    launch: Launch,
    data: FederatedDataModule,
    begin: build.Start,
    watchers: build.Watchers,
    opening: Opening | None,
) -> Result:
    """Launch the processes, build what needs them, and run; the first process alone has opened the folder."""
    with (
        deterministic(config.deterministic),
        StopRequest(STOPPING if is_first() else "") as stop,
        last_words(lambda reason: account_for_lost(reason, config, folder, watchers.files)),
    ):
        agreed: Opening | None = None
        failure, wait = "", FAILED_SECONDS
        try:
            if opening is not None and not (opening.refusal or opening.finished):
                forget(folder)
            fabric = build_fabric(launch, config.runtime.precision, watchers.in_order, stop)
            if not started_by_fabric_run():
                fabric.launch()
            with talking():
                agreed = fabric.broadcast(opening)
            assert agreed is not None  # the first process sent its own
            result = _outcome(agreed, config, folder)
            if result is None:
                plan, reason = build.round_plan(config, fabric, data, begin, watchers.orchestrator, stop)
                if plan.sharding.any(agreed.digest != data.digest()):
                    what = f"data.name={config.data.name} or data.partition={config.data.partition}"
                    raise ConfigError(
                        f"the processes have different data, or shares of them: {what} must give each process the "
                        "same; a function of your own draws from the `seed` that it takes"
                    )
                if fabric.is_global_zero:
                    _announce(config, folder, launch, plan, reason)
                    if data.left_out:
                        say(f"data: {data.left_out}")
                result = _drive(config, folder, Federation(plan), agreed.source, watchers)
            leave_at_exit()
            return result
        except BaseException as error:
            failure = str(error) or type(error).__name__
            if isinstance(error, KeyboardInterrupt):
                wait = 0.0
            watchers.progress.close()
            if agreed is not None and agreed.refusal:  # the folder is somebody else's
                raise
            rank = 0 if is_first() else seat().rank
            account(error, config, folder, watchers.files if rank == 0 else None, rank)
        finally:
            watchers.wandb.close(exit_code=1, reason=failure, wait=wait)  # where the run has not ended it in order


def _drive(
    config: Config, folder: Path, federation: Federation, source: Path | None, watchers: build.Watchers
) -> Result:
    """Load what is resumed, run, and say how it ended."""
    plan = federation.plan
    stop, zero = plan.stop, plan.fabric.is_global_zero
    state = federation.fresh_state()
    if source is not None:
        shared = checkpoint.read_shared(source)
        state = checkpoint.load(source, shared, plan.sharding, plan.fabric.device)
        try:
            restore(plan.aggregator, shared["aggregator"], plan.sharding)
        except StateError as error:
            raise checkpoint.CheckpointError(f"cannot go on from {source}: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            kind = f"{type(error).__name__}: {error}"
            raise checkpoint.CheckpointError(
                f"{source} holds no state that {plan.aggregator.name} can go on from ({kind}): another version wrote "
                "it, or it is damaged; start anew without resume, under another name= to keep it"
            ) from error
        if zero:
            say(f"going on from {source}, after round {state.round}")
            if changed := changed_code(shared.get("code"), to_dict(config)):
                state.records[-1].info["changed_code"] = changed
                say(f"{', '.join(changed)}: changed since; a remark will say so of the results")
    try:
        status = federation.run(state)
    except NonFiniteError:
        if state.round > 0:
            watchers.saver.save(plan, state)
        raise
    if zero:
        if status == "stopped":
            say(
                f"stopped by {stop.received or 'another process'} after round {state.round} of "
                f"{config.rounds}, saved; go on with resume=auto"
            )
        for line in closing_lines(state.records, folder, config.rounds, status == "finished", config.metric):
            say(line)
    return Result(status, folder, state.round, stop.reason(status))


def _announce(config: Config, folder: Path, launch: Launch, plan: RoundPlan, reason: str) -> None:
    method, data, network = (label(part.name) for part in (config.aggregator, config.data, config.model))
    link = "" if is_builtin("channels", config.channel.name) else f"link {label(config.channel.name)}, "
    down = config.downlink
    back = "" if plan.downlink.is_perfect else f"downlink noise {down.noise:g}, missing {down.missing_rate:g}, "
    say(
        f"{method} on {data}: {config.clients} clients, {config.rounds} rounds, "
        f"{link}noise {config.channel.noise:g}, missing {config.channel.missing_rate:g}, {back}seed {config.seed}; "
        f"{network} of {plan.layout.size:,} parameters"
    )
    say(f"{launch.world_size} x {launch.accelerator}, engine {plan.engine.name} ({reason}); results go to {folder}")
    terms = plan.aggregator.client_terms(config.local.proximal_mu)
    if terms:
        say(f"the clients add to their loss: {', '.join(map(repr, terms))}")
    remark = precision_remark(launch.accelerator, config.runtime.precision)
    if remark:
        say(remark)
