// Backward of the layer on Hopper: one dgrad and one wgrad launch per macrobatch, then the replicated chain.
//
//   moe_dgrad_hopper         pull dy (and x); [gate, up again]; dhu, SwiGLU backward, dot128; dx, push
//   moe_dgrad_clamp_hopper   the same with a clamp before SwiGLU
//   moe_wgrad_hopper         dW_down, dW_gate, dW_up of the macrobatch's experts
//   moe_chain_hopper         one rank's part of the gradients of replicated weights
//   moe_chain_collect        the last rank's accumulators become everybody's gradients
//
// NumPy twin: mok_ref/layer.py: moe_backward. Launched by mok_ref/gpu/hopper_backward.py.
// Grid: at most one CTA per SM. Work is drawn by atomic ticket and depends on smaller tickets only, so a launch
// ends with any number of its CTAs resident. Inside a launch nobody waits for another rank.
// Compiled for: sm_90a
#include "backward_chain.cuh"
#include "backward_tiles.cuh"

using namespace mok;

extern __shared__ __align__(1024) unsigned char shared_memory[];

template <bool kClamp>
MOK_DEVICE void dgrad_kernel(const LayerParams& layer, const DgradParams& params, const DgradMaps& maps) {
  const DgradContext context{layer, params, maps, init_pipeline(shared_memory, kMathWarps + 1)};
  const i32 warp = threadIdx.x / kWarpSize;
  switch (warp / 4) {  // of an if/else ptxas keeps the multiplying branch at the registers of the kernel's start
    case 0:
      setmaxnreg_dec<kHelperRegisters>();
      if (threadIdx.x == 0) produce_dgrad(context);
      if (warp == 1) store_dgrad(context);
      if (warp >= 2) pull_rows(layer, params);
      break;
    case 1:
    case 2:
      setmaxnreg_inc<kMathRegisters>();
      multiply_dgrad<kClamp>(context, warp / 4 - 1);
      break;
  }
}

template <bool kChain>
MOK_DEVICE void wgrad_kernel(const LayerParams& layer, const WgradParams& params, const WgradMaps& maps) {
  const WgradContext context{layer, params, maps, init_pipeline(shared_memory, kMathWarps)};
  const i32 warpgroup = threadIdx.x / (4 * kWarpSize);
  switch (warpgroup) {
    case 0:
      setmaxnreg_dec<kLoaderRegisters>();
      if (threadIdx.x == 0) {
        if constexpr (kChain) {
          produce_weights(context, ChainTickets{context});
        } else {
          produce_weights(context, ExpertTickets(context));
        }
      }
      break;
    case 1:
    case 2:
      setmaxnreg_inc<kMathOnlyRegisters>();
      multiply_wgrad(context, warpgroup - 1);
      break;
  }
}

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

extern "C" __global__ void __launch_bounds__(kThreads, 1)
moe_wgrad_hopper(const __grid_constant__ LayerParams layer, const __grid_constant__ WgradParams params,
                 const __grid_constant__ WgradMaps maps) {
  wgrad_kernel<false>(layer, params, maps);
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
