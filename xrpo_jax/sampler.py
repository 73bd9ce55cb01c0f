"""Sampling: continuous batching on the host, over lanes of rows on the device.

Prompts are prefilled once, a few at a time as their rows come up; `slots` rows decode at once, in
lanes that run side by side, and between chunks of steps a finished row's slot goes to the next row
of the queue. A lane's cache grows and shrinks with its rows, and its rows become fewer when the
queue is empty. A row's tokens depend on its prompt and its key's coordinates alone, not on slot,
lane, chunk, cache or device, nor on whether it was paused on the way; and which row runs where
depends on nothing but the rows, never on the clock.

A row that is to go on later leaves a Path: its place in a cache and the tokens that it drew. Slots
behind a path's tokens hold what others left, and are written before they are attended to.

Shapes: N rows · G prompts · R slots · P prompt length · T new tokens · C cache length.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from xrpo_jax import lane as lanes
from xrpo_jax import lane_programs, machine, rng
from xrpo_jax import mesh as meshes
from xrpo_jax.arrays import Params, Path, Samples
from xrpo_jax.lane import Decoding, Drawn, Lane
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.model.decode import Cache
from xrpo_jax.sampling import Method

FEW = 4  # a lane shrinks to this part of its rows
GRAIN = 16  # cache lengths are multiples of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """The fixed sizes and settings of sampling."""

    model: ModelConfig
    method: Method
    dtype: str
    prompts: int  # G, prefilled together
    slots: int  # R, rows decoded at one time
    lengths: tuple[int, ...]  # the P that prompts are padded to, ascending
    max_new_tokens: int  # T
    stop_ids: tuple[int, ...]
    lanes: int = 1  # parts of the slots that run side by side
    chunk: int = 8  # steps between two looks at what has finished
    # Whether caches are written slot by slot.
    scattered: bool = dataclasses.field(default_factory=machine.scatters)

    @property
    def decoding(self) -> Decoding:
        """What the device's functions are compiled for."""
        return Decoding(
            model=self.model,
            method=self.method,
            dtype=self.dtype,
            stop_ids=self.stop_ids,
            chunk=self.chunk,
            scattered=self.scattered,
        )

    @property
    def cache_lengths(self) -> tuple[int, ...]:
        """The C that a lane may have, ascending: all that a row can need, its half, its quarter."""
        longest = self.lengths[-1] + self.max_new_tokens
        least = self.lengths[0] + min(self.chunk, self.max_new_tokens)
        found = {-(-longest // part // GRAIN) * GRAIN for part in (4, 2, 1)}
        return tuple(sorted(length for length in found if length >= min(least, max(found))))

    def sizes(self, devices: int) -> tuple[int, ...]:
        """The rows that a lane may have, ascending."""
        full = self.slots // self.lanes
        few = full // FEW
        return (few, full) if few >= FEW and few % devices == 0 else (full,)


@dataclasses.dataclass(kw_only=True)
class _Page:
    """A cache that rows begin from, made when the first of them does."""

    make: Callable[[], Cache]
    cache: Cache | None = None
    waiting: int = 0  # rows that have not begun

    def read(self) -> Cache:
        if self.cache is None:
            self.cache = self.make()
        return self.cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """A row in the queue."""

    number: int  # of the row in the call
    page: _Page
    place: int  # in the page
    prompt_length: int
    before: np.ndarray  # i32[*] tokens of its completion so far
    token: int  # the newest token: its keys and values are yet to be computed
    left: int


@dataclasses.dataclass(kw_only=True)
class _Held:
    """A lane and what the host knows of it."""

    lane: Lane
    rows: list[_Row | None]  # by slot
    position: np.ndarray  # i64[n]
    left: np.ndarray  # i64[n]

    def free(self) -> list[int]:
        return [slot for slot, row in enumerate(self.rows) if row is None]

    @property
    def length(self) -> int:
        return self.lane.cache.keys[0].shape[2]

    def reach(self, steps: int) -> int:
        """Slots of the cache that the next steps need."""
        ends = self.position + np.minimum(self.left, steps)
        return int(np.max(np.where(self.left > 0, ends, 0)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """The sampler's border, NumPy in and out; rows are split over the mesh's devices.

    In both calls `keys` are rng.Rows with N coordinates, of which each token takes its own by its
    place in the completion; `limit` is the number of new tokens (int or i[N]); `keep` asks for
    the rows' paths, which hold their cache on the device for as long as they live.
    `finished(rows i[M], Samples of M rows)` is called after every chunk with what has ended since,
    M = 0 where nothing has, while the next chunk runs: each row once, in an order that depends on
    the rows alone. What it raises ends the call with the chunk that runs.
    """

    sampler: Sampler
    mesh: Mesh

    def __call__(
        self,
        params: Params,
        prompts,
        row,
        keys: rng.Rows,
        limit,
        keep: bool = False,
        finished: Callable[[np.ndarray, Samples], None] | None = None,
    ) -> Samples:
        """Row i continues `prompts[row[i]]`; prompts are token arrays, `row` is i[N].

        Raises ValueError for a prompt that is empty or too long.
        """
        row = np.asarray(row)
        limit = np.minimum(np.broadcast_to(limit, row.shape), self.sampler.max_new_tokens)
        places = {place: where for where in self._pages(params, prompts) for place in where[0]}
        order = sorted(range(len(row)), key=lambda i: places[row[i]][2])  # stable
        queue = []
        for i in order:
            members, page, _ = places[row[i]]
            prompt = prompts[row[i]]
            queue.append(
                _Row(
                    number=i,
                    page=page,
                    place=members.index(row[i]),
                    prompt_length=len(prompt),
                    before=np.zeros(0, np.int32),
                    token=int(prompt[-1]),
                    left=int(limit[i]),
                )
            )
        out = _nothing(self.sampler, len(row), keep)
        self._run(params, queue, keys, keep, out, finished)
        return out.replace(paths=tuple(out.paths)) if keep else out

    def resume(
        self,
        params: Params,
        paths,
        keys: rng.Rows,
        limit,
        keep: bool = False,
        finished: Callable[[np.ndarray, Samples], None] | None = None,
    ) -> Samples:
        """Row i continues `paths[i]`; several may continue one. Only what is new is returned.

        A row ends with its T-th token whatever `limit` says, and nothing follows a stop token.
        Raises ValueError for a path of no tokens.
        """
        begun = np.array([len(path.tokens) if path else 0 for path in paths], np.int32)
        if not begun.all():
            raise ValueError("a path of no tokens cannot be resumed; allowed: at least one token")
        limit = np.minimum(np.broadcast_to(limit, begun.shape), self.sampler.max_new_tokens - begun)
        out = _nothing(self.sampler, len(paths), keep)
        if keep:
            out = out.replace(paths=list(paths))
        out.stopped[:] = [path.tokens[-1] in self.sampler.stop_ids for path in paths]
        pages: dict[int, _Page] = {}
        for path in paths:
            make = functools.partial(_same, path.cache)
            pages.setdefault(id(path.cache), _Page(make=make))
        # Rows of one cache side by side, so that a lane reads few of them.
        numbers = {name: i for i, name in enumerate(pages)}
        order = sorted(range(len(paths)), key=lambda i: numbers[id(paths[i].cache)])
        queue = [
            _Row(
                number=i,
                page=pages[id(paths[i].cache)],
                place=paths[i].place,
                prompt_length=paths[i].prompt_length,
                before=paths[i].tokens,
                token=int(paths[i].tokens[-1]),
                left=0 if out.stopped[i] else int(limit[i]),
            )
            for i in order
        ]
        self._run(params, queue, keys, keep, out, finished)
        return out.replace(paths=tuple(out.paths)) if keep else out

    def warm_up(self, params: Params, pauses: bool) -> list[Callable[[], None]]:
        """Jobs that compile all that any rows can need; with `pauses` also what paused ones do."""
        sampler = self.sampler
        return lane_programs.jobs(
            sampler.decoding,
            self.mesh,
            params,
            [(sampler.prompts, width) for width in sampler.lengths],
            sampler.sizes(self.mesh.devices.size),
            sampler.cache_lengths,
            pauses,
        )

    def _pages(self, params: Params, prompts) -> Iterator[tuple[list[int], _Page, int]]:
        """Places of prompts that are prefilled together, their page, and its number."""
        lengths, size = self.sampler.lengths, self.sampler.prompts
        bucket = [_bucket(len(prompt), lengths) for prompt in prompts]
        number = 0
        for width in lengths:
            alike = [i for i, found in enumerate(bucket) if found == width]
            for start in range(0, len(alike), size):
                members = alike[start : start + size]
                tokens = np.zeros((size, width), np.int32)
                for i, place in enumerate(members):
                    tokens[i, : len(prompts[place])] = prompts[place]
                yield members, _Page(make=functools.partial(self._prefill, params, tokens)), number
                number += 1

    def _prefill(self, params: Params, tokens: np.ndarray) -> Cache:
        tokens = jax.device_put(tokens, meshes.everywhere(self.mesh))
        return lanes.prefill(self.sampler.model, self.sampler.dtype, params, tokens)

    def _run(
        self, params: Params, rows: list[_Row], keys: rng.Rows, keep: bool, out: Samples, finished
    ) -> None:
        """Draw all rows into `out`."""
        queue = collections.deque(row for row in rows if row.left > 0)
        for row in queue:
            row.page.waiting += 1
        done = [row.number for row in rows if row.left <= 0]
        sampler = self.sampler
        weights = lanes.weights(sampler.model, sampler.dtype, params) if queue else None
        held: list[_Held | None] = [None] * sampler.lanes
        with concurrent.futures.ThreadPoolExecutor(sampler.lanes) as pool:
            while True:
                self._fill(held, queue, keys, keep)
                busy = [lane for lane in held if lane is not None]
                # JAX runs one program at a time for each thread that asks for one.
                drawn = [pool.submit(self._advance, weights, lane) for lane in busy]
                if finished is not None:  # whoever is told works while these run, or gives up
                    done.sort()
                    finished(np.array(done, int), _taken(out, done))
                if not busy:
                    break
                done = []
                for lane, found in zip(busy, drawn, strict=True):
                    done += _record(lane, found.result(), out)
                if keep:  # a lane's rows are left where they are, and are told when all are there
                    done = []
                    for i, lane in enumerate(held):
                        if lane is not None and not lane.left.any():
                            done += _kept(lane, out)
                            held[i] = None

    def _fill(self, held: list, queue: collections.deque, keys: rng.Rows, keep: bool) -> None:
        """Give free slots to the queue, each to the lane that has most; fit lanes to their rows.

        Rows side by side in the queue share pages: a lane takes its own in one piece.
        """
        sizes = self.sampler.sizes(self.mesh.devices.size)
        free = [sizes[-1] if lane is None else 0 if keep else len(lane.free()) for lane in held]
        count = [0] * len(held)
        for _ in range(min(len(queue), sum(free))):
            lane = free.index(max(free))
            count[lane] += 1
            free[lane] -= 1
        fresh = [[queue.popleft() for _ in range(number)] for number in count]
        for i, new in enumerate(fresh):
            if held[i] is None and new:
                size = sizes[-1] if keep else _least(sizes, len(new))
                held[i] = self._empty(size, self.sampler.cache_lengths[-1] if keep else 0)
            elif held[i] is not None and not held[i].left.any() and not new:
                held[i] = None
            if held[i] is not None and not keep:
                self._fit(held[i], new, more=bool(queue))
            for _, alike in itertools.groupby(new, lambda row: id(row.page)):
                self._begin(held[i], list(alike), keys)

    def _empty(self, size: int, length: int) -> _Held:
        sampler, length = self.sampler, length or self.sampler.cache_lengths[0]
        return _Held(
            lane=lanes.empty(sampler.model, sampler.dtype, self.mesh, size, length),
            rows=[None] * size,
            position=np.zeros(size, int),
            left=np.zeros(size, int),
        )

    def _fit(self, lane: _Held, new: list[_Row], more: bool) -> None:
        """Make the lane as long as its next chunk needs, and as small as its rows allow."""
        lengths, steps = self.sampler.cache_lengths, self.sampler.chunk
        need = max(
            [lane.reach(steps)]
            + [row.prompt_length + len(row.before) + min(row.left, steps) - 1 for row in new]
        )
        place = lengths.index(lane.length)
        while lengths[place] < need:
            place += 1
            self._resize(lane, np.arange(len(lane.rows)), lengths[place])
        while place and need + steps <= lengths[place - 1]:  # not at the first opportunity
            place -= 1
            self._resize(lane, np.arange(len(lane.rows)), lengths[place])
        sizes = self.sampler.sizes(self.mesh.devices.size)
        busy = np.flatnonzero(lane.left > 0)
        if not more and not new and len(lane.rows) > sizes[0] >= len(busy):
            idle = np.full(sizes[0] - len(busy), -1)
            self._resize(lane, np.concatenate([busy, idle]), lengths[place])

    def _resize(self, lane: _Held, place: np.ndarray, length: int) -> None:
        where = jax.device_put(place.astype(np.int32), meshes.rows(self.mesh))
        lane.lane = lanes.fit(self.mesh, lane.lane, where, length)
        if len(place) != len(lane.rows):
            lane.rows = [None if slot < 0 else lane.rows[slot] for slot in place]
            lane.position = np.where(place < 0, 0, lane.position[place])
            lane.left = np.where(place < 0, 0, lane.left[place])

    def _begin(self, lane: _Held, new: list[_Row], keys: rng.Rows) -> None:
        """Rows of one page take the lane's first free slots."""
        start = lanes.nobody(len(lane.rows))
        for slot, row in zip(lane.free(), new, strict=False):
            begun = len(row.before)
            lane.rows[slot], lane.left[slot] = row, row.left
            lane.position[slot] = row.prompt_length + begun - 1
            for name, value in (
                ("begins", True),
                ("place", row.place),
                ("token", row.token),
                ("position", lane.position[slot]),
                ("step", begun),
                ("left", row.left),
                ("prompt", keys.prompt[row.number]),
                ("index", keys.index[row.number]),
            ):
                getattr(start, name)[slot] = value
        page = new[0].page
        lane.lane = lanes.begin(
            self.mesh,
            lane.lane,
            page.read(),
            jax.device_put(start, meshes.rows(self.mesh)),
            jax.device_put(keys.step_key, meshes.everywhere(self.mesh)),
        )
        page.waiting -= len(new)
        if not page.waiting:
            page.cache = None

    def _advance(self, weights: dict, lane: _Held) -> Drawn:
        """Run a chunk; returns what it drew, as NumPy."""
        steps = min(self.sampler.chunk, int(lane.left.max()))
        steps = jax.device_put(np.int32(steps), meshes.everywhere(self.mesh))
        lane.lane, drawn = lanes.advance(
            self.sampler.decoding, self.mesh, weights, lane.lane, steps
        )
        return jax.device_get(drawn)


def make_draw(sampler: Sampler, mesh: Mesh) -> Draw:
    """What draws rows, and resumes those that were drawn."""
    return Draw(sampler=sampler, mesh=mesh)


def _record(lane: _Held, drawn: Drawn, out: Samples) -> list[int]:
    """Write a chunk into `out`; the numbers of the rows that ended."""
    done = []
    for slot, row in enumerate(lane.rows):
        if row is None or not lane.left[slot]:
            continue
        i, count = row.number, int(drawn.number[slot])
        columns = slice(out.length[i], out.length[i] + count)
        out.tokens[i, columns] = drawn.tokens[slot, :count]
        out.logp[i, columns] = drawn.logp[slot, :count]
        out.length[i] += count
        out.stopped[i] = drawn.stopped[slot]
        lane.position[slot] += count
        lane.left[slot] = 0 if drawn.stopped[slot] else lane.left[slot] - count
        if not lane.left[slot]:
            done.append(i)
            if out.paths is None:
                lane.rows[slot] = None
    return done


def _kept(lane: _Held, out: Samples) -> list[int]:
    """Leave paths to the lane's rows; their numbers."""
    rows = [(slot, row) for slot, row in enumerate(lane.rows) if row is not None]
    for slot, row in rows:
        new = out.tokens[row.number, : out.length[row.number]]
        out.paths[row.number] = Path(
            cache=lane.lane.cache,
            place=slot,
            prompt_length=row.prompt_length,
            tokens=np.append(row.before, new),
        )
    return [row.number for _, row in rows]


def _nothing(sampler: Sampler, size: int, keep: bool) -> Samples:
    """`size` rows without tokens."""
    return Samples(
        tokens=np.zeros((size, sampler.max_new_tokens), np.int32),
        logp=np.zeros((size, sampler.max_new_tokens), np.float32),
        length=np.zeros(size, np.int32),
        stopped=np.zeros(size, bool),
        paths=[None] * size if keep else None,
    )


def _taken(out: Samples, rows: list[int]) -> Samples:
    """Those rows of all."""
    return Samples(
        tokens=out.tokens[rows],
        logp=out.logp[rows],
        length=out.length[rows],
        stopped=out.stopped[rows],
        paths=None if out.paths is None else tuple(out.paths[row] for row in rows),
    )


def _least(sizes: tuple[int, ...], number: int) -> int:
    """The smallest size that holds as many, or the largest."""
    return next((size for size in sizes if size >= number), sizes[-1])


def _same(cache: Cache) -> Cache:
    return cache


def _bucket(length: int, lengths: tuple[int, ...]) -> int:
    if length == 0:
        raise ValueError("an empty prompt cannot be continued; allowed: at least one token")
    for bucket in lengths:
        if length <= bucket:
            return bucket
    raise ValueError(f"a prompt has {length} tokens; allowed: at most {lengths[-1]}")
