"""The buffers of a layer on one rank: symmetric memory for its peers, scratch for itself."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from mok_ref.config import ROW_TILE, MoEConfig, is_int, shown
from mok_ref.dispatch import dispatch_forward
from mok_ref.heap.protocol import RankMismatch, is_closed
from mok_ref.mxfp8 import dequantize, num_blocks, quantize
from mok_ref.numerics import BFLOAT16, as_values, bf16_to_bits, to_float64
from mok_ref.ring import TokenRing
from mok_ref.schedule import Minibatch, Schedule
from mok_ref.timing import stage


def storage_dtype(config: MoEConfig) -> np.dtype:
    """How bf16 values rest in memory: 2-byte bits, or float64 for the oracle."""
    return np.dtype(np.float64 if config.arithmetic == "float64" else np.uint16)


def to_storage(config: MoEConfig, values: np.ndarray) -> np.ndarray:
    """bf16 values (or bits) as they rest in memory."""
    if config.arithmetic == "float64":
        return to_float64(as_values(values))
    if values.dtype in (BFLOAT16, np.uint16):
        return values.view(np.uint16)
    return bf16_to_bits(values)


def max_rows(config: MoEConfig, rank: int, max_tokens: int) -> int:
    """Rows a rank can receive at worst: every route of every rank, each segment padded."""
    routes = config.ep_size * max_tokens * config.top_k
    rows = routes + config.num_local_experts(rank) * (ROW_TILE - 1)
    return max(ROW_TILE, -(-rows // ROW_TILE) * ROW_TILE)


class TokenBuffer:
    """Token rows (x or dy) in symmetric memory, in the format they travel in.

    bf16: one buffer of bits. mxfp8: codes and scales, quantised once, by the owner; the rings hold
    codes and scales too.
    """

    def __init__(self, config: MoEConfig, heap: Any, prefix: str, max_tokens: int) -> None:
        self._config, self._heap = config, heap
        width = config.hidden_size
        quantised = config.dtype == "mxfp8" and config.arithmetic != "float64"
        columns = {prefix: (width, storage_dtype(config))}
        if quantised:
            columns = {
                f"{prefix}_codes": (width, np.dtype(np.uint8)),
                f"{prefix}_scales": (num_blocks(width), np.dtype(np.uint8)),
            }
        self._columns = columns
        self._quantised = quantised
        for name, (columns_, dtype) in columns.items():
            heap.alloc(name, (max_tokens, columns_), dtype)

    def publish(self, values: np.ndarray) -> None:
        """Write this rank's rows where its peers will pull them."""
        parts: tuple[np.ndarray, ...] = (to_storage(self._config, values),)
        if self._quantised:
            parts = quantize(values, self._config.scale_rule)
        for name, part in zip(self._columns, parts, strict=True):
            self._heap.peer(self._heap.rank, name)[: len(values)] = part

    def rings(self, capacity: int) -> list[TokenRing]:
        return [TokenRing(capacity, width, dtype) for width, dtype in self._columns.values()]

    @stage("pull")
    def pull(self, schedule: Schedule, batch: Minibatch, rings: list[TokenRing]) -> None:
        """Fill a minibatch's ring slots from the owners' memory."""
        heap, top_k = self._heap, self._config.top_k
        for name, ring in zip(self._columns, rings, strict=True):
            dispatch_forward(
                schedule,
                batch.rows,
                top_k,
                heap.rank,
                heap.size,
                partial(heap.peer, name=name),
                ring.claim(batch),
            )

    def values(self, rings: list[TokenRing], batch: Minibatch, rows: slice) -> np.ndarray:
        """Rows of a minibatch in the ring as the values a product sees."""
        parts = [ring.read(batch, rows) for ring in rings]
        return dequantize(*parts) if self._quantised else as_values(parts[0])

    def names(self) -> list[str]:
        return list(self._columns)


