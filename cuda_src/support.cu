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

// ---- staging: the caller's arrays into this rank's symmetric buffers ----

// Ids outside -1..E-1 and non-finite weights are reported and count as "no route" (-1, weight +0).
MOK_DEVICE void stage_route(const LayerParams& params, i32 i) {
  i32 id = params.ids_in[i];
  float weight = params.weights_in[i];
  if (id < -1 || id >= params.num_experts) {
    report_input(params.input_error, kBadId, i, static_cast<u32>(id));
    id = -1;
  }
  if ((__float_as_uint(weight) & 0x7f800000u) == 0x7f800000u) {
    report_input(params.input_error, kBadWeight, i, __float_as_uint(weight));
    id = -1;
    weight = 0.0f;
  }
  peer_buffer<i32>(params, kTopkIds, params.rank)[i] = id;
  peer_buffer<float>(params, kTopkWeights, params.rank)[i] = weight;
}

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

extern "C" __global__ void stage_inputs(const __grid_constant__ LayerParams params) {
  if (aborted(params.abort_flag)) return;
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  const i64 routes = static_cast<i64>(params.num_tokens) * params.top_k;
  if (thread == 0) *peer_buffer<i32>(params, kNumTokens, params.rank) = params.num_tokens;
  for (i64 i = thread; i < routes; i += threads) stage_route(params, static_cast<i32>(i));
  copy_bytes(peer_buffer<u16>(params, kX, params.rank), params.x_in,
             static_cast<i64>(params.num_tokens) * params.hidden_size * 2, thread, threads);
}

extern "C" __global__ void stage_dy(const __grid_constant__ LayerParams params,
                                    const __grid_constant__ BackwardParams back) {
  if (aborted(params.abort_flag)) return;
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
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

extern __shared__ i32 warp_words[];  // [warps][L]

extern "C" __global__ void schedule_count(const __grid_constant__ LayerParams params) {
  const ChunkGrid grid = chunk_grid(params);
  const i32 warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const i32 chunk_index = blockIdx.x * warps + warp;
  if (aborted(params.abort_flag) || chunk_index >= grid.segments * grid.chunks) return;
  schedule_count_body(params, chunk_index, warp_words + warp * params.num_local_experts);
}

extern "C" __global__ void __launch_bounds__(1024) schedule_scan(const __grid_constant__ LayerParams params) {
  if (aborted(params.abort_flag)) return;
  schedule_scan_body(params);
}

extern "C" __global__ void schedule_fill(const __grid_constant__ LayerParams params) {
  const ChunkGrid grid = chunk_grid(params);
  const i32 warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const i32 task = blockIdx.x * warps + warp, chunks = grid.segments * grid.chunks;
  if (aborted(params.abort_flag)) return;
  if (task < chunks)
    schedule_fill_body(params, task, warp_words + warp * params.num_local_experts);
  else if (task - chunks < params.num_local_experts)
    schedule_pad_body(params, task - chunks);
}

// ---- epilogues ----

template <i32 kVector>
MOK_DEVICE void combine_forward_grid(const LayerParams& params) {
  const i64 columns = params.hidden_size / kVector, total = params.num_tokens * columns;
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step)
    combine_forward<kVector>(params, i / columns, static_cast<i32>(i % columns) * kVector);
}

extern "C" __global__ void combine_forward_8(const __grid_constant__ LayerParams params) {
  if (!aborted(params.abort_flag)) combine_forward_grid<8>(params);
}

extern "C" __global__ void combine_forward_1(const __grid_constant__ LayerParams params) {
  if (!aborted(params.abort_flag)) combine_forward_grid<1>(params);
}

extern "C" __global__ void dispatch_d_weights(const __grid_constant__ LayerParams params,
                                              const __grid_constant__ BackwardParams back) {
  if (aborted(params.abort_flag)) return;
  const i64 slots = static_cast<i64>(params.num_tokens) * params.top_k;
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < slots; i += step)
    dispatch_d_weight(params, back, i);
}

template <i32 kVector>
MOK_DEVICE void dispatch_backward_grid(const LayerParams& params, const BackwardParams& back) {
  const i64 columns = params.hidden_size / kVector, total = params.num_tokens * columns;
  const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = first; i < total; i += step)
    dispatch_backward<kVector>(params, back, i / columns, static_cast<i32>(i % columns) * kVector);
}

extern "C" __global__ void dispatch_backward_8(const __grid_constant__ LayerParams params,
                                              const __grid_constant__ BackwardParams back) {
  if (!aborted(params.abort_flag)) dispatch_backward_grid<8>(params, back);
}

extern "C" __global__ void dispatch_backward_1(const __grid_constant__ LayerParams params,
                                              const __grid_constant__ BackwardParams back) {
  if (!aborted(params.abort_flag)) dispatch_backward_grid<1>(params, back);
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
  words[5] = field_offset(&LayerParams::num_counters);
  words[6] = sizeof(BackwardParams);
  words[7] = field_offset(&BackwardParams::router_dx);
  words[8] = sizeof(BarrierParams);
  words[9] = field_offset(&BarrierParams::epoch);
}
