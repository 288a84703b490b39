"""What paths stand for, and what may be done there.

One rule for the paths that users give: ``~`` and ``~name`` at their start stand for a home folder, or are refused. A
path whose home folder nobody knows must not be taken literally: that would make a folder named ``~``.
"""

from __future__ import annotations

import os
import pwd
import re
from argparse import ArgumentTypeError
from pathlib import Path

CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
"""What no name may hold: no file system takes a null byte, and no terminal or table shows the others."""


class PathError(ValueError, ArgumentTypeError):
    """A path that names no place; the message, which argparse shows as it is, says which and what would do."""


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave, with ``~`` or ``~name`` at its start replaced by that home folder.

    Raises:
        PathError: there is no such user, no home folder is known here, or a control character is in it.
    """
    text = os.fspath(path)
    if CONTROLS.search(text):
        raise PathError(f"{text!r} names no place: it holds a control character")
    if not text.startswith("~"):
        return Path(text)
    name, _, rest = text[1:].partition("/")
    folder = home(name)
    if folder is None:
        reason = f"there is no user {name!r}" if name else "no home folder is known here (set HOME)"
        raise PathError(f"{text} names no place: {reason}; write the path in full")
    return folder / rest.lstrip("/")


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that a user gave in full, from the current folder: one text for all spellings of it.

    Raises:
        PathError: as `user_path`.
    """
    return os.path.abspath(user_path(path))


def moved(former: Path, present: Path) -> bool:
    """Whether what lay at the one path is at the other by now: it is gone from there, or its file was copied."""
    try:
        return former.name == present.name and (not former.exists() or former.read_bytes() == present.read_bytes())
    except OSError:
        return False


def user_file(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave for a file to be written; `~` as in `user_path`.

    Raises:
        PathError: a folder is there, or a file is in the way.
    """
    file = user_path(path)
    if file.is_dir():
        raise PathError(f"{file} is a folder; name a file")
    user_folder(file.parent)
    return file


def user_folder(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave for a folder, there already or to be made; `~` as in `user_path`.

    Raises:
        PathError: a file is there, or in the way.
    """
    folder = user_path(path)
    for place in (folder, *folder.parents):
        if os.path.lexists(place):
            if not place.is_dir():
                what = "a file" if place.is_file() else "no folder"
                raise PathError(f"{place} is {what}; name a folder" + (f", not {folder}" if place != folder else ""))
            break
    return folder


def home(name: str = "") -> Path | None:
    """Return the home folder of the user `name`, or, without a name, of whoever runs this; None where it has none.

    HOME counts only where it is an absolute path: anything else would depend on the current folder.
    """
    if not name and os.path.isabs(os.environ.get("HOME", "")):
        return Path(os.environ["HOME"])
    try:
        folder = (pwd.getpwnam(name) if name else pwd.getpwuid(os.getuid())).pw_dir
    except (KeyError, ValueError):  # nobody of that name, or no name at all (a null byte)
        return None
    return Path(folder) if os.path.isabs(folder) else None


def cache_home() -> Path | None:
    """Return the folder for this user's caches: XDG_CACHE_HOME where it is absolute, else ``~/.cache``, else None."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    folder = home()
    return None if folder is None else folder / ".cache"


def writable(folder: Path) -> bool:
    """Say whether files could be made in `folder`, or the folder itself be made; nothing is.

    A folder marked read-only counts as such for the superuser too, to whom the system would let it pass.
    """
    place = folder.absolute()
    try:
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        return place.is_dir() and bool(place.stat().st_mode & 0o222) and os.access(place, os.W_OK | os.X_OK)
    except OSError:  # within a folder of another user's
        return False
