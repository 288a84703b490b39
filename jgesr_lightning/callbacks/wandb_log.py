"""Logs a run to W&B: curves, graphs and the class table. Whatever happens here, the run's own files are complete."""

from __future__ import annotations

import logging
import netrc
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from jgesr_lightning.identity import group_name
from jgesr_lightning.records import RoundRecord

if TYPE_CHECKING:
    from lightning.pytorch.loggers import WandbLogger

    from jgesr_lightning.federation import Federation, FederationState, Stopwatch

logger = logging.getLogger(__name__)

ID_FILE = "wandb_run_id"
Mode = Literal["online", "offline", "disabled"]
DATA_VARIABLE = "WANDB_DATA_DIR"
HEADLINE = "accuracy/received"
REACH_SECONDS = 2.0
INIT_SECONDS = 30.0


class WandbLog:
    """Callback that logs each round to W&B, from rank zero alone.

    Mode "auto" logs online where an API key is configured and the server answers, and offline otherwise, decided in
    about two seconds; the environment variable WANDB_MODE goes before it. Where W&B cannot start, one line says so and
    the run goes on without; under a sweep (WANDB_SWEEP_ID), which is nothing without W&B, it raises.

    A run that is resumed in its own folder continues its W&B run, whose id stands in the file ``wandb_run_id`` there.
    A W&B run that begins in the middle is first given the rounds that came before.

    Args:
        folder: the run's folder; all that W&B writes lands in its subfolder ``wandb``.
        run_name: name shown in W&B.
        project: W&B project.
        config: the resolved configuration, nested plain values.
        group: W&B group; None: one group for all seeds of this configuration.
        tags: W&B tags.
        mode: "auto", "online", "offline" or "disabled".
        graph_every: rounds from one picture and table of the graph to the next; the last round's is always logged.
        class_table: columns and rows of the table of clients and classes, as in ``partition.csv``; None: no table.

    Attributes:
        logger: Lightning's logger around the W&B run, for whoever wants to log more; None where there is no run.
    """

    def __init__(
        self,
        folder: str | Path,
        run_name: str,
        project: str,
        config: Mapping[str, Any],
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str = "auto",
        graph_every: int = 5,
        class_table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.run_name = run_name
        self.project = project
        self.config = dict(config)
        self.group = group or group_name(config)
        self.tags = tuple(tags)
        self.mode = mode
        self.graph_every = graph_every
        self.class_table = class_table
        self.logger: WandbLogger | None = None
        self._run: Any = None
        self._best: tuple[int, float] | None = None
        self._owns_data_variable = False

    def on_federation_start(self, federation: Federation, state: FederationState) -> None:
        """Start or continue the W&B run; bring it up to the round that `state` has reached."""
        if self.mode == "disabled" or not federation.fabric.is_global_zero:
            return
        try:
            self._run, continued = self._start(resumed=bool(state.records))
        except Exception as error:
            if "WANDB_SWEEP_ID" in os.environ:
                raise RuntimeError(f"W&B did not start, and a sweep needs it: {_line(error)}") from error
            logger.warning("no W&B for this run (its files are complete without): %s", _line(error))
            self.close(exit_code=1)
            return
        if self._run is None:
            self.close(exit_code=0)
            return
        if self.class_table is not None and not continued:
            columns, rows = self.class_table
            self._safely(lambda: self._run.log({"clients/classes": _table(columns, rows)}, step=0, commit=False))
        for record in state.records:
            if continued:
                self._note_best(record)
            else:
                self._log(record)

    def on_round_end(
        self, federation: Federation, state: FederationState, record: RoundRecord, watch: Stopwatch | None = None
    ) -> None:
        """Log a round's numbers and, when it is due, its graph."""
        if self._run is None:
            return
        part: AbstractContextManager[None] = nullcontext() if watch is None else watch.part("log")
        with part:
            due = record.round % self.graph_every == 0 or record.round == federation.rounds
            self._log(record, self._pictures(federation, state, record.round) if due else {})

    def on_federation_end(self, federation: Federation, state: FederationState, status: str) -> None:
        """Write the summary and end the W&B run, as preempted where it was asked to stop."""
        if self._run is None:
            return
        self._summarise(state)
        if status == "stopped":
            self._safely(lambda: self._run.mark_preempting())
        self.close(exit_code=0 if status == "finished" else 1)

    def close(self, exit_code: int) -> None:
        """End the W&B run, as failed unless `exit_code` is 0; does nothing where it has ended or never began."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish(exit_code=exit_code)
            except Exception as error:
                logger.warning("W&B did not end in order: %s", _line(error))
        if self._owns_data_variable:
            os.environ.pop(DATA_VARIABLE, None)
            self._owns_data_variable = False

    def _start(self, resumed: bool) -> tuple[Any, bool]:
        """Return the W&B run, and whether it continues an earlier one that has the rounds so far."""
        import wandb
        from lightning.pytorch.loggers import WandbLogger

        if DATA_VARIABLE not in os.environ:
            # where W&B stages tables, and finds them again when an offline run is sent. Before W&B reads its settings
            os.environ[DATA_VARIABLE] = str((self.folder / "wandb" / "data").resolve())
            self._owns_data_variable = True
        sweep = "WANDB_SWEEP_ID" in os.environ
        mode, reason = resolve_mode(self.mode, sweep=sweep)
        if mode == "disabled":
            return None, False
        self.folder.mkdir(parents=True, exist_ok=True)  # else W&B writes into the system's temporary folder
        id_file = self.folder / ID_FILE
        known = id_file.read_text().strip() if resumed and id_file.is_file() and not sweep else ""
        run_id = None if sweep else known or secrets.token_hex(4)
        started = wandb.init(
            name=self.run_name,
            dir=str(self.folder),
            project=self.project,
            id=run_id,
            # offline there is no server to ask, and under a sweep the agent has decided
            resume=None if sweep or mode == "offline" else "allow",
            mode=mode,
            config=self.config,
            group=self.group,
            tags=list(self.tags) or None,
            # offline, W&B's page of curves in characters would only get in the way
            settings=wandb.Settings(init_timeout=INIT_SECONDS, login_timeout=5, silent=mode == "offline"),
        )
        # Lightning's logger would start a run with an x axis of its own, and settings that W&B warns about
        self.logger = WandbLogger(experiment=started)
        run = self.logger.experiment
        if reason:
            logger.warning("W&B logs offline, %s; send it later: wandb sync %s", reason, Path(run.dir).parent)
        if not sweep:
            # written in one step: a run killed here has either the whole id or none
            scratch = id_file.with_suffix(".part")
            scratch.write_text(f"{run.id}\n")
            scratch.replace(id_file)
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        # a run that was offline so far is new to the server
        return run, bool(known) and (mode == "offline" or bool(run.resumed))

    def _log(self, record: RoundRecord, pictures: Mapping[str, Any] | None = None) -> None:
        self._note_best(record)
        row = {**record.metrics, **(pictures or {}), "round": record.round}
        # the round is W&B's own step, too: what a resumed run repeats is not logged twice. Committed at once, so that
        # a killed run has lost nothing
        self._safely(lambda: self._run.log(row, step=record.round, commit=True))

    def _note_best(self, record: RoundRecord) -> None:
        value = record.metrics.get(HEADLINE)
        if value is not None and (self._best is None or value > self._best[1]):
            self._best = (record.round, value)

    def _pictures(self, federation: Federation, state: FederationState, number: int) -> dict[str, Any]:
        """Return the graph of a round as an image and as a table of values; those of single layers too, if there."""
        if number not in state.graphs:
            return {}
        import wandb

        from jgesr_lightning.reporting import plots

        label = "mixing weight" if federation.aggregator.mixing else "edge weight"
        graph = state.graphs[number].numpy()
        order = plots.cluster_order(graph)
        names = [str(client) for client in range(len(graph))]
        figure = plots.graph_heatmap(graph, order, f"{self.config['aggregator']['name']}, round {number}", label)
        logged = {
            "graph/picture": wandb.Image(plots.to_pixels(figure)),
            "graph/values": _table(["client", *names], [[k, *row] for k, row in enumerate(graph.tolist())]),
        }
        if number in state.layer_graphs:
            layers = state.layer_graphs[number].numpy()
            figures = [
                plots.graph_heatmap(one, order, f"layer {at}, round {number}", label) for at, one in enumerate(layers)
            ]
            logged["graph/layers"] = [wandb.Image(plots.to_pixels(figure)) for figure in figures]
            rows = [[at, k, *row] for at, one in enumerate(layers.tolist()) for k, row in enumerate(one)]
            logged["graph/layer_values"] = _table(["layer", "client", *names], rows)
        return logged

    def _summarise(self, state: FederationState) -> None:
        measured = [record for record in state.records if HEADLINE in record.metrics]
        if not measured or self._best is None:
            return
        last = measured[-1]
        summary = {f"last/{name}": value for name, value in last.metrics.items() if not name.startswith("seconds/")}
        summary |= {"last/round": last.round, "best/round": self._best[0], f"best/{HEADLINE}": self._best[1]}
        self._safely(lambda: self._run.summary.update(summary))

    def _safely(self, action: Callable[[], Any]) -> None:
        """Do something with the W&B run; where that fails, say so in one line and log no further."""
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            if "WANDB_SWEEP_ID" in os.environ:
                raise
            logger.warning("W&B failed, the run goes on without: %s", _line(error))
            self.close(exit_code=1)


def resolve_mode(mode: str, *, sweep: bool = False) -> tuple[Mode, str]:
    """Return "online", "offline" or "disabled", and why where "auto" became "offline", else an empty text.

    Args:
        mode: "auto", or one of the three, which then stands.
        sweep: whether a sweep's agent started this run: it has just spoken to the server, so "auto" is online.
    """
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    if mode != "auto":
        return modes[mode], ""
    named = os.environ.get("WANDB_MODE", "").strip().lower()
    modes |= {"dryrun": "offline", "shared": "online", "run": "online"}
    if named in modes:
        return modes[named], ""
    if os.environ.get("WANDB_DISABLED", "").strip().lower() in ("true", "1", "t"):
        return "disabled", ""
    if sweep:
        return "online", ""
    import wandb

    url = wandb.setup().settings.base_url
    if not has_key(url):
        return "offline", "no API key being configured (`wandb login` sets one)"
    if not reachable(url):
        return "offline", f"{url} not answering within {REACH_SECONDS:g} s"
    return "online", ""


def has_key(url: str) -> bool:
    """Return whether a key for the server at `url` stands in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    for path in [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            found = netrc.netrc(str(path)).authenticators(urlsplit(url).hostname or "")
        except (OSError, netrc.NetrcParseError):
            continue
        if found and found[2]:
            return True
    return False


def reachable(url: str, seconds: float = REACH_SECONDS) -> bool:
    """Return whether the server of `url`, or the proxy on the way to it, accepts a connection within `seconds`."""
    target = urlsplit(url)
    host = target.hostname or ""
    proxy = None if proxy_bypass(host) else getproxies().get(target.scheme)
    if proxy:
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    address = (target.hostname or "", target.port or (80 if target.scheme == "http" else 443))
    answered = threading.Event()

    def knock() -> None:
        try:
            with socket.create_connection(address, timeout=seconds):
                answered.set()
        except OSError:
            pass

    # in a thread, because looking up a name has no time limit of its own
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    import wandb

    return wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
