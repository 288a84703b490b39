"""What makes two runs comparable: the settings that decide a result, apart from the seeds, and short names for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jgesr_lightning import names, paths
from jgesr_lightning.aggregators import aggregator_settings
from jgesr_lightning.names import FIXED_DATA, KEYS, is_builtin, label
from jgesr_lightning.paths import PathError, absolute

CELL = ("data.name", "channel.noise", "channel.missing_rate")
"""The settings that make up a column of a table."""

SEEDS = ("seed", "seeds")
"""Settings that only choose among equally valid runs."""

NO_INFLUENCE = (
    "name", "output_dir", "resume", "engine", "deterministic", "data.root", "data.verify", "checkpoint", "logging",
    "metric", "runtime.accelerator", "runtime.devices", "runtime.num_nodes",
)  # fmt: skip
"""Keys and sections that say where, how fast and how often; not what comes out. A run may go on with others."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted keys.

    >>> flatten({"data": {"name": "mnist"}, "seed": 1})
    {'data.name': 'mnist', 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def rounded(value: Any) -> Any:
    """Return a setting with its numbers to twelve digits: what differs by rounding alone is one setting.

    >>> rounded(0.1 + 0.2), rounded([1, 1e-3]), rounded("a")
    (0.3, [1, 0.001], 'a')
    """
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def condition(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted settings that decide a run's outcome, rounded, without its seeds."""
    flat = flatten(config)
    own = set() if flat.get("data.name") in FIXED_DATA else {"data.root"}
    if own and isinstance(root := flat.get("data.root"), str):
        with suppress(PathError):  # runs of before have it as it was written, and its home folder may be of elsewhere
            flat["data.root"] = absolute(root)
    left_out = tuple(f"{key}." for key in (*NO_INFLUENCE, "evaluation", *SEEDS))
    return {key: rounded(value) for key, value in flat.items() if key in own or not f"{key}.".startswith(left_out)}


def relocated(former: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which parts and data that have moved since are called as they are in another one."""
    found = dict(former)
    for section, key in (place.split(".") for place in (*KEYS.values(), "data.root")):
        held = [config.get(section) for config in (former, present)]
        old, new = (part.get(key) if isinstance(part, Mapping) else None for part in held)
        if isinstance(old, str) and isinstance(new, str) and old != new and _moved(key, old, new):
            found[section] = {**found[section], key: new}
    return found


def _moved(key: str, old: str, new: str) -> bool:
    return paths.moved(Path(old), Path(new)) if key == "root" else names.moved(old, new)


def protocol(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run's condition that all methods of one table share: all but method and column."""
    return {
        key: value for key, value in condition(config).items() if key not in CELL and not key.startswith("aggregator.")
    }


def seed_of(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells the runs of one condition apart: the seed, and the single seeds where they differ from it."""
    own = sorted(
        (key, value) for key, value in (config.get("seeds") or {}).items() if value not in (None, config["seed"])
    )
    return (config["seed"], *own)


def digest(values: Mapping[str, Any], length: int = 6) -> str:
    """Return a short hash of settings, the same for equal settings in any order."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def method_label(aggregator: Mapping[str, Any]) -> str:
    """Return a method's name with the settings that are not its defaults; the fidelity by its value alone.

    >>> method_label({"name": "jgesr", "fidelity": "uniform", "alpha": 0.5})
    'jgesr (uniform, alpha=0.5)'
    >>> method_label({"name": "fedavg"})
    'fedavg'
    """
    name = label(str(aggregator["name"]))
    usual = _defaults(str(aggregator["name"]))
    changed = [
        str(value) if key == "fidelity" else f"{key}={number_text(value) if isinstance(value, float) else value}"
        for key, value in sorted(aggregator.items(), key=lambda item: item[0] != "fidelity")
        if key != "name" and not (key in usual and rounded(usual[key]) == rounded(value))
    ]
    return f"{name} ({', '.join(changed)})" if changed else name


def number_text(value: float) -> str:
    """Return a number as short as it is: different settings have different texts.

    >>> number_text(0.1 + 0.2), number_text(1e-6), number_text(1.0)
    ('0.3', '1e-06', '1')
    """
    return f"{value:.12g}"


def over_link(data: str, link: str) -> str:
    """Return the name of a data set, with that of a link which is none of ours.

    >>> over_link("mnist", "gaussian"), over_link("mnist", "/home/me/links.py:bursts")
    ('mnist', 'mnist over bursts')
    """
    return data if is_builtin("channels", link) else f"{label(data)} over {label(link)}"


def cell_label(config: Mapping[str, Any]) -> str:
    """Return the text of a run's data set, link of one's own, noise level and, where there is one, missing rate."""
    data, missing = label(config["data"]["name"]), config["channel"]["missing_rate"]
    data = over_link(data, config["channel"].get("name", "gaussian"))
    return f"{data} s={number_text(config['channel']['noise'])}" + (
        f" missing={number_text(missing)}" if missing else ""
    )


def group_name(config: Mapping[str, Any]) -> str:
    """Return a readable name shared by all seeds of a configuration and by no other, at most 128 characters.

    The number of rounds is left out: a run that is resumed for more of them stays in its group.

    >>> config = {"rounds": 30, "clients": 20, "data": {"name": "mnist"},
    ...           "channel": {"noise": 0.1, "missing_rate": 0.0}, "aggregator": {"name": "fedavg"}}
    >>> group_name({**config, "seed": 1}) == group_name({**config, "seed": 2, "rounds": 9})
    True
    >>> group_name(config) == group_name({**config, "clients": 9})
    False
    """
    text = f"{cell_label(config)} {method_label(config['aggregator'])}"
    decisive = {key: value for key, value in condition(config).items() if key != "rounds"}
    return f"{text[:120]} {digest(decisive)}"


def _defaults(method: str) -> Mapping[str, Any]:
    """Return the defaults of one of our methods; what a run's files name from outside is not imported to read them."""
    return aggregator_settings(method) if is_builtin("aggregators", method) else {}
