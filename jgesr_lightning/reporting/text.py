"""Names and reasons from outside, made fit for a terminal, Markdown, LaTeX and figures.

A folder's name, a label or the reason in a summary may hold anything: bytes that are not UTF-8, line breaks, markup.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from jgesr_lightning.names import label

_TEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "\ufffd": "?",
    "\u2013": "--", "\u2212": "$-$", "\u00b1": r"$\pm$",
    "\u2020": r"\textdagger{}", "\u2021": r"\textdaggerdbl{}", "\u00a7": r"\S{}", "\u00b6": r"\P{}",
    **{symbol: f"\\{symbol}" for symbol in "{}$&%#_"},
}  # fmt: skip
_MARKDOWN = re.compile(r"[\\|`\[\]<>&~$]|\*(?=\S)|(?<=\S)\*|(?<!\w)_|_(?!\w)")


def shown(text: object, limit: int = 300) -> str:
    r"""Return text in one printable line: no line breaks, no control or direction characters, no half characters.

    >>> shown("a\nb\udcff")
    'a\\nb\ufffd'
    """
    line = "".join(char if char.isprintable() else _visible(char) for char in str(text))
    return line if len(line) <= limit else f"{line[: limit - 4]} ..."


def _visible(char: str) -> str:
    if "\ud800" <= char <= "\udfff":
        return "\ufffd"
    return " " if char == "\u00a0" else char.encode("unicode_escape").decode()


def listed(names: Iterable[str]) -> str:
    """Return names as one would say them, at least one.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def markdown_text(text: str) -> str:
    r"""Return text as Markdown that shows it, in a table's cell too.

    >>> print(markdown_text("two_step <b>|"))
    two_step \<b\>\|
    """
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", text)


def tex_text(text: str) -> str:
    r"""Return text as LaTeX that shows it.

    >>> print(tex_text("two_step 5 % \\input{x}"))
    two\_step 5 \% \textbackslash{}input\{x\}
    """
    # two hyphens, as before the name of an option, would become a dash
    return "-{}-".join("".join(_TEX.get(char, char) for char in part) for part in text.split("--"))


def part(value: Any) -> Any:
    """Return a setting's value; of a part in a file of somebody's own what it is called, not where the file lies.

    >>> part("/home/me/mine.py:Net"), part("/home/me/lists.json"), part("torchvision:resnet18"), part(3)
    ('Net', 'lists.json', 'torchvision:resnet18', 3)
    """
    return label(os.path.basename(value)) if isinstance(value, str) and os.path.isabs(value) else value


def figure_text(text: str) -> str:
    """Return text that matplotlib takes as it stands: a pair of dollars would be a formula."""
    return text.replace("$", r"\$")
