"""A seeded synthetic conversation trace, for when no trace file is at hand.

It follows the published statistics of the FAST'25 conversation trace: prompt and output lengths by their quantiles,
arrivals in bursts on a grid of 3 s, one system-prompt block (hash 0) that all requests share, and conversations whose
next turn extends the prompt of the last, some hundred requests later, so that an infinite cache would hit 38 % of the
full blocks (36.6 % of all blocks, the partial ones counted), half of the requests hit nothing but block 0, and small
caches hit little: 4.5, 21.1 and 35.5 % with 1,000, 10,000 and 50,000 blocks in a trace of full length.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from math import exp, log

from softload.replay.trace import BLOCK_TOKENS, TraceRequest

__all__ = ["HIT_RATE", "synthetic_trace"]

HIT_RATE = 0.366
"""Share of all blocks (partial ones included) that an infinite cache hits."""

_INPUT_QUANTILES = (
    (0.0, 891.0), (0.05, 901.0), (0.10, 964.0), (0.25, 2_306.0), (0.50, 6_909.0), (0.75, 15_367.0),
    (0.90, 27_367.0), (0.95, 39_550.0), (0.99, 85_401.0), (0.999, 121_300.0), (1.0, 126_195.0),
)  # fmt: skip
_OUTPUT_QUANTILES = (
    (0.0, 1.0), (0.05, 10.0), (0.10, 24.0), (0.25, 156.0), (0.50, 350.0), (0.75, 472.0),
    (0.90, 597.0), (0.95, 698.0), (0.99, 1_118.0), (1.0, 2_000.0),
)  # fmt: skip
_GRID_MS = 3_000.0
_MEAN_BURST = 10.2
_MAX_BURST = 28
_MAX_FOLLOW_UPS = 0.46
_OPEN_CONVERSATIONS = 6_000
_GAP_REQUESTS = 400.0
_GAP_SPREAD = 0.7
_GAP_WINDOW = 20


def synthetic_trace(requests: int, seed: int = 0) -> list[TraceRequest]:
    """Make a trace of `requests` requests; equal arguments make equal traces.

    Raises:
        ValueError: a negative number of requests.
    """
    if requests < 0:
        raise ValueError(f"requests: expected 0 or more, got {requests}")
    rng = random.Random(seed)
    trace: list[TraceRequest] = []
    conversations: list[tuple[int, tuple[int, ...]]] = []  # (tokens, full blocks), oldest first
    gap = min(_GAP_REQUESTS, requests / 5)  # short traces would end before the next turn
    next_hash = 1
    blocks = hits = follow_ups = 0
    timestamp, left_in_burst = 0.0, _burst(rng)
    for index in range(requests):
        if not left_in_burst:
            timestamp += _GRID_MS
            left_in_burst = _burst(rng)
        left_in_burst -= 1

        length = _quantile(rng.random(), _INPUT_QUANTILES)
        count = -(-length // BLOCK_TOKENS)
        # The share of follow-ups is steered by what was hit so far, so that short traces meet the rate as well.
        wanted = blocks and hits < HIT_RATE * blocks and follow_ups < _MAX_FOLLOW_UPS * index
        parent = _parent(conversations, length, gap, rng) if wanted else None
        if parent is None:
            prefix: tuple[int, ...] = (0,)
        else:
            prefix = conversations.pop(parent)[1]
            follow_ups += 1
        prefix = prefix[:count]
        fresh = count - len(prefix)
        hash_ids = prefix + tuple(range(next_hash, next_hash + fresh))
        next_hash += fresh
        full = hash_ids[: length // BLOCK_TOKENS]
        blocks += count
        hits += min(len(prefix), len(full)) if index else 0
        conversations.append((length, full))
        if len(conversations) > _OPEN_CONVERSATIONS:
            conversations.pop(0)
        trace.append(TraceRequest(index, timestamp, length, _quantile(rng.random(), _OUTPUT_QUANTILES), hash_ids))
    return trace


def _parent(
    conversations: list[tuple[int, tuple[int, ...]]], length: int, gap: float, rng: random.Random
) -> int | None:
    """A conversation that a prompt of `length` tokens may continue: the longest shorter one, about `gap` turns ago."""
    around = len(conversations) - round(rng.lognormvariate(log(gap), _GAP_SPREAD))
    best: int | None = None
    for position in range(max(around - _GAP_WINDOW, 0), min(around + _GAP_WINDOW, len(conversations))):
        tokens, full = conversations[position]
        if len(full) > 1 and tokens < length and (best is None or tokens > conversations[best][0]):
            best = position
    return best


def _quantile(share: float, table: tuple[tuple[float, float], ...]) -> int:
    """Interpolate a quantile table, linearly in the logarithm of the value."""
    upper = max(bisect_left(table, (share,)), 1)
    (low_share, low), (high_share, high) = table[upper - 1], table[upper]
    weight = (share - low_share) / (high_share - low_share)
    return round(exp(log(low) + weight * (log(high) - log(low))))


def _burst(rng: random.Random) -> int:
    return min(max(1, round(rng.gauss(_MEAN_BURST, 3.4))), _MAX_BURST)
