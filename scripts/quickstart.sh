#!/usr/bin/env bash
# XRPO on the embedded policy: sets up .venv and trains. Arguments pass through, e.g.
#   bash scripts/quickstart.sh --config.algorithm.name=grpo
# The run goes to runs/quickstart-<algorithm>; the same command goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment .

name=xrpo
workdir=
for argument in "$@"; do
  case "$argument" in
    --config.algorithm.name=*) name=${argument#*=} ;;
    --workdir=*) workdir=${argument#*=} ;;
  esac
done
arguments=(--config=experiments/quickstart.py)
for argument in "$@"; do
  case "$argument" in --config=*) arguments=() ;; esac
done
[ -n "$workdir" ] || arguments+=(--workdir="runs/quickstart-$name")
exec .venv/bin/python -m xrpo_jax.main "${arguments[@]}" "$@"
