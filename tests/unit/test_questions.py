"""Questions for few objects that come in one turn of the loop are one call; each asker gets its own answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import anyio
import pytest

from softload import PageStatus
from softload.native_calls import CallGroup, NativeCall, RefusedError
from softload.protocols import Descriptor
from softload.questions import MOST_OBJECTS, Question, SmallQuestions

pytestmark = pytest.mark.asyncio


class Asked:
    """Answers with the key itself for an endpoint, and knows what was asked in which call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.group = CallGroup("asked", width=1, max_stuck=1)
        self.questions = SmallQuestions(self.group, self.descriptors)
        self.may_answer = threading.Event()
        self.may_answer.set()

    def descriptors(self, keys: Sequence[str]) -> list[Descriptor | PageStatus]:
        assert self.may_answer.wait(30)
        self.calls.append(list(keys))
        return [Descriptor(1, key, 0) for key in keys]

    async def ask(self, keys: Sequence[str]) -> list[str]:
        question, first = self.questions.add(keys)
        with question.asked():
            await question.returned.wait()
        if question.call.error is not None:
            raise question.call.error
        assert question.call.value is not None
        answers = question.call.value[first : first + len(keys)]
        return [answer.endpoint for answer in answers if isinstance(answer, Descriptor)]


def names(asker: int, count: int) -> list[str]:
    return [f"{asker}.{index}" for index in range(count)]


async def test_what_is_asked_in_one_turn_is_one_call_and_each_gets_its_own_answers() -> None:
    asked = Asked()
    answers: dict[int, list[str]] = {}

    async def asker(number: int) -> None:
        answers[number] = await asked.ask(names(number, number + 1))

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(asker, number)
    assert len(asked.calls) == 1
    assert answers == {number: names(number, number + 1) for number in range(5)}
    asked.group.close()


async def test_a_call_has_no_key_twice_and_no_more_than_so_many() -> None:
    asked = Asked()
    async with anyio.create_task_group() as tasks:
        for number in (0, 0, 1, 2):
            tasks.start_soon(asked.ask, names(number, MOST_OBJECTS // 2))
    assert sorted(len(keys) for keys in asked.calls) == [MOST_OBJECTS // 2, MOST_OBJECTS // 2, MOST_OBJECTS]
    assert all(len(set(keys)) == len(keys) for keys in asked.calls)
    asked.group.close()


async def test_who_leaves_before_it_was_asked_takes_nobody_along_and_the_last_one_the_call() -> None:
    asked = Asked()
    scopes = [anyio.CancelScope(), anyio.CancelScope()]
    answers: list[list[str]] = []

    async def asker(number: int) -> None:
        with scopes[number]:
            answers.append(await asked.ask(names(number, 2)))

    for leaving in (1, 2):
        async with anyio.create_task_group() as tasks:
            asked.may_answer.clear()
            tasks.start_soon(asked.ask, names(9, 1))  # holds the only lane
            await anyio.lowlevel.checkpoint()
            for number in range(2):
                tasks.start_soon(asker, number)
            await anyio.lowlevel.checkpoint()
            for scope in scopes[:leaving]:
                scope.cancel()
            await anyio.lowlevel.checkpoint()
            asked.may_answer.set()
        scopes[:] = [anyio.CancelScope(), anyio.CancelScope()]
        assert answers == [names(1, 2)]
    assert asked.group.statistics().queued == asked.group.statistics().running == 0
    asked.group.close()


async def test_all_who_asked_hear_that_there_is_no_thread_for_it() -> None:
    asked = Asked()
    asked.group.close()
    refused = 0

    async def asker(number: int) -> None:
        nonlocal refused
        with pytest.raises(RefusedError):
            await asked.ask(names(number, 2))
        refused += 1

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(asker, number)
    assert refused == 3


@pytest.mark.parametrize("answers", [[], [PageStatus.NOT_FOUND]], ids=["before it asked", "after it asked"])
async def test_what_was_given_up_before_it_asked_says_nothing_of_the_master(answers: list[PageStatus]) -> None:
    group = CallGroup("asked", width=1, max_stuck=1)
    may_answer, back = threading.Event(), anyio.Event()
    late: list[object] = []

    def ask() -> list[Descriptor | PageStatus]:
        assert may_answer.wait(30)
        return list(answers)

    question: Question[Descriptor] = Question(ask, lambda found, _seconds: late.append(found))
    group.submit(question.call)
    with question.asked():
        pass
    group.submit(NativeCall(lambda: None, lambda _: back.set(), priority=1.0))
    may_answer.set()
    await question.returned.wait()
    await back.wait()
    assert late == [answers][: len(answers)]
    group.close()
