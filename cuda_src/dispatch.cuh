// dispatch.cuh: token rows travel from their owners into this rank's ring of rows.
//
//   x_ring[ring_row(p)] = x[peer_rank[p]][peer_row[p] / top_k],  padding rows: 0          (spec eq. 4.3)
//
// NumPy twin     mok_ref/dispatch.py: dispatch_forward
// Executed by    the pull warps of every CTA; pieces of kPullRows rows by ticket, in walk order. The first row blocks
//                in smaller pieces by every warp but the loader's: nobody can multiply before they are there.
// Reads          peers' x through their symmetric-heap addresses, ordinary 16-byte loads, kPullDepth in flight
//                per lane (measured faster than bulk copies, which would also need shared memory)
// Writes         x_ring
// Before         the barrier kernel: peers' x is complete. A ring slot that was used before is free once all
//                down tiles of its previous minibatch are done (rows_done, acquire).
// After          rows_ready[row block] += rows, release; gate/up acquires it
#pragma once
#include "tile.cuh"
#include "trace.cuh"

namespace mok {

constexpr i32 kPullRows = 8;
constexpr i32 kPullDepth = 16;
constexpr i32 kFirstPullRows = 4;
constexpr i32 kFirstPullBlocks = 32;  // more than that are not waited for at the start
static_assert(kTileM % kPullRows == 0 && kPullRows % 2 == 0, "a piece is pairs of rows inside one row block");
static_assert(kTileM % kFirstPullRows == 0 && kFirstPullRows % 2 == 0, "the same for the first pieces");

struct PullPiece {
  i32 row_block;
  i32 first_row;        // inside the row block
  const uint4* source;  // lane l < rows of a piece: address of row l, null for padding
};

// Row blocks that are pulled in pieces of kFirstPullRows: those of the first minibatch, whose ring slot is free.
MOK_DEVICE i32 first_pull_blocks(const MinibatchWalk& minis) {
  return minis.num_minis == 0 ? 0 : min(minis.blocks_in(minis.at(0)), kFirstPullBlocks);
}

// Looks up the rows of piece `ticket`, one per lane.
template <i32 kRows>
MOK_DEVICE PullPiece pull_piece(const LayerParams& params, const MinibatchWalk& minis, u32 ticket, i32 lane) {
  constexpr i32 kPieces = kTileM / kRows;
  PullPiece piece{minis.row_block(ticket / kPieces), static_cast<i32>(ticket % kPieces) * kRows, nullptr};
  const i64 row = static_cast<i64>(piece.row_block) * kTileM + piece.first_row + lane % kRows;
  const i32 owner = __ldg(params.peer_rank + row);
  if (owner >= 0) {
    const i64 token = __ldg(params.peer_row + row) / params.top_k;
    const u64 x = __ldg(params.peer_table + kX * params.ep_size + owner);
    piece.source = reinterpret_cast<const uint4*>(x) + token * (params.hidden_size / 8);
  }
  return piece;
}

// Releases a piece: its stores have had the next piece's time to land.
template <i32 kRows = kPullRows>
MOK_DEVICE void signal_rows(const ForwardCounters& counters, i32 row_block, i32 lane) {
  if (row_block < 0) return;
  fence_proxy_async_global();
  __syncwarp();
  if (lane == 0) red_release_gpu(counters.rows_ready + row_block, kRows);
}

// Waits until the piece's ring slot may be overwritten. The slot's previous rows may need the piece that this
// warp has copied and not signalled, so that one is signalled first. Returns the piece still to be signalled.
MOK_DEVICE i32 wait_ring_slot(const LayerParams& params, const ForwardCounters& counters,
                              const MinibatchWalk& minis, i32 row_block, i32 unsignalled, i32 lane) {
  const i32 previous = minis.previous_user(row_block / minis.mini_blocks);
  if (previous >= minis.num_minis) return unsignalled;
  signal_rows(counters, unsignalled, lane);
  if (lane == 0) {
    wait_gpu(counters.rows_done + previous, minis.down_signals(previous, params.hidden_size), wait_context(params), kPhaseRingFree, previous);
  }
  __syncwarp();
  return -1;
}

// Chunks [base, base + kPullDepth * 32) of two neighbouring rows: all loads, then `between`, then all stores.
template <typename Between>
MOK_DEVICE void copy_chunks(uint4* target, const uint4* first, const uint4* second, i32 row_chunks, i32 base, i32 lane,
                            Between between) {
  uint4 data[kPullDepth];
#pragma unroll
  for (i32 i = 0; i < kPullDepth; ++i) {
    const i32 chunk = base + i * kWarpSize + lane;
    const bool is_second = chunk >= row_chunks;
    const uint4* source = is_second ? second : first;
    data[i] = make_uint4(0, 0, 0, 0);
    if (chunk < 2 * row_chunks && source != nullptr) {
      data[i] = ld_global_nc_v4(source + (is_second ? chunk - row_chunks : chunk));
    }
  }
  between();
#pragma unroll
  for (i32 i = 0; i < kPullDepth; ++i) {
    const i32 chunk = base + i * kWarpSize + lane;
    if (chunk < 2 * row_chunks) st_global_v4(target + chunk, data[i]);
  }
}

// Copies the piece's rows, two at a time; while its first loads are under way, the previous piece is signalled.
template <i32 kRows>
MOK_DEVICE void copy_rows(const LayerParams& params, const ForwardCounters& counters,
                          const MinibatchWalk& minis, const PullPiece& piece, i32 unsignalled, i32 lane) {
  const i32 row_chunks = params.hidden_size / 8;
  uint4* target = reinterpret_cast<uint4*>(params.x_ring) +
                  static_cast<i64>(minis.ring_row(piece.row_block) + piece.first_row) * row_chunks;
  const u64 source = reinterpret_cast<u64>(piece.source);
#pragma unroll 1
  for (i32 row = 0; row < kRows; row += 2, target += 2 * row_chunks) {
    const uint4* first = reinterpret_cast<const uint4*>(__shfl_sync(kFullWarp, source, row));
    const uint4* second = reinterpret_cast<const uint4*>(__shfl_sync(kFullWarp, source, row + 1));
#pragma unroll 1
    for (i32 base = 0; base < 2 * row_chunks; base += kPullDepth * kWarpSize) {
      copy_chunks(target, first, second, row_chunks, base, lane, [&] {
        if (row == 0 && base == 0) signal_rows(counters, unsignalled, lane);
      });
    }
  }
}

// All lanes of any warp: at most `most` pieces of the first row blocks. Waits for nobody.
MOK_DEVICE void pull_first_rows(const LayerParams& params, i32 most) {
  const ForwardCounters counters = forward_counters(params);
  const MinibatchWalk minis(params);
  const i32 lane = threadIdx.x % kWarpSize;
  const u32 pieces = first_pull_blocks(minis) * (kTileM / kFirstPullRows);
#pragma unroll 1
  for (i32 done = 0; done < most; ++done) {
    const u32 ticket = __shfl_sync(kFullWarp, lane == 0 ? draw_ticket(counters.first_pull_ticket) : 0, 0);
    if (ticket >= pieces) return;
    const PullPiece piece = pull_piece<kFirstPullRows>(params, minis, ticket, lane);
    copy_rows<kFirstPullRows>(params, counters, minis, piece, -1, lane);
    signal_rows<kFirstPullRows>(counters, piece.row_block, lane);
  }
}

// All lanes of one pull warp, to the end of the rows. Tickets are drawn two pieces ahead and the table
// look-ups one ahead, so that only the row loads themselves are waited for.
MOK_DEVICE void dispatch_forward(const LayerParams& params) {
  pull_first_rows(params, kFirstPullBlocks * kTileM);
  const ForwardCounters counters = forward_counters(params);
  const MinibatchWalk minis(params);
  const i32 lane = threadIdx.x % kWarpSize;
  const u32 pieces = minis.num_row_blocks * (kTileM / kPullRows);
  const u32 first = first_pull_blocks(minis) * (kTileM / kPullRows);
  auto draw = [&] { return lane == 0 ? draw_ticket(counters.pull_ticket) : 0; };
  auto drawn = [&](u32 ticket) { return __shfl_sync(kFullWarp, ticket, 0) + first; };
  u32 ticket = drawn(draw());
  if (ticket >= pieces) return;
  PullPiece piece = pull_piece<kPullRows>(params, minis, ticket, lane);
  u32 next_draw = draw();
  i32 unsignalled = -1;  // row block of the piece copied last
  while (true) {
    const u32 next_ticket = drawn(next_draw);
    const bool more = next_ticket < pieces;
    PullPiece next = piece;
    if (more) {
      next_draw = draw();
      next = pull_piece<kPullRows>(params, minis, next_ticket, lane);
    }
    unsignalled = wait_ring_slot(params, counters, minis, piece.row_block, unsignalled, lane);
    trace_task(kTraceWaitRing, piece.row_block, piece.first_row);
    copy_rows<kPullRows>(params, counters, minis, piece, unsignalled, lane);
    trace_task(kTracePull, piece.row_block, piece.first_row);
    unsignalled = piece.row_block;
    if (!more) break;
    piece = next;
  }
  signal_rows(counters, unsignalled, lane);
}

}  // namespace mok
