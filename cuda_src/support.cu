// Kernels around the megakernels: staging of inputs, barrier between ranks, schedule, epilogues, self-tests.
//
// NumPy twins: mok_ref/schedule.py, mok_ref/combine.py. Launched by mok_ref/gpu/layer.py and the heaps.
// None of them waits, except `rank_barrier`, whose waits are bounded.
#include "check.cuh"
#include "combine.cuh"
#include "numerics.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "sync.cuh"

using namespace mok;

// ---- staging: the caller's arrays into this rank's symmetric buffers, where other ranks read them ----

// Copies `bytes`, a multiple of 2; by 16 bytes where both addresses allow it.
MOK_DEVICE void copy_bytes(void* target, const void* source, i64 bytes, i64 thread, i64 threads) {
  if (target == source) return;
  const bool wide = ((reinterpret_cast<u64>(target) | reinterpret_cast<u64>(source)) & 15) == 0;
  const i64 vectors = wide ? bytes / 16 : 0;
#pragma unroll 4
  for (i64 i = thread; i < vectors; i += threads)
    static_cast<uint4*>(target)[i] = static_cast<const uint4*>(source)[i];
  for (i64 i = vectors * 8 + thread; i < bytes / 2; i += threads)
    static_cast<u16*>(target)[i] = static_cast<const u16*>(source)[i];
}

// Several ranks. copy_x: 0 where x travels in another form (MXFP8 codes).
extern "C" __global__ void stage_inputs(const __grid_constant__ LayerParams params, i32 copy_x) {
  if (aborted(params.abort_flag)) return;
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  const i64 routes = static_cast<i64>(params.num_tokens) * params.top_k;
  if (thread == 0) *peer_buffer<i32>(params, kNumTokens, params.rank) = params.num_tokens;
  for (i64 i = thread; i < routes; i += threads) stage_route(params, static_cast<i32>(i));
  clear_words(params.counters, params.num_counters, thread, threads);
  if (copy_x)
    copy_bytes(peer_buffer<u16>(params, kX, params.rank), params.x_in,
               static_cast<i64>(params.num_tokens) * params.hidden_size * 2, thread, threads);
}

// dy for backward. copy_dy: 0 where dy travels in another form, or not at all.
extern "C" __global__ void stage_dy(const __grid_constant__ LayerParams params,
                                    const __grid_constant__ BackwardParams back, i32 copy_dy) {
  if (aborted(params.abort_flag)) return;
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  if (params.ep_size == 1 && thread == 0) use_in_place(params, kDy, back.dy_in);
  if (copy_dy)
    copy_bytes(peer_buffer<u16>(params, kDy, params.rank), back.dy_in,
               static_cast<i64>(params.num_tokens) * params.hidden_size * 2, thread, threads);
}

// ---- barrier between ranks ----

// Every rank adds 1 to its own word in each rank's flags, then waits until every word of its own flags has
// reached the epoch; one word per source, so that a missing rank can be named. The epoch lives on the device:
// a replayed graph counts on. One CTA.
extern "C" __global__ void rank_barrier(const __grid_constant__ BarrierParams barrier, u32 phase) {
  if (aborted(barrier.wait.abort_flag)) return;
  const u32 epoch = *barrier.epoch + 1;
  __syncthreads();
  fence_acq_rel_sys();
  for (i32 peer = threadIdx.x; peer < barrier.size; peer += blockDim.x)
    red_release_sys(reinterpret_cast<u32*>(barrier.flags[peer]) + barrier.wait.rank, 1);
  const u32* own = reinterpret_cast<const u32*>(barrier.flags[barrier.wait.rank]);
  for (i32 peer = threadIdx.x; peer < barrier.size; peer += blockDim.x)
    if (!wait_sys(own + peer, epoch, barrier.wait, phase, peer, epoch)) break;
  __syncthreads();
  if (threadIdx.x == 0) *barrier.epoch = epoch;
}

// ---- schedule ----

extern "C" __global__ void gather_routes(const __grid_constant__ LayerParams params) {
  __shared__ i32 token_offset[kMaxRanks + 1];
  if (aborted(params.abort_flag)) return;
  gather_routes_body(params, token_offset);
}

extern __shared__ i32 expert_words[];  // count: [L]; fill: [warps + 3][L]

extern "C" __global__ void __launch_bounds__(1024, 1) schedule_count(const __grid_constant__ LayerParams params) {
  __shared__ i32 own_offset[2];
  follow_previous_kernel();
  if (params.ep_size == 1) stage_in_place(params);
  schedule_count_body(params, own_offset, expert_words);
}

// As many threads as the CTAs of the other two have: they make the blocks.
extern "C" __global__ void schedule_turns(const __grid_constant__ LayerParams params) {
  follow_previous_kernel();
  schedule_turns_body(params, walk_grid(params));
}

extern "C" __global__ void __launch_bounds__(1024, 1) schedule_fill(const __grid_constant__ LayerParams params) {
  __shared__ i32 own_offset[2];
  __shared__ BlockSums scratch[1024];
  follow_previous_kernel();
  schedule_fill_body(params, own_offset, expert_words, scratch);
}

// ---- epilogues ----

