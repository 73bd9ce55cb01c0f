"""Checkpoints: bits, retention, what a kill leaves behind, and damage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xrpo_jax import checkpoint
from xrpo_jax import mesh as meshes
from xrpo_jax.arrays import TrainState
from xrpo_jax.log import Compiles


def odd_floats(shape, seed: int) -> np.ndarray:
    """Any bits that are a float32: NaNs, infinities, -0 and denormals among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)
    bits.flat[:6] = [0x7F800000, 0xFF800000, 0x80000000, 1, 0x7FC00000, 0x7FC00001]
    return bits.view(np.float32)


def make_state(seed: int = 0, devices: int = 1) -> TrainState:
    params = {
        "embed": odd_floats((6, 4), seed),
        "layers": {"query": odd_floats((2, 4, 2, 2), seed + 1)},
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    memory = jax.tree.map(np.asarray, optimizer.init(params))
    state = TrainState(params=params, optimizer=memory)
    state = jax.tree.map(lambda leaf: np.asarray(leaf) + np.zeros((), leaf.dtype), state)
    return jax.device_put(state, meshes.everywhere(meshes.make(devices)))


def make_ledger(seed: int = 0) -> dict:
    draw = np.random.default_rng(seed)
    return {
        "values": {"mean": np.array([np.nan, 0.1, -0.0, 1 / 3])},
        "seeder": {
            "prompt": draw.integers(-1, 2**40, 5),
            "tokens": draw.integers(0, 9, (5, 3)).astype(np.int32),
            "step": np.full(5, -1, np.int64),
        },
        "tracker": {},
    }


def assert_equal_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def save(folder, *steps: int, keep: int = 9):
    manager = checkpoint.open_manager(folder, keep)
    for step in steps:
        checkpoint.save(manager, step, make_state(step), make_ledger(step))
    manager.close()


def load(folder, step: int | None = None, ledger=None, devices: int = 1):
    manager = checkpoint.open_manager(folder, 9)
    step = manager.latest_step() if step is None else step
    blank = jax.tree.map(np.zeros_like, make_ledger() if ledger is None else ledger)
    found = checkpoint.restore(manager, step, make_state(99, devices), blank)[:2]
    manager.close()
    return found


def test_round_trip_to_the_bit(tmp_path):
    save(tmp_path, 3)
    state, ledger = load(tmp_path)
    assert_equal_bits(state, make_state(3))
    assert_equal_bits(ledger, make_ledger(3))
    for leaf in jax.tree.leaves(ledger):
        assert isinstance(leaf, np.ndarray) and leaf.flags.writeable


def test_an_empty_ledger(tmp_path):
    manager = checkpoint.open_manager(tmp_path, 2)
    ledger = {"values": {}, "seeder": {}}
    checkpoint.save(manager, 1, make_state(1), ledger)
    state, found, _ = checkpoint.restore(manager, 1, make_state(2), ledger)
    manager.close()
    assert found == ledger
    assert_equal_bits(state, make_state(1))


def test_restored_to_the_placement_asked_for(tmp_path):
    save(tmp_path, 1)
    state, _ = load(tmp_path, devices=8)
    assert_equal_bits(state, make_state(1))
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_equivalent_to(
            meshes.everywhere(meshes.make(8)), leaf.ndim
        ) and isinstance(leaf, jax.Array)


def test_the_newest_are_retained(tmp_path):
    save(tmp_path, 2, 4, 6, 8, keep=2)
    manager = checkpoint.open_manager(tmp_path, 2)
    assert sorted(manager.all_steps()) == [6, 8] and manager.latest_step() == 8
    manager.close()
    assert_equal_bits(load(tmp_path, 6)[0], make_state(6))


def test_a_fresh_folder_has_no_step(tmp_path):
    manager = checkpoint.open_manager(tmp_path / "new", 2)
    assert manager.latest_step() is None
    manager.close()


def test_what_a_kill_left_half_written_is_ignored(tmp_path):
    save(tmp_path, 4)
    for name in ("6.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp-1700000000"):
        (tmp_path / "checkpoints" / name / "default").mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "default" / "manifest.ocdbt").write_bytes(b"half")
    manager = checkpoint.open_manager(tmp_path, 2)
    assert manager.latest_step() == 4
    checkpoint.save(manager, 6, make_state(6), make_ledger(6))  # the same name again
    manager.close()
    assert_equal_bits(load(tmp_path)[0], make_state(6))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "6"]


def empty(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def lose_data(folder):
    for path in folder.rglob("d/*"):
        path.unlink()


def cut_data(folder):
    for path in folder.rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_metadata(folder):
    for path in folder.rglob("_METADATA"):
        path.unlink()


@pytest.mark.parametrize("damage", [empty, lose_data, cut_data, lose_metadata])
def test_a_damaged_step_is_named_with_the_cure(tmp_path, damage):
    save(tmp_path, 3, 6)
    damage(tmp_path / "checkpoints" / "6")
    with pytest.raises(ValueError, match=r"checkpoints/6 cannot be read .*; delete that directory"):
        load(tmp_path)
    # The cure works.
    empty(tmp_path / "checkpoints" / "6")
    (tmp_path / "checkpoints" / "6").rmdir()
    state, _ = load(tmp_path)
    assert_equal_bits(state, make_state(3))


def test_a_checkpoint_of_another_shape_is_an_error_not_a_silent_cut(tmp_path):
    save(tmp_path, 3)
    ledger = make_ledger()
    ledger["seeder"]["prompt"] = np.zeros(7, np.int64)
    with pytest.raises(ValueError, match="checkpoints/3 cannot be read"):
        load(tmp_path, ledger=ledger)


def test_a_checkpoint_with_another_part_is_an_error(tmp_path):
    save(tmp_path, 3)
    ledger = make_ledger()
    ledger["tracker"] = {"alpha": np.zeros(2)}
    with pytest.raises(ValueError, match="checkpoints/3 cannot be read"):
        load(tmp_path, ledger=ledger)


def test_saving_leaves_the_device_state_as_it_is(tmp_path):
    state = make_state(5)
    manager = checkpoint.open_manager(tmp_path, 2)
    checkpoint.save(manager, 1, state, make_ledger())
    manager.close()
    assert_equal_bits(state, make_state(5))
    assert jnp.isnan(state.params["embed"]).any()


def test_saving_compiles_nothing_on_several_devices(tmp_path):
    manager = checkpoint.open_manager(tmp_path, 1)
    state = jax.block_until_ready(make_state(devices=2))
    compiles = Compiles()
    checkpoint.save(manager, 1, state, make_ledger())
    compiles.close()
    assert compiles.count == 0
    found, *_ = checkpoint.restore(manager, 1, state, make_ledger())
    assert_equal_bits(found, state)
    assert found.params["embed"].sharding == state.params["embed"].sharding
    manager.close()
