// Backward of the routed experts on Hopper with MXFP8 operands: the kernels of megakernel_backward.cu whose rows and
// weights are codes and scales, expanded to bf16 inside the kernel.
//
//   moe_dgrad_mxfp8_hopper         pull dy (and x); [gate, up again]; dhu, SwiGLU backward, dot128; dx, push
//   moe_dgrad_mxfp8_clamp_hopper   the same with a clamp before SwiGLU
//   moe_wgrad_mxfp8_hopper         dW_down, dW_gate, dW_up of the macrobatch's experts
//
// NumPy twin: mok_ref/layer.py: moe_backward. Launched by mok_ref/gpu/hopper_mxfp8_backward.py, which leaves the
// shared expert (never quantised) to the bf16 kernels: layer.shared_intermediate_size is 0 here.
// Compiled for: sm_90a
#define MOK_MXFP8 1
#include "backward_kernels.cuh"

using namespace mok;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_dgrad_mxfp8_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ MxfpDgradParams params,
                       const __grid_constant__ DgradMaps maps) {
  dgrad_kernel<false>(layer, params, maps);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_dgrad_mxfp8_clamp_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ MxfpDgradParams params,
                             const __grid_constant__ DgradMaps maps) {
  dgrad_kernel<true>(layer, params, maps);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_wgrad_mxfp8_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ WgradParams params,
                       const __grid_constant__ MxfpWgradMaps maps) {
  wgrad_kernel<false>(layer, params, maps.codes);
}
