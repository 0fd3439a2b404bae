// Kernels of routing.cuh: one warp per token, 12 bytes of dynamic shared memory per expert and warp.
//
// NumPy twin: mok_ref/routing.py. Launched by mok_ref/gpu/routing.py, before the layer (forward) and after it
// (backward), on the rank's own tokens.
#include "routing.cuh"

using namespace mok;

extern "C" __global__ void __launch_bounds__(128)
    routing_forward(const __grid_constant__ RoutingParams routing) {
  extern __shared__ char shared[];
  const i32 warps = static_cast<i32>(blockDim.x) / kWarpSize, warp = static_cast<i32>(threadIdx.x) / kWarpSize;
  const i32 token = static_cast<i32>(blockIdx.x) * warps + warp;
  if (token >= routing.num_tokens) return;
  route_forward(routing, routing_scratch(shared, warp, routing.num_experts), token, threadIdx.x % kWarpSize);
}

extern "C" __global__ void __launch_bounds__(128)
    routing_backward(const __grid_constant__ RoutingParams routing) {
  extern __shared__ char shared[];
  const i32 warps = static_cast<i32>(blockDim.x) / kWarpSize, warp = static_cast<i32>(threadIdx.x) / kWarpSize;
  const i32 token = static_cast<i32>(blockIdx.x) * warps + warp;
  if (token >= routing.num_tokens) return;
  route_backward(routing, routing_scratch(shared, warp, routing.num_experts), token, threadIdx.x % kWarpSize);
}

// Size of RoutingParams, compared with mok_ref/gpu/routing.py by a test.
extern "C" __global__ void routing_layout(u64* words) {
  if (threadIdx.x == 0 && blockIdx.x == 0) words[0] = sizeof(RoutingParams);
}
