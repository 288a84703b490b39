"""One door for every part that is chosen by name: methods, data sets, networks, partitions, links, ours and yours.

A name is one of

- a built-in one, such as ``fedavg``: a line in `BUILTIN`;
- an entry point of an installed package, in the groups ``jgesr_lightning.aggregators``, ``.data``, ``.models``,
  ``.partitions`` and ``.channels``;
- ``package.module:Attribute``, of an installed package or one in the current folder;
- ``./file.py:Attribute``, relative to the configuration file that says so, or to the current folder on a command line.

Nothing is imported before a part is asked for, and a name that leads nowhere is a ValueError of one line.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from jgesr_lightning import paths
from jgesr_lightning.checks import nearest, one_of

KEYS = {
    "aggregators": "aggregator.name",
    "data": "data.name",
    "models": "model.name",
    "partitions": "data.partition",
    "channels": "channel.name",
}
"""Kind of part (and last word of its group of entry points): the setting that chooses it."""

BUILTIN: dict[str, dict[str, Any]] = {
    "aggregators": {
        "local": "jgesr_lightning.aggregators.local:Local",
        "fedavg": "jgesr_lightning.aggregators.fedavg:FedAvg",
        "fedprox": "jgesr_lightning.aggregators.fedavg:FedProx",
        "cfl": "jgesr_lightning.aggregators.cfl:CFL",
        "fedamp": "jgesr_lightning.aggregators.fedamp:FedAMP",
        "pfedgraph": "jgesr_lightning.aggregators.pfedgraph:PFedGraph",
        "two_step": "jgesr_lightning.aggregators.two_step:TwoStep",
        "jgesr": "jgesr_lightning.aggregators.jgesr:JGESR",
        "graph_filter": "jgesr_lightning.aggregators.graph_filter:GraphFilter",
        "median": "jgesr_lightning.aggregators.median:Median",
    },
    "data": {
        "mnist": "jgesr_lightning.data.sources:find_mnist",
        "cifar10": "jgesr_lightning.data.sources:find_cifar10",
        "synthetic": "jgesr_lightning.data.sources:find_synthetic",
        "folder": "jgesr_lightning.data.folders:find_folder",
        "tensors": "jgesr_lightning.data.tensors:find_tensors",
        "clients": "jgesr_lightning.data.clientfiles:find_clients",
    },
    "models": {
        "lenet": "jgesr_lightning.models.plain:lenet",
        "fedavg_cnn": "jgesr_lightning.models.plain:fedavg_cnn",
        "mlp": "jgesr_lightning.models.plain:mlp",
    },
    "partitions": {
        "dirichlet": "jgesr_lightning.data.partition:dirichlet_partition",
        "iid": "jgesr_lightning.data.partitions:iid_partition",
        "shards": "jgesr_lightning.data.partitions:shards_partition",
        "quantity": "jgesr_lightning.data.partitions:quantity_partition",
        "natural": "jgesr_lightning.data.partitions:natural_partition",
    },
    "channels": {"gaussian": "jgesr_lightning.channel:Uplink"},
}
"""Kind -> name -> where the part stands, or the part itself."""

FIXED_DATA = ("mnist", "cifar10", "synthetic")
"""Data sets that are the same wherever they lie; any other is what its root holds, or what a function makes of it."""

PREFIXES: dict[str, tuple[str, ...]] = {"models": ("torchvision:",)}
"""Kind -> starts of names that the kind's own package explains."""

ENDINGS: dict[str, tuple[str, ...]] = {"partitions": (".json", ".npz")}
"""Kind -> ends of names, those of files, that the kind's own package explains."""

_FILE = re.compile(r"(?P<place>.+\.py):(?P<attribute>[^\W\d][\w.]*)")
_MODULE = re.compile(r"(?P<place>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<attribute>[^\W\d][\w.]*)")


def known(kind: str) -> tuple[str, ...]:
    """Return the names of a kind that can be chosen without saying where they stand."""
    return (*BUILTIN[kind], *(point.name for point in _entry_points(kind) if point.name not in BUILTIN[kind]))


