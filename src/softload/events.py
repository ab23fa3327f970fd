"""Names of log events. Pairs share one name: `.started`, then `.complete` or `.failed`."""

from typing import Final

__all__ = [
    "BREAKER_CLOSED",
    "BREAKER_OPENED",
    "DRAFT_DISABLED",
    "DRAFT_DROPPED",
    "FENCE_RAISED",
    "LOOKUP_FAILED",
    "OBJECT_REMOVED",
    "PAGE_MISSED",
    "SAVE_SKIPPED",
    "STORE_RAISED",
    "THREAD_STUCK",
]

LOOKUP_FAILED: Final = "lookup.failed"
PAGE_MISSED: Final = "page.missed"
DRAFT_DISABLED: Final = "draft.disabled"
DRAFT_DROPPED: Final = "draft.dropped"
SAVE_SKIPPED: Final = "save.skipped"
OBJECT_REMOVED: Final = "object.removed"
BREAKER_OPENED: Final = "breaker.opened"
BREAKER_CLOSED: Final = "breaker.closed"
FENCE_RAISED: Final = "fence.raised"
STORE_RAISED: Final = "store.raised"
THREAD_STUCK: Final = "thread.stuck"
