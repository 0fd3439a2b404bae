// dispatch.cuh: token rows travel from their owners into this rank's ring of rows.
//
//   x_ring[ring_row(p)] = x[peer_rank[p]][peer_row[p] / top_k],  padding rows: 0          (spec eq. 3)
//
// NumPy twin     mok_ref/dispatch.py: dispatch_forward
// Executed by    the pull warps of every CTA; pieces of kPullRows rows by ticket, in walk order
// Reads          peers' x through their symmetric-heap addresses, ordinary 16-byte loads, kPullDepth in flight
//                per lane (measured faster than bulk copies, which would also need shared memory)
// Writes         x_ring
// Before         the barrier kernel: peers' x is complete. A ring slot that was used before is free once all
//                down tiles of its previous minibatch are done (rows_done, acquire).
// After          rows_ready[row block] += rows, release; gate/up acquires it
#pragma once
#include "tile.cuh"

namespace mok {

constexpr i32 kPullRows = 2;
constexpr i32 kPullDepth = 8;
static_assert(kTileM % kPullRows == 0, "a piece lies inside one row block");

struct PullPiece {
  i32 row_block;
  i32 first_row;                 // inside the row block
  const uint4* source[kPullRows];  // null: padding
};

// Addresses of the rows of piece `ticket`, the same in all lanes.
MOK_DEVICE PullPiece pull_piece(const LayerParams& params, const MinibatchWalk& minis, u32 ticket) {
  constexpr i32 kPieces = kTileM / kPullRows;
  PullPiece piece;
  piece.row_block = minis.row_block(ticket / kPieces);
  piece.first_row = ticket % kPieces * kPullRows;
  const i64 row = static_cast<i64>(piece.row_block) * kTileM + piece.first_row;
#pragma unroll
  for (i32 i = 0; i < kPullRows; ++i) {
    const i32 owner = __ldg(params.peer_rank + row + i);
    const i64 token = __ldg(params.peer_row + row + i) / params.top_k;
    const u64 x = owner < 0 ? 0 : __ldg(params.peer_table + kX * params.ep_size + owner);
    piece.source[i] = owner < 0 ? nullptr : reinterpret_cast<const uint4*>(x) + token * (params.hidden_size / 8);
  }
  return piece;
}

// Releases a piece: its stores have had the next piece's time to land.
MOK_DEVICE void signal_rows(const ForwardCounters& counters, i32 row_block, i32 lane) {
  if (row_block < 0) return;
  fence_proxy_async_global();
  __syncwarp();
  if (lane == 0) red_release_gpu(counters.rows_ready + row_block, kPullRows);
}

// Waits until the piece's ring slot may be overwritten. The slot's previous rows may need the piece that this
// warp has copied and not signalled, so that one is signalled first. Returns the piece still to be signalled.
MOK_DEVICE i32 wait_ring_slot(const LayerParams& params, const ForwardCounters& counters,
                              const MinibatchWalk& minis, i32 row_block, i32 unsignalled, i32 lane) {
  const i32 previous = minis.previous_user(row_block / minis.mini_blocks);
  if (previous >= minis.num_minis) return unsignalled;
  signal_rows(counters, unsignalled, lane);
  const u32 tiles = minis.blocks_in(previous) * ceil_div(params.hidden_size, kTileN) * kEpilogueWarps;
  if (lane == 0) {
    wait_gpu(counters.rows_done + previous, tiles, wait_context(params), kPhaseRingFree, previous);
  }
  __syncwarp();
  return -1;
}

// Copies the piece's rows; while its first loads are under way, the previous piece is signalled.
MOK_DEVICE void copy_rows(const LayerParams& params, const ForwardCounters& counters,
                          const MinibatchWalk& minis, const PullPiece& piece, i32 unsignalled, i32 lane) {
  const i32 row_chunks = params.hidden_size / 8;
  uint4* target = reinterpret_cast<uint4*>(params.x_ring) +
                  static_cast<i64>(minis.ring_row(piece.row_block) + piece.first_row) * row_chunks;
  for (i32 base = 0; base < kPullRows * row_chunks; base += kPullDepth * kWarpSize) {
    uint4 data[kPullDepth];
#pragma unroll
    for (i32 i = 0; i < kPullDepth; ++i) {
      const i32 chunk = base + i * kWarpSize + lane;
      const bool second = chunk >= row_chunks;
      const uint4* source = second ? piece.source[1] : piece.source[0];
      data[i] = make_uint4(0, 0, 0, 0);
      if (chunk < kPullRows * row_chunks && source != nullptr) {
        data[i] = ld_global_nc_v4(source + (second ? chunk - row_chunks : chunk));
      }
    }
    if (base == 0) signal_rows(counters, unsignalled, lane);
#pragma unroll
    for (i32 i = 0; i < kPullDepth; ++i) {
      const i32 chunk = base + i * kWarpSize + lane;
      if (chunk < kPullRows * row_chunks) target[chunk] = data[i];
    }
  }
}

// All lanes of one pull warp, to the end of the rows. Tickets are drawn two pieces ahead and the table
// look-ups one ahead, so that only the row loads themselves are waited for.
MOK_DEVICE void dispatch_forward(const LayerParams& params) {
  const ForwardCounters counters = forward_counters(params);
  const MinibatchWalk minis(params);
  const i32 lane = threadIdx.x % kWarpSize;
  const u32 pieces = minis.num_row_blocks * (kTileM / kPullRows);
  auto draw = [&] {
    u32 ticket = lane == 0 ? draw_ticket(counters.pull_ticket) : 0;
    return __shfl_sync(kFullWarp, ticket, 0);
  };
  u32 ticket = draw();
  if (ticket >= pieces) return;
  PullPiece piece = pull_piece(params, minis, ticket);
  u32 next_ticket = draw();
  i32 unsignalled = -1;  // row block of the piece copied last
  while (true) {
    PullPiece next = piece;
    const bool more = next_ticket < pieces;
    const u32 after_next = more ? draw() : next_ticket;
    if (more) next = pull_piece(params, minis, next_ticket);
    unsignalled = wait_ring_slot(params, counters, minis, piece.row_block, unsignalled, lane);
    copy_rows(params, counters, minis, piece, unsignalled, lane);
    unsignalled = piece.row_block;
    if (!more) break;
    piece = next;
    next_ticket = after_next;
  }
  signal_rows(counters, unsignalled, lane);
}

}  // namespace mok
