# Needs GNU make 3.81 or newer and Python 3.11 or newer; `make` alone lists the targets.

PYTHON ?= python3
PIP_ARGS ?=
LAB_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/installed
FIRST := $(firstword $(sort $(wildcard notebooks/[0-9]*.ipynb)))
DRIFT = $(BIN)/pytest -q notebooks $(TEST_ARGS)
CHECK = import sys; found = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
    "$(PYTHON) is Python " + found + ", and 3.11 or newer is needed: set PYTHON=... to a newer one.")

.PHONY: help lab test drift notebooks figures bench clean

help:
	@echo "make lab        open the first chapter in JupyterLab"
	@echo "make test       run every test and compare every notebook with a fresh run"
	@echo "make drift      compare the notebooks again, with other thread counts and CPUs"
	@echo "make notebooks  execute notebooks/source/*.py into notebooks/*.ipynb"
	@echo "make figures    draw figures/*.svg"
	@echo "make bench      time decode steps of the 0.8B shape against the machine's limits"
	@echo "make clean      remove .venv and every cache"
	@echo
	@echo "The first of them to run makes .venv and installs into it; later runs install nothing."
	@echo "PYTHON=python3.12   the Python to make .venv with (3.11 or newer)"
	@echo "PIP_ARGS='...'      more arguments for pip install"
	@echo "LAB_ARGS='...'      more arguments for jupyter lab, such as --no-browser"
	@echo "TEST_ARGS='...'     more arguments for pytest, such as -x"
	@echo "BENCH_ARGS='...'    arguments of tests/bench.py, such as --device cuda"

# One environment for reading and testing: with two, the second command would install again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	    command -v "$(PYTHON)" >/dev/null || { \
	        echo "There is no command $(PYTHON): install Python 3.11 or newer, or set PYTHON=..." >&2; \
	        exit 1; }; \
	    "$(PYTHON)" -c '$(CHECK)' && "$(PYTHON)" -m venv --clear .venv; }
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[lab,test]" $(PIP_ARGS)
	@touch $@

lab: $(INSTALLED)
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" $(LAB_ARGS) $(FIRST)

test: $(INSTALLED)
	$(BIN)/pytest $(TEST_ARGS)

drift: $(INSTALLED)
	@echo "drift 1 of 4: one thread"
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(DRIFT)
	@echo "drift 2 of 4: two threads"
	OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 $(DRIFT)
	@echo "drift 3 of 4: as a CPU without vector instructions sums"
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(DRIFT)
	@echo "drift 4 of 4: as a CPU with AVX2 sums"
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(DRIFT)

notebooks: $(INSTALLED)
	$(BIN)/python notebooks/build.py

figures: $(INSTALLED)
	$(BIN)/python -m qwen.figures

bench: $(INSTALLED)
	$(BIN)/python tests/bench.py $(BENCH_ARGS)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis notebooks/.*.unfinished
	find notebooks qwen tests \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
