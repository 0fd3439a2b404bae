// megakernel.cu: the forward layer of one rank in one persistent kernel.
// Compiled for: sm_90a
//
//   dispatch (pull) -> gate/up -> SwiGLU -> down -> push, shared expert first           (spec section 5)
//
// NumPy twin     mok_ref/layer.py: moe_forward, between its two barriers
// Launch         at most one CTA per SM (any number works: tickets), kForwardThreads threads,
//                kForwardSharedBytes of dynamic shared memory
// Warps          warpgroup 0: warp 0 schedules and loads, warp 1 pulls rows, warps 2, 3 epilogue (SwiGLU, push)
//                warpgroups 1, 2: math, 64 rows of each tile; all of them pull a piece of the first rows at the start
// Before         schedule tables complete, counters zero, all ranks' x in place (barrier kernel)
// After          this rank's y rows are on their way to their owners: complete after the next barrier
// Never waits for another rank. Every wait is limited in time; after a time-out no more tiles are begun and the
// output is void.
#include "combine_inside.cuh"
#include "dispatch.cuh"
#include "experts.cuh"

namespace mok {

// Registers per thread after the kernel's start: 128 * helpers + 256 * math must not exceed 64,512.
constexpr i32 kHelperRegisters = 136;
constexpr i32 kMathRegisters = 184;
static_assert(128 * kHelperRegisters + 256 * kMathRegisters <= 64512, "over-subscribed registers hang silently");

extern "C" __global__ void MOK_CLUSTER_DIMS __launch_bounds__(kForwardThreads, 1)
    moe_forward_hopper(const __grid_constant__ LayerParams params, const __grid_constant__ ForwardMaps maps) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const i32 warpgroup = threadIdx.x / 128, warp = threadIdx.x / kWarpSize % 4;
  if (threadIdx.x == 0) init_barriers(shared_address(bytes));
  sync_cluster_or_cta();
  follow_previous_kernel();
  trace_start(params.rank);

  switch (warpgroup) {  // written as if/else, ptxas keeps the math branch at its registers of the start and spills
    case 0:
      setmaxnreg_dec<kHelperRegisters>();
      if (warp == 0 && elect_one()) load_tiles(params, maps, bytes);
      if (warp == 1) {
        dispatch_forward(params);
        if (params.combines != 0) arrive_slots_without_route(params);
      }
      if (warp >= 2) {
        pull_first_rows(params, 1);
        finish_tiles(params, bytes, warp - 2);
      }
      break;
    case 1:
    case 2:
      setmaxnreg_inc<kMathRegisters>();
      pull_first_rows(params, 1);
      multiply_tiles(bytes, warpgroup - 1);
      break;
  }
  if (params.combines != 0) combine_ready_tokens(params);  // inside the switch it would make the math branch spill
  if constexpr (kClusterSize > 1) {
    __syncwarp();
    cluster_sync();  // a CTA's shared memory must outlive its partner's multicasts and arrivals
  }
}

}  // namespace mok
