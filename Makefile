# Every target does its own set-up, is idempotent, and says what takes long.
# `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
PYTHON := .venv/bin/python
export PYTHONPATH := $(CURDIR):$(CURDIR)/proto/python:$(CURDIR)/sdk_py
# Machines, mounts and namespaces need root.
AS_ROOT := $(SUDO) env PYTHONPATH=$(PYTHONPATH) PATH=$(PATH)
STAMPS := build/stamps
PACKAGES := qemu-system-x86 qemu-utils mmdebstrap erofs-utils musl-tools gcc lz4 cpio e2fsprogs \
	iproute2 util-linux mount ca-certificates python3-venv

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16

.PHONY: setup
setup: $(STAMPS)/packages $(STAMPS)/venv ## Debian packages and .venv

$(STAMPS)/packages: Makefile
	@missing=$$(for p in $(PACKAGES); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
		echo "setup: installing" $$missing; \
		$(SUDO) apt-get update -qq; \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
	@mkdir -p $(STAMPS) && touch $@

# Tools of development; what the packages need comes from their own pyproject.toml.
TOOLS := buf-bin grpcio-tools hypothesis import-linter mypy mypy-protobuf pytest pytest-asyncio pytest-timeout \
	ruff types-grpcio types-protobuf hatchling
RUNTIME := grpcio grpcio-health-checking grpcio-reflection googleapis-common-protos protobuf prometheus-client \
	qemu.qmp structlog uvloop

$(STAMPS)/venv: constraints.txt Makefile | $(STAMPS)/packages
	@echo "setup: .venv with $(words $(TOOLS) $(RUNTIME)) packages and what they need (about 30 s)"
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python3 must be 3.11 or newer"; exit 1; }
	@python3 -m venv .venv
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TOOLS) $(RUNTIME)
	@touch $@

.PHONY: proto
proto: $(STAMPS)/proto ## Python stubs from the contract

$(STAMPS)/proto: $(shell find proto/cocoon -name '*.proto') proto/generate.py $(STAMPS)/venv
	@echo "proto: generating stubs"
	@PATH=$(CURDIR)/.venv/bin:$(PATH) $(PYTHON) proto/generate.py
	@touch $@

.PHONY: images
images: proto ## kernel, initramfs and guest images, into build/
	@$(PYTHON) -m bootchain --out build/boot
	@$(AS_ROOT) $(CURDIR)/$(PYTHON) -m osimages --out build/images

.PHONY: demo
demo: images ## a node, a pool and three claims on real microVMs
	@$(AS_ROOT) $(CURDIR)/$(PYTHON) sdk_py/examples/demo.py

.PHONY: test
test: images ## all tests, real VMs included
	@$(AS_ROOT) $(CURDIR)/$(PYTHON) -m pytest $(ARGS)

.PHONY: bench
bench: images ## measure; prints a table, writes build/bench.json
	@$(AS_ROOT) $(CURDIR)/$(PYTHON) -m tests.performance.bench --out build/bench.json

.PHONY: lint
lint: proto ## ruff, mypy, buf (lint, format, breaking), import contracts
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check --quiet . || { echo "run: .venv/bin/ruff format ."; exit 1; }
	@$(PYTHON) -m mypy
	@.venv/bin/buf lint
	@.venv/bin/buf format --diff --exit-code
	@.venv/bin/buf breaking --against golden_fixtures/api_baseline.binpb
	@.venv/bin/lint-imports

.PHONY: clean
clean: ## remove build/, .venv/ and generated stubs
	@$(SUDO) rm -rf build .venv proto/google proto/python/cocoon .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
