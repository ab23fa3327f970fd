"""Small pools with recognisable bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from softload.geometry import DevicePool
from softload.transfer import PoolName

PoolFactory = Callable[..., DevicePool]


@pytest.fixture
def make_pool() -> PoolFactory:
    """Makes pools of float16 buffers `[rows, width]`, one width per buffer of a component."""

    def make(
        name: PoolName = PoolName.KV,
        index_source: PoolName = PoolName.KV,
        *,
        widths: Iterable[int] = (4, 4),
        num_components: int = 1,
        layer_mapping: Mapping[int, int | tuple[int, ...]] | None = None,
        page_size: int = 4,
        pages: int = 8,
        rows_are_pages: bool = False,
        **options: Any,
    ) -> DevicePool:
        widths = tuple(widths)
        rows = pages if rows_are_pages else pages * page_size
        components = [
            [torch.zeros(rows, width, dtype=torch.float16) for width in widths] for _ in range(num_components)
        ]
        mapping = {layer: layer for layer in range(len(widths))} if layer_mapping is None else layer_mapping
        return DevicePool(name, index_source, components, mapping, page_size, rows_are_pages, **options)

    return make
