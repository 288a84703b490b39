"""Take a run's models away: one safetensors file a client, or one for all, with a card that says how to use them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from jgesr_lightning.arguments import CommandParser
from jgesr_lightning.config import ConfigError
from jgesr_lightning.files import say, write_bytes, write_text
from jgesr_lightning.paths import user_folder
from jgesr_lightning.trained.source import CARD, KINDS, Trained, card_in, foreign, open_trained, refuse_another

BOTH = "both"


def export(trained: Trained, folder: Path, kinds: Sequence[str], *, one_file: bool = False) -> list[Path]:
    """Write models and card; files of a former export are replaced, each at once, or removed when the card is there.

    Args:
        trained: the models.
        folder: where to, made if need be.
        kinds: some of "received" and "trained".
        one_file: all clients of a kind in one file, their entries' names after ``client_000.``.

    Returns:
        The files, the card last: where it is, all the others are.

    Raises:
        ConfigError: models that are not there, or what is none of a former export where something would go.
        OSError: a file cannot be written.
    """
    former = refuse_another(folder)
    clients = [{**entry, "files": {}} for entry in trained.card["clients"]]
    files: dict[str, list[tuple[int, str, str]]] = {}
    for kind in kinds:
        for client, entry in enumerate(clients):
            prefix = f"client_{client:03d}." if one_file else ""
            name = f"{kind}.safetensors" if one_file else f"{kind}_client_{client:03d}.safetensors"
            entry["files"][kind] = {"file": name} | ({"prefix": prefix} if one_file else {})
            files.setdefault(name, []).append((client, kind, prefix))

    def content(name: str) -> bytes:
        tensors: dict[str, Tensor] = {}
        for client, kind, prefix in files[name]:
            tensors |= {f"{prefix}{key}": tensor.clone() for key, tensor in trained.tensors(client, kind).items()}
        return save(tensors, metadata={"format": "pt"})

    for name in files:
        path = folder / name  # without a card, but as it would be: of an export that was cut short
        if name not in former and os.path.lexists(path) and not (path.is_file() and path.read_bytes() == content(name)):
            raise foreign(path)
    folder.mkdir(parents=True, exist_ok=True)
    card = portable(trained.card, folder)
    for name in files:
        write_bytes(folder / name, content(name))
    write_text(folder / CARD, json.dumps({**card, "clients": clients}, indent=1))
    if trained.place.resolve() != folder.resolve():  # else they are the source, which may have no other
        for name in former - files.keys():
            (folder / name).unlink(missing_ok=True)
    return [*(folder / name for name in files), folder / CARD]


def portable(card: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a card for a folder of its own: the file of one's own network is copied there, and named from there.

    Raises:
        ConfigError: another file of that name is there, and no former card's.
    """
    place, _, attribute = card["network"]["name"].rpartition(":")
    if not place.endswith(".py"):
        return card
    source, copy = Path(place), folder / Path(place).name
    if source.resolve() != copy.resolve():
        content = source.read_bytes()
        if copy.exists() and copy.read_bytes() != content and not _names(card_in(folder), copy):
            raise ConfigError(f"{copy} is another file than {source}, which goes along; name another folder with --out")
        write_bytes(copy, content)
    return {**card, "network": {**card["network"], "name": f"./{copy.name}:{attribute}"}}


def _names(card: dict[str, Any], copy: Path) -> bool:
    """Return whether a card names the file beside it as that of its network."""
    network = card.get("network")
    return isinstance(network, dict) and str(network.get("name")).startswith(f"./{copy.name}:")


def main(arguments: Sequence[str]) -> int:
    """Run the command `export`."""
    parser = CommandParser(
        "export", "Write the models of a run to safetensors files with a card.", "export runs/mnist_s01 --what both"
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("--what", help="received, trained or both (default: all that were kept)")
    parser.add_argument("--one-file", action="store_true", help="all clients in one file")
    parser.add_argument("--out", metavar="FOLDER", help="where to, in place of a former export (default: RUN/export)")
    given = parser.parse_args(list(arguments))
    trained = open_trained(given.run)
    kinds = _kinds(trained, given.what)
    folder = user_folder(given.out or trained.place / "export")
    files = export(trained, folder, kinds, one_file=given.one_file)
    say(f"{len(files) - 1} files of {trained.num_clients} clients ({' and '.join(kinds)}) and {CARD}: {folder}")
    return 0


def _kinds(trained: Trained, what: str | None) -> tuple[str, ...]:
    if what is None:
        return trained.kinds
    if what == BOTH:
        return tuple(trained.best_kind(kind) for kind in KINDS)
    if what not in KINDS:
        raise ConfigError(f"--what is {what!r}; it must be received, trained or both")
    return (trained.best_kind(what),)
