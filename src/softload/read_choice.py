"""How one unit reads its objects of the `page` layout: whole, or in parts of some layers each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from softload.config import Layout, ReadMode
from softload.context import Context
from softload.cost_model import best_way
from softload.geometry.layout import ObjectSpec, range_groups
from softload.planning import Column
from softload.protocols import Descriptor
from softload.ranged_reads import SESSIONS_AT_A_TIME
from softload.unit_pages import UnitPages

__all__ = ["parts_to_read"]

_WORTH_BYTES = 1 << 20
"""Less comes whole: one read that took long for other reasons must not change how the next small one is done."""

_WORTH_SECONDS = 1e-3
"""What is here sooner is read whole: the choice itself takes a part of that."""

_COPY_RATE = 8e9
"""Bytes per second that go from landing memory into slots. Copies weigh little in the choice: it is not measured."""

_Work = dict[tuple[Column, str], int]
"""Objects to read, by kind and endpoint."""


def parts_to_read(
    context: Context,
    wants: UnitPages,
    descriptors: Mapping[str, Descriptor | None],
    unread: Collection[str],
    layer_seconds: float | None,
) -> tuple[range, ...]:
    """The layers of each part that a streaming unit reads objects in, first to last; none where it reads them whole.

    Args:
        context: the loader's parts.
        wants: the unit's pages.
        descriptors: where its objects are, as far as that is known.
        unread: keys of the objects that it is about to read; the others are here, or on their way.
        layer_seconds: what the forward takes for a layer; ``None`` where nobody waits for single layers.
    """
    config = context.config
    if config.layout is not Layout.PAGE or config.read_mode is ReadMode.WHOLE:
        return ()
    if config.read_mode is ReadMode.RANGES:
        return range_groups(context.pools.num_layers)
    if layer_seconds is None:
        return ()
    work = _work(wants, descriptors, unread)
    if sum(count * column.spec.size for (column, _), count in work.items()) < _WORTH_BYTES:
        return ()
    model = context.reader.costs
    whole = {at: model.costs(at, ranged=False) for at in {at for _, at in work}}
    ranged = {at: model.costs(at, ranged=True) for at in whole}

    known = context.part_sizes

    def ranges_in(spec: ObjectSpec, layers: range) -> tuple[int, int]:
        at = (spec.pool, spec.part, layers)
        if at not in known:
            known[at] = _ranges_in(spec, layers)
        return known[at]

    def part_seconds(layers: range) -> float:
        seconds = 0.0
        for (column, at), count in work.items():
            ranges, nbytes = ranges_in(column.spec, layers)
            seconds += ranged[at].seconds(count * ranges, count * nbytes)
        return seconds

    whole_seconds = sum(whole[at].seconds(count, count * column.spec.size) for (column, at), count in work.items())
    if whole_seconds < _WORTH_SECONDS:
        return ()
    # Nobody waits for layers of which nothing is read.
    groups = range_groups(context.pools.num_layers)
    waited = [group for group in groups if any(ranges_in(column.spec, group)[1] for column, _ in work)]
    parts = best_way(
        waited,
        whole_seconds=whole_seconds,
        part_seconds=part_seconds,
        copy_seconds=lambda layers: sum(
            count * ranges_in(column.spec, layers)[1] / _COPY_RATE for (column, _), count in work.items()
        ),
        layer_seconds=layer_seconds,
        start_seconds=model.start_seconds(min(sum(work.values()), SESSIONS_AT_A_TIME)),
    ).parts
    return _without_gaps(parts, context.pools.num_layers)


def _without_gaps(parts: Sequence[range], num_layers: int) -> tuple[range, ...]:
    """Parts for all layers: each goes on until the next one begins."""
    bounds = [0, *(part.start for part in parts[1:]), num_layers]
    return tuple(range(start, stop) for start, stop in pairwise(bounds)) if parts else ()


def _work(wants: UnitPages, descriptors: Mapping[str, Descriptor | None], unread: Collection[str]) -> _Work:
    work: _Work = {}
    for column in wants.columns:
        pages = wants.pages_of(column)
        found = [descriptors.get(key) for key in column.keys[pages.start : pages.stop] if key in unread]
        for endpoint, count in Counter("" if each is None else each.endpoint for each in found).items():
            work[column, endpoint] = count
    return work


def _ranges_in(spec: ObjectSpec, layers: range) -> tuple[int, int]:
    """How many ranges of an object these layers need, and their bytes."""
    layer = np.fromiter((fragment.layer for fragment in spec.fragments), np.int64)
    wanted = (layer >= layers.start) & (layer < layers.stop)
    nbytes = np.fromiter((fragment.nbytes for fragment in spec.fragments), np.int64)
    return int(wanted[0]) + int((wanted[1:] & ~wanted[:-1]).sum()), int(nbytes[wanted].sum())
