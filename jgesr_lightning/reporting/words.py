"""What a table says, in words made from its numbers."""

from __future__ import annotations

from collections.abc import Sequence

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
    clear = {label: one for label, one in rest.items() if clear_lead(one, table.metric)}
    behind = {label: one for label, one in rest.items() if label not in clear and one.clear_of_all}
    level = {label: one for label, one in rest.items() if not one.clear_of_all and one.half_width is not None}
    unknown = [label for label, one in rest.items() if one.half_width is None]
    names = _listed(leaders)
    it, same, of = ("It", "it", "") if len(leaders) == 1 else (first, first, f" of {first}")
    sentences = [
        f"{where}: {names} {'has' if len(leaders) == 1 else 'have'} the best mean, {_value(table, entries[first])}"
    ]
    sentences[0] += f" over {seeds_text(entries[first].value.n)}"
    if len(leaders) > 1 and rest:  # intervals are of one method minus another, not of two
        sentences.append(f"The others are compared with {first}, the first of these")
    apart = [label for label in unknown if rest[label].n == 0]
    once = [label for label in unknown if rest[label].n == 1]
    same_lead = [f"{label} ({rest[label].mean:+{form}})" for label in unknown if rest[label].n > 1]
    if once and not (clear or level or behind):
        nearest = min(once, key=lambda label: abs(rest[label].mean))
        common = " in common" if all(entry.value.n > 1 for entry in entries.values()) else ""
        sentences.append(
            f"With one seed{common} nothing can be said of chance: "
            f"the lead{of} over {nearest}, the next, is {rest[nearest].mean:+{form}}"
        )
    if clear:
        least = min(clear, key=lambda label: abs(clear[label].mean))
        which = "all others" if len(clear) == len(rest) else _listed(list(clear))
        sentences.append(
            f"{it} is clear of {which}; its smallest clear lead is over {least}, {_lead(clear[least], form)}"
        )
    if level:
        near = sorted(level, key=lambda label: abs(level[label].mean))[:_NAMED]
        texts = [_told(label, level[label], form) for label in near]
        texts += [f"{len(level) - _NAMED} others"] if len(level) > _NAMED else []
        sentences.append(f"{it} cannot be told apart from {_listed(texts)}")
    if behind:
        told = [_told(label, one, form) for label, one in behind.items()]
        sentences.append(f"On the seeds in common {same} is behind {_listed(told)}")
    if once and (clear or level or behind):
        sentences.append(f"{it} has one seed in common with {_listed(once)}")
    if same_lead:
        sentences.append(
            f"{it} differs from {_listed(same_lead)} by the same on every seed, which tells nothing of chance"
        )
    if apart:
        sentences.append(
            f"No lead is told over {_listed(apart)}, which share no seed with {same}: other clients, other data"
        )
    marked = [f"{label}{mark_text(entry.marks)}" for label, entry in entries.items() if entry.marks]
    if marked:
        sentences.append(f"Runs of {_listed(marked)} carry a remark below the table")
    return ". ".join(sentences) + "."


def _told(label: str, one: Difference, form: str) -> str:
    return f"{label} ({_lead(one, form)})"


def _lead(one: Difference, form: str) -> str:
    return f"{one.mean:+{form}} {interval_text(one.mean, one.holm_half_width, form)}"


def _value(table: Table, entry: Entry) -> str:
    return f"{entry.value.mean:{number_form(table.unit)}}{' %' if table.unit else ''}{mark_text(entry.marks)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
