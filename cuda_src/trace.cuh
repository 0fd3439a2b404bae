// Clock stamps of the megakernels' tasks: who did what, from when to when. Compiled in where MOK_TRACE is 1;
// otherwise every function here is empty and the kernels are the same bytes as without their calls.
//
//   trace_start(params.rank);                        at the kernel's start, every thread
//   trace_task(kTraceDown, row_block, column);       what this warp has done since its stamp before: lane 0 records
//   trace_task<4 * kWarpSize>(...)                   of a warpgroup only the first warp
//
// So the time of a warp that calls it is cut into tasks and waits without gaps.
// Python twin    mok_ref/gpu/trace.py sets `mok_trace` and reads the records; mok_ref/planner/trace.py: STAMP
// Executed by    any warp; each has a region of the buffer and a count of its own, so nobody waits for anybody
// Writes         records of this warp's region up to its capacity, and the number of tasks seen: the host tells
//                from it how many found no room. Launches that follow go on where the last one ended.
#pragma once
#include "sync.cuh"

namespace mok {

// Names for people: mok_ref/planner/trace.py: STAMP_KINDS. Inside a group the order is that of TileKind and TaskKind.
enum TraceKind : i32 {
  kTracePull = 0,           // a piece of rows copied
  kTraceSharedGateUp = 1,   // products of a tile, by one math warpgroup, from its first operands to its last product
  kTraceSharedDown = 2,
  kTraceGateUp = 3,
  kTraceDown = 4,
  kTraceAgain = 5,          // backward: gate or up made again
  kTraceHidden = 6,         // backward: dhu
  kTraceInput = 7,          // backward: dx
  kTraceWeight = 8,         // backward: dW
  kTraceStore = 9,          // what follows from the products of a tile, and its way into memory
  kTraceLoad = 10,          // the loader's part in a tile, waiting for room included
  kTraceWaitRows = 11,      // loader: the tile's rows are not complete yet
  kTraceWaitOperands = 12,  // math: no tile, or its first operands are not there yet
  kTraceWaitStore = 13,     // math: the tile before has not left yet
  kTraceWaitTile = 14,      // store: nothing to store yet
  kTraceWaitRing = 15,      // pull: no piece yet, or its ring slot is still in use
  kTraceCombine = 16,       // a part of a token summed
  kTraceWaitToken = 17,     // no token is complete
};

#if MOK_TRACE

struct alignas(16) TraceRecord {
  u16 sm, rank, kind, warp;
  u32 row_block, column;
  u64 start, end;  // globaltimer, ns
};

// Region of (rank, CTA, warp): `capacity` records. Set by the host before the first launch; all zero: record nothing.
struct TraceBuffer {
  TraceRecord* records;
  u32* counts;      // tasks seen, per region
  u32 capacity;
  u32 num_ctas;     // CTAs beyond them record nothing
  u32 first_rank;
  u32 num_ranks;
};

constexpr i32 kTraceWarps = 16;

extern "C" {
__device__ TraceBuffer mok_trace;
}

// What a warp knows of its own region, and its last stamp.
struct TraceRegion {
  u32 index;
  u32 count;
  u64 stamp;
};

constexpr u32 kNoRegion = ~0u;

MOK_DEVICE TraceRegion& trace_region() {
  __shared__ TraceRegion regions[kTraceWarps];
  return regions[threadIdx.x / kWarpSize];
}

MOK_DEVICE void trace_start(i32 rank) {
  const u32 warp = threadIdx.x / kWarpSize, slot = rank - mok_trace.first_rank;
  if (threadIdx.x % kWarpSize != 0 || warp >= kTraceWarps) return;
  const bool has_region = slot < mok_trace.num_ranks && blockIdx.x < mok_trace.num_ctas;
  const u32 index = has_region ? (slot * mok_trace.num_ctas + blockIdx.x) * kTraceWarps + warp : kNoRegion;
  trace_region() = TraceRegion{index, has_region ? mok_trace.counts[index] : 0, global_timer_ns()};
}

// Waits that the clock does not see are left out.
template <i32 kThreads = kWarpSize>
MOK_DEVICE void trace_task(i32 kind, i32 row_block, i32 column) {
  if (threadIdx.x % kThreads != 0) return;
  TraceRegion& region = trace_region();
  if (region.index >= mok_trace.num_ranks * mok_trace.num_ctas * kTraceWarps) return;  // kNoRegion, too
  const u64 start = region.stamp, end = global_timer_ns();
  region.stamp = end;
  if (kind >= kTraceWaitRows && end == start) return;
  const u32 at = region.count++;
  mok_trace.counts[region.index] = at + 1;
  if (at >= mok_trace.capacity) return;
  const u16 rank = region.index / (mok_trace.num_ctas * kTraceWarps) + mok_trace.first_rank;
  mok_trace.records[static_cast<i64>(region.index) * mok_trace.capacity + at] =
      TraceRecord{static_cast<u16>(sm_id()), rank, static_cast<u16>(kind), static_cast<u16>(threadIdx.x / kWarpSize),
                  static_cast<u32>(row_block), static_cast<u32>(column), start, end};
}

#else

MOK_DEVICE void trace_start(i32) {}
template <i32 kThreads = kWarpSize>
MOK_DEVICE void trace_task(i32, i32, i32) {}

#endif

}  // namespace mok
