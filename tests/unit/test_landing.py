"""Landing memory: ranges never overlap, nothing is lost, and grants are whole and in turn."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Sequence

import anyio
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from softload.arena import ALIGNMENT, Arena
from softload.landing import LandingMemory, Segment, SegmentState, Share

UNIT = ALIGNMENT


def check_arena(arena: Arena, taken: Sequence[tuple[int, int]]) -> None:
    """Free ranges and `taken` ones tile the arena, and free neighbours are joined."""
    free = list(zip(arena._offsets, arena._lengths, strict=True))
    assert free == sorted(free)
    assert all(length > 0 for _, length in free)
    assert all(start + length < following for (start, length), (following, _) in zip(free, free[1:], strict=False))
    at = 0
    for offset, length in sorted([*free, *taken]):
        assert offset == at, "a gap or an overlap"
        at += length
    assert at == arena.nbytes
    assert arena.free_bytes == sum(length for _, length in free)
    assert arena.is_unused == (not taken)


def test_memory_was_touched_before_anything_lands_in_it() -> None:
    arena = Arena(32 << 20, pinned=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arena.memory[:] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000, "8,192 pages, all of which are there"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 16)), max_size=60))
def test_an_arena_is_tiled_by_what_is_taken_and_what_is_free(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(64 * UNIT, pinned=False)
    taken: list[tuple[int, int]] = []
    for take, number in steps:
        if take:
            nbytes = UNIT * (1 + number % 24)
            longest = max(arena._lengths, default=0)
            offset = arena.take(nbytes)
            assert (offset is not None) == (longest >= nbytes), "a gap that is long enough is used"
            if offset is not None:
                taken.append((offset, nbytes))
        elif taken:
            arena.give(*taken.pop(number % len(taken)))
        check_arena(arena, taken)
    for offset, nbytes in taken:
        arena.give(offset, nbytes)
    check_arena(arena, [])


def check_memory(memory: LandingMemory, segments: Sequence[Segment]) -> None:
    held = [segment for segment in segments if segment.state is not SegmentState.FREE]
    for arena in memory.arenas:
        check_arena(arena, [(each.offset, each.reserved) for each in held if each.arena is arena])
    quarantined = sum(each.reserved for each in held if each.state is SegmentState.QUARANTINED)
    statistics = memory.statistics()
    assert statistics.quarantined == memory.quarantined() == quarantined
    assert statistics.in_use == sum(each.reserved for each in held) - quarantined
    by_share = {
        share: sum(each.reserved for each in held if each.share is share and each.state is not SegmentState.QUARANTINED)
        for share in Share
    }
    assert all(by_share[share] <= memory.limit(share) for share in Share)
    assert by_share[Share.STREAMING] + by_share[Share.PREFETCH] <= memory.limit(Share.STREAMING)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.sampled_from(Share), st.integers(1, 20), st.integers(1, 6)),
        st.tuples(st.just("release"), st.integers(0, 1 << 16)),
        st.tuples(st.just("quarantine"), st.integers(0, 1 << 16)),
        st.tuples(st.just("cancel"), st.integers(0, 1 << 16)),
    ),
    max_size=40,
)


@given(steps)
def test_grants_are_whole_and_in_turn_and_nothing_is_lost(plan: list[tuple[object, ...]]) -> None:
    asyncio.run(_run_plan(plan))


async def _run_plan(plan: list[tuple[object, ...]]) -> None:
    memory = LandingMemory(128 * UNIT)
    grants: list[list[Segment]] = []
    every: list[Segment] = []
    waiting: dict[Share, list[asyncio.Task[list[Segment] | None]]] = {share: [] for share in Share}

    async def settle() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        for tasks in waiting.values():
            done = [task.done() for task in tasks]
            assert done == sorted(done, reverse=True), "nobody was served before who came earlier"
            while tasks and tasks[0].done():
                took(tasks.pop(0).result())

    def took(segments: list[Segment] | None) -> None:
        assert segments is not None
        grants.append(segments)
        every.extend(segments)

    for step in plan:
        kind = step[0]
        if kind == "grant":
            _, share, objects, count = step
            assert isinstance(share, Share) and isinstance(objects, int) and isinstance(count, int)
            sizes = [(objects * UNIT - 7, count)]
            task = asyncio.ensure_future(memory.grant(sizes, share))
            await asyncio.sleep(0)
            if memory.cost(sizes) > memory.limit(share):
                assert await task is None, "what can never fit is refused at once"
            elif task.done():
                assert not waiting[share], "nobody is served before who waits"
                segments = task.result()
                assert segments is not None
                assert [segment.nbytes for segment in segments] == [objects * UNIT - 7] * count
                took(segments)
            else:
                waiting[share].append(task)
        elif kind == "cancel":
            tasks = [task for queue in waiting.values() for task in queue]
            if tasks:
                task = tasks[int(str(step[1])) % len(tasks)]
                task.cancel()
                await asyncio.wait([task])
                for queue in waiting.values():
                    if task in queue:
                        queue.remove(task)
                assert task.cancelled()
        elif grants:
            index = int(str(step[1])) % len(grants)
            if kind == "release":
                for segment in grants.pop(index):
                    memory.release(segment)
            else:
                for segment in grants[index]:
                    if segment.state is not SegmentState.QUARANTINED:
                        memory.quarantine(segment, "owner")
        await settle()
        check_memory(memory, every)
        for share, waiters in memory._queues.items():
            assert len(waiters) == len(waiting[share])
            if waiters and memory._fits(waiters[0].total, share):
                longest = max(length for arena in memory.arenas for length in [0, *arena._lengths])
                free = sum(arena.free_bytes for arena in memory.arenas)
                size = waiters[0].sizes[0][0]
                assert longest < size or free < waiters[0].total, "the first in the queue waits although it fits"
    for segments in grants:
        for segment in segments:
            memory.release(segment)
    await settle()
    while any(waiting.values()) or grants:
        for segment in every:
            if segment.state is not SegmentState.FREE:
                memory.release(segment)
        grants.clear()
        await settle()
    for segment in every:
        if segment.state is not SegmentState.FREE:
            memory.release(segment)
    check_memory(memory, every)
    assert memory.statistics().in_use == memory.statistics().quarantined == memory.statistics().waiting == 0


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5)), min_size=1, max_size=6))
def test_segments_come_in_the_order_of_the_sizes_and_do_not_overlap(sizes: list[tuple[int, int]]) -> None:
    memory = LandingMemory(1 << 16)
    assume(memory.cost(sizes) <= memory.limit(Share.STREAMING))
    segments = memory.try_grant(sizes, Share.STREAMING)
    assert segments is not None
    assert [each.nbytes for each in segments] == [size for size, count in sizes for _ in range(count)]
    assert all(each.pointer % ALIGNMENT == 0 for each in segments)
    for index, segment in enumerate(segments):
        segment.memory[:] = index
    assert all((each.memory == index).all() for index, each in enumerate(segments))


def test_equal_objects_lie_side_by_side_where_the_memory_allows_it() -> None:
    memory = LandingMemory(1 << 16)
    segments = memory.try_grant([(100, 8)], Share.STREAMING)
    assert segments is not None
    assert [b.offset - a.offset for a, b in zip(segments, segments[1:], strict=False)] == [128] * 7


@pytest.mark.asyncio
async def test_a_large_grant_is_not_overtaken_by_small_ones() -> None:
    memory = LandingMemory(64 * UNIT)
    first = memory.try_grant([(UNIT, 50)], Share.STREAMING)
    assert first is not None
    served: list[str] = []

    async def ask(name: str, count: int) -> None:
        await memory.grant([(UNIT, count)], Share.STREAMING)
        served.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "large", 50)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(ask, "small", 1)
        await anyio.wait_all_tasks_blocked()
        assert served == []
        for segment in first:
            memory.release(segment)
        await anyio.wait_all_tasks_blocked()
        assert served == ["large", "small"]


@pytest.mark.asyncio
async def test_a_cancelled_wait_lets_the_next_one_go_on() -> None:
    memory = LandingMemory(64 * UNIT)
    assert memory.try_grant([(UNIT, 30)], Share.STREAMING) is not None
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def large() -> None:
            with scope:
                await memory.grant([(UNIT, 50)], Share.STREAMING)

        granted = anyio.Event()

        async def small() -> None:
            assert await memory.grant([(UNIT, 20)], Share.STREAMING) is not None
            granted.set()

        tasks.start_soon(large)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(small)
        await anyio.wait_all_tasks_blocked()
        assert not granted.is_set()
        scope.cancel()
        await granted.wait()
    assert memory.statistics().waiting == 0


def test_quarantine_is_replaced_up_to_half_and_sheds_beyond() -> None:
    memory = LandingMemory(64 * UNIT * 64)
    capacity = memory.capacity
    size = capacity // 16
    held = memory.try_grant([(size, 14)], Share.STREAMING)
    assert held is not None
    retired: list[Arena] = []
    memory._retire = retired.append
    for count, segment in enumerate(held, start=1):
        memory.quarantine(segment, f"owner{count % 7}")
        assert memory.sheds == (count * size > capacity // 2)
        lacking = memory.missing_replacement()
        fresh = sum(arena.nbytes for arena in memory.arenas[1:])
        assert fresh + lacking <= capacity // 2 + size
        if lacking:
            memory.add_arena(Arena(lacking, pinned=False))
        assert not memory.missing_replacement()
    for count in range(7):
        assert memory.refuses(f"owner{count}") == (memory.quarantined(f"owner{count}") > capacity // 8)
    for segment in held:
        memory.release(segment)
    assert memory.statistics().replaced == 0
    assert len(memory.arenas) == 1 and retired
    assert memory.statistics().quarantined_peak == 14 * size


def test_a_double_release_is_a_bug_and_says_so() -> None:
    memory = LandingMemory(1 << 16)
    granted = memory.try_grant([(10, 1)], Share.SAVE)
    assert granted is not None
    memory.release(granted[0])
    with pytest.raises(RuntimeError, match="released twice"):
        memory.release(granted[0])


def test_kept_bytes_are_reclaimed_before_anybody_waits() -> None:
    kept: list[Segment] = []

    def reclaim(nbytes: int) -> None:
        while kept and nbytes > 0:
            segment = kept.pop(0)
            nbytes -= segment.reserved
            memory.release(segment)

    memory = LandingMemory(64 * UNIT, reclaim=reclaim)
    kept += memory.try_grant([(UNIT, 40)], Share.PREFETCH) or []
    assert len(kept) == 40
    assert memory.try_grant([(UNIT, 50)], Share.STREAMING) is not None


@pytest.mark.asyncio
async def test_everybody_who_waits_for_the_quarantine_to_end_is_told() -> None:
    memory = LandingMemory(64 * UNIT)
    for _ in range(2):  # and again the next time
        segments = memory.try_grant([(UNIT, 2)], Share.STREAMING)
        assert segments is not None
        for segment in segments:
            segment.state = SegmentState.IN_FLIGHT
            memory.quarantine(segment, "owner")
        async with anyio.create_task_group() as tasks:
            for segment in segments:
                for _ in range(2):
                    tasks.start_soon(memory.wait_none_quarantined)
                await anyio.wait_all_tasks_blocked()
                memory.release(segment)
        await memory.wait_none_quarantined()


@pytest.mark.asyncio
async def test_no_share_passes_its_limit_by_what_was_freed_for_it_and_granted_to_others() -> None:
    """Bytes enough are free, but not side by side; what is freed then serves first who waited."""
    kept: list[Segment] = []

    def reclaim(nbytes: int) -> None:
        while kept and nbytes > 0:
            segment = kept.pop(0)
            nbytes -= segment.reserved
            memory.release(segment)

    def taken(units: int, share: Share) -> Segment:
        segments = memory.try_grant([(units * UNIT, 1)], share)
        assert segments is not None
        return segments[0]

    def loads() -> int:
        return memory._used[Share.STREAMING] + memory._used[Share.PREFETCH]

    memory = LandingMemory(64 * UNIT, reclaim=reclaim)
    gaps = []
    for used, share in zip((6, 6, 6, 6, 6, 15), (Share.SAVE,) * 4 + (Share.STREAMING,) * 2, strict=True):
        gaps.append(taken(2, share))
        taken(used, Share.STREAMING)
    gaps.append(taken(2, Share.STREAMING))
    between = taken(3, Share.STREAMING)
    gaps.append(taken(2, Share.STREAMING))
    assert memory.try_grant([(UNIT, 1)], Share.SAVE) is None, "full"
    for gap in gaps:  # eight of two
        memory.release(gap)
    sizes = [(2 * UNIT, 1), (2 * UNIT, 1)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(memory.grant, [*sizes, (UNIT, 1), (3 * UNIT, 1)], Share.PREFETCH)
        await anyio.wait_all_tasks_blocked()
        assert memory.statistics().waiting == 1
        kept.append(between)
        refused = memory.try_grant([*sizes, (4 * UNIT, 1)], Share.STREAMING)
        assert memory.statistics().waiting == 0, "who waited was served"
        assert loads() <= memory.limit(Share.STREAMING)
        assert refused is None
