// mxfp8_dispatch.cuh: token rows as codes and scales from their owners into this rank's ring of rows.
//
//   x_codes[ring_row(p)], x_scales[.][ring_row(p)] = those of token peer_row[p] / top_k on rank peer_rank[p]
//   padding rows: 0                                                                        (spec eq. 4.3, 7.1)
//
// NumPy twin     mok_ref/dispatch.py: dispatch_forward of both columns of a TokenBuffer
// Executed by    the pull warp of every CTA; pieces of kPullRows rows by ticket, in walk order, as in dispatch.cuh
// Reads          peers' codes (16-byte loads, kCodePullDepth in flight per lane) and scale bytes
// Writes         x_codes, x_scales, the flag for scales that are not plain
// Before, after  as in dispatch.cuh
#pragma once
#include "dispatch.cuh"
#include "expand.cuh"
#include "mxfp8_tile.cuh"

namespace mok {

constexpr i32 kCodePullDepth = 8;
static_assert(kPullRows == 8, "a lane stores the scale words of eight rows at once");

struct CodePiece {
  i32 row_block;
  i32 first_row;   // inside the row block
  u64 codes;       // lane l < kPullRows: address of row l, 0 for padding
  u64 scales;
};

// Looks up the rows of piece `ticket`, one per lane.
MOK_DEVICE CodePiece code_piece(const LayerParams& params, const MinibatchWalk& minis, u32 ticket, i32 lane) {
  constexpr i32 kPieces = kTileM / kPullRows;
  CodePiece piece{minis.row_block(ticket / kPieces), static_cast<i32>(ticket % kPieces) * kPullRows, 0, 0};
  const i64 row = static_cast<i64>(piece.row_block) * kTileM + piece.first_row + lane % kPullRows;
  const i32 owner = __ldg(params.peer_rank + row);
  if (owner >= 0) {
    const i64 token = __ldg(params.peer_row + row) / params.top_k, hidden = params.hidden_size;
    piece.codes = __ldg(params.peer_table + kXCodes * params.ep_size + owner) + token * hidden;
    piece.scales = __ldg(params.peer_table + kXScales * params.ep_size + owner) +
                   token * num_scale_blocks(params.hidden_size);
  }
  return piece;
}

// Copies the piece's codes, 16 bytes a lane at a time through all its rows; while its first loads are under way,
// the previous piece is signalled.
template <typename Between>
MOK_DEVICE void copy_codes(const CodePiece& piece, uint4* target, i32 row_chunks, i32 lane, Between between) {
  i32 row = 0, chunk = lane;
  const auto skip_rows = [&] {
    while (chunk >= row_chunks && row < kPullRows) {
      chunk -= row_chunks;
      ++row;
    }
  };
  skip_rows();
#pragma unroll 1
  for (i32 base = 0; base < kPullRows * row_chunks; base += kCodePullDepth * kWarpSize) {
    uint4 data[kCodePullDepth];
#pragma unroll
    for (i32 i = 0; i < kCodePullDepth; ++i) {
      const u64 source = __shfl_sync(kFullWarp, piece.codes, row % kPullRows);
      data[i] = make_uint4(0, 0, 0, 0);
      if (row < kPullRows && source != 0) data[i] = ld_global_nc_v4(reinterpret_cast<const uint4*>(source) + chunk);
      chunk += kWarpSize;
      skip_rows();
    }
    if (base == 0) between();
#pragma unroll
    for (i32 i = 0; i < kCodePullDepth; ++i) {
      const i32 place = base + i * kWarpSize + lane;
      if (place < kPullRows * row_chunks) st_global_v4(target + place, data[i]);
    }
  }
}

// The scale bytes of the piece's rows: lane l takes columns 64 l, 64 (l + 32), ... of all eight of them.
MOK_DEVICE void copy_scales(const LayerParams& params, const CodePiece& piece, u16* target, i32 lane) {
  const i32 blocks = num_scale_blocks(params.hidden_size), rows = ring_rows(params);
  u32 greatest = 0;
#pragma unroll 1
  for (i32 base = 0; base < ceil_div(blocks, 2); base += kWarpSize) {
    const i32 column = base + lane;
    u32 words[kPullRows / 2] = {};
#pragma unroll
    for (i32 row = 0; row < kPullRows; ++row) {
      const u8* source = reinterpret_cast<const u8*>(__shfl_sync(kFullWarp, piece.scales, row));
      if (source == nullptr) continue;
      const u32 first = 2 * column < blocks ? __ldg(source + 2 * column) : 0;
      const u32 second = 2 * column + 1 < blocks ? __ldg(source + 2 * column + 1) : 0;
      words[row / 2] |= (first | second << 8) << row % 2 * 16;
      greatest = max(greatest, max(first, second));
    }
    if (2 * column < blocks) {
      st_global_v4(target + scale_place(column, rows, 0), words[0], words[1], words[2], words[3]);
    }
  }
  if (!is_plain(greatest)) *rows_are_wide(params) = 1;
}

// All lanes of the pull warp, to the end of the rows. Tickets are drawn two pieces ahead and the table look-ups one
// ahead, so that only the row loads themselves are waited for.
MOK_DEVICE void dispatch_codes(const LayerParams& params, const CodeParams& codes) {
  const ForwardCounters counters = forward_counters(params);
  const MinibatchWalk minis(params);
  const i32 lane = threadIdx.x % kWarpSize, row_chunks = params.hidden_size / 16;
  const u32 pieces = minis.num_row_blocks * (kTileM / kPullRows);
  auto draw = [&] { return lane == 0 ? draw_ticket(counters.pull_ticket) : 0; };
  auto drawn = [&](u32 ticket) { return __shfl_sync(kFullWarp, ticket, 0); };
  u32 ticket = drawn(draw());
  if (ticket >= pieces) return;
  CodePiece piece = code_piece(params, minis, ticket, lane);
  u32 next_draw = draw();
  i32 unsignalled = -1;  // row block of the piece copied last
  while (true) {
    const u32 next_ticket = drawn(next_draw);
    const bool more = next_ticket < pieces;
    CodePiece next = piece;
    if (more) {
      next_draw = draw();
      next = code_piece(params, minis, next_ticket, lane);
    }
    unsignalled = wait_ring_slot(params, counters, minis, piece.row_block, unsignalled, lane);
    trace_task(kTraceWaitRing, piece.row_block, piece.first_row);
    const i64 ring_row = minis.ring_row(piece.row_block) + piece.first_row;
    copy_codes(piece, reinterpret_cast<uint4*>(codes.x_codes) + ring_row * row_chunks, row_chunks, lane,
               [&] { signal_rows(counters, unsignalled, lane); });
    copy_scales(params, piece, codes.x_scales + ring_row, lane);
    trace_task(kTracePull, piece.row_block, piece.first_row);
    unsignalled = piece.row_block;
    if (!more) break;
    piece = next;
  }
  signal_rows(counters, unsignalled, lane);
}

}  // namespace mok
