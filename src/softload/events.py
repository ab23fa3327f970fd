"""Names of log events, `subject.what_happened`; docs/failures.md says when each is logged and at what level."""

from typing import Final

__all__ = [
    "BREAKER_CLOSED",
    "BREAKER_OPENED",
    "CONSENSUS_FAILED",
    "COPY_FAILED",
    "DRAFT_DISABLED",
    "DRAFT_DROPPED",
    "FENCE_RAISED",
    "LOOKUP_FAILED",
    "MEMORY_FAILED",
    "OBJECT_REMOVED",
    "PAGE_MISSED",
    "SAVE_SKIPPED",
    "STAGED_RAISED",
    "STORE_MALFORMED",
    "STORE_RAISED",
    "TASK_RAISED",
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
CONSENSUS_FAILED: Final = "consensus.failed"
COPY_FAILED: Final = "copy.failed"
FENCE_RAISED: Final = "fence.raised"
MEMORY_FAILED: Final = "memory.failed"
STAGED_RAISED: Final = "staged.raised"
STORE_MALFORMED: Final = "store.malformed"
STORE_RAISED: Final = "store.raised"
TASK_RAISED: Final = "task.raised"
THREAD_STUCK: Final = "thread.stuck"
