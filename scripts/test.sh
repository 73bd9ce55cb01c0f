#!/usr/bin/env bash
# Installs the test extra into .venv, checks lint and format, runs the whole suite.
# Arguments pass through to pytest, e.g. bash scripts/test.sh tests/test_planner.py
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment ".[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
export JAX_PLATFORMS=cpu
# Two workers, a file to each at a time: most of the time is compilation, on one core.
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
