"""One pool of device tensors, seen as pages of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from softload.transfer import PoolName

__all__ = ["BufferMeta", "Components", "ComponentSource", "DevicePool", "IndexMapper", "read_components"]

Components: TypeAlias = Sequence[Sequence[torch.Tensor]]
"""Buffers by component: `[[K of every layer], [V of every layer]]`, for example."""

ComponentSource: TypeAlias = Components | Callable[[], Components]
"""Components, or what answers with the engine's present ones, so that a rebuilt pool can be noticed."""

IndexMapper: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Translates slots of the index source into slots of the pool."""

BufferMeta: TypeAlias = tuple[int, int, int]
"""`(data_ptr, row_stride, page_bytes)` of a buffer, the last two in bytes."""


def read_components(source: ComponentSource) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The components that `source` has now."""
    return tuple(tuple(component) for component in (source() if callable(source) else source))


class DevicePool:
    """A zero-copy view over a named set of device tensors whose rows are addressed by slot.

    Buffers are numbered component after component ("flattened"): buffer `i` of component `c` is `c * n + i`, with `n`
    buffers in every component. The pool holds its tensors alive and never copies, reads or writes them.

    Args:
        name: the pool.
        index_source: the logical pool whose slots address this one, for example `PoolName.KV` for an indexer.
        components: tensors `[rows, ...]` by component, each row contiguous; or a callable that answers with them.
        layer_mapping: transfer layer -> index, or indices, of its buffers within each component. Layers may be absent;
            every buffer belongs to exactly one layer.
        page_size: tokens per page.
        rows_are_pages: whether one row holds a page; otherwise one row holds a token, and a page's rows are contiguous.
        packed: whether a page's buffers lie one after another in one object of `Layout.PAGE`; otherwise each component
            is an object of its own.
        index_mapper: translates slots of `index_source` into slots of this pool.
        num_draft_layers: draft layers packed behind the target: the last buffers of each component are theirs, in depth
            order, and depth `d` rides on transfer layer `d`: `layer_mapping={d: (d, n_target + d)}`.

    Raises:
        TypeError: something that should be a tensor is none.
        ValueError: a geometry that cannot be addressed page by page; the message names pool, expected and got.
    """

    __slots__ = (
        "_components",
        "_draft_buffers",
        "_layer_buffers",
        "_layer_of",
        "_pointers",
        "_source",
        "_tokens_of_page",
        "buffer_meta",
        "buffers",
        "index_mapper",
        "index_source",
        "layer_mapping",
        "name",
        "num_draft_layers",
        "num_pages",
        "packed",
        "page_size",
        "page_views",
        "rows_are_pages",
    )

    def __init__(
        self,
        name: PoolName,
        index_source: PoolName,
        components: ComponentSource,
        layer_mapping: Mapping[int, int | tuple[int, ...]],
        page_size: int,
        rows_are_pages: bool,
        packed: bool = True,
        index_mapper: IndexMapper | None = None,
        *,
        num_draft_layers: int = 0,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"pool {name}: expected a page size of at least 1 token, got {page_size}")
        self.name = PoolName(name)
        self.index_source = PoolName(index_source)
        self.page_size = page_size
        self.rows_are_pages = rows_are_pages
        self.packed = packed
        self.index_mapper = index_mapper
        self.num_draft_layers = num_draft_layers
        self._source = components
        self._tokens_of_page = np.arange(page_size)
        self._components = read_components(components)
        self._check_components()
        self.buffers: tuple[torch.Tensor, ...] = tuple(buffer for component in self._components for buffer in component)
        for index in range(len(self.buffers)):
            self._check_buffer(index)
        self._pointers = tuple(buffer.data_ptr() for buffer in self.buffers)
        self.buffer_meta: tuple[tuple[BufferMeta, ...], ...] = tuple(
            tuple(self._meta(buffer) for buffer in component) for component in self._components
        )
        self.num_pages: int = min(buffer.shape[0] for buffer in self.buffers) // self._rows_per_page
        self.page_views: tuple[torch.Tensor, ...] = tuple(self._page_view(buffer) for buffer in self.buffers)
        self.layer_mapping: Mapping[int, tuple[int, ...]] = MappingProxyType(
            {
                layer: (indices,) if isinstance(indices, int) else tuple(indices)
                for layer, indices in sorted(layer_mapping.items())
            }
        )
        self._check_mapping()
        self._check_draft()
        self._layer_buffers = {
            layer: self._flatten(index for index in indices if index < self._target_count)
            for layer, indices in self.layer_mapping.items()
        }
        self._draft_buffers = tuple(self._flatten((self._target_count + d,)) for d in range(num_draft_layers))
        self._layer_of = {
            buffer: layer for layer, indices in self.layer_mapping.items() for buffer in self._flatten(indices)
        }

    def __repr__(self) -> str:
        shape = f"{len(self._components)}x{len(self._components[0])} buffers of {self.num_pages} pages"
        draft = f", {self.num_draft_layers} of them draft" if self.num_draft_layers else ""
        return f"<DevicePool {self.name} from {self.index_source}: {shape}{draft}, page {self.page_size}>"

    @property
    def components(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The tensors as they were when the pool was made, by component."""
        return self._components

    @property
    def component_source(self) -> ComponentSource:
        """What the tensors came from."""
        return self._source

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self.buffers[0].device

    @property
    def num_layers(self) -> int:
        """Transfer layers up to the last one that has a buffer here."""
        return max(self.layer_mapping) + 1

    def page_bytes(self, buffer_index: int) -> int:
        """One page's bytes in the buffer with this flattened index."""
        return self._meta(self.buffers[buffer_index])[2]

    def layer_buffers(self, layer: int) -> tuple[int, ...]:
        """Flattened indices of a transfer layer's own buffers, component after component; a packed draft's excluded."""
        return self._layer_buffers.get(layer, ())

    def draft_buffers(self, depth: int) -> tuple[int, ...]:
        """Flattened indices of the packed draft's buffers at `depth`, component after component."""
        return self._draft_buffers[depth]

    def layer_of(self, buffer_index: int) -> int:
        """The transfer layer that a buffer belongs to; for a packed draft's buffer the layer that it rides on."""
        return self._layer_of[buffer_index]

    def is_draft_buffer(self, buffer_index: int) -> bool:
        """Whether the buffer is a draft model's, packed here or of a draft pool."""
        return self.name.is_draft or buffer_index % len(self._components[0]) >= self._target_count

    def translate(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of `index_source` as slots of this pool."""
        return slots if self.index_mapper is None else self.index_mapper(slots)

    def rows(self, slots: torch.Tensor, pages: int) -> npt.NDArray[np.int64]:
        """Where pages lie: their rows in `page_views`.

        Args:
            slots: integer tensor on any device: token slots `[pages * page_size]`, whole and aligned pages; or, where
                one row holds a page, the rows themselves, `[pages]`.
            pages: how many pages are meant.

        Returns:
            int64 array `[pages]`, a copy.

        Raises:
            ValueError: another number of slots, a page that is not aligned or not contiguous, or a row out of range.
        """
        if slots.dim() != 1 or slots.dtype is torch.bool or slots.is_floating_point() or slots.is_complex():
            raise ValueError(
                f"pool {self.name}: expected one-dimensional integer slots, got {slots.dtype} of {tuple(slots.shape)}"
            )
        host: npt.NDArray[np.int64] = slots.detach().to(device="cpu", dtype=torch.int64).numpy()
        if self.rows_are_pages and host.size == pages:
            rows = host.copy()
        elif host.size == pages * self.page_size:
            rows = self._page_rows(host.reshape(pages, self.page_size))
        else:
            rows_too = f" or {pages} rows" if self.rows_are_pages else ""
            raise ValueError(
                f"pool {self.name}: expected {pages * self.page_size} token slots{rows_too} "
                f"for {pages} pages of {self.page_size} tokens, got {host.size} slots"
            )
        self.check_rows(rows)
        return rows

    def check_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """Raise `ValueError` unless all of them are rows of `page_views`."""
        if rows.size and not (0 <= rows.min() and rows.max() < self.num_pages):
            page = int(((rows < 0) | (rows >= self.num_pages)).argmax())
            raise ValueError(
                f"pool {self.name}: expected page rows in [0, {self.num_pages}), got {rows[page]} for page {page}"
            )

    def check_alive(self) -> None:
        """Make sure that the addresses handed out are still the engine's buffers.

        Raises:
            RuntimeError: a buffer has moved, or the engine has others now: the pool must be made again.
        """
        of_engine = [buffer for component in read_components(self._source) for buffer in component]
        now = tuple(map(torch.Tensor.data_ptr, of_engine))
        if now == self._pointers == tuple(map(torch.Tensor.data_ptr, self.buffers)):
            return
        for index, (buffer, pointer) in enumerate(zip(self.buffers, self._pointers, strict=True)):
            if buffer.data_ptr() != pointer:
                raise RuntimeError(
                    f"pool {self.name}: buffer {index} has moved: expected address {pointer:#x}, "
                    f"got {buffer.data_ptr():#x}; make the pool again"
                )
        if len(now) != len(self._pointers):
            raise RuntimeError(
                f"pool {self.name}: the engine's pool was rebuilt: expected {len(self._pointers)} buffers, "
                f"got {len(now)}; make the pool again"
            )
        for index, (expected, got) in enumerate(zip(self._pointers, now, strict=True)):
            if got != expected:
                raise RuntimeError(
                    f"pool {self.name}: the engine's pool was rebuilt: expected buffer {index} at {expected:#x}, "
                    f"got {got:#x}; make the pool again"
                )

    def geometry(self, *, draft: bool) -> str:
        """Stable text of all that decides what the stored bytes mean; the pool's size and addresses are no part of it.

        Args:
            draft: whether to describe the draft's buffers, or all others.
        """
        chosen = [index for index in range(len(self.buffers)) if self.is_draft_buffer(index) is draft]
        buffers = ",".join(
            f"{self._layer_of[index]}:{str(self.buffers[index].dtype).removeprefix('torch.')}"
            f"{'x'.join(map(str, self.buffers[index].shape[1:])) or '1'}:{self.page_bytes(index)}"
            for index in chosen
        )
        return (
            f"{self.name}<{self.index_source}|page={self.page_size}|rows={'page' if self.rows_are_pages else 'token'}"
            f"|packed={int(self.packed)}|components={len(self._components)}|{buffers}"
        )

    @property
    def _rows_per_page(self) -> int:
        return 1 if self.rows_are_pages else self.page_size

    @property
    def _target_count(self) -> int:
        """Buffers of each component that are not a packed draft's."""
        return len(self._components[0]) - self.num_draft_layers

    def _flatten(self, indices: Iterable[int]) -> tuple[int, ...]:
        chosen = tuple(indices)
        count = len(self._components[0])
        return tuple(c * count + index for c in range(len(self._components)) for index in chosen)

    def _meta(self, buffer: torch.Tensor) -> BufferMeta:
        row_bytes = buffer.shape[1:].numel() * buffer.element_size()
        return buffer.data_ptr(), buffer.stride(0) * buffer.element_size(), row_bytes * self._rows_per_page

    def _page_view(self, buffer: torch.Tensor) -> torch.Tensor:
        rows, elements = buffer.shape[0], buffer.shape[1:].numel()
        stride = buffer.stride(0) if rows > 1 else elements
        flat = buffer.detach().as_strided((rows, elements), (stride, 1), buffer.storage_offset()).view(torch.uint8)
        if not self.rows_are_pages and self.page_size > 1:
            flat = flat[: self.num_pages * self.page_size].view(self.num_pages, -1)
        return flat[: self.num_pages]

    def _page_rows(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        starts = tokens[:, 0]
        rows: npt.NDArray[np.int64] = starts // self.page_size
        if (tokens == (rows * self.page_size)[:, None] + self._tokens_of_page).all():  # as a rule
            return rows
        misaligned = starts % self.page_size != 0
        if misaligned.any():
            page = int(misaligned.argmax())
            raise ValueError(
                f"pool {self.name}: expected page {page} to start at a multiple of {self.page_size}, "
                f"got slot {starts[page]}"
            )
        broken = tokens != starts[:, None] + self._tokens_of_page
        page, token = (int(index) for index in np.unravel_index(int(broken.argmax()), broken.shape))
        raise ValueError(
            f"pool {self.name}: expected contiguous slots within page {page}, "
            f"got {tokens[page, token]} at token {token} of the page that starts at {starts[page]}"
        )

    def _check_components(self) -> None:
        if not self._components:
            raise ValueError(f"pool {self.name}: expected at least one component, got none")
        counts = [len(component) for component in self._components]
        if 0 in counts:
            raise ValueError(f"pool {self.name}: expected buffers in every component, got none in {counts.index(0)}")
        if len(set(counts)) > 1:
            raise ValueError(f"pool {self.name}: expected equally many buffers in every component, got {counts}")

    def _check_buffer(self, index: int) -> None:
        buffer, where = self.buffers[index], f"pool {self.name}: buffer {index}"
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"{where}: expected a torch.Tensor, got {type(buffer).__name__}")
        if buffer.device != self.device:
            raise ValueError(f"{where}: expected all buffers on {self.device}, got {buffer.device}")
        if buffer.dim() == 0 or buffer.numel() == 0:
            raise ValueError(f"{where}: expected rows with bytes, got shape {tuple(buffer.shape)}")
        if buffer.shape[0] < self._rows_per_page:
            raise ValueError(
                f"{where}: expected rows for at least one page of {self.page_size} tokens, got {buffer.shape[0]} rows"
            )
        if not buffer[0].is_contiguous():
            raise ValueError(
                f"{where}: expected every row to be contiguous, "
                f"got shape {tuple(buffer.shape)} with strides {buffer.stride()}"
            )
        elements, stride = buffer.shape[1:].numel(), buffer.stride(0)
        if buffer.shape[0] > 1 and stride < elements:
            raise ValueError(f"{where}: expected rows that do not overlap, got {elements} elements every {stride}")
        if self._rows_per_page > 1 and stride != elements:
            raise ValueError(
                f"{where}: expected the {self.page_size} rows of a page to be contiguous, "
                f"got rows of {elements} elements every {stride}"
            )

    def _check_mapping(self) -> None:
        count = len(self._components[0])
        owner: dict[int, int] = {}
        for layer, indices in self.layer_mapping.items():
            if layer < 0:
                raise ValueError(f"pool {self.name}: expected transfer layers from 0, got {layer}")
            if not indices:
                raise ValueError(
                    f"pool {self.name}: expected buffers for transfer layer {layer}, got none; leave it out"
                )
            for index in indices:
                if not 0 <= index < count:
                    raise ValueError(
                        f"pool {self.name}: layer {layer}: expected buffer indices in [0, {count}), got {index}"
                    )
                if index in owner:
                    raise ValueError(
                        f"pool {self.name}: expected every buffer in one transfer layer, "
                        f"got buffer {index} in layers {owner[index]} and {layer}"
                    )
                owner[index] = layer
        unmapped = [index for index in range(count) if index not in owner]
        if unmapped:
            raise ValueError(f"pool {self.name}: expected a transfer layer for every buffer, got none for {unmapped}")

    def _check_draft(self) -> None:
        draft, count = self.num_draft_layers, len(self._components[0])
        if draft == 0:
            return
        if self.name.is_draft:
            raise ValueError(f"pool {self.name}: expected no packed draft in a draft pool, got {draft} layers")
        if not 0 < draft < count:
            raise ValueError(
                f"pool {self.name}: expected 0 to {count - 1} packed draft layers among {count} buffers, got {draft}"
            )
        layers = sum(any(index < self._target_count for index in indices) for indices in self.layer_mapping.values())
        if draft > layers:
            raise ValueError(
                f"pool {self.name}: expected at most as many packed draft layers as target layers ({layers}), "
                f"got {draft}"
            )
        for depth in range(draft):
            index = self._target_count + depth
            got = next(layer for layer, indices in self.layer_mapping.items() if index in indices)
            if got != depth:
                raise ValueError(
                    f"pool {self.name}: expected draft depth {depth} (buffer {index}) on transfer layer {depth}, "
                    f"got it on layer {got}"
                )
