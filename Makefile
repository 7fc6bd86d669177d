# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs; "make help" lists the targets.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh
PYTHON ?= python3
# PYTHON is the interpreter that creates the environments. It is not exported, because the scripts use a variable of the
# same name for an interpreter that has pip, such as the one in .venv.
unexport PYTHON
JOBS ?= auto
# Tests that start processes mostly wait for timers and sockets, so more of them run in parallel than there are CPUs.
WAITERS ?= $(shell expr $$(nproc) + 2)
MINUTES ?= 60
BIN := .venv/bin
ENVIRONMENTS := .venv/.done .venv-frontend/.done .venv-backend/.done
SOURCES := shared/src services/dra-frontend/src services/nri-backend/src services/kubectl-numa/src
CHECKED := $(SOURCES) tests hack

.PHONY: help demo test test-image test-node test-node-core noise images release release-check fuzz check check-fast bench lock proto chart-schema state-api command-reference metrics-tables configuration-table manifests docs kind-up kind-down clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.done ## Show what both services do for a claim on this machine's topology (no root, no cluster, under a minute)
	@$(BIN)/python -m tests.demo

# The unit tests of each service run in an environment with only the packages of that service.
test: $(ENVIRONMENTS) ## Run unit, integration, plugin, chart, fuzz and hostile tests (no root)
	.venv-frontend/bin/pytest -q -n $(JOBS) tests/unit/contract tests/unit/numa_node tests/unit/dra_frontend tests/unit/numa_tools
	.venv-backend/bin/pytest -q -n $(JOBS) tests/unit/contract tests/unit/numa_node tests/unit/nri_backend
	$(BIN)/pytest -q -n $(WAITERS) --dist loadgroup tests/unit/test_*.py tests/hostile tests/fuzz tests/integration tests/plugin tests/chart

test-image: .venv/.done ## Run unit, fuzz and hostile tests with the Python and the packages from the images (root)
	hack/test_image.sh

test-node: .venv/.done ## Run tests on a real kernel and containerd in a virtual machine (root; the first run creates its disk)
	tests/node/run.sh

test-node-core: .venv/.done ## Run the node tests marked core, whose rules no release may break, on one machine (root)
	tests/node/run.sh --profile default -m core

noise: .venv/.done ## Measure disturbances on claimed CPUs, and delays that a partition change causes for other containers (root)
	PATIENCE=$${PATIENCE:-3} tests/node/run.sh --profile noise

.PHONY: page-check
page-check: .venv/.done ## Test the web page in headless Chromium (installed with apt-get, as root); screenshots: build/page
	command -v chromium >/dev/null || { apt-get -q -y update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -q -y install --no-install-recommends chromium fonts-dejavu-core; }
	$(BIN)/pytest -q -n 2 tests/page

.PHONY: plugin plugin-check
plugin: .venv/.done ## Build kubectl-numa and its archive in dist/; with REPOSITORY=ADDRESS also the manifest for krew
	$(BIN)/python -m hack.plugin dist $(REPOSITORY)

plugin-check: .venv/.done ## Test kubectl-numa with a real kubectl (from Debian if none is installed)
	KUBECTL=$$(hack/kubectl.sh) && export KUBECTL && $(BIN)/pytest -q -n 2 tests/plugin/test_commands.py

.PHONY: quickstart-check
quickstart-check: .venv/.done ## Run the command blocks of the installation pages with real kubectl and Helm on a cluster of fakes
	KUBECTL=$$(hack/kubectl.sh) && export KUBECTL && $(BIN)/pytest -q -rs -n 2 --dist loadfile tests/quickstart

images: .venv/.done ## Build both images and their SBOMs from Debian packages, without a container engine (root)
	hack/images.sh

release: .venv/.done ## Build all files of a release in dist/ (root; docs/release.md explains the variables)
	hack/release.sh

release-check: .venv/.done ## Build a release twice from scratch and compare the digests (root, 20 minutes)
	hack/release.sh --check

fuzz: .venv/.done ## Fuzz parsers of untrusted input, and event traces of a node (MINUTES=60); failing inputs: build/fuzz
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

