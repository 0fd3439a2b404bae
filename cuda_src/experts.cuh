// experts.cuh: the expert products of the forward megakernel, and the push of their results.
//
//   gate/up tile   128 rows x (128 columns of gate | the same 128 of up), then SwiGLU           (spec eq. 3, 4)
//   down tile      128 rows x 256 columns:  y = bf16(tc(h, W_down))                             (spec eq. 5)
//                  row p goes to combine[peer_row[p]] on rank peer_rank[p]; padding rows go nowhere
//   shared expert  the same two tiles over this rank's own tokens, results to shared_h, shared_y
//
// NumPy twin     mok_ref/experts.py: experts_forward
// Executed by    producer lane (operands), two math warpgroups (64 rows of the tile each), signal lane
// Before         rows_ready / hidden_ready of the tile's row block, acquired by the producer lane
// After          hidden_ready, rows_done, released by the signal lane once all math warps have stored
#pragma once
#include "swiglu.cuh"
#include "tensor_core.cuh"
#include "tile.cuh"

namespace mok {

// Tensor maps of one rank, by value. Python twin: mok_ref/gpu/hopper.py: FORWARD_MAPS
struct ForwardMaps {
  TensorMap x_ring, h_ring;                            // rows of 64 K-elements, boxes of 64 rows
  TensorMap w_gate, w_up, w_down;                      // 5-D, boxes of 128 weight rows
  TensorMap x, shared_h;
  TensorMap shared_w_gate, shared_w_up, shared_w_down;
};

// Which matrices a tile multiplies and where its operand rows start.
struct TileOperands {
  const TensorMap* a;
  const TensorMap* b[2];   // first and second 128 weight rows
  i32 a_row;
  i32 b_row[2];
  bool permuted;
};

MOK_DEVICE TileOperands tile_operands(const Tile& tile, const LayerParams& params, const ForwardMaps& maps) {
  const i32 hidden = params.hidden_size, width = params.intermediate_size;
  TileOperands o;
  o.a_row = tile.first_row;
  if (tile.kind == kGateUp || tile.kind == kSharedGateUp) {
    const bool routed = tile.kind == kGateUp;
    o.a = routed ? &maps.x_ring : &maps.x;
    o.b[0] = routed ? &maps.w_gate : &maps.shared_w_gate;
    o.b[1] = routed ? &maps.w_up : &maps.shared_w_up;
    o.b_row[0] = o.b_row[1] = tile.expert * width + tile.column * kHiddenTile;
    o.permuted = is_permuted(routed ? width : params.shared_intermediate_size);
  } else {
    const bool routed = tile.kind == kDown;
    o.a = routed ? &maps.h_ring : &maps.shared_h;
    o.b[0] = o.b[1] = routed ? &maps.w_down : &maps.shared_w_down;
    o.b_row[0] = tile.expert * hidden + tile.column * kTileN;
    o.b_row[1] = o.b_row[0] + kTileN / 2;
    o.permuted = is_permuted(hidden);
  }
  return o;
}

// ---------------------------------------------------------------- producer lane

// Waits for the rows that operand A of the tile reads.
MOK_DEVICE void wait_operand_rows(const Tile& tile, const LayerParams& params, const ForwardCounters& counters) {
  if (tile.valid_rows == 0 || tile.kind == kSharedGateUp) return;
  const WaitContext wait = wait_context(params);
  const i32 block = tile.row_block;
  if (tile.kind == kGateUp) {
    wait_gpu(counters.rows_ready + block, kTileM, wait, kPhaseRowsReady, block);
  } else {
    const bool routed = tile.kind == kDown;
    const i32 width = routed ? params.intermediate_size : params.shared_intermediate_size;
    const u32* ready = routed ? counters.hidden_ready : counters.shared_hidden_ready;
    wait_gpu(ready + block, ceil_div(width, kHiddenTile), wait, kPhaseHiddenReady, block);
  }
  fence_proxy_async_global();
}

// One 128-row half of the weight tile. The permuting map counts rows in groups of 32.
MOK_DEVICE void load_weight_half(u32 dst, const TileOperands& o, bool second, i32 k, u32 full, bool multicast) {
  const TensorMap* map = second ? o.b[1] : o.b[0];
  const i32 row = second ? o.b_row[1] : o.b_row[0];
  const i32 c1 = o.permuted ? 0 : row, c4 = o.permuted ? row / 32 : 0;
  if (multicast) {
    tma_load_5d_cluster(dst, map, k, c1, 0, 0, c4, full, (1 << kClusterSize) - 1);
  } else {
    tma_load_5d(dst, map, k, c1, 0, 0, c4, full);
  }
}

// All k-blocks of a tile into the ring. Rows beyond the first 64 are loaded only if they are used.
MOK_DEVICE void load_operands(const Tile& tile, const TileOperands& o, OperandRing& ring, i32 cluster_rank) {
  const bool upper = tile.valid_rows > 64, any = tile.valid_rows > 0;
  const u32 bytes = any ? kOperandBBytes + (upper ? 2 : 1) * kHalfTileBytes : 0;
  for (i32 block = 0; block < tile.k_blocks; ++block, ring.advance()) {
    const i32 k = block * kTileK;
    const u32 full = ring.full();
    mbarrier_wait(ring.empty(), ring.phase);
    mbarrier_arrive_expect_tx(full, bytes);
    if (!any) continue;
    tma_load_2d(ring.a(), o.a, k, o.a_row, full);
    if (upper) tma_load_2d(ring.a() + kHalfTileBytes, o.a, k, o.a_row + 64, full);
    if (kClusterSize == 2 && tile.shares_weights) {
      load_weight_half(ring.b() + cluster_rank * kOperandBBytes / 2, o, cluster_rank != 0, k, full, true);
    } else {
      load_weight_half(ring.b(), o, false, k, full, false);
      load_weight_half(ring.b() + kOperandBBytes / 2, o, true, k, full, false);
    }
  }
}

// ---------------------------------------------------------------- math warpgroups

// acc = tc(A rows of this warpgroup, weight tile), from +0 over all k-blocks; hands back each stage once
// the next k-block's products are under way.
MOK_DEVICE void tc_tile(float (&acc)[128], OperandRing& ring, i32 k_blocks, i32 warpgroup, i32 lane) {
  const u32 offset = warpgroup * kHalfTileBytes;
  u32 previous = ring.empty();
  mbarrier_wait(ring.full(), ring.phase);
  wgmma_fence();
  tc_k64<Major::kK, Major::kK>(acc, ring.a() + offset, ring.b(), 0);
  wgmma_commit();
  ring.advance();
  for (i32 block = 1; block < k_blocks; ++block) {
    mbarrier_wait(ring.full(), ring.phase);
    wgmma_fence();
    tc_k64<Major::kK, Major::kK>(acc, ring.a() + offset, ring.b(), 1);
    wgmma_commit();
    wgmma_wait<1>();
    release_stage(previous, lane);
    previous = ring.empty();
    ring.advance();
  }
  wgmma_wait<0>();
  release_stage(previous, lane);
}

// A warpgroup without valid rows only hands the stages back.
MOK_DEVICE void skip_tile(OperandRing& ring, i32 k_blocks, i32 lane) {
  for (i32 block = 0; block < k_blocks; ++block, ring.advance()) {
    mbarrier_wait(ring.full(), ring.phase);
    __syncwarp();
    release_stage(ring.empty(), lane);
  }
}

MOK_DEVICE HiddenTarget hidden_target(const Tile& tile, const LayerParams& params) {
  const bool routed = tile.kind == kGateUp;
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
  const u64* combine = params.peer_table + kCombine * params.ep_size;
  u16* buffer = reinterpret_cast<u16*>(__ldg(combine + __ldg(params.peer_rank + index)));
  return buffer + __ldg(params.peer_row + index) * hidden;
}

// One of the thread's two rows of y, 256 columns, rounded to bf16 and stored.
template <i32 kHalf>
MOK_DEVICE void push_row(const float (&acc)[128], u16* target, i32 column_tile, i32 hidden_size, i32 q) {
  if (target == nullptr) return;
  const i32 first = column_tile * kTileN;
#pragma unroll
  for (i32 j = 0; j < kTileN / 32; ++j) {
    u32 y[4];
#pragma unroll
    for (i32 u = 0; u < 4; ++u) {
      const i32 i = 16 * j + 4 * u + 2 * kHalf;
      y[u] = pack_bf16x2(acc[i], acc[i + 1]);  // RNE to bf16
    }
    store_group(target + first, j, hidden_size - first, is_permuted(hidden_size), q, y);
  }
}

// ---------------------------------------------------------------- roles

// Warp 0, lane 0: draws tickets, announces tiles, loads operands. The next ticket is drawn while the current
// tile loads.
MOK_DEVICE void produce_tiles(const LayerParams& params, const ForwardMaps& maps, unsigned char* bytes) {
  const u32 shared = shared_address(bytes);
  const i32 cluster_rank = kClusterSize == 1 ? 0 : cluster_ctarank();
  const ForwardCounters counters = forward_counters(params);
  TileWalk walk(params, cluster_rank);
  TileQueue queue{bytes, shared, 0};
  OperandRing ring{shared, 0, 1};
  TicketMail mail(counters.tile_ticket, params.abort_flag, shared, cluster_rank);
  while (true) {
    const Tile tile = walk.locate(mail.next());
    queue.put(tile);
    if (tile.kind == kStop) break;
    mail.draw();
    wait_operand_rows(tile, params, counters);
    load_operands(tile, tile_operands(tile, params, maps), ring, cluster_rank);
  }
}

// One math warpgroup: products, epilogue, next tile.
MOK_DEVICE void multiply_tiles(const LayerParams& params, unsigned char* bytes, i32 warpgroup) {
  const u32 shared = shared_address(bytes);
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const i32 row = 64 * warpgroup + 16 * warp + lane / 4;
  const SwigluClamp clamp = swiglu_clamp(params);
  TileQueue queue{bytes, shared, 0};
  OperandRing ring{shared, 0, 0};
  while (true) {
    const Tile tile = queue.get();
    if (tile.kind == kStop) break;
    if (tile.valid_rows <= 64 * warpgroup) {
      skip_tile(ring, tile.k_blocks, lane);
    } else {
      const bool gate_up = tile.kind == kGateUp || tile.kind == kSharedGateUp;
      u16* target_0 = gate_up ? nullptr : push_target(tile, params, row);
      u16* target_1 = gate_up ? nullptr : push_target(tile, params, row + 8);
      float acc[128];
      tc_tile(acc, ring, tile.k_blocks, warpgroup, lane);
      if (gate_up) {
        swiglu_forward(acc, hidden_target(tile, params), clamp, row, lane);
      } else {
        push_row<0>(acc, target_0, tile.column, params.hidden_size, lane % 4);
        push_row<1>(acc, target_1, tile.column, params.hidden_size, lane % 4);
      }
    }
    queue.finish(lane);
  }
}

// Warp 1, lane 0: tells other CTAs that a tile is stored. A math warp would have to wait for its stores.
MOK_DEVICE void signal_tiles(const LayerParams& params, unsigned char* bytes) {
  const ForwardCounters counters = forward_counters(params);
  const MinibatchWalk minis(params);
  const bool ring_is_reused = minis.num_minis > minis.minis_per_macro;
  TileQueue queue{bytes, shared_address(bytes), 0};
  while (true) {
    const Tile tile = queue.wait_finished();
    if (tile.kind == kStop) break;
    if (tile.valid_rows > 0) {
      if (tile.kind == kGateUp) red_release_gpu(counters.hidden_ready + tile.row_block, 1);
      if (tile.kind == kSharedGateUp) red_release_gpu(counters.shared_hidden_ready + tile.row_block, 1);
      if (tile.kind == kDown && ring_is_reused) {
        red_release_gpu(counters.rows_done + tile.row_block / minis.mini_blocks, 1);
      }
    }
    queue.release();
  }
}

}  // namespace mok
