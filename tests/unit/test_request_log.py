"""Lines about single requests are bounded."""

from __future__ import annotations

import io

import pytest
import structlog
from structlog.testing import capture_logs

from softload.request_log import RequestLog, printable, tell


def test_so_many_lines_of_an_event_in_a_second() -> None:
    now = 10.2
    lines = RequestLog(lambda: now)
    log = structlog.get_logger("test")
    with capture_logs() as written:
        for _ in range(70):
            lines.tell(log.info, "page.missed", page=1)
        lines.tell(log.info, "lookup.failed")
        assert (len(written), lines.dropped) == (51, 20)
        now = 11.0
        lines.tell(log.info, "page.missed", page=2)
    assert written[-1] == {"event": "page.missed", "page": 2, "log_level": "info"}
    assert lines.dropped == 20


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("r1", "r1"),
        ("clé ключ 鍵", "clé ключ 鍵"),
        ("a\n2026 [critical] forged", "a\\n2026 [critical] forged"),
        ("\x1b[2J\x9b\x07", "\\x1b[2J\\x9b\\x07"),
        ("\u2028\x85\u202e", "\\u2028\\x85\\u202e"),
        ("\ud800", "\\ud800"),
        ("x" * 10_000, "x" * 200 + "..."),
        (7, 7),
    ],
    ids=ascii,
)
def test_a_name_is_printed_as_one_short_line(name: object, written: object) -> None:
    assert printable(name) == written


def test_a_log_that_cannot_be_written_costs_the_line() -> None:
    stream = io.StringIO()
    stream.close()
    log = structlog.wrap_logger(structlog.PrintLogger(stream), processors=[structlog.processors.JSONRenderer()])
    lines = RequestLog()
    lines.tell(log.info, "page.missed", request_id="a")
    assert lines.dropped == 1
    assert not tell(log.info, "breaker.opened")
