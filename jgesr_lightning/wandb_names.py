"""What W&B is told a run is called: what the user set, else the environment's WANDB_ variables, else our defaults.

W&B refuses names that are too long or hold certain characters, some of them only when an offline run is sent, days
later. `refusal` says so first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PROJECT = "jgesr_lightning"
NAME_LENGTH = 128
TAG_LENGTH = 64
NO_PART_OF_AN_ADDRESS = "/\\#?%:\r\n"  # projects and entities stand in the addresses of pages


@dataclass(frozen=True)
class Labels:
    """What a W&B run is filed under; None leaves the choice to W&B.

    Attributes:
        name: shown in W&B.
        project: it belongs to.
        group: shared by the seeds of one configuration.
        entity: user or team that owns the project.
        job_type: kind of work within a group.
        notes: free text.
        tags: at most 64 characters each.
    """

    name: str
    project: str
    group: str
    entity: str | None = None
    job_type: str | None = None
    notes: str | None = None
    tags: tuple[str, ...] = ()


def labels(
    given: Mapping[str, str | None],
    tags: Sequence[str],
    defaults: Mapping[str, str],
    environment: Mapping[str, str],
) -> Labels:
    """Return what a run is filed under.

    Args:
        given: what the user set: name, project, group, entity, job_type, notes; None or missing where nothing was.
        tags: what the user set, checked already; none: those of WANDB_TAGS.
        defaults: name and group where neither user nor environment name one.
        environment: the process's; empty variables count as missing.

    Raises:
        ValueError: W&B would refuse one of them; the message names the setting or the variable.
    """
    found: dict[str, str | None] = {"project": PROJECT, **defaults}
    for key, variable in VARIABLES.items():
        shown = "name" if key == "name" else f"logging.{key}"
        if given.get(key) is not None:
            found[key] = given[key]
        elif environment.get(variable):
            found[key], shown = environment[variable], variable
        _refuse(key, found.get(key), shown)
    if not tags:
        tags = [tag.strip() for tag in environment.get("WANDB_TAGS", "").split(",") if tag.strip()]
        for tag in tags:
            _refuse("tag", tag, "a tag of WANDB_TAGS")
    return Labels(**found, tags=tuple(tags))  # type: ignore[arg-type]


def refusal(key: str, value: str | None) -> str:
    """Return why W&B would refuse a run's name, project, group, entity, job type or tag; empty where it would not.

    Args:
        key: which of them; notes are free.
        value: None is left to W&B.
    """
    if value is None or key == "notes":
        return ""
    longest = TAG_LENGTH if key == "tag" else NAME_LENGTH
    if not value.strip():
        return "it must not be empty"
    if len(value) > longest:
        return f"it must have at most {longest} characters for W&B, and has {len(value)}"
    wrong = [repr(character) for character in NO_PART_OF_AN_ADDRESS if character in value]
    if key in ("project", "entity") and wrong:
        return f"it must not hold {' '.join(wrong)}, which W&B refuses"
    return ""


def _refuse(key: str, value: str | None, shown: str) -> None:
    if reason := refusal(key, value):
        text = str(value)
        raise ValueError(f"{shown} is {text if len(text) <= 40 else f'{text[:20]}...{text[-15:]}'!r}; {reason}")


VARIABLES = {
    "name": "WANDB_NAME",
    "project": "WANDB_PROJECT",
    "group": "WANDB_RUN_GROUP",
    "entity": "WANDB_ENTITY",
    "job_type": "WANDB_JOB_TYPE",
    "notes": "WANDB_NOTES",
}
