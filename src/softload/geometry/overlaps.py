"""Whether buffers share bytes: then restoring a page of one would damage a page of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from softload.geometry.device_pool import DevicePool

__all__ = ["first_overlap"]


@dataclass(frozen=True, slots=True)
class _Span:
    """All pages of one buffer: `count` times `nbytes` bytes, every `stride` bytes from `start` on."""

    start: int
    stride: int
    nbytes: int
    count: int
    name: str

    @property
    def stop(self) -> int:
        return self.start + (self.count - 1) * self.stride + self.nbytes


def first_overlap(pools: Sequence[DevicePool]) -> tuple[str, str] | None:
    """Two buffers that share bytes, or ``None``.

    Buffers may be interleaved: some engines keep the layers of a page together.
    """
    spans = sorted((_span(pool, index) for pool in pools for index in range(len(pool.buffers))), key=lambda s: s.start)
    for tangle in _tangles(spans):
        if len(tangle) > 1 and not _is_interleaved(tangle):
            overlap = _overlap(tangle)
            if overlap is not None:
                return overlap
    return None


def _span(pool: DevicePool, index: int) -> _Span:
    view = pool.page_views[index]
    return _Span(view.data_ptr(), view.stride(0), view.shape[1], view.shape[0], f"pool {pool.name}, buffer {index}")


def _tangles(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Runs of spans, sorted by their start, of which each begins before all earlier ones have ended."""
    tangle: list[_Span] = []
    stop = 0
    for span in spans:
        if tangle and span.start >= stop:
            yield tangle
            tangle = []
        tangle.append(span)
        stop = max(stop, span.stop)
    if tangle:
        yield tangle


def _is_interleaved(tangle: Sequence[_Span]) -> bool:
    """Equal strides, and each at a place of its own within one."""
    stride = tangle[0].stride
    if any(span.stride != stride for span in tangle):
        return False
    phases = sorted(((span.start - tangle[0].start) % stride, span.nbytes) for span in tangle)
    ends = [phase + nbytes for phase, nbytes in phases]
    starts = [phase for phase, _ in phases[1:]] + [stride]
    return all(end <= start for end, start in zip(ends, starts, strict=True))


def _overlap(tangle: Sequence[_Span]) -> tuple[str, str] | None:
    """Page by page."""
    starts = np.concatenate([span.start + np.arange(span.count, dtype=np.int64) * span.stride for span in tangle])
    stops = starts + np.repeat([span.nbytes for span in tangle], [span.count for span in tangle])
    owners = np.repeat(np.arange(len(tangle)), [span.count for span in tangle])
    order = np.argsort(starts, kind="stable")
    starts, stops, owners = starts[order], stops[order], owners[order]
    clash = np.flatnonzero(np.maximum.accumulate(stops)[:-1] > starts[1:])
    if not clash.size:
        return None
    at = int(clash[0])
    return tangle[int(owners[np.argmax(stops[: at + 1])])].name, tangle[int(owners[at + 1])].name
