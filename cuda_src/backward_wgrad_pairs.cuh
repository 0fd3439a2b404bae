// Weight gradients of experts with few rows: the products of backward_wgrad.cuh, made by pairs of CTAs.
//
// A task is 256 x 256 of dW. CTA r of a cluster makes rows 128 r .. 128 r + 127, its multiplying warpgroup g columns
// 128 g .. 128 g + 127. The warpgroups take turns: one multiplies while the other stores, so that short chains do not
// pay for their stores. Both CTAs multiply with the same columns of rows_in: each fetches 64 of a warpgroup's 128 and
// delivers them to both (multicast inside the cluster's shared memory, never over links).
//
// Included by megakernel_backward.cu: operands are bf16.
// NumPy twin: mok_ref/experts.py: weight_gradient. Same sums in the same order as backward_wgrad.cuh: same bits.
// Executed by: CTAs of kThreads threads in clusters of two. Warp 0 of CTA 0 draws tickets, warp 1 loads rows_out and
// warp 2 rows_in (a k-block of a half is 512 clocks, and one lane needs about 300 for a copy), warpgroups 1 and 2
// multiply and store. Warp 3, and warp 0 of CTA 1, make dx beside it.
// Synchronisation: CTA 0 writes each task into both CTAs' queues; the queue's `empty` barriers live in CTA 0. A stage
// is free once the four warps that used it have said so in both CTAs. Nobody waits for another cluster.
#pragma once
#include "backward_epilogue.cuh"
#include "backward_wgrad.cuh"

namespace mok {

constexpr i32 kPairRows = 2 * kTileRows;
constexpr i32 kPairStages = 6;
constexpr u32 kPairStageBytes = 4 * kBoxBytes;  // 128 columns of rows_out, 128 of rows_in, 64 rows of both
constexpr i32 kPairLoaderRegisters = 88, kPairMathRegisters = 208;
constexpr i32 kTurnBarrier = 1;  // named barriers 1 and 2: it is warpgroup 0's, 1's turn to multiply
static_assert(128 * kPairLoaderRegisters + 256 * kPairMathRegisters <= 64512, "over-subscribed registers hang");
static_assert(kPairStages * kPairStageBytes == kStages * kStageBytes, "both rings have the same bytes");

using PairCursor = RingCursor<kPairStages>;

// SharedLayout with smaller stages.
struct PairLayout {
  u32 base;

