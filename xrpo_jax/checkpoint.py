"""The state of a run on disk: TrainState and ledger under a step number, written atomically.

Where rollouts are drawn ahead, the Origin of the step that comes next belongs to it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from xrpo_jax.arrays import Params, TrainState
from xrpo_jax.types import Ledger

Manager = ocp.CheckpointManager


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """What a step's rollouts are drawn with: the parameters and the ledger of an earlier `step`."""

    step: int
    params: Params
    ledger: Ledger


def open_manager(workdir: str | os.PathLike, keep: int) -> Manager:
    """Orbax's manager of `workdir/checkpoints`, retaining the newest `keep`.

    A step is written beside its place and renamed, so that a kill leaves it whole or not there.
    """
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=True,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager(pathlib.Path(workdir).absolute() / "checkpoints", options=options)


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    ledger: Ledger,
    origin: Origin | None = None,
) -> None:
    """Write (state, ledger) as `step`; on return it is on disk.

    An `origin` is that of the rollouts of `step`, and of the step before.
    """
    tree = jax.tree.map(_one_copy, _tree(state, ledger, origin))
    manager.save(step, args=ocp.args.StandardSave(tree), force=True)
    manager.wait_until_finished()


def _one_copy(leaf: Any) -> Any:
    """One device's copy of what all have: Orbax would compile programs to write a part of each."""
    copied = isinstance(leaf, jax.Array) and leaf.is_fully_replicated
    return leaf.addressable_data(0) if copied else leaf


def shapes(tree: TrainState) -> TrainState:
    """Shape, dtype and placement of every array, which is all that `restore` needs of it."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def restore(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    ledger: Ledger,
    ahead: bool = False,
) -> tuple[TrainState, Ledger, Origin | None]:
    """Read `step` into the shapes, dtypes and placement of `state` and `ledger` (see `shapes`).

    With `ahead` there is an origin, of the same shapes. Raises ValueError, naming the directory and
    the cure, when it is damaged or of another run.
    """
    origin = Origin(step=step - 1, params=state.params, ledger=ledger) if ahead else None
    tree = _tree(state, ledger, origin)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    where = manager.directory / str(step)
    try:
        found = manager.restore(step, args=ocp.args.StandardRestore(target))
        jax.tree.map(_check_shape, found, target)
    except Exception as error:
        raise ValueError(
            f"checkpoint {where} cannot be read ({type(error).__name__}: {error}); delete that "
            "directory to resume from the one before it, or choose another --workdir"
        ) from error
    if origin is not None:
        stored = found["origin"]
        origin = dataclasses.replace(
            origin, params=stored["params"], ledger=_ledger(stored["ledger"], ledger)
        )
    return found["state"], _ledger(found["ledger"], ledger), origin


def _tree(state: TrainState, ledger: Ledger, origin: Origin | None) -> dict:
    """All of it by name; Orbax stores no empty memory."""

    def filled(ledger: Ledger) -> Ledger:
        return {name: memory for name, memory in ledger.items() if memory}

    tree = {"state": state, "ledger": filled(ledger)}
    if origin is not None:
        tree["origin"] = {"params": origin.params, "ledger": filled(origin.ledger)}
    return tree


def _ledger(found: Ledger, like: Ledger) -> Ledger:
    """What was stored, with the memories that are empty."""
    memories = {name: found.get(name, {}) for name in like}
    return {
        name: {key: np.asarray(value) for key, value in memory.items()}
        for name, memory in memories.items()
    }


def restore_params(
    workdir: str | os.PathLike, step: int | None, like: Params
) -> tuple[int, Params]:
    """Read the parameters alone of `step` (None: the newest), and say which step it is.

    `like` is a tree of jax.ShapeDtypeStruct; a sharding in it is where the parameter goes. Nothing
    in `workdir` changes, so a run may be writing there. Raises FileNotFoundError naming the steps
    there are, ValueError naming a directory that is damaged or of another model.
    """
    folder = pathlib.Path(workdir).absolute() / "checkpoints"
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
    if not steps:
        raise FileNotFoundError(f"{folder} holds no checkpoint; give the --workdir of a run")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{folder} holds no step {step}; allowed: {steps}")
    where = folder / str(steps[-1] if step is None else step)
    target = {"state": {"params": like}}
    reader = ocp.PyTreeCheckpointHandler()
    try:
        # What a partial restore does not find it leaves as it is, so it is looked up before.
        stored = reader.metadata(where / "default").tree["state"]["params"]
        strange = sorted(_names(stored) ^ _names(like))
        if strange:
            raise ValueError(f"parameters that only one side has: {', '.join(strange)}")
        jax.tree.map(_check_shape, stored, like)
        found = reader.restore(
            where / "default",
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=True,
            ),
        )["state"]["params"]
    except Exception as error:
        raise ValueError(
            f"checkpoint {where} cannot be read ({type(error).__name__}: {error}); choose another "
            "--step, or the model (init_from) that the run was made from"
        ) from error
    finally:
        reader.close()
    return int(where.name), found


def _names(tree: Params) -> set[str]:
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def _check_shape(found: np.ndarray, target: jax.ShapeDtypeStruct) -> None:
    if found.shape != target.shape:  # Orbax checks those of device arrays only
        raise ValueError(f"an array has shape {found.shape} there and {target.shape} here")
