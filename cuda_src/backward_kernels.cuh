// The bodies of the Hopper backward kernels for both kinds of operands: which warp does what.
//
// Included by megakernel_backward.cu (bf16) and megakernel_mxfp8_backward.cu, which give them their parameters.
// Executed by: CTAs of kThreads threads, roles in backward_pipeline.cuh. kSharedBytes of dynamic shared memory.
#pragma once
#include "backward_chain.cuh"
#include "backward_epilogue.cuh"
#include "backward_tiles.cuh"

namespace mok {

template <bool kClamp>
MOK_DEVICE void dgrad_kernel(const LayerParams& layer, const DgradParams& params, const DgradMaps& maps) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const DgradContext context{layer, params, maps, init_pipeline(shared_memory, kMathWarps + 1)};
  trace_start(layer.rank);
  const i32 warp = threadIdx.x / kWarpSize;
  switch (warp / 4) {  // of an if/else ptxas keeps the multiplying branch at the registers of the kernel's start
    case 0:
      setmaxnreg_dec<kHelperRegisters>();
      if (warp == 0 && elect_one()) produce_dgrad(context);
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
  leave_cluster();
}

// `beside(worker, workers)` is called by the warps that have no part in the products.
template <bool kChain, typename Beside = NothingBeside>
MOK_DEVICE void wgrad_kernel(const LayerParams& layer, const WgradParams& params, const WgradMaps& maps,
                             const Beside& beside = {}) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const WgradContext context{layer, params, maps, init_pipeline(shared_memory, kMathWarps + 1)};
  trace_start(layer.rank);
  const i32 warp = threadIdx.x / kWarpSize;
  switch (warp / 4) {
    case 0:
      setmaxnreg_dec<kLoaderRegisters>();
      if (warp == 0 && elect_one()) load_weights(context);
      if (warp == 1 && elect_one()) {
        if constexpr (kChain) {
          draw_weights(context, ChainTickets{context});
        } else {
          draw_weights(context, ExpertTickets<kTileRows * kClusterSize>(layer, params));
        }
      }
      if (warp >= 2) beside(2 * blockIdx.x + warp - 2, 2 * gridDim.x);
      break;
    case 1:
    case 2:
      setmaxnreg_inc<kMathOnlyRegisters>();
      multiply_wgrad<!kChain && !kMxfp8>(context, warp / 4 - 1);
      break;
  }
  leave_cluster();
}

}  // namespace mok
