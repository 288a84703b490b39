import os
import socket
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from jgesr_lightning.runtime.sharding import Sharding, assign


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12), st.integers(1, 5))
@settings(deadline=None)
def test_assignment_is_a_partition_within_grahams_bound(loads, world):
    owners = assign(loads, world)
    assert sorted(k for clients in owners for k in clients) == list(range(len(loads)))
    assert all(clients == sorted(clients) for clients in owners)
    longest = max(sum(loads[k] for k in clients) for clients in owners)
    assert longest <= sum(loads) / world + (1 - 1 / world) * max(loads) + 1e-9  # Graham's bound for any list


def test_assignment_puts_the_longest_first():
    assert assign([1, 1, 1, 3], 2) == [[3], [0, 1, 2]]


def test_one_process_moves_nothing():
    sharding = Sharding([[0, 1, 2]], size=5, rank=0, device=torch.device("cpu"))
    rows = torch.randn(3, 5)
    assert sharding.to_columns(rows) is rows
    assert sharding.to_rows(rows) is rows
    assert sharding.layers((2, 0, 3)) == (2, 0, 3)


def test_a_client_that_two_processes_hold_is_refused():
    with pytest.raises(ValueError, match="exactly one process"):
        Sharding([[0, 1], [1]], size=5, rank=0, device=torch.device("cpu"))


def test_layers_are_cut_at_the_column_bounds():
    shares = [
        Sharding([[0], [1], [2]], size=10, rank=r, device=torch.device("cpu")).layers((4, 1, 5)) for r in range(3)
    ]
    assert shares == [(3, 0, 0), (1, 1, 1), (0, 0, 4)]


OWNERS = [[0, 3, 4], [1], [2, 5]]


def _check_layouts(rank):
    size = 11
    sharding = Sharding(OWNERS, size, rank, torch.device("cpu"))
    everything = torch.arange(6 * size, dtype=torch.float64).view(6, size)
    for matrix in (everything, everything.float(), everything % 3 == 0):
        columns = sharding.to_columns(matrix[OWNERS[rank]])
        assert columns.dtype == matrix.dtype
        assert torch.equal(columns, matrix[:, sharding.columns])
        assert torch.equal(sharding.to_rows(columns), matrix[OWNERS[rank]])
    partial = everything[:, sharding.columns]
    gram = sharding.sum(partial @ partial.T)
    assert torch.equal(gram, everything @ everything.T)  # small whole numbers: exact in any order
    values = torch.tensor(OWNERS[rank], dtype=torch.float32)
    assert torch.equal(sharding.gather(values), torch.arange(6, dtype=torch.float64))
    assert sharding.any(rank == 1)
    assert not sharding.any(False)


def _process(rank, world, port, out):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        _check_layouts(rank)
        dist.destroy_process_group()
        out.put(None)
    except BaseException:
        out.put(traceback.format_exc())
        sys.exit(1)


@pytest.mark.processes
def test_rows_and_columns_over_three_processes():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=_process, args=(rank, 3, port, out)) for rank in range(3)]
    for process in processes:
        process.start()
    failures = [out.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert failures == [None, None, None]
