import hashlib
import http.server
import os
import socket
import threading

import pytest

from jgesr_lightning.data import fetch
from jgesr_lightning.data.fetch import FetchError, answering, download

CONTENT = b"the very file" * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(405 if self.path == "/no-head" else 200)
        self.end_headers()

    def do_GET(self):
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write({"/cut": CONTENT[:-100], "/wrong": CONTENT[::-1]}.get(self.path, CONTENT))

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def silent(monkeypatch):
    """A server that takes calls and never says a word."""
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/file"


DEAD = "http://127.0.0.1:9/file"


def test_downloads_whole_and_checked(server, tmp_path):
    target = tmp_path / "a" / "file"
    download([f"{server}/no-head"], target, MD5)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_dead_mirror_does_not_stop_it(server, silent, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "STALL_SECONDS", 0.5)
    urls = [DEAD, f"{server}/missing", f"{server}/wrong", f"{server}/cut", f"{server}/good"]
    download(urls, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_all_reasons_are_told_and_nothing_is_left(server, tmp_path):
    urls = [DEAD, f"{server}/missing", f"{server}/wrong", f"{server}/cut"]
    with pytest.raises(FetchError) as caught:
        download(urls, tmp_path / "sub" / "file", MD5)
    reasons = str(caught.value).split("; ")
    assert [reason.startswith(url) for reason, url in zip(reasons, urls, strict=True)] == [True] * 4
    for reason, word in zip(reasons, ("refused", "Not Found", "MD5", ""), strict=True):
        assert word in reason
    assert not (tmp_path / "sub").exists()


@pytest.mark.timeout(30)
def test_a_silent_server_is_given_up(silent, server):
    verdicts = answering([silent, DEAD, f"{server}/good"], seconds=0.5)
    assert verdicts[silent] and verdicts[DEAD] and verdicts[f"{server}/good"] == ""


@pytest.mark.timeout(30)
def test_a_name_lookup_that_hangs_is_given_up(monkeypatch):
    release = threading.Event()

    def hang(*args, **options):
        release.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert (
        "no answer within 0.3 s" in answering(["http://mirror.invalid/file"], seconds=0.3)["http://mirror.invalid/file"]
    )
    release.set()


@pytest.mark.timeout(30)
def test_a_download_that_stalls_is_cut_off(silent, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(fetch, "answering", lambda urls: dict.fromkeys(urls, ""))
    with pytest.raises(FetchError, match="timed out"):
        download([silent], tmp_path / "file", MD5)


def test_a_failed_write_leaves_the_old_file(server, tmp_path, monkeypatch):
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        download([f"{server}/good"], target, MD5)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
