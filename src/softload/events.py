"""Names of log events. Pairs share one name: `.started`, then `.complete` or `.failed`."""

from typing import Final

__all__ = [
    "BREAKER_CLOSED",
    "BREAKER_OPENED",
    "DRAFT_DISABLED",
    "DRAFT_DROPPED",
    "LOAD_COMPLETE",
    "LOAD_STARTED",
    "LOOKUP_FAILED",
    "OBJECT_REMOVED",
    "PAGE_MISSED",
    "SAVE_SKIPPED",
    "STORE_RAISED",
    "THREAD_STUCK",
]

LOAD_STARTED: Final = "load.started"
LOAD_COMPLETE: Final = "load.complete"
LOOKUP_FAILED: Final = "lookup.failed"
PAGE_MISSED: Final = "page.missed"
DRAFT_DROPPED: Final = "draft.dropped"
DRAFT_DISABLED: Final = "draft.disabled"
SAVE_SKIPPED: Final = "save.skipped"
OBJECT_REMOVED: Final = "object.removed"
BREAKER_OPENED: Final = "breaker.opened"
BREAKER_CLOSED: Final = "breaker.closed"
STORE_RAISED: Final = "store.raised"
THREAD_STUCK: Final = "thread.stuck"
