"""What the files of a checkpoint must hold: checked before it is used, so that a wrong one is a line, not a traceback.

Each function returns what is wrong, as the end of a sentence, or an empty string.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

KEYS = (
    *("schema", "round", "num_clients", "size", "world_size"),
    *("config", "aggregator", "records", "graphs", "layer_graphs"),
)
FURTHER = ("trained", "believed")
"""What a process's rows may be of besides the models: what clients had trained, what the server takes them to hold."""
RECORD = {"round", "metrics", "clients", "info"}


def of_method(state: object) -> str:
    """Check a method's state: a table of names, of only what is read back without unpickling anything."""
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        return "state() is no table of names"
    return _unkept(state, "state()")


def _unkept(value: object, where: str) -> str:
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor):
        return ""
    if isinstance(value, dict):
        odd = next((key for key in value if type(key) not in (int, str)), None)
        if odd is not None:
            return f"{where} has a key that is a {type(odd).__name__}"
        return next(filter(None, (_unkept(item, f"{where}[{key!r}]") for key, item in value.items())), "")
    if type(value) in (list, tuple):
        items = enumerate(value)  # type: ignore[arg-type, var-annotated]
        return next(filter(None, (_unkept(item, f"{where}[{at}]") for at, item in items)), "")
    return f"{where} is a {type(value).__name__}"


def of_state(shared: dict[str, Any]) -> str:
    """Check what all processes share."""
    missing = [key for key in KEYS if key not in shared]
    if missing:
        return f"lacks {', '.join(sorted(missing))}"
    for key, least in (("round", 0), ("num_clients", 1), ("size", 1), ("world_size", 1)):
        if not _whole(shared[key]) or shared[key] < least:
            return f"has {key} {_shown(shared[key])}, which is no whole number of at least {least}"
    for key in ("config", "aggregator"):
        if not isinstance(shared[key], dict) or not all(isinstance(name, str) for name in shared[key]):
            return f"has {key} {_shown(shared[key])}, which is no table of names"
    wrong = _records(shared["records"], shared["round"], shared["num_clients"])
    if wrong:
        return wrong
    count = shared["num_clients"]
    for key, dimensions in (("graphs", 2), ("layer_graphs", 3)):
        graphs = shared[key]
        if not isinstance(graphs, dict) or not all(_whole(number) for number in graphs):
            return f"has {key} {_shown(graphs)}, which is no table of rounds"
        for number, graph in graphs.items():
            if not _dense(graph) or graph.dim() != dimensions or graph.shape[-2:] != (count, count):
                return f"has a graph of round {number} that is no real matrix of {count} x {count}"
    return ""


def of_rows(part: dict[str, Any], size: int, expected: Collection[int], dtype: torch.dtype | None) -> str:
    """Check the rows of one process.

    Args:
        part: content of its file.
        size: number of columns.
        expected: the clients that no other process has.
        dtype: type of the other processes' rows, or None.
    """
    clients = part.get("clients")
    if not isinstance(clients, list) or not all(_whole(client) for client in clients):
        return "its clients are no list of numbers"
    if len(set(clients)) < len(clients) or not set(clients) <= set(expected):
        return "its clients are not those of the run, each once"
    for name in ["models", *(name for name in FURTHER if name in part)]:
        matrix = part.get(name)
        if not isinstance(matrix, Tensor) or not _dense(matrix) or matrix.shape != (len(clients), size):
            return f"its {name} are no real matrix of {len(clients)} x {size}"
        dtype = dtype or matrix.dtype
        if matrix.dtype != dtype:
            return f"its {name} are of type {matrix.dtype}, others of {dtype}"
    return ""


def _records(records: object, last: int, count: int) -> str:
    if not isinstance(records, list):
        return f"has records {_shown(records)}, which are no list"
    for number, record in enumerate(records):
        if not isinstance(record, dict) or not RECORD >= record.keys() >= {"round"} or not _whole(record["round"]):
            return f"has record {number} of another kind"
        metrics, clients = record.get("metrics", {}), record.get("clients", {})
        if not isinstance(metrics, dict) or not all(isinstance(k, str) and _number(v) for k, v in metrics.items()):
            return f"has record {number} with metrics that are no numbers"
        if not isinstance(clients, dict) or not all(_client_row(row, count) for row in clients.values()):
            return f"has record {number} with other than {count} numbers for its clients"
        if not isinstance(record.get("info", {}), dict):
            return f"has record {number} with info of another kind"
    rounds = [record["round"] for record in records]
    if rounds != sorted(set(rounds)) or (rounds and rounds[-1] != last):
        return f"has records that do not lead to round {last}"
    return ""


def _client_row(row: object, count: int) -> bool:
    return isinstance(row, list) and len(row) == count and all(_number(value) for value in row)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dense(value: object) -> bool:
    """Whether `value` is an ordinary real tensor with its numbers in memory."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.dtype in (torch.float32, torch.float64)
    )


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, (int, float, str)) and len(repr(value)) < 40 else type(value).__name__
