# Everything sets itself up on a fresh machine: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.up-to-date
RUN := $(BIN)/python -m

.PHONY: venv demo test test-all lint clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(RUN) pip install --quiet --upgrade pip
	$(RUN) pip install --quiet -c constraints.txt torch==2.13.0
	$(RUN) pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## a syncer and two learners train a small model; under 5 minutes on 2 cores
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## under 15 minutes
	$(RUN) pytest -m "not long and not alone" -n 2 --dist worksteal
	$(RUN) pytest -m "not long and alone"

test-all: $(STAMP)  ## what is too long for `make test`
	$(RUN) pip install --quiet -c constraints.txt -e '.[dev,dev-long]'
	$(RUN) pytest -m "long and not alone" -n 2 --dist worksteal
	$(RUN) pytest -m "long and alone"

lint: $(STAMP)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
