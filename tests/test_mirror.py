"""The tests mirror the package: each module has its test file, or a line here that says where it is tested."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "trained/samples": "trained/test_scoring",
    "version": "test_cli",
    "trained/source": "trained/test_export",
    "aggregators/base": "aggregators/test_contract",  # what every method keeps
    "aggregators/fedavg": "aggregators/test_averages",
    "aggregators/local": "aggregators/test_averages",
    "aggregators/median": "aggregators/test_averages",
    "arguments": "test_cli",
    "callbacks/checkpoint": "runtime/test_checkpoint",
    "callbacks/files": "test_experiment",
    "callbacks/own": "test_python",
    "callbacks/wandb_media": "callbacks/test_wandb_log",
    "callbacks/wandb_mode": "callbacks/test_wandb_log",
    "closing": "test_experiment",
    "config/error": "config/test_loading",
    "config/schema": "config/test_loading",
    "config/section": "config/test_written",
    "data/archive": "data/test_faults",
    "data/clientfiles": "data/test_own",
    "data/folders": "data/test_own",
    "data/published": "data/test_faults",
    "data/registry": "data/test_sources",
    "data/samples": "data/test_own",
    "data/synthetic": "data/test_sources",
    "data/tables": "data/test_own",
    "data/tensors": "data/test_own",
    "graph/arrays": "graph/test_prox",
    "graph/interior_point": "graph/test_learning",
    "graph/problem": "graph/test_objective",
    "identity": "reporting/test_table",
    "measures": "test_likeness",
    "models/fitness": "test_models",
    "models/plain": "test_models",
    "models/vision": "test_models",
    "orchestrator": "test_federation",
    "plan": "test_federation",
    "records": "test_federation",
    "reporting/agg": "reporting/test_hostile",
    "reporting/collection": "reporting/test_hostile",
    "reporting/comparisons": "reporting/test_figures",
    "reporting/map_plot": "reporting/test_map",
    "reporting/maps": "reporting/test_map",
    "reporting/network": "reporting/test_figures",
    "reporting/options": "reporting/test_table",
    "reporting/paper": "reporting/test_table",
    "reporting/render": "reporting/test_table",
    "reporting/runs": "reporting/test_table",
    "reporting/sources": "reporting/test_figures",
    "reporting/tables": "reporting/test_table",
    "reporting/text": "reporting/test_hostile",
    "reporting/words": "reporting/test_report",
    "run_folder": "test_experiment",
    "runtime/libraries": "test_python",
    "runtime/contents": "runtime/test_checkpoint",
    "runtime/digests": "runtime/test_checkpoint",
    "runtime/strategy": "test_processes",
    "schedules": "test_optimizers",
    "solvers/coefficients": "solvers/test_pdca",
    "solvers/columns": "solvers/test_masked",
    "solvers/models": "solvers/test_masked",
    "solvers/solver": "solvers/test_pdca",
    "study/beside": "study/test_runner",
    "study/command": "study/test_runner",
    "timing": "test_federation",
    "training/base": "training/test_engines",
    "training/batches": "training/test_engines",
    "training/choose": "training/test_engines",
    "training/network": "training/test_networks",
    "training/sequential": "training/test_engines",
    "training/stacked": "training/test_engines",
    "training/stages": "training/test_engines",
    "training/step": "training/test_optimization",
}
"""Module of the package: test file."""

MODULES = [
    str(file.relative_to(ROOT / "jgesr_lightning").with_suffix(""))
    for file in sorted((ROOT / "jgesr_lightning").rglob("*.py"))
    if file.stem not in ("__init__", "__main__")
]


def own(module):
    folder, _, name = module.rpartition("/")
    return ROOT / "tests" / folder / f"test_{name}.py"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_test_file_or_a_line_that_says_where(module):
    if not own(module).is_file():
        assert module in ELSEWHERE, f"give {module} a test file, or a line in tests/test_mirror.py"
        assert (ROOT / "tests" / f"{ELSEWHERE[module]}.py").is_file()


def test_no_line_speaks_of_what_is_gone():
    assert set(ELSEWHERE) <= set(MODULES)
