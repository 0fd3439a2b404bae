"""Transfers of the forward megakernel alone, over the links between GPUs, beside NCCL all-to-all.

    GB/s of a rank = bytes of rows that crossed the link / time of the slowest rank / 1e9

Only remote bytes count. All ranks transfer at once unless a mode says `one way`, so each direction
of a link carries the pulls of one rank (or the pushes of the other); in `pull and push` it carries
both, and both are counted.

CUDA twin: cuda_src/links.cu (kernel `links_transfer`), which calls the copy code of dispatch.cuh
and the push code of experts.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok_ref.config import ROW_TILE
from mok_ref.numerics import array_module

SOURCE, KERNEL = "links.cu", "links_transfer"
NCCL = "NCCL all-to-all"
MIB = 1 << 20
SWEEP_HIDDEN = (2048, 7168)
SWEEP_MIB = (1, 4, 16, 64, 256, 1024)
CTAS_MIB = 256  # the message of the sweep over CTAs
SWEEP_CTAS = (4, 8, 16, 32, 64)
REPEATS = 10


@dataclass(frozen=True)
class LinkMode:
    """Who moves what in one launch.

    pull_warps  warps of each CTA that pull; 0: nobody pulls (the megakernel has 1)
    pushes      whether the two epilogue warps of each CTA push
    one_way     only rank 0 works, all others are idle
    """

    name: str
    pull_warps: int
    pushes: bool = False
    one_way: bool = False

    @property
    def transfers(self) -> int:
        """How often every row crosses the link."""
        return (self.pull_warps > 0) + self.pushes


PULL, PUSH = LinkMode("pull", 1), LinkMode("push", 0, True)
BOTH = LinkMode("pull and push", 1, True)
MODES = (
    PULL,
    PUSH,
    BOTH,
    LinkMode("pull, one way", 1, one_way=True),
    LinkMode("push, one way", 0, True, one_way=True),
    LinkMode("pull, 2 warps", 2),
    LinkMode("pull, 3 warps", 3),
)


def gigabytes_per_s(num_bytes: float, ms: float) -> float:
    """bytes / time in units of 1e9 bytes per second."""
    return num_bytes / ms / 1e6


def rows_of(num_bytes: int, hidden_size: int) -> int:
    """Rows of bf16 that hold at least `num_bytes`, in whole row blocks."""
    return -(-num_bytes // (2 * hidden_size * ROW_TILE)) * ROW_TILE


def remote_tables(
    rank: int, size: int, num_rows: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(peer_rank, peer_row) of a schedule whose rows all lie on other ranks, in random order.

    Row i of the batch lies on rank (rank + 1 + i mod (R - 1)) mod R, at its row i; no two ranks
    name the same row of a third. With one rank all rows are its own.
    """
    row = rng.permutation(num_rows).astype(np.int32)
    others = max(size - 1, 1)
    peer = (rank + (1 if size > 1 else 0) + row % others) % size
    return peer.astype(np.int32), row


def pattern(rank: int, row: Any, hidden_size: int) -> Any:
    """(n, H) uint16 that rank `rank` holds in the rows named by `row`, of NumPy or CuPy.

    Multiplicative hash of the element's number, so that no row is like another or of zeros.
    """
    xp = array_module(row)
    number = row.astype(np.uint32)[:, None] * np.uint32(hidden_size)
    number = number + xp.arange(hidden_size, dtype=np.uint32)
    return ((number + np.uint32(rank << 20)) * np.uint32(2654435761) >> np.uint32(16)).astype(
        np.uint16
    )


