"""What a study consists of: its file, and the cells, one run each, that are the product of its axes."""

from __future__ import annotations

import fnmatch
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from jgesr_lightning import names
from jgesr_lightning.checks import is_count, nearest
from jgesr_lightning.config import (
    KEYS,
    Config,
    ConfigError,
    Section,
    Setting,
    Settings,
    as_argument,
    completed,
    find_config,
    folders,
    in_full,
    load_config,
    parse_overrides,
    read_yaml,
    to_dict,
    written,
)
from jgesr_lightning.config.schema import ChannelConfig
from jgesr_lightning.config.section import looks_like
from jgesr_lightning.config.written import read_tree
from jgesr_lightning.identity import condition, digest, flatten, number_text, relocated, seed_of
from jgesr_lightning.paths import user_path
from jgesr_lightning.summary import DamagedSummaryError, read_summary

OWN = ("name", "resume", "seed", "data.name", "channel.noise", "channel.missing_rate", "aggregator.name")
"""Settings that each cell has of its own."""

AXES = {
    "seed": "seeds",
    "data.name": "data",
    "channel.noise": "noise",
    "channel.missing_rate": "missing_rate",
    "aggregator.name": "methods",
}
"""What a study's file calls those of them that it sets."""

COPIES_MAY_DIFFER = (
    "name", "output_dir", "resume", "data.root", "metric", "logging.project", "logging.group", "logging.entity",
    "logging.job_type", "logging.notes", "logging.tags", "runtime.devices", "runtime.num_nodes",
)  # fmt: skip
"""Settings in which a run may differ from the cell that it stands for: names, places, devices, and what W&B is told."""


class StudyFile(Section):
    """A study's file; every axis may also be a single value, and one that is not given is the base's."""

    base: str = Field(description="configuration that every cell starts from: a path from this file, or as for `train`")
    settings: Settings = Field(default_factory=dict, description="of all cells")
    methods: dict[str, Settings] | list[str] = Field(
        description="label -> the method's settings, its `name` where the label is not it; dotted keys set anything"
    )
    data: dict[str, Settings] | list[str] | str | None = Field(
        None, description="data sets, or label -> settings: `data.name` where the label is not it, and any others"
    )
    noise: list[str] | str | None = Field(None, description="noise levels")
    missing_rate: list[str] | str | None = Field(None, description="missing rates")
    grid: dict[str, list[str]] = Field(default_factory=dict, description="dotted key -> values; crossed with all else")
    seeds: list[int] | int | None = Field(None, description="seeds")
    metric: str | None = Field(None, description="what tables lead with")


RUNS_ALONE = {key.partition(".")[0] for key in KEYS} - set(StudyFile.model_fields)
"""First words of keys that stand in the file of a run and in no study's."""


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        name: of its folder, readable and unique within the study.
        base: configuration file that it starts from.
        overrides: ``key=value`` arguments on top of it, `name` and `output_dir` among them.
        config: the resolved and checked configuration.
    """

    name: str
    base: str
    overrides: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.folder

    def summary(self) -> dict[str, Any]:
        """Return the run's summary, empty where there is none that can be used."""
        try:
            return read_summary(self.folder)
        except DamagedSummaryError:
            return {}

    def damage(self) -> str:
        """Return what is wrong with the run's summary, empty where there is none or it is sound."""
        try:
            read_summary(self.folder)
        except DamagedSummaryError as error:
            return str(error)
        return ""

    def is_finished(self) -> bool:
        """Whether the run is done, with these very settings."""
        summary = self.summary()
        present = to_dict(self.config)
        if summary.get("status") != "finished":
            return False
        return identity(relocated(summary["config"], present)) == identity(present)


def identity(config: Mapping[str, Any]) -> str:
    """Return what tells runs of different outcome apart; numbers that differ by rounding alone are one."""
    try:
        stored = json.loads(json.dumps(completed(config)))  # as summary.json gives it back: lists for tuples
        return digest({"condition": condition(stored), "seed": seed_of(stored)}, 32)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:  # no configuration of ours
        return f"none ({type(error).__name__})"


def copied(config: Mapping[str, Any]) -> str:
    """Return what has to be equal for a run to stand for a cell of another study."""
    try:
        stored = json.loads(json.dumps(completed(config)))
        flat, decisive = flatten(stored), condition(stored)  # such as the root of data of one's own
    except (AttributeError, KeyError, RecursionError, TypeError):
        return ""
    left_out = tuple(f"{key}." for key in COPIES_MAY_DIFFER)
    kept = {key: value for key, value in flat.items() if key in decisive or not f"{key}.".startswith(left_out)}
    return digest(kept, 32)


