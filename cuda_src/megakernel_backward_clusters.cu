// Backward of the routed experts by clusters of two CTAs (see megakernel_backward.cu for the whole).
//
//   moe_dgrad_hopper         dgrad of a macrobatch: two row blocks and the same columns at a time
//   moe_dgrad_clamp_hopper   the same with a clamp before SwiGLU
//   moe_wgrad_hopper         weight gradients where experts have many rows: 256 rows of dW at a time; beside the last
//                            macrobatch's, dx
//
// Both CTAs of a cluster multiply with the same operand B, each fetches half of it and delivers that to both
// (multicast inside the cluster's shared memory, never over links): two thirds of the bytes out of the L2, which cost
// power, and power is what limits long products. Same sums in the same order: same bits.
// Compiled for: sm_90a
#define MOK_CLUSTER_SIZE 2
#include "backward_kernels.cuh"

using namespace mok;

extern "C" __global__ void MOK_CLUSTER_DIMS __launch_bounds__(kThreads, 1)
moe_dgrad_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ DgradParams params,
                 const __grid_constant__ DgradMaps maps) {
  dgrad_kernel<false>(layer, params, maps);
}

extern "C" __global__ void MOK_CLUSTER_DIMS __launch_bounds__(kThreads, 1)
moe_dgrad_clamp_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ DgradParams params,
                       const __grid_constant__ DgradMaps maps) {
  dgrad_kernel<true>(layer, params, maps);
}

extern "C" __global__ void MOK_CLUSTER_DIMS __launch_bounds__(kThreads, 1)
moe_wgrad_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ WgradParams params,
                 const __grid_constant__ WgradMaps maps, const __grid_constant__ BackwardParams back) {
  wgrad_kernel<false>(layer, params, maps, DxBeside<4>{layer, back, params.with_dx != 0});
}
