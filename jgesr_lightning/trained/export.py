"""Take a run's models away: one safetensors file a client, or one for all, with a card that says how to use them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from jgesr_lightning.arguments import CommandParser
from jgesr_lightning.config import ConfigError
from jgesr_lightning.paths import user_folder
from jgesr_lightning.runtime.files import say, write_atomically, write_text
from jgesr_lightning.trained.source import CARD, KINDS, Trained, card_in, open_trained, refuse_another

BOTH = "both"


def export(trained: Trained, folder: Path, kinds: Sequence[str], *, one_file: bool = False) -> list[Path]:
    """Write models and card; files of a former export are replaced, each at once.

    Args:
        trained: the models.
        folder: where to, made if need be.
        kinds: some of "received" and "trained".
        one_file: all clients of a kind in one file, their entries' names after ``client_000.``.

    Returns:
        The files, the card last: where it is, all the others are.

    Raises:
        ConfigError: models that are not there, an attached client in the folder, or a file of the user's own where
            the network's file would go.
        OSError: a file cannot be written.
    """
    refuse_another(folder)
    folder.mkdir(parents=True, exist_ok=True)
    card = portable(trained.card, folder)
    clients = [{**entry, "files": {}} for entry in trained.card["clients"]]
    written: list[Path] = []
    for kind in kinds:
        together: dict[str, Tensor] = {}
        for client, entry in enumerate(clients):
            tensors = {name: tensor.clone() for name, tensor in trained.tensors(client, kind).items()}
            if one_file:
                prefix = f"client_{client:03d}."
                entry["files"][kind] = {"file": f"{kind}.safetensors", "prefix": prefix}
                together |= {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
                continue
            entry["files"][kind] = {"file": f"{kind}_client_{client:03d}.safetensors"}
            written.append(_write(folder / entry["files"][kind]["file"], tensors))
        if one_file:
            written.append(_write(folder / f"{kind}.safetensors", together))
    write_text(folder / CARD, json.dumps({**card, "clients": clients}, indent=1))
    return [*written, folder / CARD]


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
        write_atomically(copy, lambda file: file.write(content))
    return {**card, "network": {**card["network"], "name": f"./{copy.name}:{attribute}"}}


def _names(card: dict[str, Any], copy: Path) -> bool:
    """Return whether a card names the file beside it as that of its network."""
    network = card.get("network")
    return isinstance(network, dict) and str(network.get("name")).startswith(f"./{copy.name}:")


def _write(path: Path, tensors: dict[str, Tensor]) -> Path:
    content = save(tensors, metadata={"format": "pt"})
    write_atomically(path, lambda file: file.write(content))
    return path


def main(arguments: Sequence[str]) -> int:
    """Run the command `export`."""
    parser = CommandParser(
        "export", "Write the models of a run to safetensors files with a card.", "export runs/mnist_s01 --what both"
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("--what", help="received, trained or both (default: all that were kept)")
    parser.add_argument("--one-file", action="store_true", help="all clients in one file")
    parser.add_argument("--out", metavar="FOLDER", help="where to (default: RUN/export)")
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
