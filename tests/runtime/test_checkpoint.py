import pytest
import torch

from jgesr_lightning.records import RoundRecord
from jgesr_lightning.runtime import checkpoint
from jgesr_lightning.runtime.checkpoint import CheckpointError
from jgesr_lightning.runtime.sharding import Sharding
from jgesr_lightning.state import FederationState

CPU = torch.device("cpu")


def state_of(round_number, rows=(0, 1, 2)):
    records = [RoundRecord(r, {"accuracy/received": r / 10}, {"loss": [1.0, float("nan")]}) for r in range(3)]
    models = torch.stack([torch.full((4,), float(k)) for k in rows])
    return FederationState(round_number, models, records, {2: torch.eye(3)}, {})


def single(clients=3, size=4):
    return Sharding([list(range(clients))], size, 0, CPU)


def test_what_is_saved_comes_back_without_pickles(tmp_path):
    folder = checkpoint.save(tmp_path, state_of(2), {"clusters": [[0, 1], [2]]}, {"seed": 0}, single())
    for file in folder.iterdir():
        torch.load(file, weights_only=True)
    shared = checkpoint.read_shared(folder)
    assert shared["aggregator"] == {"clusters": [[0, 1], [2]]}
    assert shared["config"] == {"seed": 0}
    state = checkpoint.load(folder, shared, single(), CPU)
    assert state.round == 2
    assert torch.equal(state.models, state_of(2).models)
    assert [record.metrics for record in state.records] == [record.metrics for record in state_of(2).records]
    assert torch.equal(state.graphs[2], torch.eye(3))


def test_the_former_checkpoint_goes_only_when_the_new_one_is_whole(tmp_path, monkeypatch):
    first = checkpoint.save(tmp_path, state_of(1), {}, {}, single())
    second = checkpoint.save(tmp_path, state_of(2), {}, {}, single())
    assert list(tmp_path.iterdir()) == [second]

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(CheckpointError, match=r"No space left.*round_00002 is kept"):
        checkpoint.save(tmp_path, state_of(3), {}, {}, single())
    assert list(tmp_path.iterdir()) == [second]
    assert checkpoint.newest(tmp_path) == second
    assert not first.exists()


def test_a_half_written_checkpoint_is_not_found_and_is_cleared_by_the_next(tmp_path):
    whole = checkpoint.save(tmp_path, state_of(1), {}, {}, single())
    (tmp_path / ".round_00002.partial").mkdir()
    (tmp_path / ".round_00002.partial" / "state.pt").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) == whole
    final = checkpoint.save(tmp_path, state_of(2), {}, {}, single())
    assert list(tmp_path.iterdir()) == [final]


def test_another_number_of_processes_may_read_it(tmp_path):
    folder = checkpoint.save(tmp_path, state_of(2), {}, {}, single())
    for rank, clients in enumerate([[0, 2], [1]]):
        sharding = Sharding([[0, 2], [1]], 4, rank, CPU)
        state = checkpoint.load(folder, checkpoint.read_shared(folder), sharding, CPU)
        assert torch.equal(state.models, state_of(2).models[clients])


def test_damage_is_named(tmp_path):
    folder = checkpoint.save(tmp_path, state_of(2), {}, {}, single())
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
    folder = checkpoint.save(tmp_path, state_of(2), {}, {}, single())
    monkeypatch.setattr(checkpoint, "SCHEMA", 99)
    with pytest.raises(CheckpointError, match="has schema 1, this program reads schema 99"):
        checkpoint.read_shared(folder)


@pytest.mark.parametrize("content", [[1], torch.zeros(3), {"schema": 1}, {"schema": 1, "round": 2}])
def test_what_is_no_checkpoint_though_torch_can_load_it_is_named(tmp_path, content):
    folder = checkpoint.save(tmp_path, state_of(2), {}, {}, single())
    torch.save(content, folder / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt (is no part|lacks)"):
        checkpoint.read_shared(folder)


@pytest.mark.parametrize(
    "content", [[1], {"clients": [0, 1, 2]}, {"clients": [0, 1, 2], "models": torch.zeros(2, 4)}, {"models": 3}]
)
def test_models_of_another_kind_are_named(tmp_path, content):
    folder = checkpoint.save(tmp_path, state_of(2), {}, {}, single())
    shared = checkpoint.read_shared(folder)
    torch.save(content, folder / "models_00000.pt")
    with pytest.raises(CheckpointError, match=r"models_00000\.pt"):
        checkpoint.load(folder, shared, single(), CPU)
