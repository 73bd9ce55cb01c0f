#!/usr/bin/env bash
# XRPO on the embedded policy: sets up .venv and trains. Arguments pass through, e.g.
#   bash scripts/quickstart.sh --config.algorithm.name=grpo
# The run goes to runs/quickstart-<algorithm>; the same command goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment .

config=experiments/quickstart.py
name=xrpo
workdir=
rest=()
while [ $# -gt 0 ]; do
  argument=$1
  shift
  case "$argument" in
    --config | --workdir | --config.*) # the form with a space
      case "$argument" in
        *=*) ;;
        *)
          [ $# -gt 0 ] || { echo "error: $argument wants a value" >&2; exit 2; }
          argument="$argument=$1"
          shift
          ;;
      esac
      ;;
  esac
  case "$argument" in
    --config=*) config=${argument#*=} ;;
    --workdir=*) workdir=${argument#*=} ;;
    --config.algorithm.name=*) name=${argument#*=} rest+=("$argument") ;;
    *) rest+=("$argument") ;;
  esac
done
case "$config" in
  *:*) mode=-${config##*:} ;;
  *) mode= ;;
esac
# The config comes first: overrides are read against it.
exec .venv/bin/python -m xrpo_jax.main --config="$config" \
  --workdir="${workdir:-runs/quickstart-$name$mode}" ${rest[@]+"${rest[@]}"}
