// The bodies of the Hopper backward kernels for both kinds of operands: which warp does what.
//
// Included by megakernel_backward.cu (bf16) and megakernel_mxfp8_backward.cu, which give them their parameters.
// Executed by: CTAs of kThreads threads, roles in backward_pipeline.cuh. kSharedBytes of dynamic shared memory.
#pragma once
#include "backward_chain.cuh"
#include "backward_tiles.cuh"

extern __shared__ __align__(1024) unsigned char shared_memory[];

namespace mok {

template <bool kClamp>
MOK_DEVICE void dgrad_kernel(const LayerParams& layer, const DgradParams& params, const DgradMaps& maps) {
  const DgradContext context{layer, params, maps, init_pipeline(shared_memory, kMathWarps + 1)};
  trace_start(layer.rank);
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
      pull_first_rows(layer, params);
      multiply_dgrad<kClamp>(context, warp / 4 - 1);
      break;
  }
}

template <bool kChain>
MOK_DEVICE void wgrad_kernel(const LayerParams& layer, const WgradParams& params, const WgradMaps& maps) {
  const WgradContext context{layer, params, maps, init_pipeline(shared_memory, kMathWarps + 1)};
  trace_start(layer.rank);
  const i32 warpgroup = threadIdx.x / (4 * kWarpSize);
  switch (warpgroup) {
    case 0:
      setmaxnreg_dec<kLoaderRegisters>();
      if (threadIdx.x == 0) load_weights(context);
      if (threadIdx.x == kWarpSize) {
        if constexpr (kChain) {
          draw_weights(context, ChainTickets{context});
        } else {
          draw_weights(context, ExpertTickets<kTileRows>(layer, params));
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

}  // namespace mok
