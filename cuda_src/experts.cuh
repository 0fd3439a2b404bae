// experts.cuh: the expert products of the forward megakernel, and the push of their results.
//
//   gate/up tile   128 rows x (128 columns of gate | the same 128 of up), then SwiGLU           (spec eq. 5.1, 5.2)
//   down tile      128 rows x 256 columns:  y = bf16(tc(h, W_down))                             (spec eq. 5.3)
//                  row p goes to combine[peer_row[p]] on rank peer_rank[p]; padding rows go nowhere
//   shared expert  the same two tiles over this rank's own tokens, results to shared_h, shared_y
//
// NumPy twin     mok_ref/experts.py: experts_forward
// Executed by    loader lane (which tile, are its rows there, operands), two math warpgroups (64 rows of the tile
//                each), epilogue warps (SwiGLU, stores, push)
// Before         rows_ready / hidden_ready of the tile's row block, acquired by the loader lane
// After          hidden_ready, rows_done, released by every epilogue warp after its stores
#pragma once
#include "combine_inside.cuh"
#include "swiglu.cuh"
#include "tensor_core.cuh"
#include "tile.cuh"
#include "trace.cuh"

namespace mok {

// Tensor maps of one rank, by value. Python twin: mok_ref/gpu/hopper.py: FORWARD_MAPS
struct ForwardMaps {
  TensorMap x_ring, h_ring;                            // boxes of 64 rows, 64 along K
  TensorMap w_gate, w_up, w_down;                      // boxes of 128 weight rows, 64 along K
  TensorMap x, shared_h;
  TensorMap shared_w_gate, shared_w_up, shared_w_down;
};

MOK_DEVICE bool is_gate_up(const Tile& tile) { return tile.kind == kGateUp || tile.kind == kSharedGateUp; }
MOK_DEVICE bool is_routed(const Tile& tile) { return tile.kind == kGateUp || tile.kind == kDown; }

// ---------------------------------------------------------------- loader lane

// The counter that says whether operand A of a tile is complete; null: nothing to wait for.
struct RowsAwaited {
  const u32* counter;
  u32 expected;
  u32 phase;
};

MOK_DEVICE RowsAwaited rows_awaited(const Tile& tile, const LayerParams& params, const ForwardCounters& counters) {
  if (tile.kind == kStop || tile.kind == kSharedGateUp || tile.valid_rows == 0) return {nullptr, 0, 0};
  if (tile.kind == kGateUp) return {counters.rows_ready + tile.row_block, kTileM, kPhaseRowsReady};
  const i32 width = is_routed(tile) ? params.intermediate_size : params.shared_intermediate_size;
  const u32* ready = is_routed(tile) ? counters.hidden_ready : counters.shared_hidden_ready;
  return {ready + tile.row_block, static_cast<u32>(ceil_div(width, kHiddenTile) * kEpilogueWarps),
          kPhaseHiddenReady};
}

// Which matrices a tile multiplies and where its operand rows start.
struct TileOperands {
  const TensorMap* a;
  const TensorMap* b_low;   // first 128 weight rows
  const TensorMap* b_high;  // second 128
  i32 a_row, b_low_row, b_high_row;
};

MOK_DEVICE TileOperands tile_operands(const Tile& tile, const LayerParams& params, const ForwardMaps& maps) {
  const bool routed = is_routed(tile);
  TileOperands o;
  o.a_row = tile.first_row;
  if (is_gate_up(tile)) {
    o.a = routed ? &maps.x_ring : &maps.x;
    o.b_low = routed ? &maps.w_gate : &maps.shared_w_gate;
    o.b_high = routed ? &maps.w_up : &maps.shared_w_up;
    o.b_low_row = o.b_high_row = tile.expert * params.intermediate_size + tile.column * kHiddenTile;
  } else {
    o.a = routed ? &maps.h_ring : &maps.shared_h;
    o.b_low = o.b_high = routed ? &maps.w_down : &maps.shared_w_down;
    o.b_low_row = tile.expert * params.hidden_size + tile.column * kTileN;
    o.b_high_row = o.b_low_row + kTileN / 2;
  }
  return o;
}

// One weight tile; in a cluster that shares it each CTA fetches a half for both.
MOK_DEVICE void load_weights(const TileOperands& o, u32 dst, i32 k, u32 full, bool shares, i32 cluster_rank) {
  constexpr u32 kHalf = kOperandBBytes / 2;
  if (kClusterSize == 2 && shares) {
    const TensorMap* map = cluster_rank == 0 ? o.b_low : o.b_high;
    const i32 row = cluster_rank == 0 ? o.b_low_row : o.b_high_row;
    tma_load_2d_cluster(dst + cluster_rank * kHalf, map, k, row, full, (1 << kClusterSize) - 1);
  } else {
    tma_load_2d(dst, o.b_low, k, o.b_low_row, full);
    tma_load_2d(dst + kHalf, o.b_high, k, o.b_high_row, full);
  }
}

// Operand A, its second 64 rows only if there are any; in a cluster that shares it each CTA fetches 64 rows for both.
MOK_DEVICE void load_rows(const TileOperands& o, u32 dst, i32 k, u32 full, bool upper, bool shares, i32 cluster_rank) {
  if (kClusterSize == 2 && shares) {
    if (cluster_rank == 1 && !upper) return;
    const i32 row = o.a_row + 64 * cluster_rank;
    tma_load_2d_cluster(dst + cluster_rank * kHalfTileBytes, o.a, k, row, full, (1 << kClusterSize) - 1);
  } else {
    tma_load_2d(dst, o.a, k, o.a_row, full);
    if (upper) tma_load_2d(dst + kHalfTileBytes, o.a, k, o.a_row + 64, full);
  }
}

// One k-block of a tile into the ring. Rows beyond the first 64 are loaded only if they are used.
MOK_DEVICE void load_k_block(const Tile& tile, const TileOperands& o, i32 k, OperandRing& ring, i32 cluster_rank) {
  const bool upper = tile.valid_rows > 64, any = tile.valid_rows > 0;
  const u32 full = ring.full();
  mbarrier_wait(ring.empty(), ring.parity() ^ 1);
  mbarrier_arrive_expect_tx(full, any ? kOperandBBytes + (upper ? 2 : 1) * kHalfTileBytes : 0);
  if (any) {
    load_rows(o, ring.a(), k, full, upper, tile.shared == kSharesRows, cluster_rank);
    load_weights(o, ring.b(), k, full, tile.shared == kSharesWeights, cluster_rank);
  }
  ++ring.number;
}

// Draws tickets, announces tiles, loads their operands. The next tile is looked up from kLookAhead k-blocks before the
// current one is through, when the ring is full: one step per k-block, for the ring is empty before all of them are done.
MOK_DEVICE void load_tiles(const LayerParams& params, const ForwardMaps& maps, unsigned char* bytes) {
  constexpr i32 kLookAhead = kStages + kSearchSteps + 1;
  const i32 cluster_rank = kClusterSize == 1 ? 0 : cluster_ctarank();
  const ForwardCounters counters = forward_counters(params);
  TileWalk walk(params, cluster_rank);
  TileQueue queue(bytes);
  TicketMail mail(counters.tile_ticket, params.abort_flag, queue.shared, cluster_rank);
  OperandRing ring{queue.shared, 0};
  Tile tile = walk.locate(mail.next());
  bool is_ready = false;
  while (true) {
    const RowsAwaited rows = rows_awaited(tile, params, counters);
    if (!is_ready && rows.counter != nullptr) {
      wait_gpu(rows.counter, rows.expected, wait_context(params), rows.phase, tile.row_block);
      trace_task(kTraceWaitRows, tile.row_block, tile.column);
    }
    queue.put(tile);
    if (tile.kind == kStop) break;
    mail.draw();
    fence_proxy_async_global();  // the rows were written by ordinary stores
    const TileOperands operands = tile_operands(tile, params, maps);
    TileSearch next;
    is_ready = false;
    const i32 look = max(tile.k_blocks - kLookAhead, 0), ready_look = look + kSearchSteps + 1;
    for (i32 block = 0; block < tile.k_blocks; ++block) {
      if (block == look) {
        next = walk.begin_search(mail.next());
      } else if (block > look) {
        walk.advance(next);
      }
      if (block == ready_look) {
        const RowsAwaited then = rows_awaited(next.tile, params, counters);
        is_ready = then.counter == nullptr || ld_acquire_gpu(then.counter) >= then.expected;
      }
      load_k_block(tile, operands, block * kTileK, ring, cluster_rank);
    }
    while (next.steps_left > 0) walk.advance(next);
    trace_task(kTraceLoad, tile.row_block, tile.column);
    tile = next.tile;
  }
}

// ---------------------------------------------------------------- math warpgroups

// What a math warp has computed and not handed over yet: the second half of its previous tile. It waits in
// registers while the next tile's products begin, until the epilogue has taken the first half.
struct Pending {
  HalfTile half;
  u32 waits;  // 1: there is one
};

MOK_DEVICE void hand_over(Pending& pending, const StagingBuffer& staging, i32 lane) {
  stage_half(staging, pending.half, lane);
  pending.waits = 0;
}

// Before this warp waits for anything that may depend on its own previous tile.
MOK_DEVICE void hand_over_now(Pending& pending, const StagingBuffer& staging, i32 lane) {
  if (pending.waits == 0) return;
  staging.wait_free(1);
  hand_over(pending, staging, lane);
}

// Waits for the next k-block. Once a tile's first k-block is there the others follow; in a cluster they may need the
// partner, and the partner this warp's previous tile: what is pending is then handed over while waiting.
MOK_DEVICE void wait_operands(const OperandRing& ring, Pending& pending, const StagingBuffer& staging, i32 lane) {
  if constexpr (kClusterSize > 1) {
    while (pending.waits != 0 && !mbarrier_test_wait(ring.full(), ring.parity())) {
      if (staging.is_free(1)) hand_over(pending, staging, lane);
    }
  }
  mbarrier_wait(ring.full(), ring.parity());
}

// Low words of the operands' descriptors in stage 0; of A the rows of this warpgroup.
struct StageDescriptors {
  u32 a, b;

