# Sourced by the other scripts: `environment WHAT` installs WHAT (. or .[test]) into .venv.
# PYTHON names the interpreter (3.11 to 3.13); a second call with nothing new takes no time.
suitable() {
  command -v "$1" >/dev/null && "$1" -c \
    'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

environment() {
  local python stamp
  # What XLA compiles is kept with the environment, so that a second run starts at once.
  export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.venv/jax-cache}
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
      if suitable "$python"; then break; fi
      python=
    done
    if [ -z "$python" ]; then
      echo "error: no Python 3.11 to 3.13 among: ${PYTHON:-python3 python3.13 python3.12 python3.11}" >&2
      echo "(set PYTHON=/path/to/python)" >&2
      return 2
    fi
    echo "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
    .venv/bin/python -m pip install --quiet --upgrade pip
  fi
  stamp=".venv/installed-$(echo "$1" | tr -c 'a-z\n' '-')"
  if [ ! -e "$stamp" ] || [ setup.cfg -nt "$stamp" ]; then
    echo "installing $1 (some minutes the first time)"
    .venv/bin/python -m pip install --quiet --editable "$1"
    touch "$stamp"
  fi
}
