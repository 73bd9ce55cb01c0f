"""Segment reductions over ragged groups, the one helper that knows about devices.

Shapes: n rows here · G groups over all devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Groups:
    """Rows that are compared with one another: ids i32[n] below `number`, weight f32[n] (0 = pad).

    Every method takes f32[n] and returns f32[n]: the group's number, read back by each row.
    With `axis` the reduction runs over that mesh axis too.
    """

    ids: jax.Array
    weight: jax.Array
    number: int = struct.field(pytree_node=False)
    axis: str | None = struct.field(pytree_node=False, default=None)

    def having(self, values: jax.Array) -> Groups:
        """These groups without the rows whose value is not finite."""
        return self.replace(weight=jnp.where(jnp.isfinite(values), self.weight, 0.0))

    def joined(self) -> Groups:
        """All rows as one group."""
        return self.replace(ids=jnp.zeros_like(self.ids), number=1)

    def only(self, rows: jax.Array) -> Groups:
        """These groups without the rows that are not in `rows` bool[n]."""
        return self.replace(weight=jnp.where(rows, self.weight, 0.0))

    def total(self, values: jax.Array) -> jax.Array:
        """Sum over the row's group."""
        kept = jnp.where(self.weight > 0, values * self.weight, 0.0)
        sums = jax.ops.segment_sum(kept, self.ids, self.number)
        if self.axis is not None:
            sums = jax.lax.psum(sums, self.axis)
        return sums[self.ids]

    def size(self) -> jax.Array:
        """Rows in the row's group."""
        return self.total(jnp.ones_like(self.weight))

    def mean(self, values: jax.Array) -> jax.Array:
        """Mean over the row's group."""
        return self.total(values) / jnp.maximum(self.size(), 1.0)

    def std(self, values: jax.Array, ddof: int) -> jax.Array:
        """Standard deviation over the row's group; exactly 0 where all values are equal."""
        squares = self.total(jnp.square(values - self.mean(values)))
        size = self.size()
        variance = jnp.where(size > ddof, squares / jnp.maximum(size - ddof, 1.0), 0.0)
        # Rounding of the mean leaves a tiny spread among equal rewards such as 0.1, which a
        # division by (std + 1e-6) would blow up.
        return jnp.where(self.spread(values) > 0, jnp.sqrt(variance), 0.0)

    def spread(self, values: jax.Array) -> jax.Array:
        """Largest minus smallest value of the row's group."""
        real = self.weight > 0
        high = jax.ops.segment_max(jnp.where(real, values, -jnp.inf), self.ids, self.number)
        low = jax.ops.segment_max(jnp.where(real, -values, -jnp.inf), self.ids, self.number)
        if self.axis is not None:
            high, low = jax.lax.pmax(high, self.axis), jax.lax.pmax(low, self.axis)
        spread = jnp.where(jnp.isfinite(high), high + low, 0.0)
        return spread[self.ids]

    def everything(self, values: jax.Array) -> jax.Array:
        """Sum over all real rows of all groups and devices: a scalar."""
        total = jnp.sum(jnp.where(self.weight > 0, values, 0.0))
        return total if self.axis is None else jax.lax.psum(total, self.axis)
