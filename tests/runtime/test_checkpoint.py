import json
import os
import shutil

import numpy as np
import pytest
import torch

from jgesr_lightning.records import FederationState, RoundRecord
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.runtime.checkpoint import CheckpointError, Found, find
from jgesr_lightning.runtime.sharding import Sharding

CPU = torch.device("cpu")


def state_of(round_number, rows=(0, 1, 2)):
    records = [
        RoundRecord(r, {"accuracy/received": r / 10}, {"loss": [1.0, float("nan"), 2.0]})
        for r in range(round_number + 1)
    ]
    models = torch.stack([torch.full((4,), float(k)) for k in rows])
    return FederationState(round_number, models, records, {2: torch.eye(3)}, {})


def single(clients=3, size=4):
    return Sharding([list(range(clients))], size, 0, CPU)


def save(root, round_number=2, **options):
    return checkpoint.save(root, state_of(round_number), {}, {}, single(), **options)


def names(root):
    return sorted(path.name for path in root.iterdir())


def rewrite(path, change):
    """Let `change` edit the content of a file, in a checkpoint that is then one without digests."""
    content = torch.load(path, weights_only=True)
    changed = change(content)
    torch.save(content if changed is None else changed, path)
    (path.parent / "digests.json").unlink()
    state = torch.load(path.parent / "state.pt", weights_only=True)
    if isinstance(state, dict):
        state.pop("digests", None)
        torch.save(state, path.parent / "state.pt")


def test_what_is_saved_comes_back_without_pickles(tmp_path):
    folder = checkpoint.save(tmp_path, state_of(2), {"clusters": [[0, 1], [2]]}, {"seed": 0}, single())
    for file in folder.glob("*.pt"):
        torch.load(file, weights_only=True)
    shared = checkpoint.read_shared(folder)
    assert shared["aggregator"] == {"clusters": [[0, 1], [2]]}
    assert shared["config"] == {"seed": 0}
    state = checkpoint.load(folder, shared, single(), CPU)
    assert state.round == 2
    assert torch.equal(state.models, state_of(2).models)
    assert [record.metrics for record in state.records] == [record.metrics for record in state_of(2).records]
    assert torch.equal(state.graphs[2], torch.eye(3))


def test_the_one_before_is_kept_and_older_ones_go_when_the_new_one_is_whole(tmp_path, monkeypatch):
    for round_number in (1, 2, 3):
        save(tmp_path, round_number)
    assert names(tmp_path) == ["round_00002", "round_00003"]

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(CheckpointError, match=r"No space left.*round_00003 is kept"):
        save(tmp_path, 4)
    assert names(tmp_path) == ["round_00002", "round_00003"]
    assert find(tmp_path).folder.name == "round_00003"


def test_the_one_before_is_kept_beyond_five_digits(tmp_path):
    for number in (99_998, 99_999, 100_000):
        state = FederationState(number, torch.zeros(3, 4), [RoundRecord(number)])
        checkpoint.save(tmp_path, state, {}, {}, single())
    assert names(tmp_path) == ["round_100000", "round_99999"]


@pytest.mark.parametrize(
    ("state", "odd"),
    [
        ({"f": print}, "state()['f'] is a builtin_function_or_method"),
        ({"a": [1, {"b": {3}}]}, "state()['a'][1]['b'] is a set"),
        ({"a": (np.float64(1),)}, "state()['a'][0] is a float64"),
        ({"a": np.zeros(2)}, "state()['a'] is a ndarray"),
        ({"a": {(1, 2): 3}}, "state()['a'] has a key that is a tuple"),
        ({0: 1.5}, "state() is no table of names"),
        ([1.5], "state() is no table of names"),
        (None, "state() is no table of names"),
    ],
)
def test_what_could_not_be_read_back_of_a_methods_state_is_not_written(tmp_path, state, odd):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path, state_of(2), state, {}, single())
    assert f"round_00002: the method's {odd}; it must hold numbers" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_half_written_checkpoint_is_not_found_and_is_cleared_by_the_next(tmp_path):
    whole = save(tmp_path, 1)
    (tmp_path / ".round_00002.partial").mkdir()
    (tmp_path / ".round_00002.partial" / "state.pt").write_bytes(b"half")
    (tmp_path / ".round_00002.partial" / ".models_00000.pt.7f.tmp").write_bytes(b"half")
    assert find(tmp_path).folder == checkpoint.newest(tmp_path) == whole
    save(tmp_path, 3)
    assert names(tmp_path) == ["round_00001", "round_00003"]


