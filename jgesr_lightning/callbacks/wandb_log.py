"""Logs a run to W&B: curves, graphs and clients. Whatever happens here, the run's own files are complete."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from jgesr_lightning.callbacks import wandb_media as media
from jgesr_lightning.callbacks.wandb_mode import resolve_mode, wandb_program
from jgesr_lightning.files import write_text
from jgesr_lightning.paths import home, writable
from jgesr_lightning.records import FederationState, RoundRecord, best_of, last_measured
from jgesr_lightning.wandb_names import Labels

if TYPE_CHECKING:
    from lightning.pytorch.loggers import WandbLogger

    from jgesr_lightning.plan import RoundPlan
    from jgesr_lightning.timing import Stopwatch

logger = logging.getLogger(__name__)

ID_FILE = "wandb_run_id"
HEADLINE = "accuracy/received"
INIT_SECONDS = 30.0
FAILED_SECONDS = 10.0
"""How long a run that failed waits for a W&B run that is still starting, to mark it failed."""


class WandbLog:
    """Callback that logs each round to W&B, from rank zero alone.

    Mode "auto" logs online where an API key is configured and the server answers, and offline otherwise, decided in
    about two seconds; the environment variable WANDB_MODE goes before it. Where W&B cannot start, one line says so and
    the run goes on without; under a sweep (WANDB_SWEEP_ID), which is nothing without W&B, it raises.

    W&B starts in a thread, beside training; rounds that end before it is ready are logged with the first one after.

    A run that is resumed in its own folder continues its W&B run, whose id stands in the file ``wandb_run_id`` there,
    and below it how many records W&B has. A W&B run is first given the rounds that came before and that it lacks.

    Args:
        folder: the run's folder; all that W&B writes lands in its subfolder ``wandb``.
        labels: name, project, group and what else W&B files the run under.
        config: the resolved configuration, nested plain values.
        mode: "auto", "online", "offline" or "disabled".
        graph_every: rounds from one picture and table of the graph to the next; the last round's is always logged.
        class_table: columns and rows of the table of clients and classes, as in ``partition.csv``; None: no table.
        artifacts: whether the final models and graph of a finished run are kept as an artifact.
        save_code: whether the package's code is kept with the run.
        announce: called once when the W&B run has begun, from the thread that started it, with what ``summary.json``
            says of it: id, mode, project, group; online its path and url, offline the command that sends it.

    Attributes:
        logger: Lightning's logger around the W&B run, for whoever wants to log more; None until it has started, and
            where there is no run.
    """

    def __init__(
        self,
        folder: str | Path,
        labels: Labels,
        config: Mapping[str, Any],
        mode: str = "auto",
        graph_every: int = 5,
        class_table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None,
        artifacts: bool = False,
        save_code: bool = False,
        announce: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.labels = labels
        self.config = dict(config)
        self.mode = mode
        self.graph_every = graph_every
        self.class_table = class_table
        self.artifacts = artifacts
        self.save_code = save_code
        self.announce = announce
        self.logger: WandbLogger | None = None
        self._run: Any = None
        self._start: _Start | None = None
        self._progress: tuple[RoundPlan, FederationState] | None = None
        self._logged = 0  # records that W&B has
        self._named: set[str] = set()  # metrics whose summary is defined
        self._diverged = False
        self._set: dict[str, str] = {}  # variables of the environment

    def on_federation_start(self, plan: RoundPlan, state: FederationState) -> None:
        """Begin to start or continue the W&B run, without waiting for it."""
        if self.mode == "disabled" or not plan.fabric.is_global_zero:
            return
        self._progress = (plan, state)
        self._set = {name: place for name, place in _folders(self.folder / "wandb").items() if name not in os.environ}
        os.environ |= self._set  # before W&B reads its settings
        records = len(state.records)
        self._start = _Start(lambda: self._begin(records))

    def on_round_end(self, plan: RoundPlan, state: FederationState, record: RoundRecord, watch: Stopwatch) -> None:
        """Log the numbers of this round, and of those before it that W&B lacks; and their graphs, where due."""
        with watch.part("log"):
            if self._ready(wait=0.0):
                self._catch_up()

    def on_federation_end(self, plan: RoundPlan, state: FederationState, status: str) -> None:
        """Log what is left, write the summary and end the W&B run, as preempted where it was asked to stop."""
        models = None
        if self.artifacts and self.mode != "disabled" and status == "finished":
            models = plan.sharding.gather(state.models).to(state.models.dtype)  # all processes take part
        if self._start is None:
            return
        if self._ready(wait=2 * INIT_SECONDS):
            self._catch_up()
            self._summarise(state)
            if models is not None:
                self._safely(lambda: self._keep(plan, state, models))
            if status == "stopped":
                reason = f"stopped after round {state.round} of {plan.rounds}; resume=auto goes on from there"
                self._safely(lambda: self._run.alert("run stopped early", reason, level="WARN"))
                self._safely(lambda: self._run.mark_preempting())
        self.close(exit_code=0 if status == "finished" else 1)

    def close(self, exit_code: int, reason: str = "", wait: float = FAILED_SECONDS) -> None:
        """End the W&B run, as failed unless `exit_code` is 0; does nothing where it has ended or never began.

        Args:
            exit_code: 0 for a run that did what was asked.
            reason: why it failed, for an alert; empty: no alert.
            wait: seconds for a W&B run that is still starting.
        """
        if self._start is not None and self._ready(wait, strict=False):
            self._catch_up(strict=False)
            if reason:
                self._safely(lambda: self._run.alert("run failed", reason, level="ERROR"), strict=False)
        self._finish(exit_code)

    def _finish(self, exit_code: int) -> None:
        run, self._run, self._start = self._run, None, None
        if run is not None:
            try:
                run.finish(exit_code=exit_code)
            except Exception as error:
                logger.warning("W&B did not end in order: %s", _line(error))
        for name in self._set:
            os.environ.pop(name, None)
        self._set = {}

    def _ready(self, wait: float, strict: bool = True) -> bool:
        """Whether the W&B run has begun, after `wait` seconds at most; raises where a sweep's could not (`strict`)."""
        if self._run is not None:
            return True
        start = self._start
        if start is None or not start.done(wait):
            return False
        if start.error is not None:
            self._finish(exit_code=1)
            if strict and "WANDB_SWEEP_ID" in os.environ:
                raise RuntimeError(f"W&B did not start, and a sweep needs it: {_line(start.error)}") from start.error
            logger.warning("no W&B for this run (its files are complete without): %s", _line(start.error))
        elif start.result is None:
            self._finish(exit_code=0)
        else:
            self._run, self._logged = start.result
        return self._run is not None

    def _begin(self, records: int) -> tuple[Any, int] | None:
        """Return the W&B run, and how many of the `records` that a resumed run has it holds; None where it is off."""
        import wandb
        from lightning.pytorch.loggers import WandbLogger

        sweep = "WANDB_SWEEP_ID" in os.environ
        mode, reason = resolve_mode(self.mode, sweep=sweep)
        if mode == "disabled":
            if sweep:
                logger.warning("W&B is disabled by WANDB_MODE or WANDB_DISABLED: the sweep learns nothing of this run")
            return None
        self.folder.mkdir(parents=True, exist_ok=True)  # else W&B writes into the system's temporary folder
        id_file = self.folder / ID_FILE
        kept = id_file.read_text().split() if records and id_file.is_file() and not sweep else []
        known = kept[0] if kept else ""
        labels = self.labels
        started = wandb.init(
            name=labels.name,
            dir=str(self.folder),
            project=None if sweep else labels.project,  # the agent has decided
            entity=None if sweep else labels.entity,
            id=None if sweep else known or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
            # offline there is no server to ask, and under a sweep the agent has decided
            resume=None if sweep or mode == "offline" else "allow",
            mode=mode,
            config=self.config,
            group=labels.group,
            job_type=labels.job_type,
            notes=labels.notes,
            tags=list(labels.tags) or None,
            save_code=True if self.save_code else None,
            # offline, W&B's page of curves in characters would only get in the way
            settings=wandb.Settings(init_timeout=INIT_SECONDS, login_timeout=5, silent=mode == "offline"),
        )
        # Lightning's logger would start a run with an x axis of its own, and settings that W&B warns about
        self.logger = WandbLogger(experiment=started)
        run = self.logger.experiment
        sync = sync_command(self.folder, run.id) if mode == "offline" else ""
        if reason:
            logger.warning("W&B logs offline, %s; send it later: %s", reason, sync)
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        # a run that was offline so far is new to the server
        continued = bool(known) and (mode == "offline" or bool(run.resumed))
        had = min(records, int(kept[1]) if len(kept) > 1 else records) if continued else 0  # older runs do not say
        self._note(run, had)
        if self.class_table is not None and not had:
            run.log({"clients/classes": media.table(*self.class_table)}, step=0, commit=False)
        if self.save_code and not had:
            run.log_code(str(Path(__file__).parent.parent), name=f"code-{run.id}")
        if self.announce is not None:
            self.announce(_facts(run, mode, sync))
        return run, had

    def _note(self, run: Any, logged: int) -> None:
        """Note which W&B run to go on with, and what it has: a run that is killed has both, in one step, or neither."""
        if "WANDB_SWEEP_ID" not in os.environ:
            write_text(self.folder / ID_FILE, f"{run.id}\n{logged}\n")

    def _catch_up(self, strict: bool = True) -> None:
        """Log every record that W&B does not have yet."""
        assert self._progress is not None
        plan, state = self._progress
        while self._run is not None and self._logged < len(state.records):
            self._logged += 1
            self._safely(lambda: self._log(plan, state, state.records[: self._logged]), strict)
            self._safely(lambda: self._note(self._run, self._logged), strict)

    def _log(self, plan: RoundPlan, state: FederationState, records: Sequence[RoundRecord]) -> None:
        """Log the last of `records`, with pictures where they are due."""
        record = records[-1]
        pictures = self._pictures(plan, state, records) if plan.is_due(record.round, self.graph_every) else {}
        for name in record.metrics.keys() - self._named:
            # one by one: W&B takes one of several patterns that match, and pictures want no summary of this kind.
            # A sweep's search reads a plain number, which W&B keeps where no summary is defined
            self._named.add(name)
            if "WANDB_SWEEP_ID" not in os.environ:
                summary = "last,max" if name.startswith("accuracy/") else "last"
                self._run.define_metric(name, step_metric="round", summary=summary)
        # the round is W&B's own step, too: what a resumed run repeats is not logged twice. Committed at once, so that
        # a killed run has lost nothing
        self._run.log({**record.metrics, **pictures, "round": record.round}, step=record.round, commit=True)
        if record.info.get("reason") == "diverged" and not self._diverged:
            self._diverged = True
            text = f"round {record.round}: the solver of {self.config['aggregator']['name']} diverged"
            self._run.alert("solver diverged", f"{text}; aggregator.step=backtracking helps", level="ERROR")

    def _pictures(self, plan: RoundPlan, state: FederationState, records: Sequence[RoundRecord]) -> dict[str, Any]:
        """Return the graph of the last of `records`, and the clients' curves up to it."""
        number = records[-1].round
        shown = media.client_curves(records)
        graph = state.graphs.get(number)
        if graph is None:
            return shown
        label = "mixing weight" if plan.aggregator.mixing else "edge weight"
        order = media.client_order(self.class_table, len(graph))
        title = f"{self.config['aggregator']['name']}, round {number}"
        return shown | media.graph_media(graph, state.layer_graphs.get(number), order, label, title, number)

    def _summarise(self, state: FederationState) -> None:
        last, metric = last_measured(state.records), str(self.config.get("metric") or HEADLINE)
        if last is None:
            return
        best = best_of(state.records, metric) or last
        summary: dict[str, Any] = {
            f"last/{name}": value for name, value in last.metrics.items() if not name.startswith("seconds/")
        }
        summary |= {"last/round": last.round, "best/round": best.round, "best/metric": metric}
        summary |= {f"best/{name}": best.metrics[name] for name in (HEADLINE, metric) if name in best.metrics}
        self._safely(lambda: self._run.summary.update(summary))

    def _keep(self, plan: RoundPlan, state: FederationState, models: Tensor) -> None:
        last = state.records[-1].metrics.get(HEADLINE)
        metadata = {"round": state.round, HEADLINE: last, "method": self.config["aggregator"]["name"]}
        graph = state.graphs.get(state.round)
        self._run.log_artifact(media.models_artifact(f"models-{self._run.id}", models, plan.layout, graph, metadata))

    def _safely(self, action: Callable[[], Any], strict: bool = True) -> None:
        """Do something with the W&B run; where that fails, say so in one line and log no further."""
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            if strict and "WANDB_SWEEP_ID" in os.environ:
                raise
            logger.warning("W&B failed, the run goes on without: %s", _line(error))
            self._finish(exit_code=1)


