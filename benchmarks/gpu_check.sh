#!/usr/bin/env bash
# All checks that need a GPU, in at most 8 minutes on one GPU: benchmarks/gpu_check.sh [flags of gpu_check.py].
# Writes gpu_check.json (or --output) and prints a short table. Exit code 1 when a check failed.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
test -x "$python" || python=python3
exec timeout --kill-after=10 480 "$python" benchmarks/gpu_check.py "$@"
