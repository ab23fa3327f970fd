"""The objects of one save: in which order they are taken, how many at a time, and what became of their pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import anyio

from softload.geometry.group import ResolvedComponent
from softload.outcomes import PageSave, SaveOutcome, SaveStatus
from softload.planning import Column
from softload.transfer import TransferUnit

__all__ = ["SaveObject", "by_column", "first_pages", "outcome_of", "slices"]

_WORST = (
    SaveStatus.REFUSED,
    SaveStatus.FAILED,
    SaveStatus.TIMED_OUT,
    SaveStatus.STORE_FULL,
    SaveStatus.SHED,
    SaveStatus.SUPPRESSED,
    SaveStatus.SAVED,
    SaveStatus.PRESENT,
)


@dataclass(slots=True, eq=False)
class SaveObject:
    """One object of one page that is to be saved."""

    column: Column
    page: int
    status: SaveStatus | None = None
    done: anyio.Event | None = None
    """Set once the status is known; ``None`` for what this call does not write."""

    @property
    def key(self) -> str:
        """Under which it is stored."""
        return self.column.keys[self.page]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.column.spec.size


def by_column(objects: Iterable[SaveObject]) -> dict[Column, list[SaveObject]]:
    """The same objects, one kind after another."""
    found: dict[Column, list[SaveObject]] = {}
    for item in objects:
        found.setdefault(item.column, []).append(item)
    return found


def first_pages(objects: Sequence[SaveObject], max_bytes: int, max_objects: int) -> list[SaveObject]:
    """Those of the first pages that are within the bounds; of a single page, where that is not, a part."""
    first = slices(objects, max_bytes, max_objects)[0]
    if len(first) == len(objects):
        return first
    split = objects[len(first)].page  # does not come whole
    return [item for item in first if item.page < split] or first


def slices(objects: Iterable[SaveObject], max_bytes: int, max_objects: int) -> list[list[SaveObject]]:
    """All of them, in their order, as few at a time as the bounds allow; a single object may be larger."""
    slices: list[list[SaveObject]] = []
    total = 0
    for item in objects:
        if not slices or total + item.size > max_bytes or len(slices[-1]) >= max_objects:
            slices.append([])
            total = 0
        slices[-1].append(item)
        total += item.size
    return slices


def outcome_of(
    unit: TransferUnit, components: Sequence[ResolvedComponent], objects: Sequence[SaveObject]
) -> SaveOutcome:
    """What became of a unit, once every object's status is known."""
    worst: dict[tuple[str, int], SaveStatus] = {}
    drafted: dict[int, bool] = {}
    for item in objects:
        assert item.status is not None
        where = (item.column.pool.name, item.page)
        if item.column.spec.draft:
            drafted[item.page] = drafted.get(item.page, True) and item.status is SaveStatus.SAVED
            if not item.column.pool.name.is_draft:
                continue  # a packed draft's loss is not its target's
        known = worst.get(where, item.status)
        worst[where] = min(known, item.status, key=_WORST.index)
    pages = tuple(
        PageSave(page, worst[component.pool.name, page], component.pool.name)
        for component in components
        for page in range(len(component.keys))
        if (component.pool.name, page) in worst
    )
    lost = {
        page.page
        for page in pages
        if not page.component.is_draft and page.status not in (SaveStatus.SAVED, SaveStatus.PRESENT)
    }
    saved = {page.page for page in pages if page.status is SaveStatus.SAVED and not page.component.is_draft} - lost
    return SaveOutcome(unit.request_id, pages, len(saved), sum(drafted.values()))
