# Two commands do everything: `make demo` and `make test`. Both make .venv first, from the pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The pins are those of Python 3.11; another Python takes what pyproject.toml's ranges give it.
PINS := $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt" if sys.version_info[:2] == (3, 11) else "")')

.PHONY: demo serve bench test lint clean

# The package alone: what a user needs.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(PINS) -e .
	touch $@

# The package with its test tools.
$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) $(PINS) -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

serve: $(VENV)/.installed
	$(BIN)/mini-vllm serve

# The package with what draws charts.
$(VENV)/.installed-plot: $(VENV)/.installed
	$(PIP) $(PINS) -e '.[plot]'
	touch $@

# What each idea of the engine buys: about two minutes on two cores that have nothing else to do.
bench: $(VENV)/.installed-plot
	mkdir -p build
	$(BIN)/mini-vllm bench ladder --repeats 2 --json build/ladder.json --markdown build/ladder.md --plot build/ladder.svg

lint: $(VENV)/.installed-test
	$(BIN)/ruff check mini_vllm tests examples
	$(BIN)/ruff format --check mini_vllm tests examples
	$(BIN)/mypy

test: $(VENV)/.installed-test lint
	$(BIN)/mini-vllm pull
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info