class _Start:
    """Something that is done in a thread, with its result or error."""

    def __init__(self, action: Callable[[], tuple[Any, int] | None]) -> None:
        self.result: tuple[Any, int] | None = None
        self.error: Exception | None = None
        self._action = action
        self._thread = threading.Thread(target=self._work, name="W&B start", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self.result = self._action()
        except Exception as error:
            self.error = error

    def done(self, wait: float) -> bool:
        """Whether it is over, after `wait` seconds at most."""
        self._thread.join(wait)
        return not self._thread.is_alive()


def _folders(place: Path) -> dict[str, str]:
    """Return the variables with which W&B keeps in `place` what it could keep nowhere else.

    Its data always: there it stages tables, and finds them again when an offline run is sent. Its cache where the home
    folder cannot be written. Its configuration where there is no home folder at all, without which it does not start.
    """
    at_home = home()
    parts = {"WANDB_DATA_DIR": "data"}
    if at_home is None or not writable(at_home):
        parts["WANDB_CACHE_DIR"] = "cache"
    if at_home is None:
        parts |= {"WANDB_CONFIG_DIR": "config", "XDG_DATA_HOME": "data"}  # the latter is looked up before the first
    return {name: str((place / part).resolve()) for name, part in parts.items()}


def sync_command(folder: Path, run_id: str) -> str:
    """Return the command that sends an offline run: every part of it, where it was resumed."""
    parts = sorted((folder / "wandb").glob(f"offline-run-*-{run_id}"))
    return f"{wandb_program()} {shlex.join(['sync', *map(str, parts)])}"


def _facts(run: Any, mode: str, sync: str) -> dict[str, Any]:
    facts = {"id": run.id, "mode": mode, "project": run.project, "group": run.group}
    return facts | ({"sync": sync} if mode == "offline" else {"path": run.path, "url": run.url})


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