// One thread per kVector columns of one token: grid (tokens, CTAs per token). They do not look at the abort flag,
// which would delay every load: a rank that has given up only adds up rows that nobody will use.

template <i32 kVector>
MOK_DEVICE void combine_forward_grid(const LayerParams& params) {
  const i32 column = static_cast<i32>(blockIdx.y * blockDim.x + threadIdx.x) * kVector;
  follow_previous_kernel();
  if (column < params.hidden_size) combine_forward<kVector>(params, blockIdx.x, column);
}

extern "C" __global__ void combine_forward_8(const __grid_constant__ LayerParams params) {
  combine_forward_grid<8>(params);
}

extern "C" __global__ void combine_forward_1(const __grid_constant__ LayerParams params) {
  combine_forward_grid<1>(params);
}

// Alone where the router's share of dx is made from d_topk_weights, else part of dispatch_backward.
extern "C" __global__ void dispatch_d_weights(const __grid_constant__ LayerParams params,
                                              const __grid_constant__ BackwardParams back) {
  if (aborted(params.abort_flag)) return;
  const i64 slots = static_cast<i64>(params.num_tokens) * params.top_k;
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < slots; i += step)
    dispatch_d_weight(params, back, i);
}

template <i32 kVector>
MOK_DEVICE void dispatch_backward_grid(const LayerParams& params, const BackwardParams& back, i32 with_d_weights) {
  const i32 thread = blockIdx.y * blockDim.x + threadIdx.x, threads = gridDim.y * blockDim.x;
  if (thread * kVector < params.hidden_size) dispatch_backward<kVector>(params, back, blockIdx.x, thread * kVector);
  for (i32 slot = thread; with_d_weights && slot < params.top_k; slot += threads)
    dispatch_d_weight(params, back, static_cast<i64>(blockIdx.x) * params.top_k + slot);
}

extern "C" __global__ void dispatch_backward_8(const __grid_constant__ LayerParams params,
                                              const __grid_constant__ BackwardParams back, i32 with_d_weights) {
  dispatch_backward_grid<8>(params, back, with_d_weights);
}

extern "C" __global__ void dispatch_backward_1(const __grid_constant__ LayerParams params,
                                              const __grid_constant__ BackwardParams back, i32 with_d_weights) {
  dispatch_backward_grid<1>(params, back, with_d_weights);
}

// ---- self-tests ----

MOK_DEVICE u32 test_pattern(u32 writer, u32 owner) {
  return 0x9e3779b9u * (writer + 1) ^ 0x85ebca6bu * (owner + 1);
}

// Writes this rank's word into every rank's test words.
extern "C" __global__ void self_test_write(const u64* words, i32 rank, i32 size) {
  for (i32 peer = threadIdx.x; peer < size; peer += blockDim.x)
    *reinterpret_cast<volatile u32*>(words[peer] + 4 * rank) = test_pattern(rank, peer);
  fence_acq_rel_sys();
}

// verdict[peer]: bit 0 the peer's pointer does not read back what this rank wrote through it,
// bit 1 the peer's write into this rank's words has not arrived.
extern "C" __global__ void self_test_read(const u64* words, i32 rank, i32 size, u32* verdict) {
  for (i32 peer = threadIdx.x; peer < size; peer += blockDim.x) {
    const u32 remote = *reinterpret_cast<const volatile u32*>(words[peer] + 4 * rank);
    const u32 local = *reinterpret_cast<const volatile u32*>(words[rank] + 4 * peer);
    verdict[peer] = (remote != test_pattern(rank, peer) ? 1u : 0u) | (local != test_pattern(peer, rank) ? 2u : 0u);
  }
}

// Occupies `gridDim.x` CTAs until the flag is set or the time is over: a foreign kernel for tests.
extern "C" __global__ void hold_sm(const u32* release, u64 limit_ns) {
  const u64 start = global_timer_ns();
  while (ld_relaxed_gpu(release) == 0 && global_timer_ns() - start < limit_ns) {
  }
}

// Delays the stream: a slow rank for tests.
extern "C" __global__ void delay(u64 nanoseconds) {
  const u64 start = global_timer_ns();
  while (global_timer_ns() - start < nanoseconds) {
  }
}

// Byte offset of a field (NVRTC has no offsetof of its own).
template <typename Struct, typename Field>
MOK_DEVICE u64 field_offset(Field Struct::*field) {
  return reinterpret_cast<u64>(&(static_cast<const Struct*>(nullptr)->*field));
}

// Sizes and last offsets of the parameter structs as this compiler lays them out.
extern "C" __global__ void params_layout(u64* words) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  words[0] = sizeof(ScheduleInfo);
  words[1] = field_offset(&ScheduleInfo::token_offset);
  words[2] = sizeof(ErrorRecord);
  words[3] = field_offset(&ErrorRecord::reserved);
  words[4] = sizeof(LayerParams);
  words[5] = field_offset(&LayerParams::combines);
  words[6] = sizeof(BackwardParams);
  words[7] = field_offset(&BackwardParams::router_dx);
  words[8] = sizeof(BarrierParams);
  words[9] = field_offset(&BarrierParams::epoch);
}