def rests_on_files(config: Config) -> bool:
    """Whether something of one's own decides a run, data or code, which may have changed since an equal run."""
    partition = config.data.partition or "dirichlet"
    parts = {
        "aggregators": config.aggregator.name,
        "models": config.model.name,
        "partitions": partition,
        "channels": config.channel.name,
    }
    ours = all(names.is_builtin(kind, name) for kind, name in parts.items())
    return not ours or partition.endswith(names.ENDINGS["partitions"]) or config.data.name not in names.FIXED_DATA


def load_study(name: str | Path, overrides: Sequence[str] = ()) -> tuple[str, list[Cell]]:
    """Return a study's name and its cells, every configuration checked.

    `StudyFile` says what the file holds. Cells are ordered by seed first: a study that is cut short has whole
    comparisons. What stands nearer to a cell wins: a method's settings over a data set's, those over the grid's, and
    those over the study's; the command line over all. Axes that are not given are the base's.

    Args:
        name: a YAML file, or the bare name of one in ``configs/studies/``.
        overrides: ``key=value`` for all cells; `output_dir` is the folder that the study's own folder goes into.

    Raises:
        ConfigError: the file, or a cell's configuration, is wrong; one line.
    """
    path = find_study(name)
    tree = read_tree(path)
    if "methods" not in tree and (RUNS_ALONE & {key.partition(".")[0] for key in tree}):
        raise ConfigError(f"{path} is one run, not a study; it is run by: python -m jgesr_lightning train {path}")
    study, places = read_yaml(path, StudyFile)
    study = study.replace(base=_base(study.base, path, places["base"]))
    given = _given(overrides, study, path)
    output = user_path(given.pop("output_dir", "runs")) / path.stem
    shared = study.settings | ({"metric": written(study.metric, places["metric"])} if study.metric else {})
    _refuse_own(study, path, places)
    axes = _axes(study, path, places)
    loaded = _Loaded(study.base, given)
    cells: dict[str, Cell] = {}
    known: dict[str, str] = {}
    for point in itertools.starmap(_Point, itertools.product(*axes.values())):
        settings = _settings_of(point, shared, study.grid, path.parent)
        config, channel = loaded.config(point, settings), loaded.channel(point, settings)
        seed = config.seed if point.seed is None else point.seed
        lost = channel.missing_rate  # zero as it is written: the shipped studies have runs of both m0 and m0.0
        rate = f"_m{_named(lost) if lost else point.missing_rate}" if lost or len(axes["missing_rate"]) > 1 else ""
        data, method = point.data[0] or config.data.name, point.method[0]
        words = [names.word(text) for text in (data, method, *map(_named, point.grid))]
        cell = "_".join([f"{words[0]}_s{_named(channel.noise)}{rate}", *words[1:], f"seed{seed}"])
        own = {"seed": str(seed), "name": cell, "output_dir": str(output)}
        arguments = {**{key: as_argument(value) for key, value in in_full(settings).items()}, **given, **own}
        try:
            config = config.replace(channel=channel, seed=seed, name=cell, output_dir=str(output))
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        if cell in cells:
            raise ConfigError(f"{path}: {cell} comes twice; give each value, and each label, once")
        run = identity(to_dict(config))
        if run in known:  # such as the rates 0 and 0.0, or values of a grid that make no difference
            raise ConfigError(f"{path}: {known[run]} and {cell} would be one run twice; leave one out")
        known[run] = cell
        cells[cell] = Cell(cell, study.base, tuple(f"{key}={value}" for key, value in arguments.items()), config)
    return path.stem, list(cells.values())


class _Point(NamedTuple):
    """A cell's value of each of the `_axes`, in order: None where the base's holds; labels with their settings."""

    seed: int | None
    data: tuple[str | None, Settings]
    noise: Setting | None
    missing_rate: Setting | None
    grid: tuple[Setting | None, ...]
    method: tuple[str, Settings]


def _axes(study: StudyFile, path: Path, places: Mapping[str, str]) -> dict[str, Sequence[Any]]:
    """Return the values of each axis of a study, the slowest first; ConfigError for none, or for a label twice."""
    for key in ("data", "methods"):  # a mapping has each label once
        labels = _several(getattr(study, key))
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ConfigError(f"{path}: {key} has {twice[0]} twice; give each label once")
    grid = [_settings(f"grid.{key}", values, places) for key, values in study.grid.items()]
    axes: dict[str, Sequence[Any]] = {
        "seeds": _several(study.seeds),
        "data": list(_labelled(study.data).items()),
        "noise": _settings("noise", study.noise, places),
        "missing_rate": _settings("missing_rate", study.missing_rate, places),
        "grid": list(itertools.product(*grid)),
        "methods": list(_labelled(study.methods).items()),
    }
    for key, axis in axes.items():
        if not axis:
            raise ConfigError(f"{path}: {key} is empty; give at least one")
    return axes


