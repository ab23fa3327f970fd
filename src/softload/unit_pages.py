"""What one unit wants, and how much of it is still good: cuts, boundaries, draft policy. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from softload.config import DraftPolicy
from softload.context import Context
from softload.geometry.group import ResolvedComponent
from softload.outcomes import PageOutcome, PageStatus
from softload.planning import Column, ComponentPages, cut, needed_pages, unit_parts
from softload.transfer import HitPolicy, PoolName, TransferUnit

__all__ = ["UnitPages", "Wanted"]


class Wanted(NamedTuple):
    """One object that a unit needs: page `page` of `column`. A tuple, since there are very many and all are hashed."""

    column: Column
    page: int

    @property
    def key(self) -> str:
        """Its key in the store."""
        return self.column.keys[self.page]


class UnitPages:
    """The pages of one unit.

    `pages` of the `requested` ones are good so far, `draft_pages` of the draft's; both only ever shrink.

    Raises:
        ValueError: components that do not fit the pools or one another.
    """

    def __init__(self, context: Context, unit: TransferUnit) -> None:
        self.request_id = unit.request_id
        parts = unit_parts(unit, context.pools, context.config.layout, context.keys)
        self.target, self.columns = parts.target, parts.columns
        self.draft, self.draft_columns = parts.draft, parts.draft_columns
        self.draft_is_packed = bool(self.draft) and not unit.draft
        # In the `page` layout a packed draft has no objects of its own: the target object's size tells if it is in.
        self.draft_rides = self.draft_is_packed and not self.draft_columns
        self.requested = max((len(component.keys) for component in self.target), default=0)
        self._check()
        self.pages = self.requested
        self.draft_pages = min((len(component.keys) for component in self.draft), default=0)
        self._good = [_with_slots(component) for component in self.target]
        self._draft_good = [_with_slots(component) for component in self.draft]
        self._bad: dict[int, tuple[PageStatus, PoolName]] = {}

    def all_columns(self) -> Iterator[Column]:
        """Every kind of object that it wants."""
        yield from self.columns
        yield from self.draft_columns

    def own_components(self) -> Iterator[ResolvedComponent]:
        """The components whose slots are the unit's own; a packed draft's are its target's."""
        yield from self.target
        if not self.draft_is_packed:
            yield from self.draft

    def pages_of(self, column: Column) -> range:
        """The pages of a column that what is good so far needs."""
        if column.spec.draft:
            component, pages = self.draft[column.component], self.draft_pages
        else:
            component, pages = self.target[column.component], self.pages
        return needed_pages(pages, component.hit_policy, component.window)

    def page_keys(self) -> set[str]:
        """The page keys of all its components."""
        return set().union(*(component.keys for component in (*self.target, *self.draft)))

    def keys_of(self, column: Column) -> Sequence[str]:
        """A column's page keys."""
        return (self.draft if column.spec.draft else self.target)[column.component].keys

    def needed(self) -> Iterator[Wanted]:
        """Every object that what is good so far needs, first layers first, the draft's last."""
        for column in self.all_columns():
            for page in self.pages_of(column):
                yield Wanted(column, page)

    def status_of(self, page: int) -> PageStatus | None:
        """Why the first missed page is a miss, as far as that is known."""
        known = self._cause_of(page)
        return known[0] if known is not None else None

    def mark_bad(self, column: Column, page: int, status: PageStatus) -> None:
        """An object cannot be had; `recut` draws the conclusion."""
        if column.spec.draft:
            self._draft_good[column.component][page] = False
            return
        self._good[column.component][page] = False
        self._bad.setdefault(page, (status, column.pool.name))

    def mark_without_draft(self, column: Column, page: int) -> None:
        """An object of the `page` layout was written without the packed draft."""
        for good, component in zip(self._draft_good, self.draft, strict=True):
            if component.pool is column.pool:
                good[page] = False

    def recut(self) -> None:
        """Keep the longest prefix that is whole."""
        self.pages = cut(self.pages, self._components())
        self.draft_pages = cut(min(self.pages, self.draft_pages), self._draft_components())

    def limit(self, pages: int, status: PageStatus) -> None:
        """Keep `pages` pages at most; the next one is a miss with `status` if nothing better is known."""
        if pages < self.pages:
            self._bad.setdefault(pages, (status, self.target[0].pool.name))
            self.pages = pages
            self.recut()

    def apply_draft_policy(self, policy: DraftPolicy, truncate_pages: int) -> None:
        """At admission: what the loss of draft pages costs the target."""
        if not self.draft or self.draft_pages >= self.pages or policy is DraftPolicy.DROP:
            return
        # With trailing windows not every prefix of the target that the draft reaches is a boundary.
        together = cut(min(self.pages, self.draft_pages), [*self._components(), *self._draft_components()])
        if policy is DraftPolicy.REQUIRE or self.pages - together <= truncate_pages:
            self._bad[together] = (PageStatus.NOT_FOUND, self.draft[0].pool.name)
            self.pages = together
            self.recut()

    def restrict_windows(self) -> None:
        """Only the windows of the chosen boundary are read: other pages of trailing components cannot serve a cut.

        Nor can they bring a packed draft that has no objects of its own.
        """
        restricted = list(zip(self._good, self.target, strict=True))
        if self.draft_rides:
            restricted += zip(self._draft_good, self.draft, strict=True)
        for flags, component in restricted:
            if component.hit_policy is HitPolicy.TRAILING_PAGES:
                window = needed_pages(self.pages, component.hit_policy, component.window)
                flags[:] = [good and page in window for page, good in enumerate(flags)]
        self.recut()

    def continue_from(self, source: UnitPages) -> None:
        """Be no better than what a prefetch of the same request landed."""
        # Not strict: a unit that takes no pages has no components.
        self._good = _both(source._good, self._good)
        self._draft_good = _both(source._draft_good, self._draft_good)
        self._bad = dict(source._bad)
        self.pages = min(self.requested, source.pages)
        self.draft_pages = min(self.draft_pages, source.draft_pages)
        self.recut()

    def outcomes(self, restored: int, otherwise: PageStatus) -> Iterator[PageOutcome]:
        """One outcome per page; `otherwise` where the first miss has no reason of its own."""
        for page in range(self.requested):
            known = self._cause_of(page) if page == restored else self._bad.get(page)
            if page < restored:
                yield PageOutcome(page, PageStatus.LOADED)
            elif known is not None:
                yield PageOutcome(page, *known)
            else:
                yield PageOutcome(page, otherwise if page == restored else PageStatus.AFTER_MISS)

    def _cause_of(self, page: int) -> tuple[PageStatus, PoolName] | None:
        """What is known against a page, or else against the next one: a window that broke costs pages before it too."""
        return self._bad.get(min((bad for bad in self._bad if bad >= page), default=-1))

    def _components(self) -> list[ComponentPages]:
        return [
            ComponentPages(good, component.hit_policy, component.window)
            for good, component in zip(self._good, self.target, strict=True)
        ]

    def _draft_components(self) -> list[ComponentPages]:
        return [
            ComponentPages(good, component.hit_policy, component.window)
            for good, component in zip(self._draft_good, self.draft, strict=True)
        ]

    def _check(self) -> None:
        for component in self.target:
            if len(component.keys) != self.requested:
                raise ValueError(
                    f"request {self.request_id!r}, pool {component.pool.name}: expected {self.requested} page keys "
                    f"as in the other components, got {len(component.keys)}"
                )
        for component in self.draft:
            if len(component.keys) > self.requested:
                raise ValueError(
                    f"request {self.request_id!r}, pool {component.pool.name}: expected at most {self.requested} "
                    f"draft page keys, got {len(component.keys)}"
                )


def _with_slots(component: ResolvedComponent) -> list[bool]:
    """Which pages can be had at all: all where no slots are taken yet."""
    return [True] * len(component.keys) if component.rows is None else (component.rows >= 0).tolist()


def _both(theirs: list[list[bool]], own: list[list[bool]]) -> list[list[bool]]:
    return [
        [good and flag for good, flag in zip(flags, mine, strict=False)]
        for flags, mine in zip(theirs, own, strict=False)
    ]
