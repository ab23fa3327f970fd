"""How a page becomes objects of the store: pure plans, made once per pool."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from softload.config import Layout
from softload.geometry.device_pool import DevicePool
from softload.transfer import PoolName

__all__ = [
    "TAIL_BYTES",
    "Fragment",
    "ObjectSpec",
    "PartRanges",
    "layer_groups",
    "object_specs",
    "range_groups",
    "ranges_of",
]

TAIL_BYTES = 32
"""Bytes of the tail that ends every object of `Layout.GROUPED`: format, length and digests."""

_FIRST_BYTES = 16 << 10
_LATER_BYTES = 128 << 10
"""A pool's first object of a page in `Layout.GROUPED`, and each later one, takes in groups of layers until it has these
bytes. An object costs what reading 60 KiB from its owner costs, so that smaller ones bring nothing earlier."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """One buffer's part of an object: `nbytes` at `offset`, one page of the flattened buffer `buffer`.

    `layer` is the transfer layer that needs it; a packed draft's fragment has the layer that it rides on.
    """

    buffer: int
    offset: int
    nbytes: int
    layer: int
    draft: bool


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """One of the objects that a page of a pool becomes.

    Args:
        pool: the pool whose bytes it holds.
        part: which of the page's objects in that pool it is, as object keys have it.
        group: the first group of layers that it holds bytes of; 0 in `Layout.PAGE`.
        draft: whether all of it is a draft's.
        payload: bytes of the page.
        size: bytes of the object: the payload and, in `Layout.GROUPED`, the tail.
        target_size: the size of the same object written without the packed draft; `size` where none is in it.
        layers: the transfer layers that have bytes in it, ascending; layers of the draft model for draft objects.
        fragments: in order of their offsets, covering the payload without gaps.
    """

    pool: PoolName
    part: str
    group: int
    draft: bool
    payload: int
    size: int
    target_size: int
    layers: tuple[int, ...]
    fragments: tuple[Fragment, ...]

    def has_any(self, layers: range) -> bool:
        """Whether bytes of any of these neighbouring layers are in it."""
        first = bisect_left(self.layers, layers.start)
        return first < len(self.layers) and self.layers[first] < layers.stop


def layer_groups(num_layers: int) -> tuple[range, ...]:
    """Layers in groups of 1, 1, 2, 4, 8, ...; the last one is cut.

    Small groups first give the first layer early, large ones later keep the rate of whole-object reads.
    """
    if num_layers < 1:
        raise ValueError(f"expected at least 1 layer, got {num_layers}")
    groups = []
    start = 0
    while start < num_layers:
        stop = min(max(2 * start, start + 1), num_layers)
        groups.append(range(start, stop))
        start = stop
    return tuple(groups)


def range_groups(num_layers: int) -> tuple[range, ...]:
    """Layers in groups of 1, 1, 2, 4, ..., none larger than about a tenth of all.

    Parts of objects are made of them: what is read in ranges has to keep ahead of a forward that needs about as long.
    """
    groups: list[range] = []
    for group in layer_groups(num_layers):
        most = max(4, 1 << (num_layers // 10).bit_length())
        groups += (range(start, min(start + most, group.stop)) for start in range(group.start, group.stop, most))
    return tuple(groups)


def object_specs(pool: DevicePool, layout: Layout, num_layers: int) -> tuple[ObjectSpec, ...]:
    """The objects of one page of `pool`, in the order in which a load wants them.

    Args:
        pool: the pool.
        layout: how pages become objects.
        num_layers: transfer layers in all; for a pool of a sidecar draft the draft model's layers.

    Raises:
        ValueError: the pool has buffers for layers beyond `num_layers`.
    """
    if pool.num_layers > num_layers:
        raise ValueError(
            f"pool {pool.name}: expected transfer layers below {num_layers}, "
            f"got a buffer for layer {pool.num_layers - 1}"
        )
    if layout is Layout.PAGE:
        return _page_specs(pool)
    return (*_grouped_specs(pool, num_layers), *_grouped_draft_specs(pool))


def ranges_of(spec: ObjectSpec, layers: range) -> list[tuple[int, int]]:
    """Byte ranges `(offset, nbytes)` of the object that these transfer layers need, neighbours merged.

    A packed draft's bytes come with the transfer layer that they ride on.
    """
    ranges: list[tuple[int, int]] = []
    for fragment in spec.fragments:
        if fragment.layer not in layers:
            continue
        if ranges and sum(ranges[-1]) == fragment.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + fragment.nbytes)
        else:
            ranges.append((fragment.offset, fragment.nbytes))
    return ranges


class PartRanges:
    """Byte ranges of objects, a part of some layers at a time; worked out once for each kind of object.

    Args:
        parts: the transfer layers of each part, ascending; none where objects are read whole.
    """

    def __init__(self, parts: Sequence[range] = ()) -> None:
        self._parts = tuple(parts)
        self._known: dict[tuple[PoolName, str, int], list[tuple[range, list[tuple[int, int]]]]] = {}

    def __repr__(self) -> str:
        return f"<PartRanges {', '.join(map(str, self._parts)) or 'none'}>"

    def __bool__(self) -> bool:
        return bool(self._parts)

    def of(self, spec: ObjectSpec, size: int) -> Sequence[tuple[range, Sequence[tuple[int, int]]]]:
        """`(layers, byte ranges)` of an object of `size` bytes, for each part that has some."""
        at = (spec.pool, spec.part, size)
        if at not in self._known:
            self._known[at] = self._work_out(spec, size)
        return self._known[at]

    def _work_out(self, spec: ObjectSpec, size: int) -> list[tuple[range, list[tuple[int, int]]]]:
        parts = self._parts
        if parts and spec.layers[-1] >= parts[-1].stop:  # a draft of its own may have more layers than the target
            parts = (*parts, range(parts[-1].stop, spec.layers[-1] + 1))
        found = []
        for layers in parts:
            # A range past the end of an object without the packed draft would fail the whole key.
            pairs = [
                (offset, min(nbytes, size - offset)) for offset, nbytes in ranges_of(spec, layers) if offset < size
            ]
            if pairs:
                found.append((layers, pairs))
        return found


def _grouped_specs(pool: DevicePool, num_layers: int) -> list[ObjectSpec]:
    groups = [
        [buffer for layer in layers for buffer in pool.layer_buffers(layer)] for layers in layer_groups(num_layers)
    ]
    return _joined_specs(pool, "g", groups, draft=pool.name.is_draft)


def _grouped_draft_specs(pool: DevicePool) -> list[ObjectSpec]:
    if not pool.num_draft_layers:
        return []
    groups = [
        [buffer for depth in depths for buffer in pool.draft_buffers(depth)]
        for depths in layer_groups(pool.num_draft_layers)
    ]
    return _joined_specs(pool, "d", groups, draft=True)


def _joined_specs(pool: DevicePool, letter: str, groups: Sequence[Sequence[int]], *, draft: bool) -> list[ObjectSpec]:
    """Objects of whole groups of layers, named by these: what is in one follows from its key and the geometry."""
    suffix = _draft_suffix(pool) if draft else ""
    sizes = [sum(pool.page_bytes(buffer) for buffer in buffers) for buffers in groups]
    specs = []
    for joined in _joined_groups(sizes):
        first, last = joined[0], joined[-1]
        part = f"{letter}{first}{suffix}" if first == last else f"{letter}{first}-{last}{suffix}"
        buffers = [buffer for group in groups[first : last + 1] for buffer in group]
        specs.append(_spec(pool, part, first, buffers, draft=draft, tail=TAIL_BYTES))
    return specs


def _joined_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Which groups of layers share an object, by the bytes of each; groups without bytes are in none."""
    joined: list[list[int]] = []
    total = least = 0
    for group, nbytes in enumerate(sizes):
        if not nbytes:
            continue
        if total >= least:
            least = _LATER_BYTES if joined else _FIRST_BYTES
            joined.append([])
            total = 0
        joined[-1].append(group)
        total += nbytes
    if len(joined) > 1 and total < _FIRST_BYTES:  # what is left is not worth an object
        left = joined.pop()
        joined[-1] += left
    return joined


