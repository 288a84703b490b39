# Everything starts here; `make` alone lists the targets. The Python environment is made on first need, in .venv.
SHELL := bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
RUN := $(VENV)/.ready-to-run
TEST := $(VENV)/.ready-to-test
DOCS := $(VENV)/.ready-for-docs
RUNS ?= runs
export RUNS
# One folder whose name may hold spaces, if there is one of that name; else each word of RUNS is a folder.
runs = if [ -e "$$RUNS" ]; then set -- "$$RUNS"; else set -- $$RUNS; fi
STUDY ?= table1_small

# A folder of data sets that the checkouts of a group share, beside them, is used where there is one.
ifndef JGESR_DATA
ifneq ($(wildcard ../shared/data/.),)
export JGESR_DATA := $(abspath ../shared/data)
endif
endif

.PHONY: help setup train test docs bench bench-gpu lint format table figures map report reproduce data slurm test-slurm clean clean-all need-config

help: ## list the targets
	@echo 'usage: make TARGET [CONFIG=mnist_s01] [ARGS="key=value ..."]'; echo
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r target text; do \
	  printf '  %-12s %s\n' "$$target" "$$text"; done

setup: $(TEST) ## make or update .venv with everything; the other targets do what they need by themselves

train: need-config $(RUN) ## run a federation: make train CONFIG=mnist_s01 ARGS="aggregator.name=fedavg seed=3"
	@$(PY) -m jgesr_lightning train "$(CONFIG)" $(ARGS)

test: $(TEST) ## run the tests, a process a core up to four; ARGS goes to pytest ("-n 0": one after another)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup $(ARGS)

docs: $(DOCS) ## build the documentation site into build/site; a broken link or reference fails
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet && echo build/site/index.html

bench: $(TEST) ## run the timings in tests/benchmarks, ARGS="--quick" for short ones
	@for name in math training; do echo "== tests/benchmarks/bench_$$name.py"; \
	  $(PY) -m tests.benchmarks.bench_$$name $(ARGS) || exit; done

bench-gpu: $(TEST) ## the same on a CUDA GPU, with checks against the CPU; says so where there is none
	@$(PY) -m tests.benchmarks.bench_gpu $(ARGS)

lint: $(TEST) ## check style, types and the direction of imports
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports

format: $(TEST) ## format the code and mend what ruff can mend
	@$(PY) -m ruff check --fix
	@$(PY) -m ruff format

table: $(RUN) ## tables of the runs in RUNS (default: runs): one folder, or several with spaces between
	@$(runs); $(PY) -m jgesr_lightning table "$$@" $(ARGS)

figures: $(RUN) ## figures of the runs in RUNS (default: runs)
	@$(runs); $(PY) -m jgesr_lightning figures "$$@" $(ARGS)

map: $(RUN) ## which method leads where, of a study over kappa and noise: make map RUNS=runs/map_small
	@$(runs); $(PY) -m jgesr_lightning map "$$@" $(ARGS)

report: $(RUN) ## one HTML page with the tables and figures of the runs in RUNS
	@$(runs); $(PY) -m jgesr_lightning report "$$@" $(ARGS)

reproduce: $(RUN) ## run what is left of a study, then its tables, figures and page: make reproduce STUDY=table1_small
	@$(PY) -m jgesr_lightning study "$(STUDY)" $(ARGS)
	@folder=$$($(PY) -m jgesr_lightning study "$(STUDY)" $(ARGS) --folder) && \
	$(PY) -m jgesr_lightning table "$$folder" --format all --out "$$folder/tables" && \
	case "$(STUDY)" in *map*) $(PY) -m jgesr_lightning map "$$folder" --format all --out "$$folder/map";; esac && \
	$(PY) -m jgesr_lightning figures "$$folder" && \
	$(PY) -m jgesr_lightning report "$$folder"

data: $(RUN) ## fetch a data set: make data DATASET=cifar10 (default: that of CONFIG, else mnist)
	@$(PY) -m jgesr_lightning data $(or $(DATASET),$(CONFIG),mnist) $(ARGS)

slurm: need-config $(RUN) ## submit a run to SLURM; SBATCH="--gpus-per-node=4 ..." adds options
	@command -v sbatch >/dev/null || { echo 'error: sbatch was not found; run this where SLURM jobs are submitted' >&2; exit 2; }
	@sbatch $(SBATCH) configs/slurm/train.sbatch "$(CONFIG)" $(ARGS)

test-slurm: $(TEST) ## try the SLURM scripts on a cluster of one node, started and ended by the test
	@tests/slurm/run $(ARGS)

clean: ## remove caches and build products; runs, data and .venv stay
	@rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	@find jgesr_lightning tests -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean ## also remove .venv; runs and data stay
	@rm -rf $(VENV) $(VENV).lock

need-config:
	@[ -n "$(CONFIG)" ] && for file in "$(CONFIG)" "$(CONFIG).yaml" "configs/$(CONFIG)" "configs/$(CONFIG).yaml"; do \
	  [ -f "$$file" ] && exit 0; done; \
	{ [ -z "$(CONFIG)" ] && echo 'error: CONFIG is missing, as in: make $(firstword $(MAKECMDGOALS)) CONFIG=mnist_s01' || \
	  echo 'error: no configuration file $(CONFIG)'; \
	  echo 'configurations:'; cd configs && find . -name '*.yaml' ! -path './sweeps/*' ! -path './studies/*' ! -name base.yaml | \
	  sed 's,^\./,  ,; s,\.yaml$$,,' | sort; } >&2; exit 2

# $(call install,EXTRAS,STAMPS): a stamp is written only when all of it succeeded, and lasts until pyproject.toml changes.
# One at a time, where flock is to be had: who comes second waits, and then finds the stamp.
define install
@if command -v flock >/dev/null && { exec 9>$(VENV).lock; } 2>/dev/null; then \
  flock -n 9 2>/dev/null || { [ $$? = 1 ] && echo 'Waiting for another make that installs into $(VENV)' && flock 9; }; \
  [ -e $@ ] && ! [ $@ -ot pyproject.toml ] && exit 0; \
fi; \
rm -f $(2); \
if ! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
  for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
    "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; \
  done; \
  [ -n "$$python" ] || { echo 'error: Python 3.11 or newer with its venv module was not found$(if $(PYTHON), at $(PYTHON)); \
name one with PYTHON=/path/to/python (Debian and Ubuntu: the package python3-venv)' >&2; exit 2; }; \
  echo "Making $(VENV) with $$("$$python" --version)"; \
  "$$python" -m venv --clear $(VENV) || exit; \
fi; \
echo 'Installing into $(VENV) (PyTorch and Lightning are large: the first time takes some minutes)'; \
$(PY) -m pip install --quiet --disable-pip-version-check --editable '.$(1)' && touch $(2)
endef

$(RUN): pyproject.toml
	$(call install,,$(RUN))

$(TEST): pyproject.toml
	$(call install,[test],$(RUN) $(TEST))

$(DOCS): pyproject.toml
	$(call install,[docs],$(RUN) $(DOCS))
