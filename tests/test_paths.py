import os
import pwd
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from jgesr_lightning import cli, paths
from jgesr_lightning.data import data_root
from jgesr_lightning.data.cache import cache_paths
from jgesr_lightning.paths import PathError, cache_home, home, user_file, user_folder, user_path, writable


@pytest.fixture
def homeless(monkeypatch):
    """Whoever runs this has no HOME and no entry among the users, as in a container under a foreign user number."""

    def nobody(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(paths.pwd, "getpwuid", nobody)


@pytest.mark.parametrize("path", ["a/b", "/a/b", "a/~", "a/~root/b", ".", "file~"])
def test_other_paths_stay_as_they_are(path):
    assert user_path(path) == Path(path)


def test_home_folders_take_their_place(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_path("~") == Path("/somewhere")
    assert user_path("~/a/b") == user_path("~//a/b") == Path("/somewhere/a/b")
    assert user_path("~root/x") == Path(pwd.getpwnam("root").pw_dir, "x")
    assert user_path(Path("~/x")) == Path("/somewhere/x")


@pytest.mark.parametrize("unusable", ["", "~", "relative", "./x"])
def test_a_home_that_depends_on_the_current_folder_is_none(monkeypatch, unusable):
    monkeypatch.setenv("HOME", unusable)
    assert home() == Path(pwd.getpwuid(os.getuid()).pw_dir)


def test_nobodys_home_is_refused(homeless):
    assert home() is None
    with pytest.raises(PathError, match=r"^~/x names no place: no home folder is known here \(set HOME\); write"):
        user_path("~/x")


@pytest.mark.parametrize("path", ["~no_such_user_here/x", "~no_such_user_here", "~~/x"])
def test_an_unknown_user_is_refused(path):
    with pytest.raises(PathError, match="names no place: there is no user"):
        user_path(path)
    with pytest.raises(ArgumentTypeError, match="names no place"):  # which argparse shows as it is
        user_path(path)


def test_caches_go_where_the_standard_says(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_home() == Path("/caches")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")  # the standard: a relative one is to be ignored
    assert cache_home() == Path("/somewhere/.cache")


def test_without_a_home_a_cache_lies_beside_the_data_or_nowhere(homeless, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cache_home() is None
    assert cache_paths("mnist", tmp_path) == [tmp_path / ".cache" / "mnist.pt"]
    monkeypatch.setenv("JGESR_DATA", "~/data")
    with pytest.raises(PathError, match="~/data names no place"):
        data_root()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["table", "figures", "report"])
def test_folders_of_runs_follow_the_rule(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, "~no_such_user_here/runs"]) == 2
    assert "argument RUNS: ~no_such_user_here/runs names no place" in capsys.readouterr().err
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main([command, "~/runs"]) == 2
    assert f"no folder and no file {tmp_path}/runs" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["\0", "a\nb", "~a\0b/x", "\x7f"])
def test_a_control_character_is_refused_in_one_line(path):
    for function in (user_path, user_folder, user_file):
        with pytest.raises(PathError, match="names no place: it holds a control character") as caught:
            function(path)
        assert str(caught.value).isprintable()


def test_writable_makes_nothing(tmp_path):
    assert writable(tmp_path / "a" / "b") and not (tmp_path / "a").exists()
    (tmp_path / "marked").mkdir(mode=0o555)
    assert not writable(tmp_path / "marked") and not writable(tmp_path / "marked" / "below")
    (tmp_path / "file").touch()
    assert not writable(tmp_path / "file" / "below")


def test_a_file_where_a_folder_is_wanted_is_said_to_be_one(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert user_folder(tmp_path / "new" / "one") == tmp_path / "new" / "one"
    assert user_folder(tmp_path) == tmp_path
    assert user_file(file) == file
    assert not (tmp_path / "new").exists()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for function, path, said in (
        (user_folder, file, f"{file} is a file; name a folder"),
        (user_folder, file / "a" / "b", f"{file} is a file; name a folder, not {file}/a/b"),
        (user_folder, tmp_path / "link", f"{tmp_path}/link is no folder; name a folder"),
        (user_file, tmp_path, f"{tmp_path} is a folder; name a file"),
        (user_file, file / "a", f"{file} is a file; name a folder"),
    ):
        with pytest.raises(PathError) as caught:
            function(path)
        assert str(caught.value) == said


COMMANDS = [[name, "nowhere", "--out", "FILE"] for name in ("map", "table", "figures")]
COMMANDS += [["table", "nowhere", "--store", "FOLDER"], ["report", "nowhere", "--out", "FOLDER"], ["init", "FILE"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_of_the_wrong_kind_is_said_at_once(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    (tmp_path / "FOLDER").mkdir()
    assert cli.main(command) == 2
    kind, wanted = ("folder", "file") if "FOLDER" in command else ("file", "folder")
    assert f"{kind.upper()} is a {kind}; name a {wanted}" in capsys.readouterr().err
