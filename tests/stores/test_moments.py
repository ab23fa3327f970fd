"""Something is done at a named moment, once, on the calling thread; processes of a cluster are struck on time."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from softload import StoreSetupError
from softload.stores import MemoryStore, MooncakeCluster
from softload.testing import ClusterFaults, Moment, MomentStore, cluster_faults, parse_fault
from softload.testing.store_suite import Buffer

SIZE = 1024


def filled() -> tuple[MomentStore, Buffer]:
    store, buffer = MomentStore(MemoryStore(capacity=1 << 20)), Buffer(SIZE)
    store.open()
    store.put_start(["a", "b"], [SIZE] * 2)
    store.put_write(["a", "b"], [buffer.pointer] * 2, [SIZE] * 2)
    store.put_end(["a", "b"])
    return store, buffer


def test_every_moment_comes_where_its_name_says() -> None:
    store, buffer = filled()
    passed: list[str] = []
    for moment in Moment:
        store.at(moment, lambda moment=moment: passed.append(moment))  # type: ignore[misc]
    store.exists(["a"])
    assert passed == [Moment.LOOKUP]
    store.descriptors(["a"])
    assert passed[1:] == [Moment.ADMISSION, Moment.ADMITTED]
    store.read(["a"], [buffer.pointer], [SIZE])
    assert passed[3:] == [Moment.READ, Moment.LANDED]
    store.put_start(["c"], [SIZE])
    store.put_write(["c"], [buffer.pointer], [SIZE])
    assert passed[5:] == [Moment.SAVE]
    for _ in range(2):
        store.exists(["a"])
        store.read(["a"], [buffer.pointer], [SIZE])
    assert len(passed) == 6, "once"


def test_the_nth_call_that_counts() -> None:
    store, buffer = filled()
    threads: list[int] = []
    done = store.at(Moment.READ, lambda: threads.append(threading.get_ident()), nth=2, when=lambda keys: "b" in keys)
    for key, is_done in (("b", False), ("a", False), ("b", True), ("b", True)):
        store.read([key], [buffer.pointer], [SIZE])
        assert done.is_set() is is_done
    assert threads == [threading.get_ident()]
    with pytest.raises(ValueError, match="expected nth of 1 or more, got 0"):
        store.at(Moment.READ, lambda: None, nth=0)


def test_what_raises_is_raised_once_by_the_store() -> None:
    store, _ = filled()

    def action() -> None:
        raise RuntimeError("the test's own")

    done = store.at(Moment.LOOKUP, action)
    with pytest.raises(RuntimeError, match="the test's own"):
        store.exists(["a"])
    assert done.is_set()
    assert list(store.exists(["a"])) == [True]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("evict=0.5", "expected faults of a cluster's processes, got evict"),
        ("kill-owner@1", "kill-owner: expected a cluster with owners"),
        ("kill-master@read", "kill-master@read: expected a MomentStore"),
    ],
)
def test_faults_that_cannot_happen(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterFaults(MooncakeCluster(segment=1 << 24, lease=1.0), [parse_fault(spec)])


def test_nothing_is_cut_off_in_a_network_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_faults, "why_no_partitions", lambda: "the network of the whole machine")
    with pytest.raises(ValueError, match="part-master: expected .* a network namespace of one's own, got the network"):
        ClusterFaults(MooncakeCluster(segment=1 << 24, lease=1.0), [parse_fault("part-master@1")])


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.mooncake
def test_processes_are_struck_and_mended_and_none_stays_frozen() -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("no Mooncake build is installed")
    cluster = MooncakeCluster(segment=64 << 20, lease=1.0, owners=2)
    cluster.start()
    try:
        first, second = cluster.owners
        master = cluster.master
        assert master is not None
        faults = [parse_fault(spec) for spec in ("kill-owner@0:0.2", "freeze-owner@0.05", "freeze-master@0.1:0.5")]
        with ClusterFaults(cluster, faults) as happening:
            deadline = time.monotonic() + 20
            while len(happening.happened) < 5 and time.monotonic() < deadline:
                time.sleep(0.01)
            what = [text for _, text in happening.happened]
            assert what[:3] == ["owner 0 killed", "owner 1 frozen", "master frozen"]
            assert set(what[3:]) == {"owner 0 started", f"process {master.pid} thawed"}
            assert not first.alive and cluster.owners[0].alive
            assert is_stopped(second.pid)
            assert not is_stopped(master.pid)
        assert not is_stopped(second.pid)
        assert happening.happened[-1][1] == f"process {second.pid} thawed"
    finally:
        cluster.close()


class BrokenPartitions:
    """A kernel that says no to one thing, or to both."""

    refused: frozenset[str] = frozenset()

    def part(self, ports: Iterable[int]) -> None:
        self._refuse("part", ports)

    def join(self, ports: Iterable[int]) -> None:
        self._refuse("join", ports)

    def _refuse(self, what: str, ports: Iterable[int]) -> None:
        assert set(ports)
        if what in self.refused:
            raise StoreSetupError(f"expected `ip rule {what}` to succeed, got 'no'")


@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ("part", "got part-owner: expected `ip rule part` to succeed, got 'no'$"),
        ("join", "got the end of part-owner: expected `ip rule join` to succeed, got 'no'$"),
    ],
)
def test_a_fault_that_cannot_happen_is_told_at_the_end_and_later_ones_happen(
    refused: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("no Mooncake build is installed")
    monkeypatch.setattr(cluster_faults, "why_no_partitions", lambda: None)
    monkeypatch.setattr(cluster_faults, "Partitions", BrokenPartitions)
    monkeypatch.setattr(BrokenPartitions, "refused", frozenset({refused}))
    store, _ = filled()
    cluster = MooncakeCluster(segment=64 << 20, lease=1.0, owners=2)
    cluster.start()
    try:
        faults = [parse_fault(spec) for spec in ("part-owner@lookup:0.05", "freeze-owner@lookup:2", "kill-master@0.2")]
        happening = ClusterFaults(cluster, faults, store)
        with pytest.raises(StoreSetupError, match=told), happening:
            for _ in range(2):
                assert list(store.exists(["a"])) == [True], "the call that brought the moment knows nothing of it"
            wait_for(lambda: any("master killed" in what for _, what in happening.happened))
            assert any("frozen" in what for _, what in happening.happened)
        assert not any(is_stopped(owner.pid) for owner in cluster.owners)
    finally:
        cluster.close()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


RULES_SCRIPT = """
import subprocess
from softload import StoreSetupError
from softload.testing.partitions import Partitions

def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout

def rules():
    return sum("sport" in line or "dport" in line for line in ip("rule", "show").splitlines())

partitions = Partitions()
foreign = "pref", "5", "ipproto", "tcp", "dport", "7002", "lookup", "77"
ip("rule", "add", *foreign)
try:
    partitions.part([7001, 7002, 7003])
except StoreSetupError as error:
    assert "File exists" in str(error), error
else:
    raise AssertionError("another had made one of the rules")
assert rules() == 1, "all or none"
ip("rule", "del", *foreign)
partitions.part([7001, 7002, 7003])
assert rules() == 6
ip("rule", "del", *foreign)
try:
    partitions.join([7001, 7002, 7003])
except StoreSetupError:
    pass
else:
    raise AssertionError("another had taken one of the rules away")
assert rules() == 0
partitions.part([7002])
partitions.join([7002])
assert rules() == 0
"""


def test_ports_are_cut_off_together_or_not_at_all() -> None:
    try:
        subprocess.run(["unshare", "--net", "ip", "rule", "show"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces: {error}")
    done = subprocess.run(["unshare", "--net", sys.executable, "-c", RULES_SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
