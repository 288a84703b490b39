"""Small studies, and programs that stand for a cell's run."""

import json
import sys
from pathlib import Path

from jgesr_lightning.config import to_dict
from jgesr_lightning.study import load_study
from jgesr_lightning.study.processes import programs

ROOT = Path(__file__).parent.parent.parent
BASE = """
clients: 4
rounds: 2
aggregator: {name: fedavg}
data: {name: synthetic, fraction: 0.2}
local: {epochs: 1}
runtime: {accelerator: cpu, devices: 1}
logging: {wandb: false}
"""

FAKE = """
import json, pathlib, sys, time
folder, result, config, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4])
time.sleep(seconds)
folder.mkdir(parents=True, exist_ok=True)
with (folder.parent / "order.txt").open("a") as file:
    file.write(folder.name + "\\n")
print("a line of output")
if result < 0:
    print("error: it went wrong")
    print("and this is printed later")
    sys.exit(1)
(folder / "summary.json").write_text(json.dumps({"status": "finished", "last": {"accuracy/received": result},
    "seconds": {"total": 60.0}, "config": json.loads(config)}))
"""


def write_study(folder, text, base=BASE):
    (folder / "base.yaml").write_text(base)
    path = folder / "tiny.yaml"
    path.write_text(f"base: {folder / 'base.yaml'}\n{text}")
    return path


def cells_of(folder, text, *overrides):
    return load_study(write_study(folder, text), [f"output_dir={folder / 'runs'}", *overrides])[1]


def fake(result=0.9, seconds=0.0):
    """Return a program that writes a cell's summary as a training run does, or fails where the result is negative."""

    def command(cell):
        value = result(cell) if callable(result) else result
        return [
            sys.executable,
            "-c",
            FAKE,
            str(cell.folder),
            str(value),
            json.dumps(to_dict(cell.config)),
            str(seconds),
        ]

    return programs(command)


def quiet(line):
    pass


TWO = "methods: {local: {}, fedavg: {}}\ndata: [synthetic]\n"
