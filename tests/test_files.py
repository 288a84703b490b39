import errno
import os
import resource
import socket
import stat
import subprocess
import sys

import pytest
import torch

from jgesr_lightning.files import InUseError, held_since, locked, move_aside, say, write_atomically, write_text


def test_a_failed_write_leaves_the_former_file_and_no_other(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "former")

    def fail_halfway(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*file\.txt"):
        write_atomically(path, fail_halfway)
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_held_against_other_processes_and_let_go(tmp_path):
    lock = tmp_path / "lock"
    attempt = f"""
from pathlib import Path
from jgesr_lightning.files import InUseError, locked
try:
    with locked(Path({str(lock)!r})):
        print("got it")
except InUseError as error:
    print("in use:", error)
"""

    def other():
        return subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=True).stdout

    with locked(lock):
        assert "in use: process " in other()
        with pytest.raises(InUseError), locked(lock):
            pass
    assert other() == "got it\n"


def test_since_when_a_lock_is_held_is_told_without_taking_it(tmp_path):
    path = tmp_path / "lock"
    assert held_since(path) is None and not path.exists()
    with locked(path):
        os.utime(path, (0, 1000))
        assert held_since(path) == 1000
        assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert held_since(path) is None
    (tmp_path / "link").symlink_to(path)
    assert held_since(tmp_path / "link") is None


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path):
    (tmp_path / "target").write_text("precious")
    for name in ("target", "nothing"):
        (tmp_path / f"to_{name}").symlink_to(tmp_path / name)
        with pytest.raises(OSError, match="is a symbolic link"), locked(tmp_path / f"to_{name}"):
            pass
    assert (tmp_path / "target").read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_a_lock_on_a_file_with_other_content_changes_nothing_in_it(tmp_path):
    path = tmp_path / "notes"
    path.write_text("not a lock")
    with locked(path), pytest.raises(InUseError, match="another process"), locked(path):
        pass
    assert path.read_text() == "not a lock"


def test_a_process_that_inherits_the_descriptor_holds_the_lock(tmp_path):
    code = f"""
import subprocess, sys
from pathlib import Path
from jgesr_lightning.files import locked
with locked(Path({str(tmp_path / "lock")!r})) as descriptor:
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)  # nor may it keep a pipe of ours open
    child = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,), **quiet)
    print(child.pid, flush=True)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout)
    try:
        with pytest.raises(InUseError), locked(tmp_path / "lock"):
            pass
    finally:
        os.kill(child, 9)


def test_a_file_system_without_locks_is_a_line_and_nothing_is_held(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path / "lock") as descriptor:
        assert descriptor is None
    assert "cannot be locked" in caplog.text


def test_a_full_disk_is_named_where_torch_names_its_own_source(tmp_path):
    """A limit on the size of files stands for the full disk: both reach the writer as an OSError."""
    path = tmp_path / "rows.pt"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomically(path, lambda file: torch.save(torch.zeros(100_000), file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "00")
    (tmp_path / "target").write_text("precious")
    (tmp_path / ".file.txt.00.tmp").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "file.txt", "new")
    assert (tmp_path / "target").read_text() == "precious"


def test_processes_of_one_number_in_two_containers_write_apart(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, lambda file: (write_text(path, "the other's"), file.write(b"whole")))
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_flushes_no_folders_is_written_to_all_the_same(tmp_path, monkeypatch, number):
    flush = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(tmp_path / "file.txt", "new")
    assert (tmp_path / "file.txt").read_text() == "new"


def test_folders_are_moved_aside_under_free_names(tmp_path):
    for number in (1, 2):
        (tmp_path / "run").mkdir()
        assert move_aside(tmp_path / "run") == tmp_path / f"run.{number}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("gone", [OSError(32, "Broken pipe"), ValueError("I/O operation on closed file")])
def test_a_reader_that_went_away_stops_nothing(monkeypatch, gone):
    class Broken:
        def write(self, text):
            raise gone

        def flush(self):
            raise gone

    monkeypatch.setattr(sys, "stderr", Broken())
    say("a line")
    monkeypatch.setattr(sys, "stderr", None)
    say("a line")
