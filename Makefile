# One command each; all of them set up what they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup fmt lint test test-ceph bench docs demo clean

help:
	@echo "make demo       pack, train, kill and resume a small model: the main job in a minute"
	@echo "make test       all tests, with a real S3 server"
	@echo "make lint       ruff, mypy --strict, import contracts"
	@echo "make fmt        format the code"
	@echo "make docs       check the documentation: links resolve, its Python runs"
	@echo "make bench      benchmarks against limits and peers (minutes; makes environments for the peers)"
	@echo "make test-ceph  the store conformance suite against Ceph from Debian's packages"
	@echo "make setup      only make .venv"

setup: .venv/.complete

.venv/.complete: pyproject.toml constraints.txt tools/setup.sh
	@PYTHON="$(PYTHON)" tools/setup.sh

fmt: setup
	$(BIN)/ruff format src tests testkit benchmarks examples tools
	$(BIN)/ruff check --fix --quiet src tests testkit benchmarks examples tools

lint: setup
	$(BIN)/ruff check src tests testkit benchmarks examples tools
	$(BIN)/ruff format --check src tests testkit benchmarks examples tools
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: setup
	$(BIN)/pytest -q -n auto --maxprocesses 4 --dist loadfile

test-ceph: setup
	tools/install_ceph.sh
	$(BIN)/pytest -q -m ceph

bench: setup
	$(BIN)/python -m benchmarks.run

docs: setup
	$(BIN)/python tools/check_docs.py

demo: setup
	@$(BIN)/python -m examples.demo

clean:
	rm -rf .venv build dist .peers
