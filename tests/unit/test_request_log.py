"""Lines about single requests are bounded."""

from __future__ import annotations

import structlog
from structlog.testing import capture_logs

from softload.request_log import RequestLog


def test_so_many_lines_of_an_event_in_a_second() -> None:
    now = 10.2
    lines = RequestLog(lambda: now)
    log = structlog.get_logger("test")
    with capture_logs() as written:
        for _ in range(70):
            lines.info(log, "page.missed", page=1)
        lines.info(log, "lookup.failed")
        assert (len(written), lines.dropped) == (51, 20)
        now = 11.0
        lines.info(log, "page.missed", page=2)
    assert written[-1] == {"event": "page.missed", "page": 2, "log_level": "info"}
    assert lines.dropped == 20
