# Everything a developer or CI runs. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFORMANCE := tests/conformance
JAVASCRIPT := tests/javascript
YJS := tests/yjs
EDITOR := examples/editor
CHROMIUM := /usr/bin/chromium

.DEFAULT_GOAL := help
.PHONY: help install serve cluster examples packages check format generate lock test-fast coverage test soak bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Development uses the versions that were tested together; `make lock` takes newer ones.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements-dev.lock

$(BIN)/millstream: pyproject.toml requirements-dev.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[yjs]'
	@touch $@

install: $(BIN)/millstream ## Make .venv and install millstream into it

PORT ?= 4437
DIR ?=

serve: install ## Serve on 127.0.0.1:PORT (4437) with data in ./data
	$(BIN)/millstream serve --listen 127.0.0.1:$(PORT)

cluster: $(VENV)/.dev ## Start three nodes with an S3 bucket on this machine; DIR=… keeps their data
	@$(BIN)/python scripts/try_cluster.py $(if $(DIR),--directory $(DIR))

$(VENV)/.dev: $(BIN)/millstream
	$(PIP) --editable '.[dev]'
	@touch $@

$(CONFORMANCE)/node_modules/.installed: $(CONFORMANCE)/package.json $(CONFORMANCE)/package-lock.json
	npm install --no-save --prefix $(CONFORMANCE) --no-audit --no-fund --loglevel=error
	@touch $@

$(JAVASCRIPT)/node_modules/.installed: $(JAVASCRIPT)/package.json $(JAVASCRIPT)/package-lock.json
	npm install --no-save --prefix $(JAVASCRIPT) --no-audit --no-fund --loglevel=error
	@touch $@

# The cache of examples/caddy, which its tests run; from Debian, as the only one of them that is not on PyPI or npm.
NGINX := $(VENV)/.nginx
$(NGINX): $(BIN)/millstream
	@PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends nginx-light >/dev/null; } || \
	  { echo "nginx is missing: install Debian's nginx-light" >&2; exit 1; }
	@touch $@

$(YJS)/node_modules/.installed: $(YJS)/package.json $(YJS)/package-lock.json
	npm install --no-save --prefix $(YJS) --no-audit --no-fund --loglevel=error
	@touch $@

$(EDITOR)/node_modules/.installed: $(EDITOR)/package.json $(EDITOR)/package-lock.json
	npm install --no-save --prefix $(EDITOR) --no-audit --no-fund --loglevel=error
	@touch $@

$(EDITOR)/dist/index.html: $(EDITOR)/node_modules/.installed $(EDITOR)/index.html $(EDITOR)/vite.config.js $(wildcard $(EDITOR)/src/*)
	npm run --silent --prefix $(EDITOR) build

examples: install $(EDITOR)/dist/index.html ## Build the examples' pages; millstream serve --examples shows them

# The browser that the editor's test drives; Debian's, if there is none and we may install it.
$(CHROMIUM):
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends chromium

FAST_DEPENDENCIES := $(VENV)/.dev $(JAVASCRIPT)/node_modules/.installed

TEST_DEPENDENCIES := $(VENV)/.dev $(CONFORMANCE)/node_modules/.installed $(JAVASCRIPT)/node_modules/.installed \
	$(YJS)/node_modules/.installed $(EDITOR)/dist/index.html $(NGINX) $(if $(shell command -v chromium),,$(CHROMIUM))

packages: $(VENV)/.dev ## Build what is published, millstream and millstream-client, into dist/
	$(BIN)/python scripts/build_packages.py

check: $(VENV)/.dev ## Lint, formatting, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev ## Reformat the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Most tests wait for servers and timers more than they compute, so there are more processes than cores.
PARALLEL := --numprocesses $(shell expr $$(nproc) + 1) --dist loadgroup

generate: $(VENV)/.dev ## Write what is generated: the blocking client, docs/cli.md, docs/configuration.md
	$(BIN)/python scripts/generate_client.py
	$(BIN)/python scripts/command_docs.py
	$(BIN)/python scripts/configuration_docs.py

lock: $(BIN)/millstream ## Lock the development dependencies at their newest versions
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --upgrade --no-header --no-annotate --quiet \
	  --output-file requirements-dev.lock

test-fast: $(FAST_DEPENDENCIES) ## Run the unit, contract and in-process HTTP tests: for every save
	$(BIN)/pytest --quiet $(PARALLEL) -m 'fast and not soak' tests/unit tests/contract tests/e2e

# Of lines and branches that the fast tests reach; to be raised with what is there, never lowered.
COVERAGE_FLOOR := 81

coverage: $(FAST_DEPENDENCIES) ## Run the fast tests and refuse less coverage than there was
	$(BIN)/pytest --quiet $(PARALLEL) -m 'fast and not soak' --cov --cov-report=term --cov-fail-under=$(COVERAGE_FLOOR) \
	  tests/unit tests/contract tests/e2e

test: $(TEST_DEPENDENCIES) ## Run all tests
	$(BIN)/pytest $(PARALLEL) -m 'not soak and not alone'
	$(BIN)/pytest -m 'alone and not soak'

soak: $(TEST_DEPENDENCIES) ## Run the long crash and load tests
	$(BIN)/pytest -m soak

bench: $(VENV)/.dev ## Measure against the peers; results in bench/results
	$(PIP) --editable '.[bench,spark]'
	$(BIN)/python -m bench

clean: ## Remove what the other targets made, data excepted
	rm -rf $(VENV) $(CONFORMANCE)/node_modules $(JAVASCRIPT)/node_modules $(YJS)/node_modules $(EDITOR)/node_modules $(EDITOR)/dist bench/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
