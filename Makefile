# make demo           sets everything up and runs the main job: text in, a scored model in one file out
# make test           sets everything up and runs ruff, mypy and the tests
# make integrations   sets everything up and runs the tests with other packages and outside the tree
# make claims         writes the figures in README and docs from benchmarks/results
# make docs           sets everything up and builds the manual in build/site; fails on warnings and broken links
# TORCH=...           another build or version of PyTorch, e.g. make test TORCH="torch==2.11.0"

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# a second demo gets a name of its own: no run is deleted, and `train` refuses a folder that is in use
DEMO_OUT ?= $(if $(wildcard runs/demo),,runs/demo)

.PHONY: demo test integrations browser check claims docs install dev clean

demo: install
	$(BIN)/parbank train --recipe demo --minutes 3 $(if $(DEMO_OUT),--out $(DEMO_OUT))

# two at a time: files go whole to one of two processes, so that what a file sets up is set up once
test: dev check
	$(BIN)/python -m pytest -n 2 --dist loadfile

# the wheel in an empty environment, the source distribution, adapters to other packages, planted faults; 25 minutes at most
integrations: $(VENV)/installed-integrations $(VENV)/installed-timm browser
	timeout --signal=INT 1500 $(BIN)/python -m pytest -n 2 --dist loadfile -m integration --durations=10 tests/integrations

# Chromium for the tests of pages. Playwright drives the system's: its own would be another download.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name >/dev/null && exit; done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive && \
	  { apt-get -q -o DPkg::Lock::Timeout=300 update || true; } && \
	  apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install --no-install-recommends chromium; } || \
	{ echo "make integrations needs Chromium, and could not install it; install it first, such as by apt-get install chromium" >&2; exit 1; }

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

claims: dev
	$(BIN)/python benchmarks/pictures.py
	$(BIN)/python benchmarks/claims.py
	$(BIN)/python benchmarks/levers.py

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

install: $(VENV)/installed
dev: $(VENV)/installed-dev

# PyTorch goes first and by exact version: pip then keeps it, whatever range the package itself allows.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$(TORCH)"
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	$(PIP) install --quiet --editable .
	touch $@

$(VENV)/installed-docs: $(VENV)/torch pyproject.toml
	$(PIP) install --quiet --editable ".[docs]"
	touch $@ $(VENV)/installed

$(VENV)/installed-dev: $(VENV)/torch pyproject.toml
	$(PIP) install --quiet --editable ".[dev]"
	touch $@ $(VENV)/installed

$(VENV)/installed-integrations: $(VENV)/torch pyproject.toml
	$(PIP) install --quiet --editable ".[dev,integrations]"
	touch $@ $(VENV)/installed-dev $(VENV)/installed

# timm, for the table of architectures, needs torchvision. In the environment itself torchvision would break transformers where
# its build does not fit PyTorch's, so that both have a folder of their own.
$(VENV)/installed-timm: $(VENV)/torch
	$(PIP) install --quiet --upgrade --no-deps --target $(VENV)/timm timm==1.0.30 torchvision==0.28.0
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