def is_builtin(kind: str, name: object) -> bool:
    """Return whether a name is one of ours."""
    if not isinstance(name, str):
        return False
    return name in BUILTIN[kind] or name.startswith(PREFIXES.get(kind, ())) or name.endswith(ENDINGS.get(kind, ()))


def is_name(kind: str, text: str) -> bool:
    """Return whether a text can only be meant for the name of a part, ours or somebody's.

    >>> is_name("data", "mnist"), is_name("data", "./mine.py:blobs"), is_name("data", "configs/mnist_s01.yaml")
    (True, True, False)
    """
    written = _FILE.fullmatch(text) or _MODULE.fullmatch(text)
    return is_builtin(kind, text) or bool(written) or text in known(kind)


def check(kind: str, name: str) -> str:
    """Return `name` if a part stands behind it; what is not built in is imported to find out.

    Raises:
        ValueError: see `find`.
    """
    if not is_builtin(kind, name):
        find(kind, name)
    return name


def find(kind: str, name: str) -> Any:
    """Return the part that a name stands for.

    Args:
        kind: "aggregators", "data", "models", "partitions" or "channels".
        name: see the module's text.

    Raises:
        ValueError: a name that nobody knows, a module that is not there or fails, or nothing there that can be called.
    """
    head = f"{KEYS[kind]} is {name!r}"
    target = _target(kind, name)
    if not isinstance(target, str):
        return target
    place, _, attribute = target.rpartition(":")
    found: Any = _module(place, head)
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            raise ValueError(f"{head}; {place} holds no {attribute}{nearest(part, names)}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{head}; {attribute} is a {type(found).__name__}; it must be a class or a function")
    return found


def resolve(text: str, folder: str | os.PathLike[str] | None = None) -> str:
    """Return a name with its file's path in full, taken from `folder` (None: the current one); others as they are.

    >>> resolve("./mine.py:Mine", "/home/me"), resolve("lists.json", "/home/me"), resolve("fedavg", "/home/me")
    ('/home/me/mine.py:Mine', '/home/me/lists.json', 'fedavg')
    """
    place, part = _file_and_part(text)
    if place is None:
        return text
    path = os.path.abspath(os.path.join(folder or os.curdir, paths.user_path(place)))
    return f"{path}:{part}" if part else path


def moved(former: str, present: str) -> bool:
    """Whether two names are of one part whose file lies elsewhere by now: a copy of it, or it is gone from there.

    >>> moved("/gone/mine.py:Mine", "/home/me/mine.py:Mine"), moved("/gone/mine.py:Mine", "/home/me/mine.py:Other")
    (True, False)
    """
    (before, part), (now, other) = map(_file_and_part, (former, present))
    return before is not None and now is not None and part == other and paths.moved(before, now)


def code_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each file that a part of somebody's own stands in, by its setting; empty without any.

    Of a Python file what counts is its syntax tree: neither comments nor blanks do. What the file imports does not.
    """
    held: dict[str, str] = {}
    for kind, key in KEYS.items():
        section, _, entry = key.partition(".")
        name = (config.get(section) or {}).get(entry)
        path = _source(kind, name) if isinstance(name, str) else None
        with suppress(OSError, SyntaxError, ValueError):
            if path is not None:
                content = path.read_bytes()
                tree = ast.dump(ast.parse(content)).encode() if path.suffix == ".py" else content
                held[key] = sha256(tree).hexdigest()[:32]
    return held


def label(name: str) -> str:
    """Return a short word for a name, fit for folders and tables.

    >>> label("/home/me/mine.py:TrimmedMean"), label("fedavg")
    ('TrimmedMean', 'fedavg')
    """
    return name.rpartition(":")[2]


def word(text: str) -> str:
    """Return a name as part of a run's folder's name.

    >>> word("./mine.py:Mine"), word("jgesr (0.1, tuned)")
    ('Mine', 'jgesr-0.1-tuned')
    """
    return re.sub(r"[^\w.+=-]+", "-", label(text)).strip("-.") or "x"


def cause(error: BaseException) -> str:
    """Return an error in one line, with the place in somebody's file where it arose."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    inner = frames[-1] if frames else None
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
        return f"SyntaxError: {error.msg}{where}"
    where = f" ({inner.filename}, line {inner.lineno})" if inner and inner.filename != __file__ else ""
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if reason else ''}{reason}{where}"


