"""Finds finished runs below folders and in files of stored results, and says which are left out and why."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jgesr_lightning.checks import nearest
from jgesr_lightning.config import ConfigError
from jgesr_lightning.identity import digest, flatten
from jgesr_lightning.names import label, word
from jgesr_lightning.reporting.runs import Run, finished_run
from jgesr_lightning.reporting.sources import UNREADABLE, Folder, damage
from jgesr_lightning.reporting.store import stored_runs
from jgesr_lightning.reporting.text import shown
from jgesr_lightning.summary import DamagedSummaryError, data_digest, read_summary

_INNER = ("wandb", "checkpoint", "figures", "media")  # folders inside a run's folder; there, none holds another run


@dataclass(frozen=True)
class Collection:
    """Runs, and what has to be said about them.

    Attributes:
        runs: finished, in the order of their folders' names; one of those with equal settings and seed.
        notes: one line for each run that is left out, with its name and the reason, and for runs that count together.
        order: labels of the methods in the order of the study's file, empty where the runs are no study's.
        names: label -> what the study's file calls that method, where it is not the label itself, nor that of several.
    """

    runs: list[Run]
    notes: list[str]
    order: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def label_of(self, given: str) -> str:
        """Return the label of a method, which may be given as the study's file calls it.

        Raises:
            ConfigError: none of the runs is of that method.
        """
        labels = {run.label: run.label for run in self.runs}
        known = {name: of for of, name in self.names.items() if of in labels} | labels
        if given not in known:
            raise ConfigError(f"no method {shown(given)!r}{nearest(given, known)}; known: {', '.join(sorted(known))}")
        return known[given]

    @property
    def titles(self) -> dict[str, str]:
        """Label -> what tables and figures call that method, where it is not the label: what the study's file does.

        A name that says nothing but what the label says, such as ``jgesr_uniform`` of ``jgesr (uniform)``, gives way to
        it; so does one that is another method's label.
        """
        labels = {run.label for run in self.runs}
        names = {of: name for of, name in self.names.items() if of in labels and not _words(name) <= _words(of)}
        found = {of: shown(name, 60) for of, name in names.items()}
        taken = Counter([*labels, *found.values()])  # shortened, two names may be one
        return {of: title for of, title in found.items() if taken[title] == 1}


def _words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", text.lower()))


def collect(roots: Iterable[str | Path], drawn: str | None = None) -> Collection:
    """Return the finished runs in and below some folders, and in files of stored results.

    Failed, stopped, unfinished and damaged runs are left out by name. Of several runs with the same settings and seed
    the newest counts; where the settings differ by rounding, or methods have one name, all count, together as one seed.

    Args:
        roots: the folders and files.
        drawn: metric whose figures are wanted: the files that they need must be sound too; None: summaries are enough.

    Raises:
        ConfigError: a folder that is not there.
    """
    found, keys = _found(roots)
    runs: dict[str, Run] = {}
    notes: list[str] = []
    for run in found:
        if isinstance(run, Run) and drawn is not None and (harm := damage(run.source, drawn, run.last_round)):
            run = f"{run.name}: {harm}"
        if isinstance(run, str):
            notes.append(f"{shown(run)}; left out")
            continue
        key = run.identity(exact=True)
        former = runs.get(key)
        if former is not None:
            newer, older = (run, former) if _age(run) >= _age(former) else (former, run)
            places = [one.name if older.name != newer.name else shown(one.folder) for one in (older, newer)]
            notes.append(f"{places[0]}: same settings and seed as {places[1]}, which is newer; left out")
            run = newer
        runs[key] = run
    kept = sorted(runs.values(), key=lambda run: str(run.folder))
    times = Counter(keys.values())
    names = {of: key for of, key in keys.items() if key not in keys and times[key] == 1}
    return Collection(kept, notes + _coinciding(kept) + _of_other_data(kept) + _of_other_code(kept), list(keys), names)


def _found(roots: Iterable[str | Path]) -> tuple[list[Run | str], dict[str, str]]:
    """Return every run (or why one cannot be used, its name first), and label -> name of the methods of studies."""
    runs: list[Run | str] = []
    keys: dict[str, str] = {}
    seen: set[Path] = set()
    for root in map(Path, roots):
        found, methods = stored_runs(root) if root.is_file() else _runs_below(root, seen)
        runs += found
        for of, key in methods.items():
            keys.setdefault(of, key)
    return runs, keys


def _runs_below(root: Path, seen: set[Path]) -> tuple[list[Run | str], dict[str, str]]:
    """Return of a folder what `stored_runs` returns of a file."""
    runs: list[Run | str] = []
    studies: dict[Path, dict[str, list[str]]] = {}  # folder of a study -> name of a method in its file -> labels
    for folder in _run_folders(root, seen):
        run = folder if isinstance(folder, str) else _read(folder)
        runs.append(run)
        if isinstance(run, Run):
            if run.folder.parent not in studies:
                studies[run.folder.parent] = {name: [] for name in _study_methods(run.folder.parent)}
            labels = studies[run.folder.parent]
            name = _study_name(run.folder.name, labels)
            if name is not None and run.label not in labels[name]:
                labels[name].append(run.label)  # several where the grid is over a setting of the method
    keys: dict[str, str] = {}
    for key, held in (item for labels in studies.values() for item in labels.items()):
        name = key if " " in key else label(key)  # of a file's or a module's, the last word
        for of in sorted(held, key=lambda of: of != name):
            keys.setdefault(of, name if len(held) == 1 else of)
    return runs, keys


def _study_name(folder: str, names: Iterable[str]) -> str | None:
    """Return which of a study's methods the run in a folder is of, by the folder's name.

    It stands behind data set, noise level and missing rate; the values of a grid, which may be called like a method,
    and the seed follow.
    """
    words = {name: word(name) for name in names}
    found = [name for name, text in words.items() if re.search(rf"_s[^_]+(_m[^_]+)?_{re.escape(text)}_", folder)]
    return max(found, key=lambda name: len(words[name]), default=None)  # the longest: jgesr_uniform is no jgesr


def _study_methods(folder: Path) -> list[str]:
    """Return the names that a study's file, of which a copy lies with its runs, gives its methods; else none."""
    try:
        content = yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))
        return [str(key) for key in content["methods"]]
    except (*UNREADABLE, yaml.YAMLError):
        return []


