"""What a table says, in words made from its numbers."""

from __future__ import annotations

from jgesr_lightning.reporting.render import interval_text, number_form
from jgesr_lightning.reporting.runs import Column
from jgesr_lightning.reporting.statistics import Difference
from jgesr_lightning.reporting.tables import (
    Entry,
    Table,
    clear_lead,
    column_title,
    in_words,
    mark_text,
    seeds_text,
    when,
)
from jgesr_lightning.reporting.text import listed

_NAMED = 5  # methods level with the best that are named, the nearest


def summary(table: Table) -> list[str]:
    """Return a paragraph for each column: which method leads, by how much and how sure, and what is level with it."""
    return [text for column in table.columns if (text := _column(table, column))]


def reading(table: Table, settings: str) -> str:
    """Return under which reading and on which data the paragraphs hold."""
    unit = "percentage points" if table.unit else "the metric's unit"
    apart = (
        " Those of the tables are corrected for the number of differences there, all of them to "
        f"{table.reference_title}, and may be wider or narrower."
    )
    return (
        f"This is {in_words(table.metric)}, {when(table.metric)}; {settings}. Differences are in "
        f"{unit}, on equal seeds; intervals have 95 % confidence (Student's t) and are corrected for the number of "
        f"methods that the best one is compared with (Holm).{apart if table.has_pairs else ''}"
    )


def _column(table: Table, column: Column) -> str:
    entries = {
        table.title(label): table.entries[label, column] for label in table.rows if (label, column) in table.entries
    }
    if not entries:
        return ""
    where, form = column_title(column), number_form(table.unit)
    if len(entries) == 1:
        label, entry = next(iter(entries.items()))
        return f"{where}: {label} alone was run, with {_value(table, entry)} over {seeds_text(entry.value.n)}."
    leaders = [label for label, entry in entries.items() if entry.leads]
    if not leaders:  # of a cosine, say, neither more nor less is better
        return ""
    ahead = {table.title(label): one for label, one in table.against_leader.get(column, {}).items()}
    first = leaders[0]
    rest = {label: one for label, one in ahead.items() if label not in leaders}
    kinds = {label: _kind(one, table.metric) for label, one in rest.items()}
    clear, behind, level, alike, once, apart = (
        {label: rest[label] for label in rest if kinds[label] == kind}
        for kind in ("clear", "behind", "level", "alike", "once", "apart")
    )
    names = listed(leaders)
    it, same, of = ("It", "it", "") if len(leaders) == 1 else (first, first, f" of {first}")
    sentences = [
        f"{where}: {names} {'has' if len(leaders) == 1 else 'have'} the best mean, {_value(table, entries[first])}"
    ]
    sentences[0] += f" over {seeds_text(entries[first].value.n)}"
    if len(leaders) > 1 and rest:  # intervals are of one method minus another, not of two
        sentences.append(f"The others are compared with {first}, the first of these")
    if once and not (clear or level or behind):
        nearest = min(once, key=lambda label: abs(once[label].mean))
        common = " in common" if all(entry.value.n > 1 for entry in entries.values()) else ""
        sentences.append(
            f"With one seed{common} nothing can be said of chance: "
            f"the lead{of} over {nearest}, the next, is {once[nearest].mean:+{form}}"
        )
    if clear:
        least = min(clear, key=lambda label: abs(clear[label].mean))
        which = "all others" if len(clear) == len(rest) else listed(clear)
        sentences.append(
            f"{it} is clear of {which}; its smallest clear lead is over {least}, {_lead(clear[least], form)}"
        )
    if level:
        near = sorted(level, key=lambda label: abs(level[label].mean))[:_NAMED]
        texts = [_told(label, level[label], form) for label in near]
        if (others := len(level) - _NAMED) > 0:
            texts.append("another" if others == 1 else f"{others} others")
        sentences.append(f"{it} cannot be told apart from {listed(texts)}")
    if behind:
        told = [_told(label, one, form) for label, one in behind.items()]
        sentences.append(f"On the seeds in common {same} is behind {listed(told)}")
    if once and (clear or level or behind):
        sentences.append(f"{it} has one seed in common with {listed(once)}")
    if alike:
        told = [f"{label} ({one.mean:+{form}})" for label, one in alike.items()]
        sentences.append(f"{it} differs from {listed(told)} by the same on every seed, which tells nothing of chance")
    if apart:
        sentences.append(
            f"No lead is told over {listed(apart)}, which share no seed with {same}: other clients, other data"
        )
    marked = [f"{label}{mark_text(entry.marks)}" for label, entry in entries.items() if entry.marks]
    if marked:
        sentences.append(f"Runs of {listed(marked)} carry a remark below the table")
    return ". ".join(sentences) + "."


def _kind(one: Difference, metric: str) -> str:
    """Return how the difference of the best method to another is told."""
    if one.half_width is None:
        return {0: "apart", 1: "once"}.get(one.n, "alike")
    if not one.clear_of_all:
        return "level"
    return "clear" if clear_lead(one, metric) else "behind"


def _told(label: str, one: Difference, form: str) -> str:
    return f"{label} ({_lead(one, form)})"


def _lead(one: Difference, form: str) -> str:
    return f"{one.mean:+{form}} {interval_text(one.mean, one.holm_half_width, form)}"


def _value(table: Table, entry: Entry) -> str:
    return f"{entry.value.mean:{number_form(table.unit)}}{' %' if table.unit else ''}{mark_text(entry.marks)}"
