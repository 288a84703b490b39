"""Runs of the command line in processes of their own, forked from a server that has paid for the imports."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import yaml

from jgesr_lightning.runtime import checkpoint

TINY = {
    "rounds": 3,
    "clients": 5,
    "data": {"name": "synthetic", "fraction": 0.05, "kappa": 0.5},
    "local": {"epochs": 1},
    "aggregator": {"name": "fedavg"},
    "runtime": {"accelerator": "cpu", "devices": 1, "precision": "64-true"},
    "logging": {"wandb": False},
}
OUTER = ("SLURM_", "WANDB_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "JGESR_")
SECONDS = 240


def cpu_seconds(pid):
    """Return what a process, one that has ended but was not waited for included, has computed; Linux alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def context():
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["jgesr_lightning.experiment", "jgesr_lightning.cli", "tests.processes"])
    return server


def _main(argv, log, environment, breaking):
    """Be one process of a run; `breaking` names a function of this module that changes something first."""
    with open(log, "ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    for key in [key for key in os.environ if key.startswith(OUTER)]:
        del os.environ[key]
    os.environ.update(environment)
    torch.set_num_threads(1)
    from lightning.fabric.utilities import rank_zero_only

    from jgesr_lightning import cli

    rank_zero_only.rank = int(environment.get("RANK", 0))
    if breaking:
        globals()[breaking]()
    # several runs in one process: the process group is that of the first
    status = max([cli.main(arguments) for arguments in argv], default=0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Started:
    """One process of a run, as `subprocess.Popen` would have it."""

    def __init__(self, argv, log, environment=None, breaking=None):
        self.log = Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        several = argv if argv and not isinstance(argv[0], str) else [argv]
        arguments = ([[str(text) for text in one] for one in several], str(log), environment or {}, breaking)
        self.process = context().Process(target=_main, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    @property
    def output(self):
        """What it printed, without the line by which older versions of PyTorch's gloo say that they are connected."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))

    def wait(self, seconds=SECONDS):
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.output}")
        return self.process.exitcode

    def wait_for(self, text, seconds=SECONDS):
        """Wait until the output holds `text`."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.is_alive(), f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < end, f"no {text!r} after {seconds} s:\n{self.output}"
            time.sleep(0.01)


def together(world, argv, folder, breaking=None):
    """Start a run of `world` processes as torchrun does, and return them."""
    environment = {}
    if world > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "TORCHELASTIC_RUN_ID": "tests",
            "GROUP_RANK": "0",
        }
    ranks = [environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}) for rank in range(world)]
    return [Started(argv, folder / f"log_{rank}.txt", extra, breaking) for rank, extra in enumerate(ranks)]


def write_config(folder, **changes):
    """Write the tiny configuration, with dotted or plain changes of whole keys, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "output_dir": str(folder / "runs"), **changes}))
    return path


def models(run):
    """Return (K, d), the models in a run's newest checkpoint, by client."""
    parts = [torch.load(path, weights_only=True) for path in sorted(checkpoint.newest(run / "checkpoint").glob("m*"))]
    rows = {client: row for part in parts for client, row in zip(part["clients"], part["models"], strict=True)}
    return torch.stack([rows[client] for client in sorted(rows)])


def break_client_one_in_round_two():
    """Let the second round's training give client 1 a NaN."""
    from jgesr_lightning.orchestrator import RoundOrchestrator

    start, collect, now = RoundOrchestrator.on_round_start, RoundOrchestrator.on_client_delivered, {}

    def on_round_start(self, round_number, sent):
        now["round"] = round_number
        start(self, round_number, sent)

    def on_client_delivered(self, row, client, model):
        collect(self, row, client, model)
        if client == 1 and now["round"] == 2:
            self.trained[row, 0] = torch.nan

    RoundOrchestrator.on_round_start = on_round_start
    RoundOrchestrator.on_client_delivered = on_client_delivered


def fail_on_the_second_process():
    """Let the second process meet a fault of the program in round 2."""
    from jgesr_lightning.training.stacked import StackedEngine

    whole = StackedEngine.train

    def train(self, round_number, *arguments, **options):
        if round_number == 2 and os.environ.get("RANK") == "1":
            raise ZeroDivisionError("division by zero")
        return whole(self, round_number, *arguments, **options)

    StackedEngine.train = train


def say_what_is_left_for_the_end():
    """Let each process say what it would do at its end, which processes of tests do not come to."""
    import atexit

    atexit.register = lambda function: print(f"at exit: {function.__name__}", file=sys.stderr, flush=True)


def fail_to_write_summaries():
    """Let the first process find no room for summary.json from round 1 on."""
    from jgesr_lightning.callbacks.files import ResultFiles

    whole = ResultFiles.write_summary

    def write_summary(self, rounds, state, status, reason):
        if state.round > 0:
            raise OSError(28, "No space left on device", str(self.folder / "summary.json"))
        whole(self, rounds, state, status, reason)

    ResultFiles.write_summary = write_summary


def fail_to_append():
    """Let the disk be full where a line is added to a table."""
    from jgesr_lightning.callbacks import files

    files.open = lambda path, *arguments, **options: open("/dev/full", *arguments, **options)  # noqa: SIM115


def allow_files_of_100_kB():  # noqa: N802
    """Let writes beyond 100 kB fail, as on a full disk."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def train_for_ever():
    """Let the training of a client have no end, in Python."""
    from jgesr_lightning.orchestrator import RoundOrchestrator

    def on_client_delivered(self, row, client, model):
        print("training for ever", flush=True)
        while True:
            time.sleep(0.01)

    RoundOrchestrator.on_client_delivered = on_client_delivered


def die_at_a_step_of_writing():
    """Be killed before the step numbered STEP of those that change files."""
    count = iter(range(1, 10**6))

    def counted(function):
        def call(*arguments, **options):
            if next(count) == int(os.environ["STEP"]):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    os.replace = counted(os.replace)
    os.fsync = counted(os.fsync)
    Path.rename = counted(Path.rename)
    Path.mkdir = counted(Path.mkdir)
    Path.unlink = counted(Path.unlink)
