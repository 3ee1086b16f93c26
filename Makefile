# `make demo` and `make test` need Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV := .venv
FLOWER := .venv-flower
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-flower check bench docs web clean help

help:
	@echo "make demo   train two small networks, compare and stitch them, write demo.html"
	@echo "make test   run the tests"
	@echo "make test-flower  run the tests with Flower, in $(FLOWER)"
	@echo "make check  lint, format and types"
	@echo "make bench  speed and memory against peers: a table, and bench/results/*.json"
	@echo "make web    compile the explorer's front end (needs npm)"
	@echo "make docs   write the pages made from the code, build the site into site/"

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
	@$(BIN)/python -m pytest -n 2

# flwr wants older versions of rich, typer and packaging than those of constraints.txt.
$(FLOWER)/installed: pyproject.toml constraints-flower.txt
	@echo "making $(FLOWER) …"
	@$(PYTHON) -m venv $(FLOWER)
	@$(FLOWER)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-flower.txt \
		--editable '.[flower]' 'flwr[simulation]' pytest
	@touch $@

test-flower: $(FLOWER)/installed
	@FLWR_TELEMETRY_ENABLED=0 $(FLOWER)/bin/python -m pytest tests/flower tests/test_docs.py -k 'flower'

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

clean:
	rm -rf $(FRONT)/node_modules $(VENV) $(FLOWER) build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
