"""What the device reports, in words: expired waits and bad inputs.

CUDA twin: cuda_src/check.cuh. A time-out is written by the kernel into pinned host memory, so it
can be read whatever state the device is in. Bad inputs are kept in device memory, the first one in
(kind, token, slot) order, until the next call that synchronises.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from mok_ref.gpu.params import ERROR_RECORD, NO_INPUT_ERROR
from mok_ref.heap.protocol import HeapError

PHASES = {
    0: "nothing in particular",
    1: "the barrier before the forward kernel (inputs in place)",
    2: "the barrier after the forward kernel (all expert outputs pushed)",
    3: "the barrier before the backward kernels (dy in place)",
    4: "the barrier after the backward kernels (all dx pushed)",
    5: "a barrier of the ordered chain over ranks",
    6: "a barrier of the caller",
    7: "gate/up waiting for pulled rows",
    8: "down waiting for hidden rows",
    9: "a pull waiting for its ring slot",
    10: "a math warp waiting for a loaded tile",
    11: "a producer warp waiting for a free stage",
    12: "backward waiting for d_gate and d_up",
    13: "a backward pull waiting for its ring slot",
    14: "a weight gradient waiting for rows",
    15: "a sum waiting for a complete token",
}
"""Texts of enum Phase."""

BARRIER_INPUTS, BARRIER_COMBINE, BARRIER_DY, BARRIER_DX, BARRIER_CHAIN, BARRIER_USER = range(1, 7)

INPUT_ERROR_KINDS = {0: "topk_ids", 1: "topk_weights", 2: "logits"}


class MokTimeoutError(HeapError):
    """A wait on the device ran out of time; the message names rank, peer, phase and epoch."""


class DeviceStatus:
    """Abort flag, barrier epoch and error words of one rank on its device.

    words   device uint64[4]: abort flag, barrier epoch, first bad input, spare
    record  one ErrorRecord in pinned host memory
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        import cupy

        self.rank = rank
        # of the latest step: how a place splits into token and slot, or a logit's into token and
        # expert
        self.top_k = self.num_experts = 1
        self.timeout_ns = int(timeout_s * 1e9)
        self._pinned = cupy.cuda.alloc_pinned_memory(ERROR_RECORD.itemsize)
        self.record = np.frombuffer(self._pinned, ERROR_RECORD, 1)
        self.record[...] = np.zeros((), ERROR_RECORD)
        self._code = self.record["code"]  # a view: looked at in every call of the layer
        self.words = cupy.array([0, 0, NO_INPUT_ERROR, 0], dtype=cupy.uint64)
        self.record_address = int(self._pinned.ptr)
        self.abort_address, self.epoch_address, self.input_error_address, _ = (
            int(self.words.data.ptr) + 8 * i for i in range(4)
        )
        cupy.cuda.get_current_stream().synchronize()

    def check_timeout(self) -> None:
        """Raise MokTimeoutError if a wait has expired; never synchronises."""
        if self._code[0]:
            raise MokTimeoutError(timeout_message(self.record[0]))

    def check(self, top_k: int | None = None) -> None:
        """Wait for the current stream, then raise what the device has reported.

        A bad input is reported once and then forgotten; an expired wait stays: the rank has given
        up.

        Raises: MokTimeoutError; ValueError naming token, slot (or expert) and value of the first
        bad input.
        """
        import cupy

        cupy.cuda.get_current_stream().synchronize()
        self.check_timeout()
        word = int(self.words.get()[2])
        if word != NO_INPUT_ERROR:
            self.words[2] = NO_INPUT_ERROR
            raise ValueError(input_message(word, top_k or self.top_k, self.rank, self.num_experts))

    def clear(self) -> None:
        """Forget everything reported (tests; a new step after all ranks have agreed on it)."""
        self.record[...] = np.zeros((), ERROR_RECORD)
        self.words[0] = 0
        self.words[2] = NO_INPUT_ERROR


def timeout_message(record: Any) -> str:
    """One line that says who waited, for whom or what, in which phase, and what was seen."""
    phase = PHASES.get(int(record["phase"]), f"phase {int(record['phase'])}")
    seconds = int(record["wait_us"]) / 1e6
    peer, epoch = int(record["peer"]), int(record["epoch"])
    if peer >= 0:
        return (
            f"rank {int(record['rank'])} waited {seconds:.2f} s for rank {peer} in {phase}, "
            f"epoch {epoch}: "
            f"arrivals expected {int(record['expected'])}, seen {int(record['seen'])}; "
            f"rank {peer} is dead, stuck or late"
        )
    return (
        f"rank {int(record['rank'])} waited {seconds:.2f} s in {phase}: "
        f"counter {int(record['counter'])} expected {int(record['expected'])}, "
        f"seen {int(record['seen'])}, epoch {epoch}"
    )


def input_message(word: int, top_k: int, rank: int, num_experts: int = 1) -> str:
    """One line for an input-error word: kind in bits 62..60, place above 32, value bits below."""
    kind, place, bits = word >> 60 & 7, word >> 32 & 0x0FFFFFFF, word & 0xFFFFFFFF
    is_logit = INPUT_ERROR_KINDS.get(kind) == "logits"
    token, index = divmod(place, num_experts if is_logit else top_k)
    where = f"rank {rank}, token {token}, {'expert' if is_logit else 'slot'} {index}"
    if kind == 0:
        value = struct.unpack("<i", struct.pack("<I", bits))[0]
        return f"topk_ids must be -1 or in 0..num_experts-1, got {value} at {where}"
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    rule = "finite" if kind == 1 else "finite or -Inf"
    return f"{INPUT_ERROR_KINDS.get(kind, 'input')} must be {rule}, got {value} at {where}"