  MOK_DEVICE u32 tile_a(u32 stage) const { return base + stage * kPairStageBytes; }
  MOK_DEVICE u32 tile_b(u32 stage) const { return tile_a(stage) + 2 * kBoxBytes; }
  MOK_DEVICE u32 staging(u32 warp) const { return SharedLayout{base}.staging(warp); }
  MOK_DEVICE u32 task(u32 slot) const { return SharedLayout{base}.task(slot); }
  MOK_DEVICE u32 full(u32 stage) const { return SharedLayout{base}.barrier(stage); }
  MOK_DEVICE u32 empty(u32 stage) const { return SharedLayout{base}.barrier(kPairStages + stage); }
  MOK_DEVICE u32 task_full(u32 slot) const { return SharedLayout{base}.barrier(2 * kPairStages + slot); }
  MOK_DEVICE u32 task_empty(u32 slot) const { return SharedLayout{base}.barrier(2 * kPairStages + kTaskSlots + slot); }
};
static_assert(2 * kPairStages + 2 * kTaskSlots <= SharedLayout::kNumBarriers, "barriers of PairLayout");

struct PairContext {
  const LayerParams& layer;
  const WgradParams& params;
  const WgradMaps& maps;
  PairLayout layout;
  u32 rank;  // in the cluster
};

// CTA 1: the slot's next task will come as 32 bytes from CTA 0.
MOK_DEVICE void expect_task(const PairLayout& layout, u32 slot) {
  mbarrier_arrive_expect_tx(layout.task_full(slot), sizeof(TileTask));
}

MOK_DEVICE PairLayout init_pairs(const void* shared, u32 rank) {
  const PairLayout layout{shared_address(shared)};
  if (threadIdx.x == 0) {
    for (i32 s = 0; s < kPairStages; ++s) {
      mbarrier_init(layout.full(s), 2);  // both loading lanes
      mbarrier_init(layout.empty(s), 2 * 4);
    }
    for (i32 s = 0; s < kTaskSlots; ++s) {
      mbarrier_init(layout.task_full(s), 1);
      mbarrier_init(layout.task_empty(s), 2 * (kMathWarps + 2));
    }
    fence_mbarrier_init();
    if (rank == 1) {
      for (i32 s = 0; s < kTaskSlots; ++s) expect_task(layout, s);
    }
  }
  cluster_sync();
  return layout;
}

// ---- tasks: warp 0 of CTA 0, one lane ----

// Hands `task` to the warps of both CTAs.
MOK_DEVICE void publish_pair_task(const PairLayout& layout, WgradTaskCursor& cursor, const TileTask& task) {
  wait_task_slot(layout, cursor);
  const u32 slot = layout.task(cursor.index), full = layout.task_full(cursor.index);
  const i32 words[8] = {task.kind,  task.block, task.column, task.valid,
                        task.depth, task.batch, task.flags,  task.ring_row};
#pragma unroll
  for (i32 i = 0; i < 8; i += 2) {
    const u64 pair = static_cast<u32>(words[i]) | static_cast<u64>(static_cast<u32>(words[i + 1])) << 32;
    st_async_cluster_u64(slot + 4 * i, full, 1, pair);
  }
  st_shared_v4(slot, words[0], words[1], words[2], words[3]);
  st_shared_v4(slot + 16, words[4], words[5], words[6], words[7]);
  mbarrier_arrive(full);
  cursor.advance();
}

// Whoever read the task needs its slot no more.
MOK_DEVICE void release_pair_task(const PairLayout& layout, WgradTaskCursor& cursor) {
  mbarrier_arrive_cluster(layout.task_empty(cursor.index), 0);
  cursor.advance();
}

MOK_DEVICE void draw_pairs(const PairContext& c) {
  const ExpertTickets<kPairRows> tickets(c.layer, c.params);
  WgradTaskCursor queue;
  TileTask task;
  do {
    wait_task_slot(c.layout, queue);
    task = tickets.locate([&] { return draw_ticket(c.params.ticket); });
    if (aborted(c.layer.abort_flag)) task.kind = kTaskEnd;
    publish_pair_task(c.layout, queue, task);
  } while (task.kind != kTaskEnd);
}

// ---- loading lanes: warp 1 rows_out, warp 2 rows_in ----

// Both halves of a task, all k-blocks: 128 columns of rows_out, the same for both halves.
MOK_DEVICE void load_rows_out(const PairContext& c, const TileTask& task, PairCursor& stage) {
  const i32 product = product_of(task.flags), blocks = depth_blocks(task);
  const Operand a{&c.maps.rows_out[product], task.block + static_cast<i32>(c.rank) * kTileRows, task.ring_row, 0,
                  c.params.rows[product] % 64 == 0};
  for (i32 group = 0; group < 2; ++group) {
    for (i32 k = 0; k < blocks; ++k) {
      mbarrier_wait(c.layout.empty(stage.index), stage.parity ^ 1);
      const u32 full = c.layout.full(stage.index);
      mbarrier_arrive_expect_tx(full, 2 * kBoxBytes);
      load_operand<Major::kMN, 2>(c.layout.tile_a(stage.index), a, k, full);
      stage.advance();
    }
  }
}

// This CTA's 64 of a half's 128 columns of rows_in, for both CTAs.
MOK_DEVICE void load_rows_in(const PairContext& c, const TileTask& task, PairCursor& stage) {
  const i32 product = product_of(task.flags), blocks = depth_blocks(task);
  const TensorMap* rows_in = &c.maps.rows_in[product];
  const bool whole = c.params.columns[product] % 64 == 0;
  for (i32 group = 0; group < 2; ++group) {
    const i32 column = task.column + group * kHalfColumns + static_cast<i32>(c.rank) * 64;
    const i32 inner = whole ? 0 : column, outer = whole ? column / 64 : 0;
    for (i32 k = 0; k < blocks; ++k) {
      mbarrier_wait(c.layout.empty(stage.index), stage.parity ^ 1);
      const u32 full = c.layout.full(stage.index);
      mbarrier_arrive_expect_tx(full, 2 * kBoxBytes);
      tma_load_4d_cluster(c.layout.tile_b(stage.index) + c.rank * kBoxBytes, rows_in, inner,
                          task.ring_row + kDepthBlock * k, outer, 0, full, 3);
      stage.advance();
    }
  }
}

template <bool kRowsOut>
MOK_DEVICE void load_pairs(const PairContext& c) {
  wait_hidden_rows(c.layer, c.params);
  PairCursor stage;
  WgradTaskCursor queue;
  while (true) {
    const TileTask task = read_task(c.layout, queue);
    if (task.kind == kTaskEnd) return;
    if (kRowsOut && c.rank == 1) expect_task(c.layout, queue.index);
    release_pair_task(c.layout, queue);
    if constexpr (kRowsOut) {
      load_rows_out(c, task, stage);
      trace_task(kTraceLoad, task.batch, task.column);
    } else {
      load_rows_in(c, task, stage);
    }
  }
}

// ---- multiplying warps ----

// 128 x 128 of dW: rows 0..63 and 64..127.
struct PairTile {
  float top[64], bottom[64];
};

MOK_DEVICE void release_pair_stage(const PairLayout& layout, u32 stage) {
  const u32 lane = threadIdx.x % kWarpSize;
  if (lane < 2) mbarrier_arrive_cluster(layout.empty(stage), lane);
}

MOK_DEVICE void tc_pair_k16(PairTile& d, u64 a, u64 b, i32 scale_d) {
  wgmma_m64n128k16<Major::kMN, Major::kMN>(d.top, a, b, scale_d);
  wgmma_m64n128k16<Major::kMN, Major::kMN>(d.bottom, a + kDescriptorStep64Rows, b, scale_d);
}

// One k-block.
MOK_DEVICE void tc_pair_k64(PairTile& d, const PairLayout& layout, u32 stage, i32 scale_d) {
  constexpr u64 kStep = kDescriptorStepK16<Major::kMN>;
  const u32 low = descriptor_low<Major::kMN>(layout.tile_a(stage));
  wgmma_fence();
  const u64 a = descriptor_of(warp_uniform(low)), b = descriptor_of(warp_uniform(low + (2 * kBoxBytes >> 4)));
  tc_pair_k16(d, a, b, scale_d);
#pragma unroll
  for (i32 step = 1; step < 4; ++step) tc_pair_k16(d, a + step * kStep, b + step * kStep, 1);
  wgmma_commit();
}

// A last k-block of which only the first `steps` groups of 16 hold anything, each a batch of its own.
MOK_DEVICE void tc_pair_tail(PairTile& d, const PairLayout& layout, u32 stage, i32 steps) {
  constexpr u64 kStep = kDescriptorStepK16<Major::kMN>;
  const u32 low = descriptor_low<Major::kMN>(layout.tile_a(stage));
  wgmma_fence();
  const u64 a = descriptor_of(warp_uniform(low)), b = descriptor_of(warp_uniform(low + (2 * kBoxBytes >> 4)));
  tc_pair_k16(d, a, b, 1);
  wgmma_commit();
#pragma unroll
  for (i32 step = 1; step < 4; ++step) {
    if (step < steps) {
      wgmma_fence();
      tc_pair_k16(d, a + step * kStep, b + step * kStep, 1);
      wgmma_commit();
    }
  }
}

// `multiply_groups` for a warpgroup of its own: d = tc(rows_out, rows_in, scale_d ? d : +0), `depth` >= 1 groups of 16.
// Ends with products under way and gives the turn to the other warpgroup.
MOK_DEVICE void multiply_pair(PairTile& d, const PairLayout& layout, PairCursor& stage, i32 depth, i32 group,
                              i32 scale_d) {
  const i32 blocks = (depth + 3) / 4;
  mbarrier_wait(layout.full(stage.index), stage.parity);
  trace_task<4 * kWarpSize>(kTraceWaitOperands, 0, 0);
  tc_pair_k64(d, layout, stage.index, scale_d);
  u32 previous = stage.index;
  stage.advance();
  for (i32 k = 2; k < blocks; ++k) {
    mbarrier_wait(layout.full(stage.index), stage.parity);
    tc_pair_k64(d, layout, stage.index, 1);
    wgmma_wait<1>();
    release_pair_stage(layout, previous);
    previous = stage.index;
    stage.advance();
  }
  if (blocks > 1) {
    mbarrier_wait(layout.full(stage.index), stage.parity);
    tc_pair_tail(d, layout, stage.index, ((depth - 1) & 3) + 1);
    wgmma_wait<0>();
    release_pair_stage(layout, previous);
    previous = stage.index;
    stage.advance();
  }
  named_barrier_arrive(kTurnBarrier + 1 - group, 2 * 4 * kWarpSize);
  wgmma_wait<0>();
  release_pair_stage(layout, previous);
}

// One multiplying warpgroup. Its turns alternate with the other's, warpgroup 0 first.
MOK_DEVICE void multiply_pairs(const PairContext& c, i32 group) {
  PairCursor stage;
  WgradTaskCursor queue;
  const u32 staging = c.layout.staging(threadIdx.x / kWarpSize - 4);
  bool first = group == 0;  // nobody gives warpgroup 0 its first turn
  while (true) {
    const TileTask task = read_task(c.layout, queue);
    if (task.kind == kTaskEnd) break;
    const i32 row = task.block + static_cast<i32>(c.rank) * kTileRows + threadIdx.x / kWarpSize % 4 * 16;
    const i32 column = task.column + group * kHalfColumns, blocks = depth_blocks(task);
    const i32 resumed = begin_of(task.flags) != kBeginZero;
    PairTile d;
    if (resumed) {
      begin_chain(d.top, c.params, task, row, column);
      begin_chain(d.bottom, c.params, task, row + 64, column);
    } else if (task.depth == 0) {
#pragma unroll
      for (i32 i = 0; i < 64; ++i) d.top[i] = d.bottom[i] = 0.0f;
    }
    if (!first) named_barrier_sync(kTurnBarrier + group, 2 * 4 * kWarpSize);
    first = false;
    if (group == 1) stage.skip(blocks);
    if (task.depth > 0) {
      multiply_pair(d, c.layout, stage, task.depth, group, resumed);
    } else {
      named_barrier_arrive(kTurnBarrier + 1 - group, 2 * 4 * kWarpSize);
    }
    if (group == 0) stage.skip(blocks);
    const TileTask finished = read_task(c.layout, queue);  // again, rather than in registers all the while
    const i32 end_row = finished.block + static_cast<i32>(c.rank) * kTileRows + threadIdx.x / kWarpSize % 4 * 16;
    const i32 end_column = finished.column + group * kHalfColumns;
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) mbarrier_arrive_cluster(c.layout.task_empty(queue.index), 0);
    queue.advance();
    trace_task<4 * kWarpSize>(kTraceWeight, finished.batch, finished.column);
    end_chain(d.top, c.params, c.maps, finished, staging, end_row, end_column);
    end_chain(d.bottom, c.params, c.maps, finished, staging, end_row + 64, end_column);
    trace_task<4 * kWarpSize>(kTraceStore, finished.batch, finished.column);
  }
  wait_bulk_stores<true>();
}