def _coinciding(runs: Sequence[Run]) -> list[str]:
    """Return a line for each run that counts together with another of the same seed, and why it does."""
    first: dict[Hashable, Run] = {}
    lines = []
    for run in runs:
        other = first.setdefault((digest(run.protocol, 32), run.label, run.column, run.seed), run)
        if other is not run:
            what = "settings that differ by rounding only"
            if run.identity() != other.identity():  # such as a class of the same name in another file
                what = f"another method of that name ({shown(run.config['aggregator']['name'])})"
            lines.append(f"{run.name}: same seed as {other.name}, and {what}; their mean counts as that seed's")
    return lines


def _of_other_data(runs: Sequence[Run]) -> list[str]:
    """Return a line for runs that would have had the same samples, had the data not changed between them."""
    first: dict[str, Run] = {}
    lines = []
    for run in runs:
        if not (held := data_digest(run.summary)):
            continue
        other = first.setdefault(digest(run.sharing, 32), run)
        if held != data_digest(other.summary):
            lines.append(f"{run.name}: other samples than {other.name}, of equal settings; the data changed in between")
    return lines


def _of_other_code(runs: Sequence[Run]) -> list[str]:
    """Return a line for runs made with code of somebody's own that was changed between them."""
    first: dict[tuple[str, str], tuple[Any, Run]] = {}
    lines = []
    for run in runs:
        code = run.summary.get("code")
        if not isinstance(code, dict) or not code:  # most have none, and there may be hundreds
            continue
        settings = flatten(run.config)
        for key, held in code.items():
            part = shown(settings.get(key))
            known, other = first.setdefault((key, part), (held, run))
            if held != known:
                lines.append(f"{run.name}: {part} is another than for {other.name}; its file changed in between")
    return lines


def _run_folders(root: Path, seen: set[Path]) -> Iterator[Path | str]:
    """Yield the folders of runs, each once, through links too; and what cannot be entered, with the reason."""
    if not root.is_dir():
        beside = [path.name for path in root.parent.glob("*") if path.exists()]
        raise ConfigError(f"no folder and no file {shown(root)}{nearest(root.name, beside)}")
    top = root.resolve()
    closed: list[OSError] = []
    for place, folders, files in os.walk(root, followlinks=True, onerror=closed.append):
        folder, real = Path(place), Path(place).resolve()
        if real in seen or real in top.parents:  # been there; or a link upwards, which would lead back here
            folders.clear()
            continue
        seen.add(real)
        is_run = "summary.json" in files or "config.yaml" in files
        passed_over = _INNER if is_run else ()  # elsewhere a run may well be called so
        folders[:] = sorted(name for name in folders if name not in passed_over and not name.startswith("."))
        if is_run:
            yield folder
            continue
        for name in sorted(files):
            if os.path.islink(folder / name) and not os.path.exists(folder / name):
                yield f"{name}: a link to a place that is not there"
    yield from (f"{error.filename}: cannot be read ({error.strerror})" for error in closed)


def _read(folder: Path) -> Run | str:
    """Return the run of a folder, or its name and why it cannot be used."""
    try:
        summary = read_summary(folder)
    except DamagedSummaryError as error:
        return f"{folder.name}: {error}"
    if not summary:
        return f"{folder.name}: not finished (no summary.json)"
    return finished_run(folder, summary, Folder(folder))


def _age(run: Run) -> float:
    path = run.folder / "summary.json" if isinstance(run.source, Folder) else run.folder.parent  # the stored file's
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
