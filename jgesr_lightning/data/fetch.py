"""Downloads that end: mirrors are probed first, stalls are cut off, files appear whole and checked or not at all."""

from __future__ import annotations

import hashlib
import http.client
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from jgesr_lightning.files import write_bytes

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0  # for all mirrors together
STALL_SECONDS = 10.0  # without a byte
TOTAL_SECONDS = 1800.0
HEADERS = {"User-Agent": "jgesr_lightning"}


class FetchError(RuntimeError):
    """A download that did not work; the message says which and why."""


def answering(urls: Sequence[str], seconds: float = PROBE_SECONDS) -> dict[str, str]:
    """Return, for each address, "" if its server answers within `seconds`, else why not. All are asked at once."""
    verdicts = dict.fromkeys(urls, f"no answer within {seconds:g} s")

    def probe(url: str) -> None:
        try:
            request = urllib.request.Request(url, headers=HEADERS, method="HEAD")
            with urllib.request.urlopen(request, timeout=seconds):
                verdicts[url] = ""
        except urllib.error.HTTPError:
            verdicts[url] = ""  # a server is there; what it has is for the download to find out
        except (OSError, http.client.HTTPException, ValueError) as error:
            verdicts[url] = _reason(error)

    # Looking a name up has no timeout of its own: threads that hang are left behind.
    threads = [threading.Thread(target=probe, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(verdicts)


def download(urls: Sequence[str], target: Path, md5: str) -> None:
    """Fetch `target` from the first of `urls` that has it whole.

    Raises:
        FetchError: none has; the message names each and its reason.

    """
    reasons = []
    for url, silent in answering(urls).items():
        reason = silent or _download_from(url, target, md5)
        if not reason:
            return
        reasons.append(f"{url}: {reason}")
    raise FetchError("; ".join(reasons))


def _download_from(url: str, target: Path, md5: str) -> str:
    """Fetch one file from one address; return "" or the reason why not."""
    log.warning("Downloading %s", url)
    deadline = time.monotonic() + TOTAL_SECONDS
    digest, chunks = hashlib.md5(usedforsecurity=False), []
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=HEADERS), timeout=STALL_SECONDS) as answer:
            while chunk := answer.read(1 << 20):
                digest.update(chunk)
                chunks.append(chunk)
                if time.monotonic() > deadline:
                    return f"not done after {TOTAL_SECONDS:g} s"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _reason(error)
    if digest.hexdigest() != md5:
        return "what arrived is not the published file (its MD5 sum differs)"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, b"".join(chunks))
    return ""


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return " ".join(str(inner).split()) or type(error).__name__
