# `make run` and `make test` are all that a fresh machine with Python >= 3.11, pip and make needs.
PYTHON ?= python3
# Else each of the hundreds of processes that the tests start would compile the package anew: 0.1 to 0.3 s.
export PYTHONDONTWRITEBYTECODE =
VENV   ?= .venv
BIN    := $(VENV)/bin
# Programs that speak to the server, and whose dependencies clash with ours and each other's.
CLIENTS := $(patsubst tests/server/clients/%,$(VENV)/clients/%/.installed,\
	$(basename $(wildcard tests/server/clients/*.txt tests/server/clients/*.json)))

# Ray, for the long tests of replicas: it sees everything else in our own environment.
RAY := $(VENV)/ray/.installed

.PHONY: run test test-all clients check format clean

run: $(VENV)/.installed
	@$(BIN)/localllm run --prompt "Tell me a tale about a fox who finds a lantern."

# Some tests wait: three processes keep two cores 0.9 busy.
test: $(VENV)/.installed-dev $(VENV)/triton-3.6 clients check
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

test-all: $(VENV)/.installed-dev $(VENV)/triton-3.6 clients $(RAY) check
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house --check

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without an NVIDIA driver (WSL has its own place for it) torch is a build for the CPU: 190 MB to download, not 3 GB.
# PyPI has none, and torch's own index may be out of reach: then torch is what the next command finds.
CPU_TORCH := https://download.pytorch.org/whl/cpu
HAS_NVIDIA := $(wildcard /dev/nvidiactl /usr/lib/wsl/lib/nvidia-smi)
TORCH := $(shell sed -n 's/^    "\(torch>=[^"]*\)",$$/\1/p' pyproject.toml)

$(VENV)/.torch: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(HAS_NVIDIA),)
	@echo "no NVIDIA driver here: installing torch for the CPU"
	@$(BIN)/python -m pip install --retries 0 --index-url $(CPU_TORCH) "$(TORCH)" \
		|| echo "$(CPU_TORCH) cannot be reached: installing the torch of the package index, which may be the one with CUDA"
endif
	@touch $@

$(VENV)/.installed: $(VENV)/.torch
	$(BIN)/python -m pip install --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/.installed

# The Triton of the oldest torch that may be used: the kernels have to compile by it too. Not every system has one.
$(VENV)/triton-3.6: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==3.6.0 || rm -rf $@

# Several at once, as each waits for the network most of the time.
clients: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs 4 $(CLIENTS)

# Each in an environment of its own. What it uses is compiled when it is first imported. Not every system has them all:
# what cannot be installed fails no test, and those that need it are skipped.
$(VENV)/clients/%/.installed: tests/server/clients/%.txt | $(VENV)/.installed-dev
	@echo "installing the client $*"
	@$(BIN)/python -m venv --clear --without-pip $(@D) \
		&& $(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-compile --only-binary :all: -r $< \
		&& touch $@ || { rm -rf $(@D); echo "the client $* cannot be installed: its tests will be skipped" >&2; }

$(VENV)/clients/%/.installed: tests/server/clients/%.json | $(VENV)/.installed-dev
	@echo "installing the client $*"
	@rm -rf $(@D) && mkdir -p $(@D) && cp $< $(@D)/package.json
	@npm install --prefix $(@D) --loglevel error --no-audit --no-fund --no-package-lock \
		&& touch $@ || { rm -rf $(@D); echo "the client $* cannot be installed: its tests will be skipped" >&2; }

$(RAY): tests/server/ray.txt | $(VENV)/.installed-dev
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> `$(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"`/ours.pth
	$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-compile --only-binary :all: -r $< \
		&& touch $@ || rm -rf $(@D)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