// The whole kernel; shared: kSharedBytes of dynamic shared memory. `beside` as in `wgrad_kernel`.
template <typename Beside>
MOK_DEVICE void wgrad_pairs_kernel(void* shared, const LayerParams& layer, const WgradParams& params,
                                   const WgradMaps& maps, const Beside& beside) {
  const u32 rank = cluster_ctarank();
  const PairContext context{layer, params, maps, init_pairs(shared, rank), rank};
  trace_start(layer.rank);
  const i32 warp = threadIdx.x / kWarpSize;
  switch (warp / 4) {
    case 0:
      setmaxnreg_dec<kPairLoaderRegisters>();
      if (warp == 0 && rank == 0 && elect_one()) draw_pairs(context);
      if (warp == 1 && elect_one()) load_pairs<true>(context);
      if (warp == 2 && elect_one()) load_pairs<false>(context);
      if (warp == 3 || (warp == 0 && rank == 1)) {
        const i32 ctas = gridDim.x, cta = blockIdx.x;
        beside(warp == 3 ? cta : ctas + cta / 2, ctas + ctas / 2);
      }
      break;
    case 1:
    case 2:
      setmaxnreg_inc<kPairMathRegisters>();
      multiply_pairs(context, warp / 4 - 1);
      break;
  }
  __syncwarp();
  cluster_sync();  // the partner writes and arrives in this CTA's shared memory to the end
}

}  // namespace mok