class Workspace:
    """All buffers of one layer on one rank; T may vary per call up to `max_tokens`.

    Collective: every rank makes it with the same config and the same max_tokens. A workspace holds
    one forward's state; the next forward invalidates contexts made before.
    On a device heap it is a `mok_ref.gpu.workspace.DeviceWorkspace`, which takes more options.
    max_saved_rows is a rank's own affair and changes no bit.
    Raises: ValueError naming the setting on which ranks disagree.
    """

    def __new__(cls, config: MoEConfig, heap: Any, *arguments: Any, **options: Any) -> Any:
        if heap.device == "cuda":
            from mok_ref.gpu.workspace import DeviceWorkspace

            return DeviceWorkspace(config, heap, *arguments, **options)
        return super().__new__(cls)

    def __init__(
        self, config: MoEConfig, heap: Any, max_tokens: int, max_saved_rows: int | None = None
    ) -> None:
        _check_sizes(config, max_tokens, max_saved_rows)
        self.config, self.heap, self.max_tokens = config, heap, int(max_tokens)
        self.max_saved_rows = None if max_saved_rows is None else int(max_saved_rows)
        self.generation = 0
        self.closed = False
        self._prefix = f"layer{_next_serial(heap)}"
        self._names: list[str] = []
        _require_same_settings(heap, self.name("settings"), config, self.max_tokens)
        slots = max_tokens * config.top_k
        bits = storage_dtype(config)
        real = np.dtype(np.float64 if config.arithmetic == "float64" else np.float32)
        self._alloc("step", (3,), np.int64)  # tokens; number of forwards, of the last backward's
        self._alloc("topk_ids", (max_tokens, config.top_k), np.int32)
        self._alloc("topk_weights", (max_tokens, config.top_k), real)
        self._alloc("slots", (slots, config.hidden_size), bits)
        self._alloc("d_topk_weights", (slots,), real)
        self.x = TokenBuffer(config, heap, self.name("x"), max_tokens)
        self.dy = TokenBuffer(config, heap, self.name("dy"), max_tokens)
        self._names += self.x.names() + self.dy.names()
        shared = config.shared_intermediate_size
        if shared:
            self._alloc("chain_in", (shared, config.hidden_size), real)
            self._alloc("chain_out", (config.hidden_size, shared), real)

    def _alloc(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.heap.alloc(self.name(name), shape, dtype)
        self._names.append(self.name(name))

    def name(self, name: str) -> str:
        """The heap name of one of this workspace's buffers."""
        return f"{self._prefix}/{name}"

    def mine(self, name: str) -> Any:
        return self.heap.peer(self.heap.rank, self.name(name))

    def peer(self, rank: int, name: str) -> Any:
        return self.heap.peer(rank, self.name(name))

    def publish_tokens(self, x: Any, topk_ids: Any, topk_weights: Any) -> None:
        """Make this rank's tokens and routes readable by its peers (a barrier must follow)."""
        num_tokens = len(x)
        self.generation += 1
        self.mine("step")[:2] = num_tokens, self.generation
        self.mine("topk_ids")[:num_tokens] = topk_ids
        self.mine("topk_weights")[:num_tokens] = topk_weights
        self.x.publish(x)

    def gather_routes(self) -> tuple[np.ndarray, np.ndarray]:
        """(token_counts (R,), topk_ids (N, K)) of the whole batch, pulled from all ranks."""
        ranks = range(self.heap.size)
        self.require_same_step("forward")
        counts = np.array([int(self.peer(r, "step")[0]) for r in ranks], np.int64)
        ids = [self.peer(r, "topk_ids")[: counts[r]] for r in ranks]
        return counts, np.concatenate(ids)

    def publish_gradient(self, dy: Any) -> None:
        """Make this rank's dy readable by its peers (a barrier must follow)."""
        self.mine("step")[2] = self.generation
        self.mine("d_topk_weights")[...] = 0  # +0 for slots without a route
        self.dy.publish(dy)

    def require_same_step(self, direction: str) -> None:
        """Refuse ranks that came into one step with different workspaces."""
        counter = {"forward": 1, "backward": 2}[direction]
        for peer in range(self.heap.size):
            theirs = int(self.peer(peer, "step")[counter])
            if theirs != self.generation:
                raise RankMismatch(
                    f"{direction} must take the same workspace on all ranks, got {self._prefix} in "
                    f"its step {self.generation} on rank {self.heap.rank} and in its step {theirs} "
                    f"on rank {peer}"
                )

    def row_weights(self, schedule: Schedule, rows: slice) -> np.ndarray:
        """Routing weight of each row, pulled from its owner; 0 for padding. float32."""
        peer_rank, peer_row = schedule.peer_rank[rows], schedule.peer_row[rows]
        weights = np.zeros(len(peer_rank), self.mine("topk_weights").dtype)
        for source in np.unique(peer_rank[peer_rank >= 0]):
            mine = peer_rank == source
            weights[mine] = self.peer(int(source), "topk_weights").ravel()[peer_row[mine]]
        return weights

    def close(self) -> None:
        """Give the symmetric memory back; collective. Closing the heap does it too."""
        if not (self.closed or is_closed(self.heap)):
            for name in self._names:
                self.heap.free(name)
        self.closed, self._names = True, []


class Lease:
    """Held by the context that a private workspace was made for: backward may still come."""


def private_workspace(config: MoEConfig, heap: Any, num_tokens: int) -> tuple[Workspace, Lease]:
    """A workspace that fits this call, the largest T of all ranks; collective.

    Workspaces of earlier calls whose contexts are gone on every rank, since nobody wanted their
    backward, are given back first. A rank may still hold what another has dropped, hence the
    exchange.
    """
    made: list[tuple[Workspace, Any]] = heap.__dict__.setdefault("_private_workspaces", [])
    made[:] = [(workspace, lease) for workspace, lease in made if not workspace.closed]
    gone = [lease() is None for _, lease in made]
    everyone = np.stack(_exchange(heap, "sizes", np.array([num_tokens, *gone], np.int64)))
    for (workspace, _), flags in zip(made, everyone[:, 1:].T, strict=True):
        if flags.all():
            workspace.close()
    workspace, lease = Workspace(config, heap, int(everyone[:, 0].max())), Lease()
    made.append((workspace, weakref.ref(lease)))
    return workspace, lease


def _exchange(heap: Any, name: str, mine: np.ndarray) -> list[np.ndarray]:
    """Every rank's array of one shape, in rank order; collective."""
    heap.alloc(name, mine.shape, mine.dtype)[...] = mine
    heap.barrier(f"reading {name!r}")
    everyone = [heap.peer(rank, name).copy() for rank in range(heap.size)]
    heap.free(name)
    return everyone


_SETTING_BYTES = 64  # a digest of the value's text, and how that begins


def _require_same_settings(heap: Any, name: str, config: MoEConfig, max_tokens: int) -> None:
    """Refuse ranks that make a workspace of different layers: every result would be wrong."""
    settings = {field.name: repr(getattr(config, field.name)) for field in fields(config)}
    settings["max_tokens"] = repr(max_tokens)
    table = np.zeros((len(settings), _SETTING_BYTES), np.uint8)
    for row, text in zip(table, settings.values(), strict=True):
        start = text.encode()[: _SETTING_BYTES - 8]
        row[:8] = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint8)
        row[8 : 8 + len(start)] = np.frombuffer(start, np.uint8)
    for peer, theirs in enumerate(_exchange(heap, name, table)):
        for setting, mine, other in zip(settings, table, theirs, strict=True):
            if (mine != other).any():
                raise ValueError(
                    "workspace must be made with the same settings on all ranks, got "
                    f"{setting}={_shown(mine)} on rank {heap.rank} and {setting}={_shown(other)} "
                    f"on rank {peer}"
                )


def _shown(setting: np.ndarray) -> str:
    text = setting[8:].tobytes().rstrip(b"\0").decode(errors="ignore")
    return text if len(text) < _SETTING_BYTES - 8 else f"{text[:-3]}..."


def _check_sizes(config: Any, max_tokens: Any, max_saved_rows: Any) -> None:
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config must be an MoEConfig, got {type(config).__name__}")
    if not (is_int(max_tokens) and max_tokens >= 0):
        raise ValueError(f"max_tokens must be an integer >= 0, got {shown(max_tokens)}")
    if not (max_saved_rows is None or (is_int(max_saved_rows) and max_saved_rows >= 0)):
        raise ValueError(
            f"max_saved_rows must be an integer >= 0 or None, got {shown(max_saved_rows)}"
        )


def _next_serial(heap: Any) -> int:
    """A new number, the same on every rank: workspaces are made in the same order everywhere."""
    number = getattr(heap, "_num_workspaces", 0)
    heap._num_workspaces = number + 1
    return number
