// megakernel_mxfp8.cu: the routed experts' forward of one rank on MXFP8 operands, in one persistent kernel.
// Compiled for: sm_90a
//
//   dispatch (pull codes) -> gate/up -> SwiGLU, quantise h -> down -> push                   (spec sections 5 and 7)
//
// NumPy twin     mok_ref/layer.py: moe_forward, between its two barriers, without the shared expert
// Launch         at most one CTA per SM (any number works: tickets), kForwardThreads threads,
//                kMxfp8SharedBytes of dynamic shared memory
// Warps          warpgroup 0: warp 0 schedules and loads, warp 1 pulls rows, warps 2, 3 epilogue (SwiGLU, push)
//                warpgroups 1, 2: expand codes and multiply, half of each tile's columns
// Before         as megakernel.cu; peers' x_codes and x_scales in place, weights quantised (mxfp8_quantize64),
//                params.shared_intermediate_size 0: the shared expert has a launch of the bf16 kernel
// After          as megakernel.cu
// Every wait is limited in time, as there.
#include "mxfp8_dispatch.cuh"
#include "mxfp8_experts.cuh"

namespace mok {

// Registers per thread after the kernel's start: 128 * helpers + 256 * math must not exceed 64,512.
constexpr i32 kHelperRegisters = 88;
constexpr i32 kMathRegisters = 208;
static_assert(128 * kHelperRegisters + 256 * kMathRegisters <= 64512, "over-subscribed registers hang silently");

extern "C" __global__ void __launch_bounds__(kForwardThreads, 1)
    moe_forward_mxfp8(const __grid_constant__ LayerParams params, const __grid_constant__ CodeParams codes,
                      const __grid_constant__ CodeMaps maps) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const i32 warpgroup = threadIdx.x / 128, warp = threadIdx.x / kWarpSize % 4;
  if (threadIdx.x == 0) {
    init_barriers(shared_address(bytes));
    init_code_barriers(shared_address(bytes));
  }
  trace_start(params.rank);
  __syncthreads();

  switch (warpgroup) {  // as in megakernel.cu: a switch, so that the math branch may use kMathRegisters
    case 0:
      setmaxnreg_dec<kHelperRegisters>();
      if (warp == 0 && elect_one()) load_code_tiles(params, codes, maps, bytes);
      if (warp == 1) dispatch_codes(params, codes);
      if (warp >= 2) finish_code_tiles(params, codes, bytes, warp - 2);
      break;
    case 1:
    case 2:
      setmaxnreg_inc<kMathRegisters>();
      multiply_code_tiles(bytes, warpgroup - 1);
      break;
  }
}

}  // namespace mok
