"""The configurations that come with the package: where they are, finding one by name, copying them to edit."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from jgesr_lightning.config.error import ConfigError
from jgesr_lightning.paths import PathError, user_folder, user_path

CONFIGS = Path("configs")
SHIPPED = Path(__file__).parents[1] / "configs"
COPIED = ("*.yaml", "*.sbatch")


def folders(below: str = "") -> list[Path]:
    """Return the folders in which a bare name is looked for: ``configs/`` here, then what the package ships."""
    return [CONFIGS / below, SHIPPED / below]


def find_config(name: str | Path, below: str = "", others: Iterable[str] = ()) -> Path:
    """Return the YAML file that `name` stands for: a path, or the bare name of a file in one of `folders`.

    Args:
        name: such as ``mnist_s01``, ``mnist_s01.yaml`` or ``configs/mnist_s01.yaml``.
        below: a folder in ``configs/`` that bare names are looked for in, such as ``studies``.
        others: words that may be meant, too.

    Raises:
        ConfigError: no such file; it names the nearest, or the nearest of `others`.
    """
    try:
        path = user_path(name)
    except PathError as error:
        raise ConfigError(f"no configuration file {name}: {error}") from None
    places = folders(below)
    spellings = [path, Path(f"{path}.yaml")]
    tried = [place / spelling for place in (Path(), *places) for spelling in spellings]  # a path in full stays itself
    if path.parts[:1] == CONFIGS.parts and not CONFIGS.is_dir():
        tried += [SHIPPED / spelling.relative_to(CONFIGS) for spelling in spellings]
    try:
        found = next((file for file in tried if file.is_file()), None)
    except OSError as error:  # too long for a file's name
        raise ConfigError(f"no configuration file {str(name)[:100]}... ({error.strerror})") from None
    if found is not None:
        return found
    if path.exists():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ConfigError(f"{path} is {kind}; name a configuration file")
    if not below and any((place / "studies" / spelling).is_file() for place in places for spelling in spellings):
        raise study_error(path)
    own, shipped = places
    known = {word: word for word in (*others, *(file.stem for file in shipped.glob("*.yaml")))}  # found by bare name
    for place in (own, path.parent):
        known |= {file.stem: str(file) for file in place.glob("*.yaml")}
    close = difflib.get_close_matches(path.stem, known, n=1)
    hint = f" (did you mean {known[close[0]]}?)" if close else ""
    raise ConfigError(f"no configuration file {path}{hint}")


def study_error(path: Path) -> ConfigError:
    """Return the error for a study in place of a run's configuration."""
    return ConfigError(f"{path} is a study, not one run; it is run by: python -m jgesr_lightning study {path}")


def copy_configs(folder: str | Path = ".") -> tuple[list[Path], list[Path]]:
    """Copy the configurations, studies, sweeps and SLURM scripts into ``configs/`` of a folder, to be edited.

    Args:
        folder: made where it does not exist.

    Returns:
        The files that were written, and those that were there already and stay as they are.

    Raises:
        ConfigError: the folder cannot be written, or is the checkout that the files come from.
        PathError: the folder's name is that of a file, or of nobody's home.
    """
    target = user_folder(Path(folder) / CONFIGS)
    if target.exists() and target.resolve() == SHIPPED.resolve():
        raise ConfigError(f"{target} are the package's own configurations; edit them there, or name another folder")
    written: list[Path] = []
    kept: list[Path] = []
    for source in sorted(file for pattern in COPIED for file in SHIPPED.rglob(pattern)):
        copy = target / source.relative_to(SHIPPED)
        if os.path.lexists(copy):
            kept.append(copy)
            continue
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        except OSError as error:
            raise ConfigError(f"{copy} cannot be written: {error.strerror or error}") from None
        written.append(copy)
    return written, kept
