// Pull of dy rows, and of x rows where they are needed again, into the rings of the backward kernels.
//
//   dy_ring[r] = dy_peer[peer_rank[r]][peer_row[r] div K],  unscaled;  x_ring likewise;  padding rows +0
//
// NumPy twin: mok_ref/dispatch.py: dispatch_forward (the same rows, into another buffer).
// Executed by: warp 3 of every CTA, 16 rows a ticket, rows in ascending order (which alternates over source
// ranks: consecutive rows of the schedule come from scattered tokens). Padding rows are written up to the next
// multiple of 64: that is how far the weight gradients read.
// Reads: peer memory, complete since the barrier before this kernel. Writes: rings; then a release add on
// dy_ready or x_ready of the row block, one for each piece.
#pragma once
#include "backward_schedule.cuh"
#include "schedule.cuh"

namespace mok {

constexpr i32 kPieceRows = 16;
constexpr i32 kPullLoads = 8;  // 16-byte loads in flight per lane

// Pieces of a row block that are pulled, of 8.
MOK_DEVICE i32 pulled_pieces(i32 valid) { return valid > 64 ? 8 : 4; }

// One row by one warp; `source` null: zeros.
MOK_DEVICE void pull_row(u16* target, const u16* source, i32 columns) {
  const i32 vectors = columns / 8, lane = threadIdx.x % kWarpSize;
  for (i32 first = lane; first < vectors; first += kPullLoads * kWarpSize) {
    uint4 value[kPullLoads];
#pragma unroll
    for (i32 i = 0; i < kPullLoads; ++i) {
      const i32 at = first + i * kWarpSize;
      value[i] = make_uint4(0, 0, 0, 0);
      if (at < vectors && source != nullptr) value[i] = ld_global_nc_v4(source + 8 * at);
    }
#pragma unroll
    for (i32 i = 0; i < kPullLoads; ++i) {
      const i32 at = first + i * kWarpSize;
      if (at < vectors) st_global_v4(target + 8 * at, value[i].x, value[i].y, value[i].z, value[i].w);
    }
  }
}

// 16 rows of a row block, then their signal.
MOK_DEVICE void pull_piece(const LayerParams& layer, const DgradParams& params, SymmetricBuffer buffer, i32 block,
                           i32 piece) {
  const i32 ring_row = block * kRowTile + piece * kPieceRows;
  const i64 row = static_cast<i64>(params.macro_index) * params.macro_blocks * kRowTile + ring_row;
  const i64 H = layer.hidden_size;
  u16* ring = buffer == kDy ? params.dy_ring : params.x_ring;
  const i32 lane = threadIdx.x % kWarpSize;
  const i32 my_rank = lane < kPieceRows ? layer.peer_rank[row + lane] : -1;
  const i32 my_token = my_rank < 0 ? 0 : layer.peer_row[row + lane] / layer.top_k;
  for (i32 r = 0; r < kPieceRows; ++r) {
    const i32 peer = __shfl_sync(kFullWarp, my_rank, r), token = __shfl_sync(kFullWarp, my_token, r);
    const u16* source = peer < 0 ? nullptr : peer_buffer<const u16>(layer, buffer, peer) + token * H;
    pull_row(ring + (ring_row + r) * H, source, layer.hidden_size);
  }
  fence_proxy_async_global();
  __syncwarp();
  const DgradCounters counters{params.counters, params.macro_blocks};
  if (lane == 0) red_release_gpu(buffer == kDy ? counters.dy_ready(block) : counters.x_ready(block), 1);
}

// dy first; x rows follow at the end when only the weight gradients want them, block by block when gate and up
// are made again.
MOK_DEVICE void pull_rows(const LayerParams& layer, const DgradParams& params) {
  const DgradWalk walk = routed_walk(layer, params);
  const bool interleave = walk.saved_blocks < walk.blocks && !params.x_in_ring;
  const u32 pieces = walk.blocks * 8;
  const u32 tickets = params.x_in_ring ? pieces : 2 * pieces;
  const DgradCounters counters{params.counters, params.macro_blocks};
  const i32 first_block = params.macro_index * params.macro_blocks;
  while (true) {
    u32 ticket = 0;
    if (threadIdx.x % kWarpSize == 0) ticket = draw_ticket(counters.pull_ticket());
    ticket = __shfl_sync(kFullWarp, ticket, 0);
    if (ticket >= tickets || aborted(layer.abort_flag)) return;
    const bool dy = interleave ? ticket / 8 % 2 == 0 : ticket < pieces;
    const i32 block = interleave ? ticket / 16 : (dy ? ticket : ticket - pieces) / 8;
    const i32 piece = ticket % 8;
    if (piece < pulled_pieces(layer.row_block_valid[first_block + block])) {
      pull_piece(layer, params, dy ? kDy : kX, block, piece);
    }
  }
}

}  // namespace mok
