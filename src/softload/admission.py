"""Revalidating what is there right before it is read: where every object is, and which of them may be read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from softload.callbacks import tell_loop
from softload.config import Layout
from softload.context import Context
from softload.health import Permit
from softload.outcomes import PageStatus
from softload.planning import Column
from softload.protocols import Descriptor
from softload.questions import MOST_OBJECTS
from softload.transfer import HitPolicy
from softload.unit_pages import UnitPages, Wanted

__all__ = ["Answers", "Endpoints", "Steps", "ask_again", "ask_descriptors", "first_columns", "readable", "revalidate"]

Answers = Mapping[str, Descriptor | PageStatus | None]
"""Per object key: where it is, or why it is not; ``None`` where its bytes are here or on their way already."""

Endpoints = dict[str, PageStatus | Permit]
"""Per endpoint of one admission: leave to read there, or why not."""

_ASKED_APART = 128
"""Objects of an admission from which on those of the first layers are asked for apart: a millisecond of waiting."""

_REST_AT_A_TIME = 128
"""Objects in one question for the others, once all are known to be there: the first layers are read and copied
meanwhile, and want the interpreter.
"""

_UNREADABLE = frozenset(
    {PageStatus.NO_MEMORY_REPLICA, PageStatus.NOT_READY, PageStatus.WRONG_SIZE, PageStatus.MALFORMED}
)
"""What may exist and cannot be read, or is not what it must be."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What of an admission is told before all answers are there; nothing where some objects are special.

    To know that an object is there takes a tenth of what it takes to know where, and what it is.

    Args:
        ahead: of the columns, the first ones that are asked for before the others.
        on_ahead: told where these are, on the loop.
        on_there: told, on the loop, where all are there and leased; ``None`` where that is not enough.
        there_first: whether to find that out before it is asked where the first ones are, or else after it.
        before_rest: awaited, in the latter case, before it is asked where the others are.
    """

    ahead: int
    on_ahead: Callable[[Answers], object]
    on_there: Callable[[], object] | None
    there_first: bool
    before_rest: Callable[[], Awaitable[None]]


async def ask_descriptors(
    context: Context, columns: Sequence[Column], until: float, steps: Steps | None = None
) -> Answers:
    """Revalidate objects: all that are neither here, nor on their way, nor known to be bad.

    Args:
        context: the loader's parts.
        columns: the objects.
        until: when it is too late for an answer.
        steps: who is told of some of them before.
    """
    ask = [key for column in columns for key in column.keys]
    answers: dict[str, Descriptor | PageStatus | None] = dict.fromkeys(ask, PageStatus.NOT_FOUND)
    reader, negative = context.reader, context.health.negative
    if len(answers) < len(ask) or reader.knows_any(answers) or negative.knows_any(answers):  # else none is special
        ask = []
        for key in answers:
            if reader.find(key) is not None:
                answers[key] = None
            elif key in negative:
                answers[key] = PageStatus.SUPPRESSED
            else:
                ask.append(key)
    if ask:
        if len(ask) < _ASKED_APART:  # steps would not be worth it
            found = await context.ask_descriptors(ask, until)
        else:
            is_simple = len(ask) == len(answers)
            found = await _ask_in_slices(context, columns, ask, until, steps if is_simple else None)
        answers.update(zip(ask, found, strict=True))
        refuted = zip(ask, found, strict=True) if PageStatus in set(map(type, found)) else ()
        for key, answer in refuted:
            # Plain absence is no news; a key that a lookup found and that is gone is a stale hit.
            if answer is PageStatus.NO_MEMORY_REPLICA or (answer is PageStatus.NOT_FOUND and key in context.promised):
                context.health.negative.add(key, answer)
    return answers


async def ask_again(context: Context, keys: list[str], until: float) -> Answers:
    """Where objects are now that were revalidated before: the answer to a question asked after this was called.

    Args:
        context: the loader's parts.
        keys: the objects, each once.
        until: when it is too late for an answer.
    """
    if len(keys) < _ASKED_APART:
        found = await context.ask_descriptors(keys, until)
    else:
        found = await _ask_in_slices(context, (), keys, until, None)
    return dict(zip(keys, found, strict=True))


async def _ask_in_slices(
    context: Context, columns: Sequence[Column], keys: list[str], until: float, steps: Steps | None
) -> list[Descriptor | PageStatus]:
    """One call after the other on one lane; where all are there, the others' follow later."""
    loop = asyncio.get_running_loop()
    count = sum(len(column.keys) for column in columns[: steps.ahead]) if steps is not None else 0
    first, rest = keys[:count], keys[count:]
    is_wanted = True

    def ask(some: list[str], at_a_time: int = MOST_OBJECTS) -> list[Descriptor | PageStatus]:
        found: list[Descriptor | PageStatus] = []
        for start in range(0, len(some), at_a_time):
            if not is_wanted:  # given up since: the lane, and the master, are there for others
                return found
            found += context.describe(some[start : start + at_a_time])
        return found

    def are_there(some: list[str]) -> bool:
        if steps is None or steps.on_there is None or not is_wanted:
            return False
        return context.calls.exists(some).count(True) == len(some) and tell_loop(loop, steps.on_there)

    def begin() -> list[Descriptor | PageStatus]:
        if steps is None or not first:
            return ask(keys)
        if steps.there_first:
            are_there(keys)
        found = ask(first)
        if is_wanted:
            tell_loop(loop, steps.on_ahead, dict(zip(first, found, strict=True)))
        may_wait = not steps.there_first and are_there(rest)
        return found if may_wait else found + ask(rest)

    try:
        found = await context.ask_master(begin, len(keys), until)
        if steps is not None and len(found) < len(keys):
            await steps.before_rest()
            found += await context.ask_master(partial(ask, rest, min(_REST_AT_A_TIME, MOST_OBJECTS)), len(rest), until)
        return found
    finally:
        is_wanted = False


