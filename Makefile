# Everything a person runs. Each target makes the virtual environment first when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-dev
EAGLE3_HOME ?= .eagle3
export EAGLE3_HOME
# One place for everything that is not the project's: Prefect's home, converted models, caches.

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt requirements-no-deps.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-no-deps.txt
	touch $@

.PHONY: install
install: $(STAMP) ## Create the virtual environment and install everything

.PHONY: demo
demo: $(STAMP) ## Run the whole pipeline on a real small model: no key, no cost, about 10 minutes on 2 cores
	$(BIN)/eagle3 demo

.PHONY: test
test: $(STAMP) ## Run all tests, two files at a time, the long ones first
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: test-operations
test-operations: $(STAMP) ## Operate a whole deployment: workers, kills, top-ups, the UI in a browser (many minutes)
	EAGLE3_TEST_OPERATIONS=1 $(BIN)/pytest tests/e2e/test_operations*.py

.PHONY: lint
lint: $(STAMP) ## Check format, lint, types and the import law
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

.PHONY: check
check: lint ## Lint, then the fast tests: run this before each commit
	$(BIN)/pytest -n 2 --dist loadfile -m 'not slow' tests/unit tests/contract

.PHONY: bench
bench: $(STAMP) ## Measure every speed and memory figure we claim, each against a control in the same run
	$(BIN)/python -m tests.bench

.PHONY: docs
docs: $(STAMP) ## Rewrite the generated pages
	$(BIN)/python -m eagle3.formats > docs/formats.md
	$(BIN)/python -m eagle3.report.recipe_docs > docs/recipe.md

.PHONY: up
up: $(STAMP) ## Start a local Prefect server and worker with our settings, and register the deployments
	$(BIN)/eagle3 up

.PHONY: down
down: $(STAMP) ## Stop what `make up` started
	$(BIN)/eagle3 down
