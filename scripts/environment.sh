# Sourced by the other scripts: `environment WHAT` installs WHAT (. or .[test]) into .venv.
# PYTHON names the interpreter (3.11 to 3.13); a second call with nothing new takes no time.
environment() {
  local python=${PYTHON:-python3} stamp
  if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
      echo "error: $("$python" --version 2>&1); needed: Python 3.11 to 3.13 (set PYTHON=...)" >&2
      return 2
    }
    echo "making .venv with $("$python" --version)"
    "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --upgrade pip
  fi
  # What XLA compiles is kept with the environment, so that a second run starts at once.
  export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.venv/jax-cache}
  stamp=".venv/installed-$(echo "$1" | tr -c 'a-z\n' '-')"
  if [ ! -e "$stamp" ] || [ setup.cfg -nt "$stamp" ]; then
    echo "installing $1 (some minutes the first time)"
    .venv/bin/python -m pip install --quiet --editable "$1"
    touch "$stamp"
  fi
}