def test_what_the_user_put_beside_or_into_checkpoints_stays(tmp_path):
    (tmp_path / "best_so_far").mkdir()
    (tmp_path / "best_so_far" / "state.pt").write_text("a copy")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "link").symlink_to("best_so_far")
    first = save(tmp_path, 1)
    (first / "why.txt").write_text("mine")
    shutil.copytree(first, tmp_path / "round_1_copy")
    for round_number in (2, 3, 3):  # the third is written once more
        last = save(tmp_path, round_number)
        if round_number == 3:
            (last / "also.txt").write_text("mine")
    kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert {"best_so_far/state.pt", "notes", "link", "round_00001/why.txt", "round_1_copy/state.pt"} <= kept
    assert "round_00001/state.pt" not in kept
    assert (tmp_path / "round_00003.1" / "also.txt").read_text() == "mine"
    assert names(tmp_path / "round_00003.1") == ["also.txt"]
    assert find(tmp_path).folder == last


def test_another_number_of_processes_may_read_it(tmp_path):
    folder = save(tmp_path)
    for rank, clients in enumerate([[0, 2], [1]]):
        sharding = Sharding([[0, 2], [1]], 4, rank, CPU)
        state = checkpoint.load(folder, checkpoint.read_shared(folder), sharding, CPU)
        assert torch.equal(state.models, state_of(2).models[clients])


def test_trained_models_are_kept_beside_where_asked(tmp_path):
    trained = torch.arange(12.0).view(3, 4)
    found = Found(folder := save(tmp_path / "with", trained=trained), checkpoint.read_shared(folder))
    rows = checkpoint.rows(found)
    assert torch.equal(rows["trained"], trained) and torch.equal(rows["models"], state_of(2).models)
    bare = Found(folder := save(tmp_path / "without"), checkpoint.read_shared(folder))
    assert checkpoint.rows(bare).keys() == {"models"}
    assert torch.equal(checkpoint.load(bare.folder, bare.shared, single(), CPU).models, state_of(2).models)


def test_one_written_before_there_were_digests_is_read(tmp_path):
    folder = save(tmp_path)
    rewrite(folder / "state.pt", lambda shared: None)
    assert not (folder / "digests.json").exists()
    assert torch.equal(checkpoint.rows(find(tmp_path))["models"], state_of(2).models)


