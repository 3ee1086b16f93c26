# `make demo` and `make test` need Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV := .venv
FLOWER := .venv-flower
OLDEST := .venv-oldest
NEWEST := .venv-newest
BUILD := .venv-build
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

PYTHONS ?= python3.11 python3.12 python3.13 python3.14

.PHONY: demo test test-flower test-oldest test-newest check bench docs web dist test-dist clean help

help:
	@echo "make demo   train two small networks, compare and stitch them, write demo.html"
	@echo "make test   run the tests"
	@echo "make test-flower  run the tests with Flower, in $(FLOWER)"
	@echo "make test-oldest, make test-newest  run the tests with the oldest and the newest packages, in $(OLDEST), $(NEWEST)"
	@echo "make check  lint, format and types"
	@echo "make bench  speed and memory against peers: a table, and bench/results/*.json"
	@echo "make web    compile the explorer's front end (needs npm)"
	@echo "make docs   write the pages made from the code, build the site into site/"
	@echo "make dist   build the wheel and the source archive into dist/"
	@echo "make test-dist  install the wheel in a clean environment of each of PYTHONS, and try it there"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sosie needs Python 3.11 or newer; set PYTHON=python3.11")'
	@echo "making $(VENV) …"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/core: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing sosie …"
	@$(PIP) --editable .
	@touch $@

$(VENV)/dev: $(VENV)/core
	@echo "installing what the tests use …"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/bench: $(VENV)/dev
	@echo "installing the peers …"
	@$(PIP) --editable '.[bench]'
	@touch $@

demo: $(VENV)/core
	@$(BIN)/sosie demo

test: $(VENV)/dev
	@$(BIN)/python -m pytest -n 2 --dist worksteal

# flwr wants older versions of rich, typer and packaging than those of constraints.txt.
$(FLOWER)/installed: pyproject.toml constraints-flower.txt
	@echo "making $(FLOWER) …"
	@$(PYTHON) -m venv $(FLOWER)
	@$(FLOWER)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-flower.txt \
		--editable '.[flower]' 'flwr[simulation]' pytest
	@touch $@

test-flower: $(FLOWER)/installed
	@FLWR_TELEMETRY_ENABLED=0 $(FLOWER)/bin/python -m pytest tests/flower tests/test_docs.py -k 'flower'

# Everything that the tests use, in the versions that pyproject.toml names as the least; PyPI's torch brings CUDA, 6 GB.
TESTED := .[plots,images,pandas,xarray,transport,hf,onnx,topology,zoo,dask,web]
TOOLS := pytest pytest-xdist hypothesis scikit-learn httpx httpx2 playwright

$(OLDEST)/installed: pyproject.toml constraints-oldest.txt
	@echo "making $(OLDEST) …"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] > (3, 12) and "the oldest packages need Python 3.11 or 3.12; set PYTHON=python3.11")'
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt \
		--editable '$(TESTED)' $(TOOLS)
	@touch $@

test-oldest: $(OLDEST)/installed
	@$(OLDEST)/bin/python -m pytest -n 2

$(NEWEST)/installed: pyproject.toml
	@echo "making $(NEWEST) …"
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		--editable '$(TESTED)' $(TOOLS)
	@touch $@

test-newest: $(NEWEST)/installed
	@$(NEWEST)/bin/python -m pytest -n 2

check: $(VENV)/dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/bench
	@$(BIN)/python bench/run.py

$(VENV)/docs: $(VENV)/core
	@echo "installing what builds the pages …"
	@$(PIP) --editable '.[docs]'
	@touch $@

docs: $(VENV)/docs
	@$(BIN)/python docs/write_pages.py
	@$(BIN)/zensical build --strict --clean
	@echo "the site is in site/: open site/index.html, or $(BIN)/python -m http.server --directory site"

# What it makes is committed: only whoever changes the front end needs npm.
FRONT := src/sosie/web/frontend
web:
	@npm ci --prefix $(FRONT) --no-audit --no-fund --silent
	@rm -f src/sosie/web/static/*.js
	@$(FRONT)/node_modules/.bin/tsc --project $(FRONT)
	@cd $(FRONT) && sha256sum *.ts tsconfig.json > ../static/built-from.txt

$(BUILD)/installed:
	@$(PYTHON) -m venv $(BUILD)
	@$(BUILD)/bin/pip install --quiet --disable-pip-version-check build twine
	@touch $@

dist: $(BUILD)/installed
	@rm -rf dist
	@$(BUILD)/bin/python -m build --outdir dist .
	@$(BUILD)/bin/twine check --strict dist/*

test-dist: dist
	@for python in $(PYTHONS); do \
		if command -v $$python >/dev/null; then $$python tests/try_wheel.py dist/*.whl || exit 1; \
		else echo "$$python: not on this machine"; fi; done

clean:
	rm -rf $(FRONT)/node_modules $(VENV) $(FLOWER) $(OLDEST) $(NEWEST) $(BUILD) build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
