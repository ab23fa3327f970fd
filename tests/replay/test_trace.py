"""The trace reader: what it accepts, and that every refusal names file, line, expected and got."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softload.replay.synthetic import synthetic_trace
from softload.replay.trace import TraceError, TraceRequest, TraceStatistics, iter_trace, read_trace, write_trace


def line(**changes: object) -> str:
    record: dict[str, object] = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [0, 1]}
    return json.dumps(record | changes)


def test_reads_what_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = synthetic_trace(40, seed=3)
    write_trace(path, requests)
    assert read_trace(path) == requests
    assert read_trace(path, limit=7) == requests[:7]


@pytest.mark.parametrize(
    ("length", "blocks"),
    [(0, 0), (1, 0), (511, 0), (512, 1), (513, 1), (1023, 1), (1024, 2)],
)
def test_only_whole_blocks_are_full(length: int, blocks: int) -> None:
    hashes = tuple(range(-(-length // 512)))
    assert TraceRequest(0, 0.0, length, 1, hashes).full_blocks == hashes[:blocks]


def test_trailing_empty_lines_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + "\n\n\n")
    assert len(read_trace(path)) == 1


@pytest.mark.parametrize(
    ("bad", "expected", "got"),
    [
        ("{", "expected a JSON object", "got malformed JSON"),
        ("[1, 2]", "expected a JSON object", "got list [1, 2]"),
        ("null", "expected a JSON object", "got null"),
        (
            '{"timestamp": 5, "input_length": 1, "output_length": 1}',
            "expected the field 'hash_ids'",
            "got input_length",
        ),
        ("{}", "expected the field 'timestamp'", "got no field"),
        (line(timestamp="soon"), "timestamp: expected a number", 'got str "soon"'),
        (line(timestamp=True), "timestamp: expected a number", "got bool true"),
        (line(timestamp=-1), "timestamp: expected a finite number of 0 or more", "got -1"),
        (line(timestamp=float("inf")), "timestamp: expected a finite number", "got inf"),
        (line(timestamp=float("nan")), "timestamp: expected a finite number", "got nan"),
        (line(input_length=1000.0), "input_length: expected an integer", "got float 1000.0"),
        (line(input_length=-5), "input_length: expected 0 or more", "got -5"),
        (line(output_length=None), "output_length: expected an integer", "got null"),
        (line(output_length=-1), "output_length: expected 0 or more", "got -1"),
        (line(hash_ids="01"), "hash_ids: expected a list of integers", 'got str "01"'),
        (line(hash_ids=[0, "1"]), "hash_ids[1]: expected an integer", 'got str "1"'),
        (line(hash_ids=[0, -1]), "hash_ids[1]: expected 0 or more", "got -1"),
        (line(hash_ids=[0]), "hash_ids: expected 2 (input_length 1000", "got 1"),
        (line(hash_ids=[0, 1, 2]), "hash_ids: expected 2", "got 3"),
        (line(timestamp=3), "timestamp: expected at least 4 ms", "got 3 ms"),
        ("", "expected a JSON object", "got an empty line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, expected: str, got: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([line(timestamp=3), line(timestamp=4), bad, line(timestamp=6)]))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert f"{path}:3: " in message
    assert expected in message
    assert got in message


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line().encode() + b'\n{"a": "\xff"}\n')
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: expected UTF-8 text, got byte 0xff"):
        read_trace(path)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.touch()
    with pytest.raises(TraceError, match="expected at least one request, got an empty file"):
        read_trace(path)


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + "\nbroken\n")
    assert len(list(iter_trace(path, limit=1))) == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [600, 4000])
def test_synthetic_traces_have_the_published_statistics(count: int, seed: int) -> None:
    trace = synthetic_trace(count, seed)
    statistics = TraceStatistics.of(trace)
    all_blocks = sum(len(request.hash_ids) for request in trace)
    assert statistics.hit_blocks / all_blocks == pytest.approx(0.366, abs=0.01)
    assert statistics.hit_rate == pytest.approx(0.382, abs=0.01)
    lengths = sorted(request.input_length for request in trace)
    for share, published, tolerance in ((0.5, 6_909, 0.2), (0.9, 27_367, 0.2), (0.99, 85_401, 0.25)):
        assert lengths[int(share * count)] == pytest.approx(published, rel=tolerance)
    assert sum(lengths) / count == pytest.approx(12_035, rel=0.12)
    assert sum(request.output_length for request in trace) / count == pytest.approx(343, rel=0.08)
    assert 891 <= lengths[0] and lengths[-1] <= 126_195
    assert all(request.hash_ids[0] == 0 for request in trace)
    assert all(len(request.hash_ids) == -(-request.input_length // 512) for request in trace)
    bursts = [sum(request.timestamp == at for request in trace) for at in {request.timestamp for request in trace}]
    assert 2 < sum(bursts) / len(bursts) and max(bursts) <= 28


def test_synthetic_traces_are_reproducible() -> None:
    assert synthetic_trace(50, 1) == synthetic_trace(50, 1)
    assert synthetic_trace(50, 1) != synthetic_trace(50, 2)
    assert synthetic_trace(0) == []
    with pytest.raises(ValueError, match="requests: expected 0 or more, got -1"):
        synthetic_trace(-1)


def test_equal_hashes_mean_equal_prefixes() -> None:
    prefixes: dict[int, tuple[int, ...]] = {}
    for request in synthetic_trace(800, seed=5):
        for position, block in enumerate(request.hash_ids):
            prefix = request.hash_ids[:position]
            assert prefixes.setdefault(block, prefix) == prefix