check: .venv/.done check-fast ## Run linters and type checks; check import rules, generated files and locks
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy $(CHECKED)
	hack/proto.sh --check
	tests/node/cri.sh --check
	$(BIN)/shellcheck -x hack/*.sh hack/image/*.sh locks/*.sh
	UV=$(BIN)/uv locks/compile.sh --check

check-fast: .venv/.done ## Run the checks that take only seconds and need all files; pre-commit runs them too
	$(BIN)/lint-imports --no-cache
	PYTHONPATH=services/kubectl-numa/src $(BIN)/lint-imports --no-cache --config services/kubectl-numa/.importlinter
	$(BIN)/python -m hack.code_size
	$(BIN)/python -m hack.commits
	$(BIN)/python -m hack.chart_schema --check
	$(BIN)/python -m hack.state_api --check
	PYTHONPATH=services/kubectl-numa/src $(BIN)/python -m hack.command_reference --check
	$(BIN)/python -m hack.metrics_tables --check
	$(BIN)/python -m hack.configuration_table --check
	$(BIN)/python -m hack.version --check

bench: .venv/.done ## Measure the driver (to compare it: AGAINST_REVISION=e3e15ce or AGAINST="COMMAND..."; short run: QUICK=1)
	@$(BIN)/python -m tests.bench $(OPTIONS) $(if $(QUICK),--quick) $(if $(DRIVERS),--drivers '$(DRIVERS)') \
	  $(if $(AGAINST_REVISION),--against-revision '$(AGAINST_REVISION)') \
	  $(if $(AGAINST),--against '$(AGAINST)' --against-backend '$(AGAINST_BACKEND)' --against-name '$(AGAINST_NAME)' \
	  $(if $(DRIVERS),,--drivers dra.cpu))

lock: .venv/.done ## Update the locks from the pyproject files
	UV=$(BIN)/uv locks/compile.sh

proto: .venv/.done ## Generate code from proto/
	hack/proto.sh
	tests/node/cri.sh

chart-schema: .venv/.done ## Generate the chart's values.schema.json from the models
	$(BIN)/python -m hack.chart_schema

state-api: .venv/.done ## Generate docs/state-api.md from the models of the state endpoint
	$(BIN)/python -m hack.state_api

command-reference: .venv/.done ## Generate docs/command-reference.md from the help texts of all programs
	PYTHONPATH=services/kubectl-numa/src $(BIN)/python -m hack.command_reference

metrics-tables: .venv/.done ## Generate the tables in docs/metrics.md from the metrics of both services
	$(BIN)/python -m hack.metrics_tables

configuration-table: .venv/.done ## Generate the table of keys in docs/configuration.md from the model
	$(BIN)/python -m hack.configuration_table

manifests: .venv/.done ## Write all objects that the chart installs to build/dra-driver-numa.yaml (VALUES=FILE: other values)
	@mkdir -p build
	HELM=$(BIN)/helm hack/manifests.sh $(if $(VALUES),--values $(VALUES)) >build/dra-driver-numa.yaml

docs: .venv-docs/.done ## Build the site in build/site from docs/ and check every link (REPOSITORY=ADDRESS of the source tree)
	NO_MKDOCS_2_WARNING=1 REPOSITORY=$(REPOSITORY) .venv-docs/bin/mkdocs build -q --strict -f hack/site/mkdocs.yml

kind-up: ## Create a kind cluster with the driver (needs docker, kind, kubectl and helm)
	hack/kind.sh up

kind-down: ## Delete the kind cluster
	hack/kind.sh down

clean: ## Remove environments, caches and build output
	rm -rf .venv .venv-frontend .venv-backend .venv-docs .mypy_cache .ruff_cache .hypothesis build dist

.venv/.done: locks/dev.txt shared/pyproject.toml services/dra-frontend/pyproject.toml services/nri-backend/pyproject.toml
	PYTHON="$(PYTHON)" hack/venv.sh .venv "locks/dev.txt" "shared services/dra-frontend services/nri-backend"

.venv-frontend/.done: locks/dra-frontend.txt locks/test.txt shared/pyproject.toml services/dra-frontend/pyproject.toml
	PYTHON="$(PYTHON)" hack/venv.sh .venv-frontend "locks/dra-frontend.txt locks/test.txt" "shared services/dra-frontend"

.venv-backend/.done: locks/nri-backend.txt locks/test.txt shared/pyproject.toml services/nri-backend/pyproject.toml
	PYTHON="$(PYTHON)" hack/venv.sh .venv-backend "locks/nri-backend.txt locks/test.txt" "shared services/nri-backend"

.venv-docs/.done: locks/docs.txt
	PYTHON="$(PYTHON)" hack/venv.sh .venv-docs "locks/docs.txt" ""
