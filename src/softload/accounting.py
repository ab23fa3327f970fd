"""Every page of every unit is counted once: where it landed, where it was placed, or where it was missed."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from softload import events
from softload.context import Context
from softload.outcomes import PageOutcome, PageStatus, UnitOutcome

__all__ = ["count_misses", "count_unit"]

_log = structlog.get_logger(__name__)

_NOT_A_FAILURE = (PageStatus.CANCELLED, PageStatus.PEER_DECLINED, PageStatus.SHED)
"""Misses that say nothing about what the next lookup of the same request would find."""


def count_unit(context: Context, outcome: UnitOutcome, *, landed: int, has_draft: bool) -> None:
    """The end of a unit that had slots.

    Args:
        context: the loader's parts.
        outcome: what became of it.
        landed: pages that are still to be counted: those past them were missed, and counted, by the unit's prefetch.
        has_draft: whether there was a draft to lose.
    """
    context.counters.restored_pages += outcome.restored_pages
    context.counters.requested_pages += outcome.restored_pages
    missed = outcome.pages[outcome.restored_pages : min(landed, outcome.requested_pages)]
    count_misses(context, outcome.request_id, missed, kept=outcome.restored_pages, requested=outcome.requested_pages)
    if has_draft and outcome.draft_pages < outcome.restored_pages:
        context.counters.draft_dropped += 1
        context.log.tell(
            _log.info,
            events.DRAFT_DROPPED,
            request_id=outcome.request_id,
            draft_pages=outcome.draft_pages,
            restored=outcome.restored_pages,
        )


def count_misses(
    context: Context, request_id: str, missed: Sequence[PageOutcome], *, kept: int, requested: int
) -> None:
    """Pages of a unit of `requested` ones that are not restored, after the `kept` ones that are, or may be."""
    context.counters.requested_pages += len(missed)
    context.counters.missed.update(page.status for page in missed)
    if not missed or missed[0].status in _NOT_A_FAILURE:
        return
    context.health.suppress(request_id)
    context.log.tell(
        _log.info,
        events.PAGE_MISSED,
        request_id=request_id,
        page=missed[0].page,
        status=missed[0].status,
        component=missed[0].component,
        restored=kept,
        requested=requested,
    )
