"""The run's plain files: metrics.csv, clients.csv, partition.csv, graphs.npz and summary.json."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jgesr_lightning.files import naming, write_atomically, write_text
from jgesr_lightning.plan import RoundPlan
from jgesr_lightning.records import FederationState, RoundRecord, best_of, last_measured, remarks
from jgesr_lightning.summary import FILE, DamagedSummaryError, read_summary
from jgesr_lightning.timing import Stopwatch

PartitionTable = tuple[list[str], list[list[Any]]]
"""Columns and rows of the table of clients x classes."""

PROTOCOL = (
    "accuracy/received: each client's local test accuracy of the model it receives after the round; "
    "accuracy/trained: of the client's own model after local training, before the uplink. "
    "Plain names are unweighted means over clients, _weighted ones weigh by test samples. "
    "The result is that of the last round."
)


class ResultFiles:
    """Writes what a run found out; on rank zero only.

    CSV files grow by whole lines, and are written anew at the start (a resumed run begins with the rounds it had),
    whenever a new column turns up, and where somebody else has changed or removed one. The other files are replaced
    atomically.

    Args:
        folder: the run's folder.
        facts: what summary.json says of the run besides its outcome.
        write_csv: whether metrics.csv and clients.csv are written.
        partition: columns and rows of partition.csv; None: no such file.
        metric: the accuracy by which the summary's best round is the best.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        write_csv: bool = True,
        partition: PartitionTable | None = None,
        metric: str = "accuracy/received",
    ) -> None:
        self.folder = folder
        self.facts = dict(facts)
        self.write_csv = write_csv
        self.partition = partition
        self.metric = metric
        self._columns: dict[str, list[str]] = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        self._seconds_before = 0.0
        self._start = time.perf_counter()
        self._outcome: tuple[int, FederationState, str, str] | None = None  # rounds, state, status and reason so far
        self._lock = threading.Lock()  # facts may come from another thread

    def on_federation_start(self, plan: RoundPlan, state: FederationState) -> None:
        """Write the partition, and the rounds and graphs that a resumed run has already had."""
        self._outcome = (plan.rounds, state, "running", "")
        if not plan.fabric.is_global_zero:
            return
        if self.partition is not None:
            columns, rows = self.partition
            write_text(self.folder / "partition.csv", _csv([columns, *rows]))
        device = plan.fabric.device
        on_gpu = device.type == "cuda"
        self.facts |= {
            "engine": plan.engine.name,
            "processes": plan.fabric.world_size,
            "device": torch.cuda.get_device_name(device) if on_gpu else f"{device.type} {platform.machine()}",
        }
        self._seconds_before = float(state.records[-1].metrics.get("seconds/elapsed", 0.0)) if state.records else 0.0
        self._start = time.perf_counter()
        if state.records:
            self._write_tables(state.records)
        if state.graphs:
            self._write_graphs(state)

    def on_round_end(self, plan: RoundPlan, state: FederationState, record: RoundRecord, watch: Stopwatch) -> None:
        """Add the round to every file."""
        if not plan.fabric.is_global_zero:
            return
        with watch.part("log"):
            record.metrics["seconds/elapsed"] = self._seconds_before + time.perf_counter() - self._start
            self._append(state.records)
            if record.round in state.graphs:
                self._write_graphs(state)
            self.write_summary(plan.rounds, state, "running", "")

    def on_federation_end(self, plan: RoundPlan, state: FederationState, status: str) -> None:
        """Write the summary."""
        if plan.fabric.is_global_zero:
            self.write_summary(plan.rounds, state, status, plan.stop.reason(status))

    def write_summary(self, rounds: int, state: FederationState, status: str, reason: str) -> None:
        """Write summary.json; `status` is running, finished, stopped or failed."""
        with self._lock:
            self._outcome = (rounds, state, status, reason)
            self._write()

    def add_facts(self, **facts: Any) -> None:
        """Have summary.json say more of the run: from its next writing on, at once where the run has ended."""
        with self._lock:
            self.facts |= facts
            if self._outcome is not None and self._outcome[2] != "running":
                self._write()

    def write_failure(self, rounds: int, reason: str, unless_finished: bool = False) -> None:
        """Write that the run failed; where it had not begun, what the folder says of earlier rounds is kept.

        With `unless_finished` a finished run stays one: it could not be gone on from, or all that is left is to end.
        """
        if self._outcome is not None:
            _, state, status, _ = self._outcome
            if not (unless_finished and status == "finished"):
                self.write_summary(rounds, state, "failed", reason)
            return
        try:
            former = read_summary(self.folder)
        except DamagedSummaryError:
            former = {}
        if unless_finished and former.get("status") == "finished":
            return
        begun = self._summary(rounds, None, "failed", reason) | former
        self._store(begun | {"status": "failed", "reason": reason})

    def _write(self) -> None:
        assert self._outcome is not None
        self._store(self._summary(*self._outcome))

    def _store(self, summary: Mapping[str, Any]) -> None:
        write_text(self.folder / FILE, json.dumps(_plain(summary), indent=1))

    def _summary(self, rounds: int, state: FederationState | None, status: str, reason: str) -> dict[str, Any]:
        records = [] if state is None else state.records
        last = last_measured(records) or (records[-1] if records else RoundRecord(0))
        best = best_of(records, self.metric) or last
        seconds: dict[str, float] = {}
        for record in records:
            for name, value in record.metrics.items():
                if name.startswith("seconds/") and name != "seconds/elapsed":
                    part = name.removeprefix("seconds/")
                    seconds[part] = seconds.get(part, 0.0) + value
        seconds["total"] = records[-1].metrics.get("seconds/elapsed", 0.0) if records else 0.0
        return {
            "schema": 1,
            "status": status,
            "reason": reason,
            "rounds": rounds,
            "rounds_done": 0 if state is None else state.round,
            "protocol": PROTOCOL,
            "last": {"round": last.round, **last.metrics},
            "best": {
                "round": best.round,
                "metric": self.metric,
                **{name: best.metrics.get(name) for name in ("accuracy/received", self.metric)},
                "note": f"chosen by {self.metric} on the test set: for orientation, not a result",
            },
            "clients": {name: values for name, values in last.clients.items() if name.startswith("accuracy/")},
            "aggregation": records[-1].info if records else {},
            "dropped_uploads": {
                str(record.round): record.info["dropped_clients"]
                for record in records
                if record.info.get("dropped_clients")
            },
            "remarks": remarks(records),
            "seconds": seconds,
            **self.facts,
        }

    def _write_graphs(self, state: FederationState) -> None:
        arrays = {f"round_{number:05d}": graph.numpy() for number, graph in state.graphs.items()}
        arrays |= {f"layers_round_{number:05d}": graphs.numpy() for number, graphs in state.layer_graphs.items()}
        write_atomically(self.folder / "graphs.npz", lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]

    def _append(self, records: Sequence[RoundRecord]) -> None:
        record = records[-1]
        known = self._columns
        if not known or set(record.metrics) - set(known["metrics"]) or set(record.clients) - set(known["clients"]):
            self._write_tables(records)
        elif self.write_csv:
            lines = self._lines([record])
            if any(self._stamp(table) != self._stamps.get(table) for table in lines):  # removed or changed meanwhile
                self._write_tables(records)
                return
            for table, text in lines.items():
                path = self.folder / f"{table}.csv"
                with naming(path), open(path, "a", newline="") as file:
                    file.write(text)
                self._stamps[table] = self._stamp(table)

    def _stamp(self, table: str) -> tuple[int, int]:
        """Return the bytes in a table's file and the time of its last change, -1 where there is none."""
        try:
            about = (self.folder / f"{table}.csv").stat()
            return about.st_size, about.st_mtime_ns
        except FileNotFoundError:
            return -1, -1

    def _write_tables(self, records: Sequence[RoundRecord]) -> None:
        self._columns = {
            "metrics": list(dict.fromkeys(name for record in records for name in record.metrics)),
            "clients": list(dict.fromkeys(name for record in records for name in record.clients)),
        }
        if not self.write_csv:
            return
        for table, lines in self._lines(records).items():
            header = ["round", *(["client"] if table == "clients" else []), *self._columns[table]]
            write_text(self.folder / f"{table}.csv", _csv([header]) + lines)
            self._stamps[table] = self._stamp(table)

    def _lines(self, records: Sequence[RoundRecord]) -> dict[str, str]:
        metrics = ([r.round, *(_cell(r.metrics.get(c)) for c in self._columns["metrics"])] for r in records)
        clients = (
            [r.round, k, *(_cell(r.clients[c][k] if c in r.clients else None) for c in self._columns["clients"])]
            for r in records
            for k in range(max((len(values) for values in r.clients.values()), default=0))
        )
        return {"metrics": _csv(metrics), "clients": _csv(clients)}


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _cell(value: float | None) -> str:
    """Return a number in full precision, whole ones without a point, and nothing for what was not measured."""
    if value is None or math.isnan(value):
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def _plain(value: Any) -> Any:
    """Return `value` with non-finite numbers as None: JSON has no word for them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
