"""Small replays on an in-process store: clean ones, ones with every fault, and what the figures say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from softload.config import DraftPolicy, Integrity, Layout
from softload.outcomes import SaveStatus
from softload.protocols import Answer
from softload.replay import runner
from softload.replay.engine_memory import Verification
from softload.replay.jobs import Job
from softload.replay.ledger import Ledger
from softload.replay.options import AdmissionMode, ReplayOptions, SchedulerOptions
from softload.replay.runner import ZEROS, is_clean, replay
from softload.replay.shapes import DraftKind
from softload.stores import MemoryStore, WrapperStore
from softload.testing import FaultKind, FaultyStore

from ..loader.harness import is_of

pytestmark = pytest.mark.asyncio

DOCS = Path(__file__).resolve().parents[2] / "docs" / "replay.md"


def documented_keys() -> set[str]:
    """The first cells of the tables of results, and the settings that are listed under them."""
    section = DOCS.read_text().partition("### Results")[2].partition("\n### ")[0]
    cells = re.findall(r"^\| (`.*?`) \| ", section, re.MULTILINE)
    settings = section.partition("How it was run:")[2]
    return set(re.findall(r"`(\w+)`", " ".join([*cells, settings])))


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(runner, "_POOL_BYTES", 512 * (32 << 10))


async def run(**settings: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "requests": 60,
        "store": "memory://?capacity=256MiB",
        "landing": 64 << 20,
        "max_running": 3,
    }
    options = ReplayOptions(**(defaults | settings))
    return await replay(options, options.read_requests())


def assert_clean(figures: dict[str, Any]) -> None:
    assert {name: figures[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert is_clean(figures)
    assert figures["finished_requests"] == figures["requests"]
    assert figures["restored_pages"] + figures["computed_pages"] == figures["request_pages"]
    assert figures["restored_pages"] <= figures["lookup_pages"]
    assert figures["lookup_pages"] - figures["restored_pages"] == sum(figures["missed_pages"].values())
    assert (figures["missed_requests"] > 0) is (figures["lookup_pages"] > figures["restored_pages"])
    if figures["lru_capacity_pages"] >= figures["request_pages"]:
        assert figures["restored_pages"] <= figures["lru_bound_pages"]


def saved_again(figures: dict[str, Any]) -> int:
    """Pages that were offered to the store when somebody looked, and not yet in it: computed and offered once more.

    How many there are is a matter of how long saves take, which on a busy machine is long.
    """
    return sum(count for status, count in figures["saved_pages"].items() if status != SaveStatus.SAVED)


@pytest.mark.parametrize("admission", AdmissionMode)
async def test_a_replay_without_faults_restores_what_an_ideal_store_would(admission: AdmissionMode) -> None:
    figures = await run(admission=admission)
    assert_clean(figures)
    assert set(figures) == documented_keys()
    assert figures["requests"] == 60
    assert 0 < figures["lru_bound_pages"] <= figures["restored_pages"] + saved_again(figures)
    assert figures["restored_pages"] > 0
    assert figures["bytes_loaded"] > 0
    assert figures["rss_mid"] > 0 and figures["rss_end"] > 0
    for name in ("first_layer_ms", "stall_ms", "load_ms"):
        assert figures[name].keys() == {"p50", "p99", "max"}
    for name in ("loop_lag_ms", "idle_loop_lag_ms", "quiet_loop_lag_ms"):
        assert figures[name].keys() == {"p50", "p99", "p99_9", "max"}


async def test_one_request_after_the_other_restores_all_that_an_ideal_store_would() -> None:
    figures = await run(max_running=1)
    assert_clean(figures)
    assert 0 < figures["restored_pages"] == figures["lru_bound_pages"]
    assert saved_again(figures) == 0


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("draft", [DraftKind.PACKED, DraftKind.SIDECAR])
@pytest.mark.parametrize("admission", AdmissionMode)
async def test_drafts_are_restored_with_their_target(
    layout: Layout, draft: DraftKind, admission: AdmissionMode
) -> None:
    figures = await run(layout=layout, draft=draft, admission=admission)
    assert_clean(figures)
    assert figures["draft_pages"] == figures["restored_pages"] > 0
    assert figures["draft_dropped"] == 0


FAULTS = ["evict=0.1", "remove=0.1", "late=0.2", "slow=0.05:0.02", "hang=2:0.5", "corrupt=0.1"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("admission", AdmissionMode)
async def test_a_fault_costs_pages_and_nothing_else(fault: str, admission: AdmissionMode) -> None:
    hangs = fault.startswith("hang")
    deadline = 0.3 if hangs else 20.0  # one that a busy machine does not meet either
    figures = await run(faults=(fault,), admission=admission, integrity=Integrity.FULL, deadline=deadline)
    assert_clean(figures)
    assert figures["restored_pages"] > 0
    if not hangs:
        assert figures["promised_unrestored"] == 0, figures["promised_unrestored_pages"]


async def test_all_faults_at_once() -> None:
    figures = await run(faults=tuple(FAULTS), integrity=Integrity.FULL, draft=DraftKind.SIDECAR, deadline=0.3)
    assert_clean(figures)
    assert sum(figures["missed_pages"].values()) > 0


@pytest.mark.parametrize("draft", [DraftKind.PACKED, DraftKind.SIDECAR])
@pytest.mark.parametrize("policy", DraftPolicy)
async def test_a_lost_draft_costs_what_the_policy_says(draft: DraftKind, policy: DraftPolicy) -> None:
    figures = await run(draft=draft, draft_policy=policy, faults=("draft-loss=0.2",))
    assert_clean(figures)
    if policy is DraftPolicy.REQUIRE:
        assert figures["draft_dropped"] == 0
        assert figures["restored_pages"] < figures["lru_bound_pages"]
    else:
        assert figures["draft_dropped"] > 0


@pytest.mark.parametrize("layout", Layout)
async def test_a_draft_is_good_up_to_its_first_lost_page(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a loss costs all drafts behind it, of everybody who shares the page: a tenth lost drops most of them."""
    stores: list[FaultyStore] = []
    drafts: list[tuple[Job, int, int]] = []

    class Store(FaultyStore):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            stores.append(self)

    class Books(Ledger):
        def settled(self, job: Job, checked: Verification) -> None:
            drafts.append((job, job.restored, job.draft_restored))
            super().settled(job, checked)

    monkeypatch.setattr(runner, "FaultyStore", Store)
    monkeypatch.setattr(runner, "Ledger", Books)
    figures = await run(layout=layout, draft=DraftKind.SIDECAR, faults=("draft-loss=0.1",))
    assert_clean(figures)
    lost = stores[0].touched_by[FaultKind.DRAFT_LOSS]
    assert 0 < figures["draft_dropped"] == sum(restored - drafted for _, restored, drafted in drafts)
    for job, restored, drafted in drafts:
        assert not any(is_of(*job.keys[:drafted])(key) for key in lost)
        assert drafted == restored or any(is_of(job.keys[drafted])(key) for key in lost)


