"""Whether W&B logs online or offline, decided in about two seconds and without asking anybody."""

from __future__ import annotations

import netrc
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from jgesr_lightning.arguments import called
from jgesr_lightning.paths import PathError, home, user_path

Mode = Literal["online", "offline", "disabled"]
REACH_SECONDS = 2.0


def resolve_mode(mode: str, *, sweep: bool = False) -> tuple[Mode, str]:
    """Return "online", "offline" or "disabled", and why where "auto" became "offline", else an empty text.

    Args:
        mode: "auto", or one of the three, which then stands.
        sweep: whether a sweep's agent started this run: it has just spoken to the server, so "auto" is online.
    """
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    if mode != "auto":
        return modes[mode], ""
    named = os.environ.get("WANDB_MODE", "").strip().lower()
    modes |= {"dryrun": "offline", "shared": "online", "run": "online"}
    if named in modes:
        return modes[named], ""
    if os.environ.get("WANDB_DISABLED", "").strip().lower() in ("true", "1", "t"):
        return "disabled", ""
    if sweep:
        return "online", ""
    import wandb

    url = wandb.setup().settings.base_url
    if not has_key(url):
        return "offline", f"no API key being configured (`{wandb_program()} login` sets one)"
    if not reachable(url):
        return "offline", f"{url} not answering within {REACH_SECONDS:g} s"
    return "online", ""


def wandb_program() -> str:
    """Return how W&B's own program is called from here, so that a printed line can be copied."""
    return called("wandb", str(Path(sys.executable).with_name("wandb")))


def has_key(url: str) -> bool:
    """Return whether a key for the server at `url` stands in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    for path in _netrc_files():
        try:
            found = netrc.netrc(str(path)).authenticators(urlsplit(url).hostname or "")
        except (OSError, netrc.NetrcParseError):
            continue
        if found and found[2]:
            return True
    return False


def reachable(url: str, seconds: float = REACH_SECONDS) -> bool:
    """Return whether the server of `url`, or the proxy on the way to it, accepts a connection within `seconds`."""
    target = urlsplit(url)
    host = target.hostname or ""
    proxy = None if proxy_bypass(host) else getproxies().get(target.scheme)
    if proxy:
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    address = (target.hostname or "", target.port or (80 if target.scheme == "http" else 443))
    answered = threading.Event()

    def knock() -> None:
        try:
            with socket.create_connection(address, timeout=seconds):
                answered.set()
        except OSError:
            pass

    # in a thread, because looking up a name has no time limit of its own
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def _netrc_files() -> list[Path]:
    try:
        if named := os.environ.get("NETRC"):
            return [user_path(named)]
    except PathError:
        return []
    folder = home()
    return [] if folder is None else [folder / ".netrc", folder / "_netrc"]