def test_any_flipped_bit_is_noticed_and_the_one_before_is_used(tmp_path):
    save(tmp_path / "good", 1, trained=torch.rand(3, 4))
    save(tmp_path / "good", 2, trained=torch.rand(3, 4))
    noticed = 0
    for name in ("state.pt", "models_00000.pt", "digests.json"):
        size = (tmp_path / "good" / "round_00002" / name).stat().st_size
        for place in range(0, size, max(1, size // 40)):
            shutil.copytree(tmp_path / "good", tmp_path / "bad")
            path = tmp_path / "bad" / "round_00002" / name
            content = bytearray(path.read_bytes())
            content[place] ^= 1 << (place % 8)
            path.write_bytes(content)
            found = find(tmp_path / "bad")
            # a blank turned into another one leaves a digest what it was
            if found.folder.name == "round_00001":
                assert len(found.passed_over) == 1 and "round_00002" in found.passed_over[0]
                noticed += 1
            else:
                assert name == "digests.json"
                assert (
                    json.loads(path.read_bytes())["sha256"]
                    == json.loads((tmp_path / "good" / "round_00002" / name).read_bytes())["sha256"]
                )
            shutil.rmtree(tmp_path / "bad")
    assert noticed > 100


def test_a_lost_file_of_digests_is_noticed(tmp_path):
    folder = save(tmp_path)
    (folder / "digests.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.pt has lost its digests\.json"):
        find(tmp_path)


@pytest.mark.parametrize("hiding", ["empty", "file", "foreign", "link"])
def test_what_only_looks_newer_hides_nothing(tmp_path, hiding):
    good = save(tmp_path, 1)
    place = tmp_path / "round_00099"
    if hiding == "file":
        place.write_text("a file")
    elif hiding == "link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
        if hiding == "foreign":
            (place / "state.pt").mkdir()
    found = find(tmp_path)
    assert found.folder == good
    assert [reason.startswith(f"{place} holds no checkpoint") for reason in found.passed_over] in ([], [True])
    save(tmp_path, 2)
    assert find(tmp_path).folder.name == "round_00002"


@pytest.mark.parametrize("name", ["models_00000.pt", "digests.json", "state.pt"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    good, folder = save(tmp_path, 1), save(tmp_path, 2)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert find(tmp_path).folder == good


def test_nothing_is_no_checkpoint(tmp_path):
    assert find(tmp_path) is None
    assert find(tmp_path / "nowhere") is None
    assert checkpoint.newest(tmp_path) is None


def test_damage_is_named(tmp_path):
    folder = save(tmp_path)
    shared = checkpoint.read_shared(folder)
    with pytest.raises(CheckpointError, match="3 clients of 4 parameters; this run has 2 of 4"):
        checkpoint.load(folder, shared, single(clients=2), CPU)
    models = folder / "models_00000.pt"
    models.write_bytes(models.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"models_00000.pt is damaged"):
        checkpoint.load(folder, shared, single(), CPU)
    models.unlink()
    with pytest.raises(CheckpointError, match=r"models_00000.pt is missing"):
        checkpoint.load(folder, shared, single(), CPU)
    (folder / "state.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"state.pt is damaged"):
        checkpoint.read_shared(folder)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.read_shared(tmp_path / "elsewhere")


def test_another_schema_is_refused(tmp_path, monkeypatch):
    folder = save(tmp_path)
    monkeypatch.setattr(checkpoint, "SCHEMA", 99)
    with pytest.raises(CheckpointError, match="has schema 1, this program reads schema 99"):
        checkpoint.read_shared(folder)


@pytest.mark.parametrize("content", [[1], torch.zeros(3), {"schema": 1}, {"schema": 1, "round": 2}])
def test_what_is_no_checkpoint_though_torch_can_load_it_is_named(tmp_path, content):
    folder = save(tmp_path)
    rewrite(folder / "state.pt", lambda _: content)
    with pytest.raises(CheckpointError, match=r"state\.pt (is no part|lacks)"):
        checkpoint.read_shared(folder)


STATES = {
    "round": ["2", -1, True, None, 2.0, torch.tensor(2)],
    "num_clients": [0, "3", None],
    "size": [0, -4, 4.0],
    "world_size": [0, None, "1"],
    "config": [None, [], "x", {1: 2}],
    "aggregator": [None, [1]],
    "records": [
        None,
        {},
        [1],
        [{}],
        [{"round": "0"}],
        [{"round": 0, "more": 1}],
        [{"round": 0, "metrics": []}],
        [{"round": 0, "metrics": {"a": "b"}}],
        [{"round": 0, "clients": {"loss": [1.0]}}],
        [{"round": 0, "clients": {"loss": 3}}],
        [{"round": 0, "info": None}],
        [{"round": 0}, {"round": 0}, {"round": 2}],
        [{"round": 0}],
    ],
    "graphs": [None, [], {"2": torch.eye(3)}, {2: [1]}, {2: torch.eye(2)}, {2: torch.eye(3).to_sparse()}],
    "layer_graphs": [None, {2: torch.eye(3)}, {2: torch.zeros(2, 3, 3, dtype=torch.long)}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in STATES.items() for value in values])
def test_wrong_content_under_the_right_schema_is_named_and_the_one_before_is_used(tmp_path, key, value):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    rewrite(folder / "state.pt", lambda shared: shared.update({key: value}))
    with pytest.raises(CheckpointError, match=r"state\.pt has .*; start anew without resume$") as caught:
        checkpoint.check(folder)
    assert "\n" not in str(caught.value)
    assert find(tmp_path).folder.name == "round_00001"


@pytest.mark.parametrize(
    "content",
    [
        [1],
        {"clients": [0, 1, 2]},
        {"clients": [0, 1, 2], "models": torch.zeros(2, 4)},
        {"models": 3},
        {"clients": [0, 1], "models": torch.zeros(2, 4)},
        {"clients": [0, 1, 1], "models": torch.zeros(3, 4)},
        {"clients": [0, 1, 3], "models": torch.zeros(3, 4)},
        {"clients": [0, 1, "2"], "models": torch.zeros(3, 4)},
        {"clients": [[0], 1, 2], "models": torch.zeros(3, 4)},
        {"clients": [0, 1, 2], "models": torch.zeros(3, 4, dtype=torch.long)},
        {"clients": [0, 1, 2], "models": torch.zeros(3, 4).to_sparse()},
        {"clients": [0, 1, 2], "models": torch.zeros(3, 4, dtype=torch.complex64)},
        {"clients": [0, 1, 2], "models": torch.zeros(3, 4, device="meta")},
        {"clients": [0, 1, 2], "models": torch.zeros(3, 4), "trained": torch.zeros(3, 5)},
        {"clients": [0, 1, 2], "models": torch.zeros(3, 4), "trained": torch.zeros(3, 4, dtype=torch.float64)},
        {"clients": [0, 1, 2], "models": torch.zeros(3, 4), "trained": None},
    ],
)
def test_models_of_another_kind_are_named_and_the_one_before_is_used(tmp_path, content):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    rewrite(folder / "models_00000.pt", lambda _: content)
    shared = checkpoint.read_shared(folder)
    with pytest.raises(CheckpointError, match=r"(models_00000\.pt|lacks the models of clients \[2\])") as caught:
        checkpoint.load(folder, shared, single(), CPU)
    assert "\n" not in str(caught.value)
    assert find(tmp_path).folder.name == "round_00001"
