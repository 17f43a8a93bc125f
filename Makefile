# Needs GNU make 3.81 or newer and Python 3.11 or newer; `make` alone lists the targets.

PYTHON ?= python3
PIP_ARGS ?=
LAB_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
BROWSER_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/installed
FIRST := $(firstword $(sort $(wildcard notebooks/[0-9]*.ipynb)))
DRIFT = $(BIN)/pytest -q notebooks $(TEST_ARGS)
BROWSER := .venv/browser
COLAB := .venv/colab
COLAB_HAS := torch==2.11.0 "numpy>=2.0,<2.2" "matplotlib==3.10.*" ipywidgets==7.7.1
CHECK = import sys; found = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
    "$(PYTHON) is Python " + found + ", and 3.11 or newer is needed: set PYTHON=... to a newer one.")

.PHONY: help lab test drift notebooks times figures bench browser html colab colabtest clean

help:
	@echo "make lab        open the first chapter in JupyterLab"
	@echo "make test       run every test and compare every notebook with a fresh run"
	@echo "make drift      compare the notebooks again, with other thread counts and CPUs"
	@echo "make notebooks  execute notebooks/source/*.py into notebooks/*.ipynb"
	@echo "make times      run every chapter and write the README's running times"
	@echo "make figures    draw figures/*.svg"
	@echo "make bench      time decode steps of the 0.8B shape against the machine's limits"
	@echo "make browser    run every chapter in JupyterLab in Chromium and move its sliders"
	@echo "make html       write the executed chapters as a site: dist/html/index.html"
	@echo "make colab      write dist/colab/*.ipynb, each of which runs without this repository"
	@echo "make colabtest  run them with Colab's releases of torch and others (several GB, once)"
	@echo "make clean      remove .venv, dist and every cache"
	@echo
	@echo "The first of them to run makes .venv and installs into it; later runs install nothing."
	@echo "PYTHON=python3.12   the Python to make .venv with (3.11 or newer)"
	@echo "PIP_ARGS='...'      more arguments for pip install"
	@echo "LAB_ARGS='...'      more arguments for jupyter lab, such as --no-browser"
	@echo "TEST_ARGS='...'     more arguments for pytest, such as -x"
	@echo "BENCH_ARGS='...'    arguments of tests/bench.py, such as --device cuda"
	@echo "BROWSER_ARGS='...'  the chapters to run in the browser, such as '01 06'"

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

times: $(INSTALLED)
	$(BIN)/python notebooks/build.py times

figures: $(INSTALLED)
	$(BIN)/python -m qwen.figures

bench: $(INSTALLED)
	$(BIN)/python tests/bench.py $(BENCH_ARGS)

$(BROWSER): $(INSTALLED)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[browser]" $(PIP_ARGS)
	@touch $@

browser: $(BROWSER)
	$(BIN)/python tests/browser.py $(BROWSER_ARGS)

html: $(INSTALLED)
	$(BIN)/python notebooks/pages.py

colab: $(INSTALLED)
	$(BIN)/python notebooks/colab.py

# Beside .venv, since the bundles must find neither the package nor these notebooks' own releases.
$(COLAB)/installed: | $(INSTALLED)
	$(BIN)/python -m venv --clear $(COLAB)
	$(COLAB)/bin/python -m pip install $(COLAB_HAS) ipykernel safetensors tokenizers huggingface_hub tqdm $(PIP_ARGS)
	@touch $@

colabtest: $(COLAB)/installed
	BUNDLE_PYTHON="$(abspath $(COLAB))/bin/python" $(BIN)/pytest -rP tests/test_colab.py $(TEST_ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis notebooks/.*.unfinished
	find notebooks qwen tests \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
