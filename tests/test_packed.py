"""The packed model's own pieces against the plain ones; whole updates are in test_update.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrpo_jax.model import attention, packed

_draws = np.random.default_rng(0)


def close(one, other, tolerance=1e-5):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance, rtol=1e-5)


def test_moved_is_a_gather_whose_transpose_is_the_way_back():
    """Six slots, of which four have a place among eight: value and gradient by hand."""
    x = jnp.asarray(_draws.standard_normal((6, 2)), jnp.float32)
    go_to = jnp.array([3, -1, 0, 7, -1, 1])
    come_from = jnp.array([2, 5, -1, 0, -1, -1, -1, 3])
    out, pull = jax.vjp(lambda x: packed.moved(x, come_from, go_to), x)
    wanted = np.zeros((8, 2), np.float32)
    wanted[[3, 0, 7, 1]] = x[jnp.array([0, 2, 3, 5])]
    np.testing.assert_array_equal(out, wanted)
    cotangent = jnp.asarray(_draws.standard_normal((8, 2)), jnp.float32)
    plain = jax.vjp(
        lambda x: jnp.zeros((8, 2)).at[jnp.array([3, 0, 7, 1])].set(x[jnp.array([0, 2, 3, 5])]), x
    )[1]
    np.testing.assert_array_equal(pull(cotangent)[0], plain(cotangent)[0])


def plain(query, key, value, mask):
    """Head by head, each query against its own key-value head, with the gradient of JAX's rules."""
    share, outs = query.shape[2] // key.shape[2], []
    for head in range(query.shape[2]):
        own_key, own_value = key[:, :, head // share], value[:, :, head // share]
        scores = jnp.einsum("nte,nce->ntc", query[:, :, head], own_key) / np.sqrt(query.shape[3])
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        outs.append(jnp.einsum("ntc,nce->nte", weights, own_value))
    return jnp.stack(outs, axis=2)


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 3), (6, 1)])
def test_attention_is_the_plain_one(heads, kv_heads):
    """Value and gradient under a mask with a row that attends to nothing, which none may read."""
    rows, steps, slots, size = 2, 3, 5, 4
    query, key, value, shares = (
        jnp.asarray(_draws.standard_normal((rows, length, number, size)), jnp.float32)
        for length, number in ((steps, heads), (slots, kv_heads), (slots, kv_heads), (steps, heads))
    )
    mask = _draws.random((rows, steps, slots)) < 0.6
    mask[:, :2, 0] = True
    mask[1, 2] = False
    shares = shares.at[1, 2].set(0.0)

    def pair(attend):
        def total(*arrays):
            out = attend(*arrays, jnp.asarray(mask))
            return jnp.sum(shares * out), out

        return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(query, key, value)

    close(pair(attention.attention), pair(plain))
    assert np.abs(pair(attention.attention)[0][1]).max() > 0.1


def test_rows_that_do_not_continue_the_prompts_evenly_are_refused():
    with pytest.raises(ValueError, match="5 rows do not continue 2 prompts"):
        packed.padded(
            jnp.ones((2, 3), int), jnp.ones(2, int), jnp.ones((5, 2), int), jnp.ones(5, int)
        )
