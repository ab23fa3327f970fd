"""Looking up what is there: a hint, which an admission revalidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import anyio
import structlog

from softload import events
from softload.context import Context
from softload.geometry.group import ResolvedComponent
from softload.outcomes import Lookup, PageStatus
from softload.planning import Column, ComponentPages, boundaries, cut, unit_parts
from softload.transfer import HitPolicy, TransferUnit

__all__ = ["look_up"]

_log = structlog.get_logger(__name__)

_FIRST_PAGES = 32
"""Pages in the first call of a lookup; each further call doubles it. Looking leases, so it stops at the first miss."""


async def look_up(context: Context, unit: TransferUnit) -> Lookup:
    """Which prefixes of a unit can be restored now, as the store says. See `PageLoader.lookup`."""
    await context.pacer.turn()
    if unit.partial:  # a prefix is restorable with all of its pools, whatever a load brings of them
        unit = replace(unit, partial=False)
    parts = unit_parts(unit, context.pools, context.config.layout, context.keys)
    target, draft_columns = parts.target, parts.draft_columns
    context.counters.lookups += 1
    pages = max((len(component.keys) for component in target), default=0)
    if not pages:
        return Lookup()
    if context.health.is_suppressed(unit.request_id):
        return Lookup(status=PageStatus.SUPPRESSED)
    found, status = await _existing(context, target, [*parts.columns, *draft_columns], pages)
    if status is not None:
        context.counters.lookups_unanswered += 1
        context.log.tell(_log.info, events.LOOKUP_FAILED, request_id=unit.request_id, status=status)
    await context.pacer.turn()
    context.promised.add(found)
    prefixes = boundaries(_component_pages(target, parts.columns, found))
    longest = prefixes[-1] if prefixes else 0
    draft_pages = cut(longest, _component_pages(parts.draft, draft_columns, found)) if draft_columns else 0
    return Lookup(prefixes, draft_pages, status if not prefixes else None)


async def _existing(
    context: Context, target: Sequence[ResolvedComponent], wanted: Sequence[Column], pages: int
) -> tuple[set[str], PageStatus | None]:
    """The wanted objects that exist, and why not all were asked for, if the store is the reason."""
    until = anyio.current_time() + context.config.lookup_deadline
    found: set[str] = set()
    # Only where every component needs every page does the first miss end the search.
    sparse = any(component.hit_policy is HitPolicy.TRAILING_PAGES for component in target)
    start, step = 0, pages if sparse else _FIRST_PAGES
    while start < pages:
        stop = min(pages, start + step)
        keys = [key for column in wanted for key in column.keys[start:stop] if key not in context.health.negative]
        answers = await context.ask_master(partial(context.calls.exists, keys), len(keys), until) if keys else []
        failed = next((answer for answer in answers if isinstance(answer, PageStatus)), None)
        found.update(key for key, answer in zip(keys, answers, strict=True) if answer is True)
        if failed is not None:
            return found, failed
        if any(key not in found for column in wanted if not column.spec.draft for key in column.keys[start:stop]):
            break
        start, step = stop, step * 2
    return found, None


def _component_pages(
    components: Sequence[ResolvedComponent], wanted: Sequence[Column], found: set[str]
) -> list[ComponentPages]:
    return [
        ComponentPages(
            [
                all(column.keys[page] in found for column in wanted if column.component == index)
                for page in range(len(component.keys))
            ],
            component.hit_policy,
            component.window,
        )
        for index, component in enumerate(components)
    ]
