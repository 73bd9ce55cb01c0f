"""How a batch is cut: minibatches of an optimizer update, and micro-batches of one forward pass.

A micro-batch packs rows of several prompts into one buffer of tokens for each device
(model/packed.py) until the buffer or the places for rows are full. There are few shapes, whatever
the batch holds, so that nothing recompiles. All of this is NumPy on the host.

Shapes: N rows of the batch · M slots of a buffer · b prompts and n = b x share rows of a
micro-batch · P prompt length · T completion tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from xrpo_jax.arrays import Batch
from xrpo_jax.learn.objective import Learn
from xrpo_jax.model.packed import Packed

ROUND = 16  # slots of a buffer are a multiple
HALF = 256  # slots: tiny buffers get no second program (a choice, the bound was not measured)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a batch is cut: optimizer updates an epoch, epochs, size and lengths of a micro-batch."""

    minibatches: int
    epochs: int
    rows: int  # of the longest completions, over all devices; of shorter ones as many more
    share: int  # rows that continue one copy of their prompt
    prompt_lengths: tuple[int, ...]  # ascending; the last holds the longest prompt
    lengths: tuple[int, ...]  # of completions, ascending; the last holds the longest
    groups: int  # prompts of a step
    tokens: int = 0  # over all devices; 0 = what `rows` and their prompts can have
    devices: int = 1

    def shapes(self) -> list[tuple[int, int, int]]:
        """Prompt length, completion length and slots of every kind of micro-batch."""
        return [
            (prompt, length, slots)
            for prompt in self.prompt_lengths
            for length in self.lengths
            for slots in self.slots(prompt)
        ]

    def places(self, length: int) -> int:
        """Rows n of a micro-batch of this completion length."""
        return self.rows * (self.lengths[-1] // length)

    def slots(self, prompt: int) -> tuple[int, ...]:
        """Slots M that a device's buffer may have for prompts of this length, ascending.

        All that is allowed, and half of it for rows that do not fill more. ValueError where all
        that is allowed is too little.
        """
        most = self.rows * self.lengths[-1] + self.rows // self.share * prompt
        slots = -(-(self.tokens or most) // self.devices)
        least = self.share * self.lengths[-1] + prompt
        if slots < least:
            raise ValueError(
                f"train.micro_tokens={self.tokens}; allowed: 0, or at least "
                f"{least * self.devices} (train.share={self.share} completions of "
                f"{self.lengths[-1]} tokens and a prompt of {prompt} on each of {self.devices} "
                "devices)"
            )
        half = -(-slots // 2)
        return tuple(size + -size % ROUND for size in ((half,) if half >= HALF else ()) + (slots,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows (indices, -1 = none) in blocks that share a prompt, as many blocks for each device."""

    rows: np.ndarray
    share: int
    prompt_width: int
    width: int
    slots: int
    devices: int


def micro_batches(batch: Batch, rows: np.ndarray, schedule: Schedule) -> list[MicroBatch]:
    """Pack `rows` (indices) into micro-batches, in blocks of up to `share` rows of one prompt.

    Raises ValueError when a prompt or completion is longer than all of the schedule's lengths.
    """
    widths = []
    for name, length, allowed in (
        ("prompt", batch.prompt_length, schedule.prompt_lengths),
        ("completion", batch.length, schedule.lengths),
    ):
        longest = int(np.max(length[rows], initial=0))
        if longest > allowed[-1]:
            raise ValueError(
                f"a {name} of {longest} tokens; micro-batches hold at most {allowed[-1]}"
            )
        widths.append(np.searchsorted(allowed, length[rows]))
    alike: dict[tuple, list[int]] = {}  # (widths, prompt) -> rows
    for row, prompt_place, place in zip(rows.tolist(), *widths, strict=True):
        prompt = batch.prompt[row, : batch.prompt_length[row]].tobytes()
        alike.setdefault((prompt_place, place, prompt), []).append(row)
    blocks: dict[tuple, list[list[int]]] = {}  # widths -> blocks
    for (prompt_place, place, _), members in alike.items():
        for start in range(0, len(members), schedule.share):
            block = members[start : start + schedule.share]
            blocks.setdefault((prompt_place, place), []).append(block)
    parts = []
    for (prompt_place, place), found in sorted(blocks.items(), key=lambda item: item[0]):
        prompt_width, width = schedule.prompt_lengths[prompt_place], schedule.lengths[place]
        room = schedule.slots(prompt_width)
        sizes = [int(batch.length[b].sum() + batch.prompt_length[b[0]]) for b in found]
        at_once = schedule.places(width) // schedule.share // schedule.devices
        for chosen in _filled(sizes, room[-1], at_once, schedule.devices):
            fullest = max(sum(sizes[number] for number in numbers) for numbers in chosen)
            places = np.full((schedule.devices, at_once, schedule.share), -1)
            for device, numbers in enumerate(chosen):
                for place_of, number in enumerate(numbers):
                    places[device, place_of, : len(found[number])] = found[number]
            parts.append(
                MicroBatch(
                    rows=places.reshape(-1),
                    share=schedule.share,
                    prompt_width=prompt_width,
                    width=width,
                    slots=next(slots for slots in room if slots >= fullest),
                    devices=schedule.devices,
                )
            )
    return parts


def _filled(sizes: list[int], room: int, at_once: int, devices: int) -> list[list[list[int]]]:
    """Blocks (numbers) of each device of each micro-batch, in order, devices filled evenly."""
    parts = []
    for number, size in enumerate(sizes):
        if parts:
            loads = [sum(sizes[n] for n in mine) for mine in parts[-1]]
            open_ = [d for d in range(devices) if len(parts[-1][d]) < at_once]
            fitting = [d for d in open_ if loads[d] + size <= room]
        if not parts or not fitting:
            parts.append([[] for _ in range(devices)])
            loads, fitting = [0] * devices, list(range(devices))
        parts[-1][min(fitting, key=lambda d: loads[d])].append(number)
    return parts


def blank(schedule: Schedule, prompt_width: int, width: int, slots: int) -> MicroBatch:
    """A micro-batch without rows, for its shapes."""
    return MicroBatch(
        rows=np.full(schedule.places(width), -1),
        share=schedule.share,
        prompt_width=prompt_width,
        width=width,
        slots=slots,
        devices=schedule.devices,
    )


def model_inputs(batch: Batch, part: MicroBatch) -> Packed:
    """The packed rows; each array holds one device's after the other's."""
    buffers = [
        _buffer(batch, part, rows) for rows in part.rows.reshape(part.devices, -1, part.share)
    ]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *buffers)


def _buffer(batch: Batch, part: MicroBatch, blocks: np.ndarray) -> Packed:
    """One device's; `blocks` are rows i[b,share]."""
    prompts, count = len(blocks), blocks.size
    tokens, positions = np.zeros((2, part.slots), np.int32)
    place = np.full(part.slots, -1, np.int32)
    before = np.zeros(min(part.slots, count * part.width), np.int32)
    prompt_slots = np.full((prompts, part.prompt_width), -1, np.int32)
    row_slots = np.full((count, part.width), -1, np.int32)
    end = 0
    for i, row in enumerate(blocks.reshape(-1).tolist()):
        if row >= 0:
            length = batch.length[row]
            mine = np.arange(end, end + length)
            tokens[mine] = batch.tokens[row, :length]
            positions[mine] = batch.prompt_length[row] + np.arange(length)
            place[mine] = prompt_slots.size + i * part.width + np.arange(length)
            before[mine] = mine - 1
            row_slots[i, :length] = mine
            end += length
    for i, block in enumerate(blocks):
        row = block[0]  # real if any is
        if row >= 0:
            length = batch.prompt_length[row]
            mine = np.arange(end, end + length)
            tokens[mine] = batch.prompt[row, :length]
            positions[mine] = np.arange(length)
            place[mine] = i * part.prompt_width + np.arange(length)
            prompt_slots[i, :length] = mine
            end += length
            firsts = row_slots[i * part.share : (i + 1) * part.share, 0]
            before[firsts[firsts >= 0]] = mine[-1]
    return Packed(
        tokens=tokens,
        positions=positions,
        place=place,
        prompts=prompt_slots,
        rows=row_slots,
        before=before,
    )


def take(tree: Any, part: MicroBatch) -> Any:
    """The micro-batch's rows of every array, cut to its width."""
    return jax.tree.map(
        lambda leaf: _rows_of(leaf, part.rows)[(slice(None), slice(part.width))[: leaf.ndim]], tree
    )


def _rows_of(leaf: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """`leaf[rows]`, zero where a row is -1."""
    out = leaf[np.maximum(rows, 0)]
    out[rows < 0] = 0
    return out


def minibatches(
    batch: Batch, whole_groups: bool, number: int, draw: np.random.Generator
) -> list[np.ndarray]:
    """The valid rows (indices) in `number` parts, shuffled if there are several."""
    order = np.flatnonzero(batch.valid)
    if number == 1:
        return [order]
    if not whole_groups:
        return np.array_split(draw.permutation(order), number)
    prompts = draw.permutation(np.unique(batch.group[order]))
    return [order[np.isin(batch.group[order], some)] for some in np.array_split(prompts, number)]


def empty(size: int, prompt_width: int, width: int, needs: frozenset[str]) -> Batch:
    """A batch of padding rows with the fields `needs` [N,T] beside the usual ones."""
    wide = np.zeros((size, width), np.float32)
    flat, count = np.zeros(size, np.float32), np.zeros(size, np.int32)
    return Batch(
        prompt=np.zeros((size, prompt_width), np.int32),
        prompt_length=count,
        tokens=wide.astype(np.int32),
        length=count,
        mask=wide,
        old_logp=wide,
        reward=flat,
        correct=flat,
        group=count,
        kind=count,
        stopped=flat,
        valid=flat,
        **dict.fromkeys(needs, wide),
    )


# What the losses read of every batch; the rest is for the model or for the scores.
READ = ("tokens", "length", "mask", "old_logp", "kind")


def for_loss(batch: Batch, needs: frozenset[str]) -> Batch:
    """The batch without what no part of the loss reads, so that its structure is known before."""
    unread = {field.name for field in dataclasses.fields(Batch)} - {*READ, *needs}
    return batch.replace(**dict.fromkeys(unread))


def for_score(batch: Batch, learn: Learn, deferred: bool) -> Batch:
    """The batch without what only the model and the log read, or what is not known yet."""
    sampled = None if learn.importance is None else batch.sampler_logp
    batch = batch.replace(prompt=None, prompt_length=None, sampler_logp=sampled)
    return batch.replace(old_logp=None, old_entropy=None) if deferred else batch
