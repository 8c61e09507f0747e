# Everything happens in a virtual environment of its own. `make demo` and `make test` need Python 3.11, pip, git and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PROTOS := $(wildcard proto/draftloom/v1/*.proto)

.PHONY: help demo test test-slow lint format proto bench clean

help: ## say what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/'

demo: $(VENV)/.installed ## index a real package, serve it, complete its held-out functions plain and with Draftloom
	$(BIN)/draftloom demo

test: $(VENV)/.installed-dev ## the test suite, under 8 minutes on two cores
	$(BIN)/python -m pytest -q

test-slow: $(VENV)/.installed-dev ## all tests, those that take minutes among them
	$(BIN)/python -m pytest -q -m ""

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## sort imports and apply ruff's safe fixes
	$(BIN)/ruff check --fix .

proto: $(VENV)/.installed-dev ## regenerate draftloom/v1 from proto/; never edit what it writes
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

bench: $(VENV)/.installed ## how much faster is code completion; the last line is JSON
	$(BIN)/python benchmarks/complete.py

clean: ## remove the environment and all caches in the tree
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[engine,worker,index]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable ".[engine,worker,index,dev]"
	touch $@
