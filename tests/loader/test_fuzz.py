"""A thousand answers that no store should give: never an exception, never an accepted bad page."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from softload import PageStatus, PutRefusal
from softload.protocols import Descriptor
from softload.testing import ScriptedStore

from .harness import MODE_IDS, MODES, eventually, keys, load, make_pools, opened, put, settle, store

pytestmark = pytest.mark.asyncio

READS = ("exists", "descriptors", "read", "session_start", "read_ranges", "session_end", "remove")
PUTS = ("put_start", "put_write", "put_end", "put_revoke")
VALUES: tuple[Any, ...] = (
    0, 1, -1, -600, -702, -704, -707, -800, -801, -900, 1 << 31, 1 << 63, -(1 << 63), True, False, None, 0.0, 1.5,
    float("nan"), "", "0", b"0", [], [0], {}, object(), Descriptor(1, "x"), Descriptor(-1, "memory"),
    Descriptor(1 << 60, "memory"), Descriptor("8", "memory"), Descriptor(True, "memory"),  # type: ignore[arg-type]
    Descriptor(1, []), Descriptor(1, None), Descriptor(1, "memory", -1), Descriptor(1, "memory", []),  # type: ignore[arg-type]
    *PageStatus, *PutRefusal,
)  # fmt: skip


def nonsense(dice: random.Random) -> Callable[[Any], Any]:
    """Turns a true answer into another: as a whole, or for single keys, in length, type, sign or value."""
    kind = dice.randrange(8)
    picks = [dice.choice(VALUES) for _ in range(64)]
    where = dice.random()

    def change(truth: Any) -> Any:
        if not isinstance(truth, Sequence):
            return picks[0]
        answers = list(truth)
        if kind == 0:
            return picks[0]
        if kind == 1:
            return answers[: int(where * len(answers))]
        if kind == 2:
            return [*answers, picks[0]]
        if kind == 3:
            raise dice.choice((RuntimeError("native"), SystemExit(1)))
        if kind == 4:
            return [picks[index % 64] for index in range(len(answers))]
        if kind == 5:
            return [-answer if type(answer) is int else picks[0] for answer in answers]
        if answers:
            index = int(where * len(answers))
            truth_there = answers[index]
            answers[index] = truth_there - 1 if kind == 6 and type(truth_there) is int else picks[0]
        return tuple(answers) if kind == 7 else answers

    return change


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
async def test_a_thousand_answers(mode: dict[str, str]) -> None:
    dice = random.Random(f"{mode}")
    pools = make_pools(pages=40, layers=3)
    scripted = ScriptedStore(store())
    given = 0
    round_number = 0
    while given < 350:
        scripted = ScriptedStore(store())
        async with opened(scripted, pools, **mode, deadline=5.0, save_deadline=5.0) as loader:
            await put(loader, pools, keys(8))
            for _ in range(6):
                round_number += 1
                name = f"r{round_number}"
                for method in (*READS, *PUTS):
                    scripted.script(method, *[nonsense(dice) for _ in range(dice.randrange(4))])
                given += scripted.pending
                assert (await loader.lookup(pools.unit(f"look{name}", keys(8)))).pages in range(9)
                pools.scramble(seed=round_number)
                outcome = (await load(loader, pools.unit(name, keys(8), range(8))))[name]
                pools.assert_restored(keys(outcome.restored_pages), range(outcome.restored_pages))
                pools.assert_rows_kept(range(8))
                async with loader.prefetch([pools.unit(f"p{name}", keys(8))]) as handle:
                    landed = (await handle.landed())[f"p{name}"]
                    placed = await handle.place([pools.unit(f"p{name}", keys(8)[:landed], range(8, 8 + landed))])
                    restored = placed.outcomes[f"p{name}"].restored_pages
                pools.assert_restored(keys(restored), range(8, 8 + restored))
                new = keys(3, f"new{name}_")
                pools.fill(new, range(20, 23))
                report = (await loader.save([pools.unit(f"s{name}", new, range(20, 23))])).outcomes[f"s{name}"]
                assert report.saved_pages in range(4)
                given -= scripted.pending
                for method in (*READS, *PUTS):
                    scripted._scripts[method].clear()
            # Calls for pages that were cut away may still be out.
            await eventually(lambda: not loader.statistics().stuck_threads)
            await settle(loader)