@pytest.mark.parametrize("shape", ["dsv4-flash/256", "glm-5.2/64", "deepseek-v3.2/64"])
@pytest.mark.parametrize("draft", [DraftKind.PACKED, DraftKind.SIDECAR])
async def test_sparse_models_with_drafts(shape: str, draft: DraftKind) -> None:
    figures = await run(shape=shape, draft=draft, requests=12)
    assert_clean(figures)
    assert figures["draft_pages"] == figures["restored_pages"] > 0
    # A window is stored where every second page ends.
    assert figures["restored_pages"] + saved_again(figures) >= 0.7 * figures["lru_bound_pages"]


@pytest.mark.parametrize("admission", AdmissionMode)
@pytest.mark.parametrize("draft", [DraftKind.PACKED, DraftKind.SIDECAR])
@pytest.mark.parametrize("layout", Layout)
async def test_faults_among_windows(admission: AdmissionMode, draft: DraftKind, layout: Layout) -> None:
    faults = ["remove=0.001", "late=0.003", "evict=0.001"]
    if layout is Layout.GROUPED:  # objects of `page` have no digests
        faults += ["corrupt=0.001", "draft-loss=0.02"]
    figures = await run(
        shape="dsv4-flash/256",
        draft=draft,
        layout=layout,
        requests=12,
        admission=admission,
        faults=tuple(faults),
        integrity=Integrity.FULL,
    )
    assert_clean(figures)  # how much is restored depends on which of the first, shared pages the faults hit


async def test_a_full_store_costs_hits_only() -> None:
    figures = await run(store="memory://?capacity=8MiB&lease=200ms")
    assert_clean(figures)
    assert 0 < figures["lru_capacity_pages"] < figures["request_pages"]


async def test_requests_arrive_as_the_trace_says() -> None:
    figures = await run(requests=12, speed=20.0)
    assert_clean(figures)
    last = max(request.timestamp for request in ReplayOptions(requests=12).read_requests())
    assert figures["wall_s"] >= last / 1e3 / 20.0


class _Liar(WrapperStore):
    """Serves wrong bytes with the right count."""

    def read(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> Sequence[Answer]:
        if len(keys) > 1:
            keys = [*keys[1:], keys[0]]
        return self.inner.read(keys, pointers, sizes)


async def test_wrong_bytes_that_the_loader_accepts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "open_store", lambda url: _Liar(MemoryStore(capacity=256 << 20)))
    figures = await run(layout=Layout.PAGE)
    assert figures["accepted_bad_pages"] > 0
    assert figures["byte_mismatches"] > figures["accepted_bad_pages"]
    assert not is_clean(figures)


async def test_digests_keep_wrong_bytes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "open_store", lambda url: _Liar(MemoryStore(capacity=256 << 20)))
    figures = await run(layout=Layout.GROUPED)
    assert_clean(figures)
    assert figures["missed_pages"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"requests": 0}, "requests: expected at least 1, got 0"),
        ({"shape": "glm-5.2/x"}, "shape: expected glm-5.2/FACTOR with a factor of 1 or more, got 'glm-5.2/x'"),
        ({"speed": 0.0}, "speed: expected a factor above 0, got 0.0"),
        ({"layer_time": -1.0}, "layer_time: expected 0 or more seconds, got -1.0"),
        ({"max_running": 0}, "max_running: expected at least 1, got 0"),
        ({"faults": ("kill-owner@3",)}, "fault 'kill-owner@3': expected a cluster of the replay's own"),
        (
            {"faults": ("kill-owner@3",), "store": "mooncake://embedded"},
            "'mooncake://embedded\\?owners=N', got 'mooncake://embedded'",
        ),
        ({"faults": ("explode=1",)}, "fault 'explode=1': expected one of"),
        ({"faults": ("draft-loss=0.5",)}, "expected a draft with objects of its own"),
        ({"store": "ftp://x"}, "ftp"),
        ({"deadline": -1.0}, "deadline: expected 0 or more"),
    ],
)
async def test_bad_options_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayOptions(**settings)


async def test_scheduler_options_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="max_prefill: expected at least 1, got 0"):
        SchedulerOptions(max_prefill=0)
