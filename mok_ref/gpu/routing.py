"""Routing on the device: logits, scores, (grouped) top-k, weights; forward and backward.

CUDA twins: cuda_src/routing.cu (choice and its gradient), cuda_src/portable.cu (products). Same
bits as mok_ref/routing.py. A `DeviceRouter` owns all its buffers: nothing is allocated in a step,
nothing waits, so a step can be captured in a CUDA graph. NaN and +Inf logits count as closed and
are reported through `input_error`; the next call that synchronises raises them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mok_ref.gpu.params import LAYER_PARAMS
from mok_ref.gpu.products import (
    STORE_BF16,
    STORE_FLOAT,
    DeviceLauncher,
    Link,
    Products,
    choose_path,
    rows_operand,
    struct,
    weight_operand,
)
from mok_ref.routing import RoutingOptions

SOURCE = "routing.cu"
SHARED_LIMIT = 48 * 1024
BYTES_PER_EXPERT = 12  # shared memory of one warp (struct RoutingScratch)
MAX_WARPS = 4

_POINTER = np.uint64

ROUTING_PARAMS = np.dtype(
    [
        ("logits", _POINTER),
        ("choice_bias", _POINTER),
        ("topk_ids", _POINTER),
        ("topk_weights", _POINTER),
        ("scores", _POINTER),
        ("ratio", _POINTER),
        ("total", _POINTER),
        ("d_topk_weights", _POINTER),
        ("d_scores", _POINTER),
        ("d_logits", _POINTER),
        ("d_logits_bf16", _POINTER),
        ("input_error", _POINTER),
        ("num_tokens", np.int32),
        ("num_experts", np.int32),
        ("top_k", np.int32),
        ("num_groups", np.int32),
        ("keep_groups", np.int32),
        ("group_top2", np.int32),
        ("is_softmax", np.int32),
        ("renormalize", np.int32),
        ("scale", np.float32),
        ("reserved", np.int32),
    ],
    align=True,
)


def launch_shape(num_tokens: int, num_experts: int) -> tuple[int, int, int]:
    """(CTAs, threads, dynamic shared memory): one warp per token, up to 4 warps per CTA.

    Raises: ValueError when one token's scores do not fit into shared memory.
    """
    per_warp = BYTES_PER_EXPERT * num_experts
    if per_warp > SHARED_LIMIT:
        raise ValueError(
            f"num_experts must be at most {SHARED_LIMIT // BYTES_PER_EXPERT}, got {num_experts=}"
        )
    warps = min(MAX_WARPS, SHARED_LIMIT // per_warp)
    return -(-num_tokens // warps), 32 * warps, warps * per_warp


def routing_params(options: RoutingOptions, num_experts: int) -> np.ndarray:
    """The options of a router as a ROUTING_PARAMS block without addresses."""
    options.check_num_experts(num_experts)
    return struct(
        ROUTING_PARAMS,
        num_experts=num_experts,
        top_k=options.top_k,
        num_groups=options.num_groups,
        keep_groups=options.num_kept,
        group_top2=int(options.group_score == "top2"),
        is_softmax=int(options.score == "softmax"),
        renormalize=int(options.renormalize),
        scale=np.float32(options.scale),
    )


class DeviceRouter:
    """One rank's router. Arrays it returns are its own buffers: the next step overwrites them.

    options       RoutingOptions
    input_error   address of the rank's input-error word (`heap.status.input_error_address`, whose
                  `heap.status.num_experts` must be this router's), or 0
    path          "auto", "soft" or "mma" (mok_ref.gpu.products)
    """

    def __init__(
        self,
        options: RoutingOptions,
        num_experts: int,
        hidden_size: int,
        max_tokens: int,
        input_error: int = 0,
        rank: int = 0,
        ep_size: int = 1,
        path: str = "auto",
    ) -> None:
        import cupy

        self.options, self.num_experts, self.hidden_size = options, num_experts, hidden_size
        self.max_tokens = max_tokens
        f32, experts, top_k = np.float32, (max_tokens, num_experts), (max_tokens, options.top_k)
        self.logits = cupy.empty(experts, f32)
        self.scores = cupy.empty(experts, f32)
        self.topk_ids = cupy.empty(top_k, np.int32)
        self.topk_weights = cupy.empty(top_k, f32)
        self.ratio = cupy.empty(top_k, f32)
        self.total = cupy.empty((max_tokens,), f32)
        self.d_logits = cupy.empty(experts, f32)
        self.d_logits_bf16 = cupy.empty(experts, np.uint16)
        self.dx = cupy.empty((max_tokens, hidden_size), np.uint16)
        self.dw = cupy.empty((num_experts, hidden_size), f32)
        self._abort = cupy.zeros(1, np.uint32)
        self._bias = None
        if options.choice_bias is not None:
            self._bias = cupy.asarray(np.asarray(options.choice_bias, f32))
        self._params = routing_params(options, num_experts)
        addresses = (
            "scores",
            "topk_ids",
            "topk_weights",
            "ratio",
            "total",
            "d_logits",
            "d_logits_bf16",
        )
        for name in addresses:
            self._params[name] = _address(getattr(self, name))
        self._params["choice_bias"] = _address(self._bias)
        self._params["input_error"] = input_error
        layer = struct(LAYER_PARAMS, rank=rank, ep_size=ep_size, abort_flag=_address(self._abort))
        self._products = Products(layer, DeviceLauncher(), choose_path(path))

    def router_logits(self, x: Any, w_router: Any) -> Any:
        """logits (T, E) = tc(x, W_router) (spec R1); x (T, H), w_router (E, H) bf16."""
        products, num_tokens = self._for_tokens(len(x))
        a = rows_operand(_address(x), num_tokens, self.hidden_size)
        b = weight_operand(_address(w_router), 0, self.num_experts, self.hidden_size)
        rows, out = products.own_rows(), _address(self.logits)
        products.product(rows, [(a, b)], self.num_experts, STORE_FLOAT, out)
        return self.logits[:num_tokens]

    def route_forward(self, logits: Any) -> tuple[Any, Any]:
        """(topk_ids, topk_weights) of logits (T, E) float32 (spec R2 to R9)."""
        self._params["logits"] = _address(logits)
        self._launch("routing_forward", len(logits))
        return self.topk_ids[: len(logits)], self.topk_weights[: len(logits)]

    def route_backward(self, d_topk_weights: Any, d_scores: Any = None) -> Any:
        """d_logits (T, E) of the last forward (spec R10, R11)."""
        num_tokens = len(d_topk_weights)
        self._params["d_topk_weights"] = _address(d_topk_weights)
        self._params["d_scores"] = _address(d_scores)
        self._launch("routing_backward", num_tokens)
        return self.d_logits[:num_tokens]

    def router_dx(self, w_router: Any, num_tokens: int) -> Any:
        """The router's share of dx (spec R12): bf16(tc(bf16(d_logits), W_routerᵀ)), (T, H)."""
        products, _ = self._for_tokens(num_tokens)
        a = rows_operand(_address(self.d_logits_bf16), num_tokens, self.num_experts)
        b = weight_operand(
            _address(w_router), 0, self.num_experts, self.hidden_size, transposed=True
        )
        rows, out = products.own_rows(), _address(self.dx)
        products.product(rows, [(a, b)], self.hidden_size, STORE_BF16, out)
        return self.dx[:num_tokens]

    def router_dw(
        self,
        x: Any,
        chains: list[int],
        barrier: Callable[[], None],
        start: Any = None,
    ) -> Any:
        """dW_router (E, H) float32 over all ranks' tokens (spec R12); collective.

        chains   address of a symmetric float32 buffer of (E, H) on every rank
        start    (E, H) float32: the chain's start instead of +0
        """
        products, _ = self._for_tokens(len(x))
        if start is not None:
            products.launcher.copy(_address(self.dw), _address(start), self.dw.nbytes)
        link = Link(
            _address(self.dw),
            (_address(self.d_logits_bf16), self.num_experts),
            (_address(x), self.hidden_size),
        )
        products.ordered_chain([link], chains, barrier, accumulate=start is not None)
        return self.dw

    def warm_up(self) -> None:
        """Compile and load every kernel."""
        from mok_ref.gpu.compiler import load_kernel
        from mok_ref.gpu.products import SOURCE as PRODUCTS

        for name in ("routing_forward", "routing_backward"):
            _ = load_kernel(SOURCE, name).num_regs
        for name in ("product", "gradient"):
            _ = load_kernel(PRODUCTS, f"portable_{name}_{self._products.path}").num_regs

    def _for_tokens(self, num_tokens: int) -> tuple[Products, int]:
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"x must have at most max_tokens={self.max_tokens} rows, got {num_tokens}"
            )
        self._products.params["num_tokens"] = num_tokens
        return self._products, num_tokens

    def _launch(self, kernel: str, num_tokens: int) -> None:
        from mok_ref.gpu.compiler import load_kernel

        self._for_tokens(num_tokens)
        self._params["num_tokens"] = num_tokens
        ctas, threads, shared = launch_shape(num_tokens, self.num_experts)
        if num_tokens:
            load_kernel(SOURCE, kernel)((ctas,), (threads,), (self._params,), shared_mem=shared)


def _address(array: Any) -> int:
    """Device address of an array, 0 for None or an empty one."""
    return int(array.data.ptr) if array is not None and array.size else 0
