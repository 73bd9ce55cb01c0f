"""`python -m xrpo_jax.main --config=experiments/quickstart.py --workdir=runs/quickstart`."""

from __future__ import annotations

import sys

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Settings, e.g. experiments/quickstart.py"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run's files go; an old run goes on.")


def read_flags(argv: list[str]) -> list[str]:
    """As absl reads them; a misspelt setting ends with one line that lists those there are."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, OSError) as error:  # what ml_collections raises
        from xrpo_jax import config

        message = config.unknown_setting(argv)
        if message is None and not isinstance(error, OSError):
            raise
        print(f"error: {message or error}", file=sys.stderr)
        sys.exit(2)


def main(argv: list[str]) -> None:
    """Run what the flags say; a wrong setting ends with one line and exit code 2."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    talkative = flags.FLAGS.verbosity > 0
    logging.set_verbosity(logging.DEBUG if talkative else logging.WARNING)
    from xrpo_jax import train  # after the flags were read: it starts JAX

    try:
        train.run(_CONFIG.value, _WORKDIR.value)
    except (ValueError, OSError) as error:
        if talkative:
            raise
        print(f"error: {error}\n(--verbosity=1 shows where)", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=read_flags)