def _settings_of(point: _Point, shared: Settings, grid: Iterable[str], folder: Path) -> Settings:
    """Return a cell's settings; what stands nearer to it wins. Files are looked for from `folder`."""
    (data, of_data), (label, of_method) = point.data, point.method
    of_axes = {
        "data.name": None if data is None else written(names.resolve(data, folder)),
        "channel.noise": point.noise,
        "channel.missing_rate": point.missing_rate,
    }
    return {
        **{key: value for key, value in of_axes.items() if value is not None},
        "aggregator.name": written(names.resolve(label, folder)),
        **shared,
        **dict(zip(grid, point.grid, strict=True)),
        **of_data,
        **{(key if "." in key else f"aggregator.{key}"): value for key, value in of_method.items()},
    }


class _Loaded:
    """The configurations of a study; reading takes its time, and neither seeds nor levels of the link change them."""

    def __init__(self, base: str, given: Mapping[str, str]) -> None:
        self._base, self._given = base, [f"{key}={value}" for key, value in given.items()]
        self._configs: dict[tuple[str, ...], Config] = {}

    def config(self, point: _Point, settings: Settings) -> Config:
        """Return a cell's configuration, perhaps with the seed and the link of another."""
        return self._load((str(point.data[0]), point.method[0], *map(str, point.grid)), settings)

    def channel(self, point: _Point, settings: Settings) -> ChannelConfig:
        """Return a cell's link."""
        levels = {"noise": point.noise, "missing_rate": point.missing_rate}
        own = {
            key: getattr(self._load((key, str(value)), settings).channel, key)
            for key, value in levels.items()
            if value is not None
        }
        return self.config(point, settings).channel.replace(**own)

    def _load(self, key: tuple[str, ...], settings: Settings) -> Config:
        if key not in self._configs:
            self._configs[key] = load_config(self._base, self._given, settings=settings)
        return self._configs[key]


def _named(value: Setting | float | None) -> str:
    """Return a value as names of cells have it: a number in one way, however it was written.

    >>> [_named(written(text)) for text in ("1.0", "1e-1", "007", "0.0", "full")]
    ['1', '0.1', '7', '0', 'full']
    """
    number = looks_like(value)
    if isinstance(number, float):
        return number_text(number)
    return str(number if type(number) is int else value)


def _given(overrides: Sequence[str], study: StudyFile, path: Path) -> dict[str, str]:
    """Return key -> value of the command line, for all cells; ConfigError where cells have a value each."""
    given = {key: as_argument(setting) for key, setting in in_full(parse_overrides(overrides)).items()}
    for key in OWN:
        if key in given:
            raise ConfigError(f"{key} cannot be set for all cells of a study: each cell has its own (--only chooses)")
    for key in study.grid:
        if key in given:
            raise ConfigError(
                f"{key} is an axis of this study's grid, which {path} sets; --only chooses among its values"
            )
    return given


def _base(name: str, path: Path, where: str) -> str:
    """Return what the base is called from here: a path from the study's file, as in a run's file, or its `name`."""
    try:
        beside = path.parent / user_path(name)
        if beside.is_file():
            return str(beside)
        find_config(name)
    except (ValueError, OSError) as error:
        raise ConfigError(f"base is {name!r}; {error} ({where})") from None
    return name


def _refuse_own(study: StudyFile, path: Path, places: Mapping[str, str]) -> None:
    """Raise ConfigError where settings name what each cell has of its own: they would change nothing, or all labels."""
    levels = [f"channel.{key}" for key in ("noise", "missing_rate") if getattr(study, key) is None]
    parts: list[tuple[str, Mapping[str, object], Sequence[str]]] = [
        ("settings", study.settings, []),
        ("grid", study.grid, []),
        *((f"data.{label}", given, ["data.name", *levels]) for label, given in _labelled(study.data).items()),
        *(  # without a dot it is a setting of the method
            (f"methods.{label}", {key: value for key, value in given.items() if "." in key}, ["aggregator.name"])
            for label, given in _labelled(study.methods).items()
        ),
    ]
    for part, given, allowed in parts:
        for key in (*OWN, "output_dir"):
            if key in given and key not in allowed:
                where = getattr(given[key], "where", "") or places.get(f"{part}.{key}", "")
                instead = f"write {AXES[key]}" if key in AXES else "each cell has its own"
                instead = "give it on the command line" if key == "output_dir" else instead
                instead = f"write {allowed[0]}" if key == "name" and allowed else instead
                place = f" ({where})" if where else f" ({path})"
                raise ConfigError(f"{part} cannot hold {key}: {instead}{place}")


