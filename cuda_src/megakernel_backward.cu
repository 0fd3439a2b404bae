// Backward of the layer on Hopper: one dgrad and one wgrad launch per macrobatch, then the replicated chain.
//
//   moe_dgrad_hopper         pull dy (and x); [gate, up again]; dhu, SwiGLU backward, dot128; dx, push: by single CTAs,
//                            for the shared expert of an MXFP8 layer (others: megakernel_backward_clusters.cu)
//   moe_dgrad_clamp_hopper   the same with a clamp before SwiGLU
//   moe_wgrad_pairs_hopper   dW_down, dW_gate, dW_up of the macrobatch's experts where these have few rows; beside the
//                            last macrobatch's, dx
//   moe_chain_hopper         one rank's part of the gradients of replicated weights
//   moe_chain_collect        the last rank's accumulators become everybody's gradients
//
// NumPy twin: mok_ref/layer.py: moe_backward. Launched by mok_ref/gpu/hopper_backward.py.
// Grid: at most one CTA per SM. Work is drawn by atomic ticket and depends on smaller tickets only, so a launch
// ends with any number of its CTAs resident. Inside a launch nobody waits for another rank.
// Compiled for: sm_90a
#include "backward_kernels.cuh"
#include "backward_wgrad_pairs.cuh"

using namespace mok;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_dgrad_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ DgradParams params,
                 const __grid_constant__ DgradMaps maps) {
  dgrad_kernel<false>(layer, params, maps);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_dgrad_clamp_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ DgradParams params,
                       const __grid_constant__ DgradMaps maps) {
  dgrad_kernel<true>(layer, params, maps);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
moe_wgrad_pairs_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ WgradParams params,
                       const __grid_constant__ WgradMaps maps, const __grid_constant__ BackwardParams back) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  wgrad_pairs_kernel(shared_memory, layer, params, maps, DxBeside<8>{layer, back, params.with_dx != 0});
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_chain_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ WgradParams params,
                 const __grid_constant__ WgradMaps maps) {
  wgrad_kernel<true>(layer, params, maps);
}

// Three matrices of `words` elements (down, gate, up) out of the last rank's chain buffer; to_bf16: the one
// rounding at the end of the chain. Ordinary grid, two elements per thread and step (words is even).
extern "C" __global__ void moe_chain_collect(const float* chain, void* down, void* gate, void* up, i64 words,
                                             i32 to_bf16) {
  for (i64 pair = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; pair < 3 * words / 2;
       pair += static_cast<i64>(gridDim.x) * blockDim.x) {
    const i64 index = 2 * pair % words, matrix = 2 * pair / words;
    void* target = matrix == 0 ? down : matrix == 1 ? gate : up;
    const float2 value = __ldcg(reinterpret_cast<const float2*>(chain) + pair);
    if (to_bf16) {
      static_cast<u32*>(target)[index / 2] = pack_bf16x2(value.x, value.y);
    } else {
      static_cast<float2*>(target)[index / 2] = value;
    }
  }
}
