"""The router of a case on one rank: the reference's functions, or the device's kernels.

Both offer `forward`, `share` (for `moe_backward`) and `gradients`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mok_ref.casefile import Case
from mok_ref.chain import ordered_chain
from mok_ref.numerics import as_values, bf16_to_bits, to_bf16
from mok_ref.routing import route_backward, route_forward, router_dx, router_logits

CHAIN_BUFFER = "case_router/dw"


class ReferenceRouter:
    """Spec R1 to R12 on the host. `tokens` are this rank's rows of the case."""

    def __init__(self, case: Case, heap: Any, tokens: slice, mode: str) -> None:
        assert case.routing is not None
        self._options, self._heap, self._mode = case.routing, heap, mode
        self._x = as_values(case.x[tokens])
        self._w_router = None if case.w_router is None else as_values(case.w_router)
        self._logits = None if case.logits is None else case.logits[tokens]
        self._saved: Any = None
        self._d_logits: Any = None

    @property
    def has_weights(self) -> bool:
        """Whether x has a gradient through the router (no: logits were given)."""
        return self._w_router is not None

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """(topk_ids, topk_weights) of this rank's tokens."""
        logits = self._logits
        if logits is None:
            logits = router_logits(self._x, self._w_router, self._mode)
        topk_ids, topk_weights, self._saved = route_forward(logits, self._options)
        return topk_ids, topk_weights

    def share(self, d_topk_weights: Any) -> Any:
        """The router's share of dx; None where logits were given."""
        self._d_logits = route_backward(self._saved, d_topk_weights)
        if self._w_router is None:
            return None
        dx = router_dx(self._d_logits, self._w_router, self._mode)
        return dx if self._mode == "float64" else bf16_to_bits(dx)

    def gradients(self) -> dict[str, Any]:
        """d_logits and, with router weights, dw_router by the ordered chain; collective."""
        if self._w_router is None:
            return {"d_logits": self._d_logits}
        dtype = np.float64 if self._mode == "float64" else np.float32
        self._heap.alloc(CHAIN_BUFFER, self._w_router.shape, dtype)
        rows_out = to_bf16(self._d_logits) if self._mode != "float64" else self._d_logits
        dw = ordered_chain(self._heap, CHAIN_BUFFER, rows_out, self._x, None, self._mode)
        self._heap.free(CHAIN_BUFFER)
        return {"d_logits": self._d_logits, "dw_router": dw}


class DeviceCaseRouter:
    """The same on a GPU, by mok_ref.gpu.routing."""

    def __init__(self, case: Case, heap: Any, tokens: slice, max_tokens: int) -> None:
        import cupy

        from mok_ref.gpu.routing import DeviceRouter

        assert case.routing is not None
        num_experts, hidden_size = len(case.w_gate), case.x.shape[1]
        self._heap = heap
        heap.status.num_experts = num_experts
        self._x = cupy.asarray(case.x[tokens])
        self._w_router = None if case.w_router is None else cupy.asarray(case.w_router)
        self._logits = None if case.logits is None else cupy.asarray(case.logits[tokens])
        self._router = DeviceRouter(
            case.routing,
            num_experts,
            hidden_size,
            max(1, max_tokens),
            heap.status.input_error_address,
            heap.rank,
            heap.size,
        )
        self._d_logits: Any = None
        heap.alloc(CHAIN_BUFFER, (num_experts, hidden_size), np.float32)

    @property
    def has_weights(self) -> bool:
        """As `ReferenceRouter.has_weights`."""
        return self._w_router is not None

    def forward(self) -> tuple[Any, Any]:
        """As `ReferenceRouter.forward`."""
        logits = self._logits
        if logits is None:
            logits = self._router.router_logits(self._x, self._w_router)
        return self._router.route_forward(logits)

    def share(self, d_topk_weights: Any) -> Any:
        """As `ReferenceRouter.share`."""
        self._d_logits = self._router.route_backward(d_topk_weights)
        if self._w_router is None:
            return None
        return self._router.router_dx(self._w_router, len(d_topk_weights))

    def gradients(self) -> dict[str, Any]:
        """As `ReferenceRouter.gradients`."""
        found = {"d_logits": self._d_logits}
        if self._w_router is not None:
            chains = self._heap.addresses(CHAIN_BUFFER)
            found["dw_router"] = self._router.router_dw(self._x, chains, self._heap.barrier)
        return found