def _file_and_part(name: str) -> tuple[Path | None, str]:
    """Return the file that a name is in, or is, and what it is called there; None and nothing for other names."""
    if match := _FILE.fullmatch(name):
        return Path(match["place"]), match["attribute"]
    return (Path(name) if name.endswith(tuple(sum(ENDINGS.values(), ()))) else None), ""


def _source(kind: str, name: str) -> Path | None:
    """Return the file of a part that is none of ours, None where there is none to be found."""
    if (path := _file_and_part(name)[0]) is not None or is_builtin(kind, name):
        return path
    with suppress(ValueError, ImportError, AttributeError):
        _reach_current_folder()
        target = _target(kind, name)
        found = importlib.util.find_spec(target.rpartition(":")[0]) if isinstance(target, str) else None
        if found is not None and found.has_location and found.origin is not None:
            return Path(found.origin)
    return None


def _target(kind: str, name: object) -> Any:
    """Return the part, or where it stands as ``module:Attribute`` or ``/path/file.py:Attribute``."""
    if isinstance(name, str):
        if name in BUILTIN[kind]:
            return BUILTIN[kind][name]
        if _FILE.fullmatch(name):
            return resolve(name)
        if _MODULE.fullmatch(name):
            return name
        offers = [point for point in _entry_points(kind) if point.name == name]
        if len({point.value for point in offers}) > 1:
            owners = " and ".join(str(point.dist and point.dist.name) for point in offers)
            raise ValueError(f"{KEYS[kind]} is {name!r}, which {owners} both offer; name the one: {offers[0].value}")
        if offers:
            return offers[0].value
        if name.endswith(".py"):
            raise ValueError(f"{KEYS[kind]} is {name!r}; say what in it: {name}:Name")
        if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
            module, _, attribute = name.rpartition(".")
            raise ValueError(f"{KEYS[kind]} is {name!r}; a part of a module is written {module}:{attribute}")
    one_of(KEYS[kind], name, (*known(kind), *(f"{prefix}NAME" for prefix in PREFIXES.get(kind, ())), "./file.py:Name"))
    return None


def _entry_points(kind: str) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=f"jgesr_lightning.{kind}"))


def _module(place: str, head: str) -> ModuleType:
    """Import a module by its dotted name or its file."""
    try:
        if place.endswith(".py"):
            return _from_file(Path(place))
        _reach_current_folder()
        return importlib.import_module(place)
    except FileNotFoundError as error:
        if error.filename == place:
            raise ValueError(f"{head}; there is no file {place}") from None
        raise ValueError(f"{head}; importing it failed: {cause(error)}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            raise ValueError(f"{head}; there is no module {error.name}, installed or in this folder") from None
        raise ValueError(f"{head}; importing it failed: {cause(error)}") from error


def _reach_current_folder() -> None:
    """Let modules of the current folder be imported: `jgesr`, unlike `python -m`, leaves it out."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(2, "no file", str(path))
    # two files of one name are two modules, and so is one that was edited, in a notebook say, since it was imported
    text = path.read_bytes()
    version = sha256(str(path).encode() + b"\0" + text).hexdigest()[:12]
    name = f"_{path.stem}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:  # for what stands beside it; last, so that nothing is hidden by it
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and isinstance(spec.loader, SourceFileLoader)  # as that of a file that ends in .py is
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        code = spec.loader.source_to_code(text, str(path))
        exec(code, module.__dict__)  # not by the loader, whose cache knows no two versions of one second and length
    except BaseException:
        del sys.modules[name]
        raise
    return module
