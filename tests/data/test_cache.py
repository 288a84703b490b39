import multiprocessing
import os
import signal
import time

import pytest
import torch

from jgesr_lightning.data import cache
from jgesr_lightning.data.cache import cache_paths, cached, in_turn, read_cache, source_key, write_cache
from jgesr_lightning.data.dataset import make_dataset

FORK = multiprocessing.get_context("fork")  # starts in milliseconds; the children do nothing but small tensor work


def dataset_of(value=0, n=40):
    images = (torch.arange(n * 64) % 251 + value).to(torch.uint8).view(n, 1, 8, 8)
    return make_dataset("toy", (images, torch.arange(n) % 4), (images[:8], torch.arange(8) % 4), ("a", "b", "c", "d"))


def equal(a, b):
    return (
        a.name == b.name
        and a.classes == b.classes
        and all(torch.equal(getattr(a, field), getattr(b, field)) for field in cache.TENSORS)
    )


def must_not_decode():
    raise AssertionError("decoded although there is a cache")


def test_decoded_once_then_read(tmp_path, own_cache):
    first = cached("toy", tmp_path, "key", dataset_of)
    again = cached("toy", tmp_path, "key", must_not_decode)
    assert equal(first, dataset_of()) and equal(again, dataset_of())
    assert (tmp_path / ".cache" / "toy.pt").is_file()
    assert not own_cache.exists()


def test_the_file_is_plain_tensors(tmp_path, own_cache):
    cached("toy", tmp_path, "key", dataset_of)
    content = torch.load(tmp_path / ".cache" / "toy.pt", weights_only=True, mmap=True)
    assert torch.equal(content["train_inputs"], dataset_of().train_inputs)


def test_a_changed_source_is_decoded_anew(tmp_path, own_cache):
    cached("toy", tmp_path, "old", dataset_of)
    assert equal(cached("toy", tmp_path, "new", lambda: dataset_of(3)), dataset_of(3))
    assert equal(cached("toy", tmp_path, "new", must_not_decode), dataset_of(3))


def test_the_key_follows_the_files(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"123")
    key = source_key("toy", tmp_path, files)
    assert source_key("toy", tmp_path, files) == key
    assert source_key("other", tmp_path, files) != key
    assert source_key("toy", tmp_path, files[:1]) != key
    os.utime(files[0], ns=(0, 5))
    touched = source_key("toy", tmp_path, files)
    assert touched != key
    files[0].write_bytes(b"1234")
    os.utime(files[0], ns=(0, 5))
    assert source_key("toy", tmp_path, files) not in (touched, key)


def cut(path):
    path.write_bytes(path.read_bytes()[:-200])


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(bytes(range(200)))] ^= 1  # one bit of one pixel
    path.write_bytes(content)


def replace(path):
    path.write_bytes(b"not a cache")


def empty(path):
    path.write_bytes(b"")


def other(path):
    torch.save({"key": "key"}, path)


@pytest.mark.parametrize("damage", [cut, flip, replace, empty, other])
def test_a_damaged_cache_is_noticed_and_made_anew(tmp_path, own_cache, damage, caplog):
    cached("toy", tmp_path, "key", dataset_of)
    path = tmp_path / ".cache" / "toy.pt"
    damage(path)
    assert equal(cached("toy", tmp_path, "key", dataset_of), dataset_of())
    assert "is damaged" in caplog.text
    assert equal(cached("toy", tmp_path, "key", must_not_decode), dataset_of())


def test_a_read_only_folder_is_left_alone(tmp_path, own_cache):
    root = tmp_path / "data"
    root.mkdir(mode=0o555)
    cached("toy", root, "key", dataset_of)
    assert list(root.iterdir()) == []
    assert [path.suffix for path in sorted((own_cache / "jgesr_lightning").iterdir())] == [".lock", ".pt"]
    assert equal(cached("toy", root, "key", must_not_decode), dataset_of())


def test_a_cache_in_a_read_only_folder_is_used(tmp_path, own_cache):
    cached("toy", tmp_path, "key", dataset_of)
    (tmp_path / ".cache").chmod(0o555)
    assert equal(cached("toy", tmp_path, "key", must_not_decode), dataset_of())


def test_folders_of_the_same_set_do_not_share_a_cache(tmp_path, own_cache):
    first, second = (cache_paths("toy", tmp_path / name)[1] for name in ("a", "b"))
    assert first != second and first.parent == second.parent == own_cache / "jgesr_lightning"


def test_works_where_nothing_can_be_written(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    root = tmp_path / "data"
    root.mkdir(mode=0o555)
    assert equal(cached("toy", root, "key", dataset_of), dataset_of())
    assert "decoding it at every start" in caplog.text


def test_a_full_disk_costs_the_cache_only(tmp_path, own_cache, monkeypatch, caplog):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    assert equal(cached("toy", tmp_path, "key", dataset_of), dataset_of())
    assert "No space left" in caplog.text
    assert [path.name for path in (tmp_path / ".cache").iterdir()] == ["toy.lock"]


def test_what_a_killed_writer_left_is_cleared(tmp_path, own_cache):
    folder = tmp_path / ".cache"
    folder.mkdir()
    (folder / ".toy.pt.0123.tmp").write_bytes(b"half")
    (folder / ".other.pt.0123.tmp").write_bytes(b"another set's")
    cached("toy", tmp_path, "key", dataset_of)
    assert sorted(path.name for path in folder.iterdir()) == [".other.pt.0123.tmp", "toy.lock", "toy.pt"]


def test_a_failed_decode_leaves_nothing(tmp_path, own_cache):
    def broken():
        raise ValueError("damaged source")

    with pytest.raises(ValueError, match="damaged source"):
        cached("toy", tmp_path, "key", broken)
    assert equal(cached("toy", tmp_path, "key", dataset_of), dataset_of())


def start_at_once(root, barrier, results):
    torch.set_num_threads(1)

    def slow():
        with (root / "decodes").open("a") as file:
            file.write("x")
        time.sleep(0.3)
        return dataset_of()

    barrier.wait()
    results.put(equal(cached("toy", root, "key", slow), dataset_of()))


@pytest.mark.processes
def test_of_many_processes_one_decodes_and_all_read_the_same(tmp_path, own_cache):
    barrier, results = FORK.Barrier(6), FORK.Queue()
    workers = [FORK.Process(target=start_at_once, args=(tmp_path, barrier, results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=60) for _ in workers] == [True] * 6
    for worker in workers:
        worker.join(60)
    assert (tmp_path / "decodes").read_text() == "x"
    assert sorted(path.name for path in (tmp_path / ".cache").iterdir()) == ["toy.lock", "toy.pt"]


def hold(path, ready):
    with in_turn(path) as held:
        ready.put(held)
        time.sleep(600)


@pytest.mark.processes
def test_a_lock_ends_with_its_process(tmp_path):
    ready = FORK.Queue()
    holder = FORK.Process(target=hold, args=(tmp_path / "lock", ready))
    holder.start()
    assert ready.get(timeout=60)
    with in_turn(tmp_path / "lock", seconds=0.2) as held:
        assert not held
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(60)
    with in_turn(tmp_path / "lock", seconds=10) as held:
        assert held


def test_a_reader_keeps_what_it_mapped_when_the_file_is_replaced(tmp_path):
    path = tmp_path / "toy.pt"
    write_cache(path, "a", dataset_of())
    mapped = read_cache(path, "a")
    write_cache(path, "b", dataset_of(9))
    assert equal(mapped, dataset_of())
    assert read_cache(path, "a") is None
