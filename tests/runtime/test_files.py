import subprocess
import sys

import pytest

from jgesr_lightning.runtime.files import InUseError, locked, move_aside, say, write_atomically, write_text


def test_a_failed_write_leaves_the_former_file_and_no_other(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "former")

    def fail_halfway(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail_halfway)
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_held_against_other_processes_and_let_go(tmp_path):
    lock = tmp_path / "lock"
    attempt = f"""
from pathlib import Path
from jgesr_lightning.runtime.files import InUseError, locked
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