class LinkBench:
    """Symmetric rows on every rank and a schedule that names only remote ones.

    heap      a device heap; collective
    max_rows  most rows of a launch, a multiple of 128
    """

    def __init__(self, heap: Any, hidden_size: int, max_rows: int) -> None:
        import cupy

        from mok_ref.gpu.params import LAYER_PARAMS, NUM_SYMMETRIC, SYMMETRIC_BUFFERS, new_params

        self.heap, self.hidden_size, self.max_rows = heap, hidden_size, max_rows
        self._names = {n: f"links_{n}_{hidden_size}_{max_rows}" for n in ("x", "combine")}
        shape, blocks = (max_rows, hidden_size), max_rows // ROW_TILE
        self.x, self.combine = (heap.alloc(name, shape, np.uint16) for name in self._names.values())
        self.x[...] = pattern(heap.rank, cupy.arange(max_rows), hidden_size)
        table = np.zeros((NUM_SYMMETRIC, heap.size), np.uint64)
        for name, heap_name in self._names.items():
            table[SYMMETRIC_BUFFERS[name]] = heap.addresses(heap_name)
        self.ring = cupy.empty(shape, np.uint16)
        self._keep = {
            "peer_table": cupy.asarray(table),
            "peer_rank": cupy.empty(max_rows, np.int32),
            "peer_row": cupy.empty(max_rows, np.int32),
            "row_block_valid": cupy.full(blocks, ROW_TILE, np.int32),
            "row_block_expert": cupy.zeros(blocks, np.int32),
            "counters": cupy.zeros(1024 + 8 * blocks, np.uint32),
        }
        status = heap.status
        self._params = new_params(
            LAYER_PARAMS,
            rank=heap.rank,
            ep_size=heap.size,
            hidden_size=hidden_size,
            top_k=1,
            mini_blocks=min(16, blocks),
            macro_blocks=-(-blocks // 16) * 16,
            max_row_blocks=blocks,
            timeout_ns=status.timeout_ns,
            x_ring=self.ring,
            error_record=status.record_address,
            abort_flag=status.abort_address,
            **self._keep,
        )

    def set_rows(self, num_rows: int) -> None:
        """The schedule of the next launches: `num_rows` remote rows, a multiple of 128."""
        import cupy

        from mok_ref.gpu.params import SCHEDULE_INFO, set_params

        rng = np.random.default_rng([self.heap.rank, num_rows])
        peer_rank, peer_row = remote_tables(self.heap.rank, self.heap.size, num_rows, rng)
        self._keep["peer_rank"][:num_rows] = cupy.asarray(peer_rank)
        self._keep["peer_row"][:num_rows] = cupy.asarray(peer_row)
        info = np.zeros(1, SCHEDULE_INFO)
        info["num_row_blocks"], info["num_rows"] = num_rows // ROW_TILE, num_rows
        self._info = cupy.asarray(info.view(np.uint8))
        set_params(self._params, info=self._info)
        self.num_rows = num_rows

    def launch(self, mode: LinkMode, num_ctas: int) -> None:
        from mok_ref.gpu.compiler import load_kernel
        from mok_ref.gpu.hopper import SHARED_BYTES, THREADS
        from mok_ref.gpu.params import by_value

        if mode.one_way and self.heap.rank:
            return
        arguments = (by_value(self._params), np.int32(mode.pull_warps), np.int32(mode.pushes))
        kernel = load_kernel(SOURCE, KERNEL, (), SHARED_BYTES)
        kernel((num_ctas,), (THREADS,), arguments, shared_mem=SHARED_BYTES)

    def milliseconds(self, mode: LinkMode, num_ctas: int, repeats: int = REPEATS) -> float:
        """Median of `repeats` launches, each begun by all ranks together; this rank's time."""
        counters = self._keep["counters"]

        def prepare() -> None:
            counters.data.memset_async(0, counters.nbytes)

        return time_together(self.heap, lambda: self.launch(mode, num_ctas), repeats, prepare)

    def check(self) -> str:
        """ "equal" if a pull brought exactly the peers' rows and a push wrote every one; else what
        differs. Collective."""
        heap, rows = self.heap, self.num_rows
        self.ring.fill(0)
        self.combine.fill(0xFFFF)
        self.milliseconds(BOTH, 8, 1)
        peer_rank, peer_row = (self._keep[n][:rows] for n in ("peer_rank", "peer_row"))
        wrong = 0
        for peer in range(heap.size):
            theirs = peer_rank == peer
            expected = pattern(peer, peer_row[theirs], self.hidden_size)
            wrong += int((self.ring[:rows][theirs] != expected).any(axis=1).sum())
        units = self.combine[:rows].reshape(-1, 8)  # 16 bytes: what one store writes
        unwritten = int((units == 0xFFFF).all(axis=1).sum())
        heap.barrier()
        heap.check()
        if wrong or unwritten:
            return f"rank {heap.rank}: {wrong} rows pulled wrong, {unwritten} units not pushed"
        return "equal"

    def close(self) -> None:
        for name in self._names.values():
            self.heap.free(name)


def time_together(
    heap: Any, call: Callable[[], Any], repeats: int, prepare: Callable[[], Any] | None = None
) -> float:
    """Median milliseconds of `call` on this rank; before each a barrier between the ranks."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    times = []
    for number in range(repeats + 1):
        if prepare is not None:
            prepare()
        heap.barrier()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        call()
        end.record(stream)
        end.synchronize()
        if number:  # the first one warms up
            times.append(cupy.cuda.get_elapsed_time(start, end))
    heap.barrier()
    heap.check()
    return float(np.median(times))


def num_multiprocessors() -> int:
    """Of the current device."""
    import cupy

    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


def sweep_points(most_ctas: int) -> list[tuple[int, LinkMode, int]]:
    """(MiB of rows, mode, CTAs): message sizes on all SMs, other modes at the largest message,
    then numbers of SMs."""
    points = [(mib, mode, most_ctas) for mib in SWEEP_MIB for mode in (PULL, PUSH)]
    points += [(SWEEP_MIB[-1], mode, most_ctas) for mode in MODES[2:]]
    points += [(CTAS_MIB, mode, ctas) for ctas in SWEEP_CTAS for mode in (PULL, PUSH)]
    return points


def bench_links(
    heap: Any, slowest: Callable[[float], float], all_to_all: Any, report: dict[str, Any]
) -> None:
    """Fill report["links"] and report["links_check"]; collective.

    slowest     the largest of all ranks' values
    all_to_all  `NcclAllToAll` of the same ranks, or None
    """
    for hidden_size in SWEEP_HIDDEN:
        bench = LinkBench(heap, hidden_size, rows_of(SWEEP_MIB[-1] * MIB, hidden_size))
        for mib, mode, ctas in sweep_points(num_multiprocessors()):
            bench.set_rows(rows_of(mib * MIB, hidden_size))
            ms = slowest(bench.milliseconds(mode, ctas))
            num_bytes = 2 * hidden_size * bench.num_rows * mode.transfers
            report["links"].append(link_row(mode.name, hidden_size, mib, num_bytes, ctas, ms))
        report["links_check"][f"H {hidden_size}, rank {heap.rank}"] = bench.check()
        bench.close()
    for mib in SWEEP_MIB if all_to_all is not None else ():
        ms = slowest(all_to_all.milliseconds(heap, mib * MIB))
        report["links"].append(link_row(NCCL, 0, mib, mib * MIB, 0, ms))


def link_row(
    mode: str, hidden: int, mib: int, num_bytes: int, ctas: int, ms: float
) -> dict[str, Any]:
    """A line of the report; hidden and ctas are 0 where they mean nothing. `mib` is what was asked
    for, `num_bytes` what crossed the link: whole row blocks, twice for `pull and push`."""
    return {
        "mode": mode,
        "H": hidden,
        "mib": mib,
        "bytes": num_bytes,
        "ctas": ctas,
        "ms": ms,
        "gb_per_s": gigabytes_per_s(num_bytes, ms),
    }
