"""Writes a Hugging Face directory from a run's checkpoint or from any model, and checks it.

    python scripts/export_hf.py --workdir=runs/quickstart --out=exports/quickstart
    python scripts/export_hf.py --from=model.gguf --out=checkpoints/model --dtype=bfloat16

`--from` is what `init_from` of a run may be: a directory, a GGUF file or an id of the Hub.
"""

import pathlib
import sys

from absl import app, flags, logging

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of a run.")
_STEP = flags.DEFINE_integer("step", None, "Which of its checkpoints; the newest by default.")
_FROM = flags.DEFINE_string("from", None, "A directory, a GGUF file or a Hub id, not a run.")
_OUT = flags.DEFINE_string("out", None, "Where to write; an earlier export there is replaced.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "float32 or bfloat16.")
_SHARD_GB = flags.DEFINE_float("shard_gb", 5.0, "The most that one file of weights may hold.")


def main(argv: list[str]) -> None:
    """Export what the flags say; a wrong one ends with one line and exit code 2."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    logging.set_verbosity(logging.ERROR)
    try:
        if (_WORKDIR.value is None) == (_FROM.value is None):
            raise ValueError("give either --workdir=RUN or --from=MODEL")
        if _STEP.value is not None and _WORKDIR.value is None:
            raise ValueError(f"--step={_STEP.value} is of a run; give --workdir=RUN")
        if not _SHARD_GB.value > 0:
            raise ValueError(f"--shard_gb={_SHARD_GB.value}; allowed: above 0")
        export_model()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def export_model() -> None:
    """Load, write, compare, and say what was compared."""
    from xrpo_jax.model import compare, export, hf, source  # after the flags: it starts JAX

    begun = _FROM.value if _WORKDIR.value is None else init_from(pathlib.Path(_WORKDIR.value))
    model = source.find(begun)
    export.require(_OUT.value, dtype=_DTYPE.value, tokenizer_dir=model.folder)
    if _WORKDIR.value is None:
        config, params = hf.load(model)
        what = begun
    else:
        config = hf.config_of(model)
        step, params = restored(config)
        what = f"step {step} of {_WORKDIR.value}"
    export.save(
        _OUT.value,
        config,
        params,
        dtype=_DTYPE.value,
        tokenizer_dir=model.folder,
        shard_bytes=int(_SHARD_GB.value * 1e9),
    )
    result = compare.check(_OUT.value, config, params, _DTYPE.value)
    print(f"{what} is in {_OUT.value}, {_DTYPE.value}")
    print(f"checked: {compare.describe(result)}")
    print(f"use it with --config.init_from={_OUT.value}")


def init_from(workdir: pathlib.Path) -> str:
    """The model that a run was made from, whose architecture and tokenizer it keeps."""
    from xrpo_jax.config import EMBEDDED
    from xrpo_jax.model import files

    file = workdir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; --workdir must be the folder of a run")
    raw = files.read_json(file)
    if not isinstance(raw.get("init_from"), str):
        raise ValueError(f"{file} has no init_from; --workdir must be the folder of a run")
    return raw["init_from"] or str(EMBEDDED)


def restored(config) -> tuple[int, dict]:
    """The step and the parameters of the checkpoint, on the default device."""
    import jax
    import jax.numpy as jnp

    from xrpo_jax import checkpoint
    from xrpo_jax.model import params

    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda param: jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=place),
        params.declare(config),
    )
    return checkpoint.restore_params(_WORKDIR.value, _STEP.value, like)


if __name__ == "__main__":
    flags.mark_flag_as_required("out")
    app.run(main)