def _all_readable(
    context: Context, column: Column, answers: Sequence[Descriptor | PageStatus | None], endpoints: Endpoints
) -> bool:
    """The common case, without a look at each: all are there, whole, at endpoints that may be read from."""
    size = column.spec.size
    found = [answer for answer in answers if type(answer) is Descriptor]
    if len(found) < len(answers):
        return False
    sizes, at, _ = zip(*found, strict=True) if found else ((), (), ())
    if sizes.count(size) < len(sizes):
        return False
    for endpoint in set(at):
        if endpoint not in endpoints:
            endpoints[endpoint] = _ask_endpoint(context, endpoint)
        if isinstance(endpoints[endpoint], PageStatus):
            return False
    return True


def first_columns(context: Context, wants: UnitPages) -> list[Column]:
    """What of a unit may be read ahead of its admission: the objects of the first layers; none where it is not simple.

    It is where every object has the one size that it must have, and a cut takes nothing but pages from the end. Where
    what is likely to be lent can only be admitted as a whole, one question for all of it is answered sooner than two.
    """
    if context.config.layout is not Layout.GROUPED or not wants.columns:
        return []
    if context.lender.lent_all and not context.admits_early:
        return []
    if any(component.hit_policy is not HitPolicy.ALL_PAGES for component in wants.target):
        return []
    return [column for column in wants.columns if column.spec.group == wants.columns[0].spec.group]


def readable(
    context: Context, columns: Iterable[Column], answers: Answers, endpoints: Endpoints
) -> dict[str, Descriptor | None] | None:
    """Where the objects of whole columns are, if all of them can be read."""
    found: dict[str, Descriptor | None] = {}
    for column in columns:
        every = [answers[key] for key in column.keys]
        if not _all_readable(context, column, every, endpoints):
            return None
        found.update(zip(column.keys, every, strict=True))  # type: ignore[arg-type]  # descriptors, all
    return found


def revalidate(
    context: Context, wants: UnitPages, answers: Answers, endpoints: Endpoints
) -> dict[str, Descriptor | None]:
    """Mark what of a unit cannot be read.

    Args:
        context: the loader's parts.
        wants: the unit's pages; `recut` draws the conclusion.
        answers: per object key.
        endpoints: what was decided about endpoints so far in this admission; added to.

    Returns:
        where the others are, as far as that is known.
    """
    descriptors: dict[str, Descriptor | None] = {}
    for column in wants.all_columns():
        every = [answers[key] for key in column.keys]
        if _all_readable(context, column, every, endpoints):
            descriptors.update(zip(column.keys, every, strict=True))  # type: ignore[arg-type]  # descriptors, all
            continue
        for page, key in enumerate(column.keys):
            found = _revalidated(context, wants, Wanted(column, page), answers[key], endpoints)
            if isinstance(found, PageStatus):
                wants.mark_bad(column, page, found)
                if found in _UNREADABLE:
                    context.health.doubt_existence()
            else:
                descriptors[key] = found
    return descriptors


def _revalidated(
    context: Context, wants: UnitPages, wanted: Wanted, answer: Descriptor | PageStatus | None, endpoints: Endpoints
) -> Descriptor | PageStatus | None:
    key, spec = wanted.key, wanted.column.spec
    if isinstance(answer, PageStatus):
        return answer
    if answer is None:
        fetch = context.reader.find(key)
        if fetch is None and spec.size != spec.target_size:
            return PageStatus.SHED  # it has gone since, and how large it is nobody has said
        size = fetch.size if fetch is not None else spec.size
        answer = fetch.descriptors[fetch.keys.index(key)] if fetch is not None else None
    else:
        size = answer.size
        if answer.endpoint not in endpoints:
            endpoints[answer.endpoint] = _ask_endpoint(context, answer.endpoint)
        refused = endpoints[answer.endpoint]
        if isinstance(refused, PageStatus):
            context.health.refuse((key,), answer.endpoint, refused)
            return refused
    if size not in (spec.size, spec.target_size):
        return PageStatus.WRONG_SIZE
    if wants.draft_rides and size < spec.size:
        wants.mark_without_draft(wanted.column, wanted.page)
    return answer


def _ask_endpoint(context: Context, endpoint: str) -> PageStatus | Permit:
    if context.landing.refuses(endpoint):
        return PageStatus.SHED
    return context.health.endpoint(endpoint).allows() or PageStatus.SUPPRESSED
