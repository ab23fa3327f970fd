"""Short requests beside long ones that load from a slow store: who waits for bytes holds no KV block."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import BLOCK, assert_equal, tiny_llama
from side_by_side import LONG, SHORT, side_by_side

pytestmark = pytest.mark.slow


def test_requests_that_wait_for_bytes_hold_no_block(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    fast = side_by_side(model, seconds_per_read=0.0)
    slow = side_by_side(model, seconds_per_read=0.5)
    for run in (fast, slow):
        assert run.held_while_waiting == 0
        assert run.restored_tokens >= LONG * (run.long_tokens // BLOCK * BLOCK)  # more where one was preempted
    assert slow.seen_waiting > 100
    assert_equal(fast.answers, slow.answers)
    assert len(slow.short_seconds) == SHORT
    print(f"short requests' p99: {fast.short_p99 * 1e3:.0f} ms beside a fast store, {slow.short_p99 * 1e3:.0f} ms slow")
    # The figure that is aimed at is 1.2; this bound is what a busy machine may make of it.
    assert slow.short_p99 < 3 * fast.short_p99
