"""What a run's ``summary.json`` says: reading it, damaged or not, and which way its metrics are better.

It may be half written by a full disk, or changed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "summary.json"
DIGITS = 32  # of the hash of a run's data; it was shorter while only a part of the inputs counted
STATUSES = ("running", "finished", "stopped", "failed")

_LESS = ("loss/", "seconds/", "aggregator/seconds", "aggregator/solver_seconds", "aggregator/stationarity_", "dropped")
"""How the names begin of metrics of which less is better."""


class DamagedSummaryError(ValueError):
    """A summary that is there but cannot be used; the message says why, in one line."""


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the `checked` summary of the run in `folder`, empty where there is none.

    Raises:
        DamagedSummaryError: there is one, but it cannot be read, or is none that a run wrote.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DamagedSummaryError(f"{FILE} cannot be read ({reason.splitlines()[0]})") from None
    return checked(found)


def checked(found: Any) -> dict[str, Any]:
    """Return what was read as a summary, if its status is a known one and config and last values are mappings.

    Raises:
        DamagedSummaryError: it is none that a run wrote.
    """
    if not isinstance(found, dict):
        raise DamagedSummaryError(f"{FILE} holds no summary")
    if found.get("status") not in STATUSES:
        raise DamagedSummaryError(f"{FILE} has no status")
    for key in ("config", "last"):
        if not isinstance(found.get(key, {}), dict) or (found["status"] == "finished" and not found.get(key)):
            raise DamagedSummaryError(f"{FILE} says {found['status']!r} but lacks {key!r}")
    return found


def data_digest(summary: dict[str, Any]) -> str:
    """Return the hash of a run's data, of who holds what; empty where its summary tells none that can be compared."""
    data = summary.get("data")
    found = data.get("digest") if isinstance(data, dict) else None
    return found if isinstance(found, str) and len(found) == DIGITS else ""


def higher_is_better(metric: str) -> bool | None:
    """Whether the larger value is the better one: of accuracies, and of how well a planted graph was found.

    False: the smaller one is, as of losses and seconds. None: neither, as of cosines and edges.

    >>> higher_is_better("accuracy/trained_worst"), higher_is_better("accuracy/trained_std@5")
    (True, False)
    >>> higher_is_better("loss/train"), higher_is_better("updates/cosine")
    (False, None)
    """
    if metric.partition("@")[0].endswith("_std") or metric.startswith(_LESS):
        return False
    return True if metric.startswith(("accuracy/", "graph/")) else None