def _page_specs(pool: DevicePool) -> tuple[ObjectSpec, ...]:
    count = len(pool.components[0])
    components = [range(c * count, (c + 1) * count) for c in range(len(pool.components))]
    if not pool.packed:
        return tuple(
            _spec(pool, f"_{c}", 0, buffers, draft=pool.name.is_draft, tail=0) for c, buffers in enumerate(components)
        )
    # A stable sort: the target's buffers of all components are a prefix, so that an object without the draft is one.
    buffers = sorted((buffer for component in components for buffer in component), key=pool.is_draft_buffer)
    return (_spec(pool, "", 0, buffers, draft=pool.name.is_draft, tail=0),)


def _spec(pool: DevicePool, part: str, group: int, buffers: Sequence[int], *, draft: bool, tail: int) -> ObjectSpec:
    fragments = tuple(_fragments(pool, buffers))
    payload = sum(fragment.nbytes for fragment in fragments)
    behind = 0 if draft else sum(fragment.nbytes for fragment in fragments if fragment.draft)
    return ObjectSpec(
        pool=pool.name,
        part=part,
        group=group,
        draft=draft,
        payload=payload,
        size=payload + tail,
        target_size=payload + tail - behind,
        layers=tuple(sorted({fragment.layer for fragment in fragments})),
        fragments=fragments,
    )


def _fragments(pool: DevicePool, buffers: Iterable[int]) -> Iterable[Fragment]:
    offset = 0
    for buffer in buffers:
        nbytes = pool.page_bytes(buffer)
        yield Fragment(buffer, offset, nbytes, pool.layer_of(buffer), pool.is_draft_buffer(buffer))
        offset += nbytes


def _draft_suffix(pool: DevicePool) -> str:
    """Keeps drafts of other geometry apart: the key space is the target's, whatever draft runs beside it."""
    text = pool.geometry(draft=True)
    return f".{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
