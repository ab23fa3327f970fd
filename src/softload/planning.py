"""Pure plans: which objects a unit wants, how far it is restorable, and how reads are batched. No I/O, no state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from softload.config import Layout
from softload.geometry.device_pool import DevicePool
from softload.geometry.group import DevicePoolGroup, ResolvedComponent
from softload.geometry.layout import ObjectSpec
from softload.keys import KeySpace
from softload.protocols import Descriptor
from softload.transfer import HitPolicy, PoolName, TransferUnit

__all__ = [
    "Column",
    "ComponentPages",
    "UnitParts",
    "alike",
    "boundaries",
    "chunks_of",
    "check_distinct",
    "columns",
    "cut",
    "needed_pages",
    "pages_of_chunk",
    "read_batches",
    "sizes_in_runs",
    "unit_parts",
]

T = TypeVar("T")

_PAGES_PER_CHUNK = 256
"""Pages that are planned at a time at most: in a millisecond, where each of them is special."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One kind of object of one component, over the unit's pages.

    Args:
        component: index of the component in its unit's target or draft.
        spec: what each object holds.
        pool: where it goes.
        keys: one object key per page.
        rows: page rows in the pool, int64 `[pages]`; ``None`` where no slots are taken yet.
    """

    component: int
    spec: ObjectSpec
    pool: DevicePool
    keys: tuple[str, ...]
    rows: npt.NDArray[np.int64] | None


def columns(
    components: Sequence[ResolvedComponent],
    specs: Mapping[PoolName, tuple[ObjectSpec, ...]],
    keys: KeySpace,
    *,
    draft: bool,
) -> list[Column]:
    """All objects of the components that hold target bytes, or those of the draft; first layers first."""
    found = [
        Column(
            index,
            spec,
            component.pool,
            keys.object_keys(component.keys, spec.pool, spec.part),
            component.rows,
        )
        for index, component in enumerate(components)
        for spec in specs[component.pool.name]
        if spec.draft is draft
    ]
    found.sort(key=lambda column: column.spec.group)
    return found


@dataclass(frozen=True, slots=True)
class UnitParts:
    """What one unit is made of: its components and the kinds of objects that hold their bytes, target and draft.

    A packed draft's components are those of its target's pools; in `Layout.PAGE` it has no objects of its own.
    """

    target: tuple[ResolvedComponent, ...]
    columns: list[Column]
    draft: tuple[ResolvedComponent, ...]
    draft_columns: list[Column]


def unit_parts(unit: TransferUnit, pools: DevicePoolGroup, layout: Layout, keys: KeySpace) -> UnitParts:
    """Take a unit apart.

    Raises:
        ValueError: components that do not fit the pools.
    """
    specs = pools.specs(layout)
    target = pools.resolve(unit.target, allow_partial=unit.partial, allow_missing_kv=unit.partial)
    if unit.draft:
        draft = pools.resolve_draft(unit.draft)
    else:
        draft = tuple(component for component in target if component.pool.num_draft_layers)
    return UnitParts(target, columns(target, specs, keys, draft=False), draft, columns(draft, specs, keys, draft=True))


def check_distinct(units: Sequence[TransferUnit]) -> None:
    """Reports go by request: one call takes each request once.

    Raises:
        ValueError: a request comes twice.
    """
    seen: set[str] = set()
    for unit in units:
        if unit.request_id in seen:
            raise ValueError(f"expected every request once, got {unit.request_id!r} twice")
        seen.add(unit.request_id)


@dataclass(frozen=True, slots=True)
class ComponentPages:
    """How one component decides: which of its pages are good, and which of them a boundary needs."""

    good: Sequence[bool]
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window: int = 1


def boundaries(components: Sequence[ComponentPages]) -> tuple[int, ...]:
    """The prefix lengths, in pages and ascending, at which every component has what it needs. Never 0."""
    if not components:
        return ()
    limit = min(
        _first_bad(component.good) if component.hit_policy is HitPolicy.ALL_PAGES else len(component.good)
        for component in components
    )
    trailing = [component for component in components if component.hit_policy is HitPolicy.TRAILING_PAGES]
    if not trailing:
        return tuple(range(1, limit + 1))
    runs = [_runs_ending(component.good) for component in trailing]
    return tuple(
        pages
        for pages in range(1, limit + 1)
        if all(run[pages - 1] >= min(component.window, pages) for run, component in zip(runs, trailing, strict=True))
    )


def cut(limit: int, components: Sequence[ComponentPages]) -> int:
    """The longest restorable prefix of at most `limit` pages; 0 where there is none."""
    if all(component.hit_policy is HitPolicy.ALL_PAGES for component in components):
        return min((_first_bad(component.good[:limit]) for component in components), default=0)
    return max((pages for pages in boundaries(components) if pages <= limit), default=0)


def needed_pages(pages: int, hit_policy: HitPolicy, window: int) -> range:
    """The pages of a component that a prefix of `pages` pages needs."""
    return range(pages) if hit_policy is HitPolicy.ALL_PAGES else range(max(0, pages - window), pages)


def chunks_of(columns: Iterable[Column]) -> Iterator[tuple[Column, int]]:
    """What is planned at a time: a column, and the first of its pages."""
    for column in columns:
        for first in range(0, len(column.keys), _PAGES_PER_CHUNK):
            yield column, first


def pages_of_chunk(pages: range, first: int) -> range:
    """Those of the needed pages that are in the chunk which begins with page `first`."""
    return range(max(pages.start, first), min(pages.stop, first + _PAGES_PER_CHUNK))


def sizes_in_runs(sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """Neighbours of equal size as `(bytes, count)`."""
    return [(size, len(list(same))) for size, same in groupby(sizes.values())]


def alike(descriptors: Sequence[Descriptor | None]) -> int:
    """How many objects, from the first on, are of one size and at one endpoint; or of which that is not known."""
    places = [None if each is None else (each.endpoint, each.size) for each in descriptors]
    return next((at for at, place in enumerate(places) if place != places[0]), len(places))


def read_batches(
    objects: Iterable[tuple[str, int, T]],
    *,
    max_bytes: int,
    max_objects: int,
    count: Callable[[T], int] = lambda _: 1,
) -> list[tuple[str, list[T]]]:
    """Split reads into calls, in order, each for one endpoint.

    Args:
        objects: `(endpoint, bytes, item)` in the order in which they are wanted.
        max_bytes: bytes of one call at most; a larger object has a call of its own.
        max_objects: objects of one call at most.
        count: how many objects an item is; one with more than `max_objects` has a call of its own.

    Returns:
        `(endpoint, items)` per call; every item once, items of an endpoint in their order.
    """
    batches: list[tuple[str, list[T]]] = []
    current: dict[str, tuple[list[T], int, int]] = {}
    for endpoint, nbytes, item in objects:
        items, total, number = current.get(endpoint, ([], 0, 0))
        number += count(item)
        if not items or total + nbytes > max_bytes or number > max_objects:
            items, total, number = [], 0, count(item)
            batches.append((endpoint, items))
        items.append(item)
        current[endpoint] = (items, total + nbytes, number)
    return batches


def _first_bad(good: Sequence[bool]) -> int:
    try:
        return good.index(False)
    except ValueError:
        return len(good)


def _runs_ending(good: Sequence[bool]) -> list[int]:
    run, runs = 0, []
    for is_good in good:
        run = run + 1 if is_good else 0
        runs.append(run)
    return runs