  MOK_DEVICE StageDescriptors(u32 shared, i32 warpgroup)
      : a(descriptor_low<Major::kK>(shared + warpgroup * kHalfTileBytes)),
        b(descriptor_low<Major::kK>(shared + kOperandABytes)) {
    keep_in_register(a);
  }
};

// One k-block, which is there.
MOK_DEVICE void tc_block(float (&acc)[128], const OperandRing& ring, const StageDescriptors& first, i32 scale_d) {
  const u32 behind = ring.stage() * (kStageBytes >> 4);
  wgmma_fence();
  const u64 a = descriptor_of(warp_uniform(first.a + behind)), b = descriptor_of(warp_uniform(first.b + behind));
  tc_k64<Major::kK, Major::kK>(acc, a, b, scale_d);
  wgmma_commit();
}

// Waits for a k-block behind a tile's first and multiplies. A stage is handed back once the next k-block's products
// are under way, or at once where that k-block is not there yet: then the free stage is worth more than products queued
// without a gap. kMayWait: something may be pending; it is handed over as soon as there is room.
template <bool kMayWait>
MOK_DEVICE void tc_next_block(float (&acc)[128], OperandRing& ring, const StageDescriptors& first, u32& held,
                              Pending& pending, const StagingBuffer& staging, i32 lane) {
  if (!mbarrier_test_wait(ring.full(), ring.parity())) {
    wgmma_wait<0>();
    release_stage(held, lane);
    held = 0;
    if constexpr (kMayWait) wait_operands(ring, pending, staging, lane);
    mbarrier_wait(ring.full(), ring.parity());
  }
  tc_block(acc, ring, first, 1);
  wgmma_wait<1>();
  if (held != 0) release_stage(held, lane);
  if (kMayWait && pending.waits != 0 && staging.is_free(1)) hand_over(pending, staging, lane);
  held = ring.empty();
  ++ring.number;
}

// acc = tc(A rows of this warpgroup, weight tile), from +0 over all k-blocks. Returns with the last one's products under
// way, in the stage of the empty barrier that it returns, or 0: `end_products` comes next.
MOK_DEVICE u32 tc_tile(float (&acc)[128], OperandRing& ring, i32 k_blocks, Pending& pending,
                       const StagingBuffer& staging, i32 lane) {
  if (!mbarrier_test_wait(ring.full(), ring.parity())) {
    hand_over_now(pending, staging, lane);
    mbarrier_wait(ring.full(), ring.parity());
  }
  trace_task<4 * kWarpSize>(kTraceWaitOperands, 0, 0);
  const StageDescriptors first(ring.shared, staging.warpgroup);
  const u32 end = ring.number + k_blocks;
  tc_block(acc, ring, first, 0);
  u32 held = ring.empty();  // stage of the products under way; 0: handed back
  ++ring.number;
  while (pending.waits != 0 && ring.number != end) tc_next_block<true>(acc, ring, first, held, pending, staging, lane);
  while (ring.number != end) tc_next_block<false>(acc, ring, first, held, pending, staging, lane);
  return held;
}

MOK_DEVICE void end_products(u32 held, i32 lane) {
  wgmma_wait<0>();
  release_stage(held, lane);
}

// A warpgroup without valid rows only hands the stages back.
MOK_DEVICE void skip_tile(OperandRing& ring, i32 k_blocks, i32 lane) {
  for (i32 block = 0; block < k_blocks; ++block, ++ring.number) {
    mbarrier_wait(ring.full(), ring.parity());
    __syncwarp();
    release_stage(ring.empty(), lane);
  }
}

constexpr i32 kUnknownWork = 0x7fffffff;

// What a math warpgroup has to know of a tile, in one register: its k-blocks; negative: but none of its rows are this
// warpgroup's; 0: there are no more tiles.
MOK_DEVICE i32 math_work(const Tile& tile, i32 warpgroup) {
  if (tile.kind == kStop) return 0;
  return tile.valid_rows > 64 * warpgroup ? tile.k_blocks : -tile.k_blocks;
}

// One math warpgroup. It knows nothing of gate, up or down: products in, bf16 halves out.
MOK_DEVICE void multiply_tiles(unsigned char* bytes, i32 warpgroup) {
  const i32 lane = threadIdx.x % kWarpSize;
  TileQueue queue(bytes);
  OperandRing ring{queue.shared, 0};
  const StagingBuffer staging{queue.shared, warpgroup};
  Pending pending;
  pending.waits = 0;
  Tile tile = queue.take(lane);  // for the trace alone; so is `next`
  i32 work = math_work(tile, warpgroup);
  while (work != 0) {
    Tile next;
    i32 next_work = kUnknownWork;
    if (work < 0) {
      hand_over_now(pending, staging, lane);
      skip_tile(ring, -work, lane);
    } else {
      float acc[128];
      const u32 held = tc_tile(acc, ring, work, pending, staging, lane);
      if (queue.ready()) {  // looked at while the last products run
        next = queue.take(lane);
        next_work = math_work(next, warpgroup);
      }
      end_products(held, lane);
      trace_task<4 * kWarpSize>(kTraceSharedGateUp + tile.kind, tile.row_block, tile.column);
      hand_over_now(pending, staging, lane);
      staging.wait_free(0);
      trace_task<4 * kWarpSize>(kTraceWaitStore, tile.row_block, tile.column);
      HalfTile first;
      take_half<0>(first, acc);
      stage_half(staging, first, lane);
      take_half<1>(pending.half, acc);
      pending.waits = 1;
    }
    if (next_work == kUnknownWork) {
      if (!queue.ready()) hand_over_now(pending, staging, lane);
      next = queue.take(lane);
      next_work = math_work(next, warpgroup);
    }
    tile = next;
    work = next_work;
  }
  hand_over_now(pending, staging, lane);
}

// ---------------------------------------------------------------- epilogue warps

MOK_DEVICE HiddenTarget hidden_target(const Tile& tile, const LayerParams& params) {
  const bool routed = is_routed(tile);
  const i32 width = routed ? params.intermediate_size : params.shared_intermediate_size;
  const i32 column = tile.column * kHiddenTile;
  const i64 row = static_cast<i64>(tile.row_block) * kTileM;
  const i64 saved = row * width + column;
  u16* gate = routed ? (row < params.max_saved_rows ? params.gate_saved : nullptr) : params.shared_gate;
  u16* up = routed ? params.up_saved : params.shared_up;
  u16* h = routed ? params.h_ring : params.shared_h;
  return HiddenTarget{h + static_cast<i64>(tile.first_row) * width + column,
                      gate == nullptr ? nullptr : gate + saved,
                      up + saved,
                      width,
                      width - column,
                      routed ? kTileM : tile.valid_rows};
}

// Where row `row` of a down tile goes, or null: the owner's combine buffer, or this rank's shared_y.
MOK_DEVICE u16* push_target(const Tile& tile, const LayerParams& params, i32 row) {
  if (row >= tile.valid_rows) return nullptr;
  const i64 hidden = params.hidden_size;
  const i64 index = static_cast<i64>(tile.row_block) * kTileM + row;
  if (tile.kind == kSharedDown) return params.shared_y + index * hidden;
  if (params.ep_size == 1) return params.combine + __ldg(params.peer_row + index) * hidden;
  const u64* combine = params.peer_table + kCombine * params.ep_size;
  u16* buffer = reinterpret_cast<u16*>(__ldg(combine + __ldg(params.peer_rank + index)));
  return buffer + __ldg(params.peer_row + index) * hidden;
}

// Half `half` of one math warpgroup's rows of y: this warp's kEpilogueRows of them. Lane l holds the target of row
// l; a row of a chunk is 128 bytes, eight lanes wide.
MOK_DEVICE void push_rows(const StagingBuffer& staging, u16* lane_target, i32 first_column, i32 hidden_size,
                          i32 half, i32 first_row, i32 lane) {
  constexpr i32 kSteps = 4;  // of 4 rows each: as many as have their loads under way together
  const i32 unit = lane % 8, column = first_column + half * kChunkColumns + 8 * unit;
#pragma unroll 1
  for (i32 row = lane / 8; row < kEpilogueRows; row += 4 * kSteps) {
    uint4 y[kSteps][2];
    u64 target[kSteps];  // of the row's first column; 0: goes nowhere
#pragma unroll
    for (i32 i = 0; i < kSteps; ++i) {
      target[i] = __shfl_sync(kFullWarp, reinterpret_cast<u64>(lane_target), row + 4 * i);
      for (i32 chunk = 0; chunk < 2; ++chunk)
        y[i][chunk] = ld_shared_v4(staging.unit(chunk, first_row + row + 4 * i, unit));
    }
#pragma unroll
    for (i32 i = 0; i < kSteps; ++i) {
      u16* const start = reinterpret_cast<u16*>(target[i]) + column;
      if (target[i] != 0 && column < hidden_size) st_global_v4(start, y[i][0]);
      if (target[i] != 0 && column + 2 * kChunkColumns < hidden_size) st_global_v4(start + 2 * kChunkColumns, y[i][1]);
    }
  }
}

// Tells other CTAs that this warp's part of the tile is stored.
MOK_DEVICE void signal_tile(const Tile& tile, const ForwardCounters& counters, i32 mini_blocks, bool ring_is_reused,
                            i32 lane) {
  __syncwarp();
  if (lane != 0) return;
  if (tile.kind == kGateUp) red_release_gpu(counters.hidden_ready + tile.row_block, 1);
  if (tile.kind == kSharedGateUp) red_release_gpu(counters.shared_hidden_ready + tile.row_block, 1);
  if (tile.kind == kDown && ring_is_reused) red_release_gpu(counters.rows_done + tile.row_block / mini_blocks, 1);
}

// One epilogue warp: kEpilogueRows rows of either math warpgroup.
MOK_DEVICE void finish_tiles(const LayerParams& params, unsigned char* bytes, i32 warp) {
  static_assert(kEpilogueRows == kWarpSize, "a lane holds the target of one row per math warpgroup");
  const i32 lane = threadIdx.x % kWarpSize, first_row = kEpilogueRows * warp;
  const ForwardCounters counters = forward_counters(params);
  const MinibatchWalk minis(params);
  const bool ring_is_reused = minis.ring_is_reused();
  const SwigluClamp clamp = swiglu_clamp(params);
  TileQueue queue(bytes);
  while (true) {
    const Tile tile = queue.get();
    if (tile.kind == kStop) break;
    const bool gate_up = is_gate_up(tile);
    const HiddenTarget hidden = hidden_target(tile, params);
    u16* const low_target = gate_up ? nullptr : push_target(tile, params, first_row + lane);
    u16* const high_target = gate_up ? nullptr : push_target(tile, params, 64 + first_row + lane);
    const i32 groups = ceil_div(tile.valid_rows, 64);
#pragma unroll 1
    for (i32 part = 0; part < 2 * groups; ++part) {  // one copy of the code for all parts: it must fit the cache
      const i32 half = groups == 2 ? part / 2 : part, group = groups == 2 ? part % 2 : 0;
      const StagingBuffer staging{queue.shared, group};
      staging.wait_full(half);
      trace_task(kTraceWaitTile, tile.row_block, tile.column);
      if (gate_up) {
        swiglu_forward(staging, hidden, clamp, half, first_row, lane);
      } else {
        push_rows(staging, group == 0 ? low_target : high_target, tile.column * kTileN, params.hidden_size, half,
                  first_row, lane);
      }
      staging.pass(staging.free(), lane);
      trace_task(kTraceStore, tile.row_block, tile.column);
    }
    if (tile.valid_rows > 0) signal_tile(tile, counters, minis.mini_blocks, ring_is_reused, lane);
    if (params.combines != 0 && !gate_up && tile.valid_rows > 0) arrive_rows(params, tile, lane);
    queue.finish(lane);
  }
}

}  // namespace mok