def find_study(name: str | Path) -> Path:
    """Return the file of a study: a path, or the name of one in ``configs/studies/``.

    Raises:
        ConfigError: no such file; it names those there are.
    """
    user_path(name)  # a home folder of nobody's is said to be that
    try:
        return find_config(name, "studies")
    except ConfigError:
        known = sorted({path.stem for folder in folders("studies") for path in folder.glob("*.yaml")})
        shown = str(name) if len(str(name)) <= 100 else f"{str(name)[:100]}..."
        raise ConfigError(f"no study {shown}{nearest(str(name), known)}; known: {', '.join(known)}") from None


def choose(cells: Sequence[Cell], only: Sequence[str] = (), part: tuple[int, int] = (1, 1)) -> list[Cell]:
    """Return the cells whose name matches one of the patterns, and of these every n-th, from the i-th.

    Args:
        cells: all cells.
        only: patterns with ``*`` and ``?``, or plain pieces of names (``seed1`` takes ``seed10`` only if alone);
            none: all cells.
        part: (i, n), i from 1.

    Raises:
        ConfigError: a pattern that matches nothing.
    """
    chosen: set[str] = set()
    for given in only:
        if not given:
            raise ConfigError("--only is empty; leave it out to choose all cells")
        found = _matching([cell.name for cell in cells], given)
        if not found:
            words = {word for cell in cells for word in cell.name.split("_")}
            raise ConfigError(f"--only {given} matches no cell{nearest(given, words)}; --list shows them")
        chosen.update(found)
    return [cell for cell in cells if not only or cell.name in chosen][part[0] - 1 :: part[1]]


def _matching(cells: Sequence[str], given: str) -> list[str]:
    """Return the names that a pattern fits; a plain piece is looked for between underscores first, then anywhere."""
    if set(given) & set("*?["):
        return fnmatch.filter(cells, given)
    return [name for name in cells if f"_{given}_" in f"_{name}_"] or [name for name in cells if given in name]


def parse_part(text: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (i, n) from the text ``i/n``, else from a SLURM array task's variables, else (1, 1).

    An array task knows the least, the greatest and the number of the array's task ids. Its own place follows where
    they are evenly spaced; ids that are not are refused, by the tasks between the ends.

    >>> [parse_part(None, {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "7",
    ...                    "SLURM_ARRAY_TASK_COUNT": "2"}) for task in ("3", "7")]
    [(1, 2), (2, 2)]
    """
    if text is not None:
        head, _, tail = text.partition("/")
        if not (is_count(head) and is_count(tail) and 1 <= int(head) <= int(tail)):
            raise ConfigError(f"--part is {text!r}; it must be i/n with i from 1 to n, such as 2/4")
        return int(head), int(tail)
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return 1, 1
    values = {
        name: environment.get(f"SLURM_ARRAY_TASK_{name}", default)
        for name, default in {"ID": "", "MIN": "0", "STEP": "1", "COUNT": "1", "MAX": ""}.items()
    }
    if not values["MAX"] and all(map(is_count, (values["MIN"], values["STEP"], values["COUNT"]))):
        values["MAX"] = str(int(values["MIN"]) + (int(values["COUNT"]) - 1) * int(values["STEP"]))
    for name, value in values.items():
        if not is_count(value):
            raise ConfigError(f"SLURM_ARRAY_TASK_{name} is {value!r}, not a number; say which part with --part i/n")
    task, first, last, count = (int(values[name]) for name in ("ID", "MIN", "MAX", "COUNT"))
    if count <= 1:
        return 1, 1
    place, rest = divmod((task - first) * (count - 1), last - first) if last > first else (-1, 0)
    if rest or not 0 <= place < count:
        raise ConfigError(
            f"the place of array task {task} among {count} from {first} to {last} cannot be told; use evenly spaced "
            f"task ids, such as --array=1-{count}, or say which part each task runs with --part i/n"
        )
    return place + 1, count


def _several(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _labelled(values: dict[str, Settings] | list[str] | str | None) -> dict[Any, Settings]:
    """Return name -> settings, from a mapping or plain names; the name None where none is given."""
    return values if isinstance(values, dict) else {name: {} for name in _several(values)}


def _settings(key: str, values: list[str] | str | None, places: Mapping[str, str]) -> list[Setting | None]:
    """Return the values of an axis with the places where they were written; None alone where none is given."""
    return [
        None if value is None else written(value, places.get(f"{key}[{at}]", places.get(key, "")))
        for at, value in enumerate(_several(values))
    ]
