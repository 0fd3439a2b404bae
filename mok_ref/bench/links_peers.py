"""Beside this layer on several GPUs: torch with NCCL all-to-all and grouped products."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mok_ref.bench.links import REPEATS, time_together


def torch_groups(comm: Any, sizes: list[int]) -> dict[int, Any]:
    """NCCL groups of this rank by size: neighbours of each size in `sizes` form one.

    comm  MPI communicator of all ranks; the GPU of each is chosen. Collective.
    """
    import socket

    import torch
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = comm.bcast(probe.getsockname()[1])
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=comm.rank,
        world_size=comm.size,
        device_id=device,
    )
    found = {}
    for size in sizes:
        for first in range(0, comm.size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= comm.rank < first + size:
                found[size] = group
    return found


class NcclAllToAll:
    """all_to_all_single of equal parts; `num_bytes` of it go to other ranks."""

    def __init__(self, group: Any, size: int) -> None:
        self.group, self.size = group, size

    def milliseconds(self, heap: Any, num_bytes: int, repeats: int = REPEATS) -> float:
        """Median of one exchange on this rank. Collective."""
        import torch
        import torch.distributed as dist

        total = num_bytes * self.size // max(self.size - 1, 1) // self.size * self.size
        source = torch.randint(0, 256, (total,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return time_together(
            heap, lambda: dist.all_to_all_single(target, source, group=self.group), repeats
        )


@cache
def _exchange() -> Any:
    """Rows to and from all ranks; its gradient is the exchange the other way round."""
    import torch
    import torch.distributed as dist

    def exchange(rows: Any, received: list[int], sent: list[int], group: Any) -> Any:
        out = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any, *plan: Any) -> Any:
            ctx.plan = plan
            return exchange(rows, *plan)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            received, sent, group = ctx.plan
            return exchange(gradients[0], sent, received, group), None, None, None

    return Exchange.apply


def nccl_layer(
    x: Any, w_gate_up: Any, w_down: Any, weights: Any, ids: Any, group: Any, size: int
) -> Any:
    """Sort by expert, exchange counts and rows, grouped products, exchange back, weighted sum.

    x (T, H), w_gate_up (L, 2I, H) and w_down (L, H, I) of this rank's experts, weights (T, K),
    ids (T, K). The counts travel to the host, as they do in layers that are built this way.
    """
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    num_local, (num_tokens, top_k) = w_down.shape[0], ids.shape
    expert, order = ids.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(num_tokens * top_k, device=x.device)
    edges = torch.arange(size * num_local + 1, device=x.device, dtype=expert.dtype)
    counts = torch.searchsorted(expert, edges).diff()
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    both = torch.stack([counts, arriving]).view(2, size, num_local)
    sent, received = both.sum(2).tolist()

    exchange = _exchange()
    rows = exchange(x[order // top_k], received, sent, group)
    local = torch.arange(num_local, device=x.device).repeat(size)
    local = torch.repeat_interleave(local, both[1].reshape(-1), output_size=sum(received))
    by_expert = local.sort(stable=True).indices
    ends = both[1].sum(0).cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(rows[by_expert], w_gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
    y = torch._grouped_mm(functional.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
    back = torch.empty_like(y).index_copy(0, by_expert, y)
    slots = exchange(back, sent, received, group)[inverse].view(num_tokens, top_k, -1)
    return (slots * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def torch_calls(inputs: Any, group: Any, size: int) -> dict[str, Callable[[], Any]]:
    """Forward without a graph; forward and backward through autograd.

    inputs: `BenchInputs` of this rank with the weights of its own experts.
    """
    import torch

    from mok_ref.bench.peers import torch_layer

    def layer(x: Any, w_gate_up: Any, w_down: Any, weights: Any) -> Any:
        if size == 1:
            return torch_layer(x, w_gate_up, w_down, weights, inputs.topk_ids)
        return nccl_layer(x, w_gate_up, w_down, weights, inputs.topk_ids, group, size)

    tensors = (inputs.x, inputs.w_gate_up, inputs.w_down, inputs.topk_weights)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def forward() -> Any:
        with torch.no_grad():
            return layer(*leaves)

    def step() -> Any:
        return torch.autograd.grad(layer(*leaves), leaves, inputs.dy)

    return {"forward": forward, "forward and backward": step}
