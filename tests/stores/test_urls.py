"""Stores by URL."""

from __future__ import annotations

import pytest

from softload.stores import EmbeddedMooncakeStore, MemoryStore, MooncakeStore, open_store, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("256MiB", 256 << 20), ("1GiB", 1 << 30), ("1.5KiB", 1536), ("7B", 7)]
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("5", 5.0), ("5s", 5.0), ("500ms", 0.5), ("2min", 120.0)])
def test_durations(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "12QiB", "-3", "1GB!", "0x10", "1 2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


def test_memory() -> None:
    store = open_store("memory://?capacity=2MiB&lease=250ms&high_watermark=0.8&eviction_ratio=0.2")
    assert isinstance(store, MemoryStore)
    assert store.lease_ttl == 0.25
    assert store.statistics().capacity == 2 << 20
    assert isinstance(open_store("memory://"), MemoryStore)


def test_keywords_win_over_the_query_and_may_be_numbers() -> None:
    store = open_store("memory://?capacity=2MiB&lease=1s", capacity=4096, lease="2s", clock=lambda: 0.0)
    assert isinstance(store, MemoryStore)
    assert (store.statistics().capacity, store.lease_ttl) == (4096, 2.0)


def test_mooncake_stores_are_made_without_a_mooncake() -> None:
    embedded = open_store("mooncake://embedded?segment=1GiB&lease=3s&owners=2&high_watermark=0.9&client_ttl=5s")
    assert isinstance(embedded, EmbeddedMooncakeStore)
    assert embedded.lease_ttl == 3.0
    real = open_store("mooncake://10.0.0.7:50051?protocol=rdma&device=mlx5_0&metadata=P2PHANDSHAKE&segment=0&tenant=t")
    assert isinstance(real, MooncakeStore)
    assert not isinstance(real, EmbeddedMooncakeStore)
    assert "10.0.0.7:50051" in repr(real)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://localhost", "memory://, mooncake://embedded or mooncake://host:port, got scheme 'redis'"),
        ("memory", "got scheme ''"),
        ("memory://host", "without a host, got 'host'"),
        ("memory:///path", "got '/path'"),
        ("memory://?size=3", "capacity, eviction_ratio, high_watermark, lease, got 'size'"),
        ("memory://?capacity=lots", "capacity: expected a size like 256MiB or 1GiB .* got 'lots'"),
        ("memory://?lease=5h", "lease: expected a duration like 500ms or 5s .* got '5h'"),
        ("memory://?high_watermark=x", "high_watermark: expected a number, got 'x'"),
        ("memory://?high_watermark=2", "high_watermark: expected a fraction above 0 and at most 1, got 2.0"),
        ("mooncake://embedded?owners=-1", "owners: expected a whole number, got '-1'"),
        ("mooncake://embedded?segment=0", "segment: expected at least 16MiB, got 0 bytes"),
        (
            "mooncake://embedded?segment=20MiB&owners=2",
            "segment: expected at least 16MiB for each of 2 owners, got 2097",
        ),
        ("mooncake://embedded?owners=100000", "segment: expected at least 16MiB for each of 100000 owners"),
        ("mooncake://embedded?lease=0.1ms", "lease: expected at least 1ms, got 0.0001 seconds"),
        ("mooncake://embedded?client_ttl=1.5s", "client_ttl: expected whole seconds, at least 1, got 1.5"),
        ("memory://?capacity", "expected NAME=VALUE after '.', parted by '&', got 'capacity'"),
        ("memory://?&&", "expected NAME=VALUE after '.', parted by '&', got ''"),
        ("memory://?lease=1s&lease=2s", "lease: expected it once, got '1s' and '2s'"),
        ("mooncake://[::1", "'mooncake://.::1': Invalid IPv6 URL"),
        ("mooncake://user@host:5", "got 'user@host:5'"),
        ("mooncake://10.0.0.7:50051?segment=1MiB", "segment: expected at least 16MiB, got 1048576 bytes"),
        ("mooncake://10.0.0.7:50051?protocol=foo", "protocol: expected tcp or rdma, got 'foo'"),
        ("mooncake://10.0.0.7:50051?metadata=x", "metadata: expected P2PHANDSHAKE, or the address .* got 'x'"),
        ("mooncake://embedded?protocol=rdma", "got 'protocol'"),
        ("mooncake://10.0.0.7", "mooncake://embedded or mooncake://host:port, got '10.0.0.7'"),
        ("mooncake://10.0.0.7:port", "got '10.0.0.7:port'"),
        ("mooncake://10.0.0.7:50051?owners=2", "got 'owners'"),
    ],
)
def test_what_is_wrong_is_named(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_store(url)
    assert str(caught.value).startswith(repr(url))
