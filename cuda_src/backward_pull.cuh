// Pull of dy rows, and of x rows where they are needed again, into the rings of the backward kernels.
//
//   dy_ring[r] = dy_peer[peer_rank[r]][peer_row[r] div K],  unscaled;  x_ring likewise;  padding rows +0
//
// NumPy twin: mok_ref/dispatch.py: dispatch_forward (the same rows, into another buffer).
// Executed by: warps 2 and 3 of every CTA, two rows a ticket, rows in ascending order (which alternates over
// source ranks: consecutive rows of the schedule come from scattered tokens). The rows of the first row blocks, one
// tile of theirs per CTA, are pulled by the multiplying warps, which have nothing else to do before that.
// Padding rows are written up to the next multiple of 64: that is how far the weight gradients read.
// Reads: peer memory, complete since the barrier before this kernel. Writes: rings; then a release add of the
// number of rows on dy_ready or x_ready of the row block.
#pragma once
#include "backward_schedule.cuh"
#include "mxfp8_backward_pull.cuh"
#include "schedule.cuh"
#include "trace.cuh"

namespace mok {

constexpr i32 kPieceRows = 2;
constexpr i32 kPieces = kRowTile / kPieceRows;
constexpr i32 kPullLoads = 8;  // 16-byte loads in flight per lane

// Rows of a row block that are pulled.
MOK_DEVICE i32 pulled_rows(i32 valid) { return valid > 64 ? 128 : 64; }

struct PullPlan {
  i32 blocks;        // row blocks of the macrobatch
  bool with_x;       // x rows too: the ring does not hold them
  bool interleave;   // x rows block by block, because gate and up are made again from them
  i32 first_blocks;  // row blocks that the multiplying warps pull

  MOK_DEVICE u32 tickets() const { return blocks * kPieces * (with_x ? 2 : 1); }
  MOK_DEVICE u32 first_tickets() const { return first_blocks * kPieces * (with_x && interleave ? 2 : 1); }
};

MOK_DEVICE PullPlan pull_plan(const LayerParams& layer, const DgradParams& params) {
  const i32 first_block = params.macro_index * params.macro_blocks;
  const i32 blocks = macro_row_blocks(layer, params.macro_index, params.macro_blocks);
  const bool made_again = layer.max_saved_rows / kRowTile < first_block + blocks;
  const i32 first = ceil_div(static_cast<i32>(gridDim.x), ceil_div(layer.intermediate_size, kTileColumns));
  return PullPlan{blocks, params.x_in_ring == 0, made_again, min(blocks, first)};
}

// Which rows a ticket stands for, and table entries on their way: loaded here, used a piece later.
struct PullTicket {
  i32 block, row;  // row block of the macrobatch, first row inside it
  bool dy;
  i32 valid;
  i32 peer[kPieceRows], peer_row[kPieceRows];
};

// dy first; x rows follow at the end when only the weight gradients want them.
MOK_DEVICE PullTicket look_up(const LayerParams& layer, const DgradParams& params, const PullPlan& plan, u32 ticket) {
  const bool interleave = plan.with_x && plan.interleave;
  const u32 group = ticket / kPieces;  // all pieces of one row block of dy or of x
  PullTicket t;
  t.dy = interleave ? group % 2 == 0 : static_cast<i32>(group) < plan.blocks;
  t.block = interleave ? group / 2 : (t.dy ? group : group - plan.blocks);
  t.row = ticket % kPieces * kPieceRows;
  const i32 row_block = params.macro_index * params.macro_blocks + t.block;
  const i64 row = static_cast<i64>(row_block) * kRowTile + t.row;
  t.valid = ld_global_s32(layer.row_block_valid + row_block);
#pragma unroll
  for (i32 i = 0; i < kPieceRows; ++i) {
    t.peer[i] = ld_global_s32(layer.peer_rank + row + i);
    t.peer_row[i] = ld_global_s32(layer.peer_row + row + i);
  }
  return t;
}

// What a row is pulled as, counted in units of two bytes: its bf16 values, or its codes.
MOK_DEVICE i32 pulled_units(const LayerParams& layer) {
  return kMxfp8 ? layer.hidden_size / 2 : layer.hidden_size;
}

// A ticket with its addresses. The same in all lanes.
struct PullPiece {
  const u16* source[kPieceRows];  // null: padding
  u16* target;
  u32* ready;                     // counter of the row block; null: nothing to pull
};

MOK_DEVICE PullPiece pull_piece(const LayerParams& layer, const DgradParams& params, const PullTicket& t) {
  const DgradCounters counters{params.counters, params.macro_blocks};
  constexpr SymmetricBuffer kDySource = kMxfp8 ? kDyCodes : kDy, kXSource = kMxfp8 ? kXCodes : kX;
  const i64 units = pulled_units(layer);
  PullPiece piece;
  piece.target = (t.dy ? params.dy_ring : params.x_ring) + (static_cast<i64>(t.block) * kRowTile + t.row) * units;
  piece.ready = t.dy ? counters.dy_ready(t.block) : counters.x_ready(t.block);
  if (t.row >= pulled_rows(t.valid)) piece.ready = nullptr;
#pragma unroll
  for (i32 i = 0; i < kPieceRows; ++i) {
    const u64 base = __ldg(layer.peer_table + (t.dy ? kDySource : kXSource) * layer.ep_size + max(t.peer[i], 0));
    piece.source[i] =
        t.peer[i] < 0 ? nullptr : reinterpret_cast<const u16*>(base) + t.peer_row[i] / layer.top_k * units;
  }
  return piece;
}

// Releases a piece: its stores have had the next piece's time to land.
MOK_DEVICE void signal_piece(u32* ready) {
  if (ready == nullptr) return;
  fence_proxy_async_global();
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) red_release_gpu(ready, kPieceRows);
}

// Copies a piece; while its first loads are under way, the piece before is signalled.
MOK_DEVICE void copy_piece(const PullPiece& piece, i32 columns, u32* unsignalled) {
  const i32 vectors = columns / 8, lane = threadIdx.x % kWarpSize;
  for (i32 first = lane; first < kPieceRows * vectors + lane; first += kPullLoads * kWarpSize) {
    uint4 value[kPullLoads];
#pragma unroll
    for (i32 i = 0; i < kPullLoads; ++i) {
      const i32 at = first + i * kWarpSize;
      const bool second = at >= vectors;
      const u16* source = second ? piece.source[1] : piece.source[0];
      value[i] = make_uint4(0, 0, 0, 0);
      if (at < kPieceRows * vectors && source != nullptr) {
        value[i] = ld_global_nc_v4(source + 8 * (second ? at - vectors : at));
      }
    }
    if (first == lane) signal_piece(unsignalled);
#pragma unroll
    for (i32 i = 0; i < kPullLoads; ++i) {
      const i32 at = first + i * kWarpSize;
      if (at < kPieceRows * vectors) {
        st_global_v4(piece.target + 8 * at, value[i].x, value[i].y, value[i].z, value[i].w);
      }
    }
  }
}

// All lanes of one pulling warp, tickets `begin` to `tickets`. They are drawn two pieces ahead and looked up one ahead,
// so that only the rows themselves are waited for.
MOK_DEVICE void pull_pieces(const LayerParams& layer, const DgradParams& params, const PullPlan& plan,
                            u32* ticket_counter, u32 begin, u32 tickets) {
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  auto draw = [&] { return first_lane ? begin + draw_ticket(ticket_counter) : 0; };  // in lane 0 alone, on its way
  u32 ticket = __shfl_sync(kFullWarp, draw(), 0);
  u32 drawn = draw();
  if (ticket >= tickets) return;
  PullTicket found = look_up(layer, params, plan, ticket);
  u32* unsignalled = nullptr;  // counter of the piece copied last
  u32 stop = 0;                // abort flag as of the piece before
  while (true) {
    const PullPiece piece = pull_piece(layer, params, found);
    ScalePiece scales;
    if constexpr (kMxfp8) {
      scales = scale_piece(layer, params, found.dy, found.block * kRowTile + found.row, found.peer, found.peer_row);
    }
    ticket = __shfl_sync(kFullWarp, drawn, 0);
    const bool more = ticket < tickets && stop == 0;
    if (more) {
      drawn = draw();
      found = look_up(layer, params, plan, ticket);
      stop = ld_relaxed_gpu(layer.abort_flag);
    }
    if (piece.ready != nullptr) {
      trace_task(kTraceWaitRing, found.block, found.row);
      const auto copy_rows = [&] { copy_piece(piece, pulled_units(layer), unsignalled); };
      if constexpr (kMxfp8) {
        copy_scales(scales, layer.hidden_size, params.macro_blocks * kRowTile, copy_rows);
      } else {
        copy_rows();
      }
      trace_task(kTracePull, found.block, found.row);
      unsignalled = piece.ready;
    }
    if (!more) break;
  }
  signal_piece(unsignalled);
}

// Pulling warps.
MOK_DEVICE void pull_rows(const LayerParams& layer, const DgradParams& params) {
  const PullPlan plan = pull_plan(layer, params);
  u32* const ticket = DgradCounters{params.counters, params.macro_blocks}.pull_ticket();
  pull_pieces(layer, params, plan, ticket, plan.first_tickets(), plan.tickets());
}

// Multiplying warps, before their first tile.
MOK_DEVICE void pull_first_rows(const LayerParams& layer, const DgradParams& params) {
  const PullPlan plan = pull_plan(layer, params);
  u32* const ticket = DgradCounters{params.counters, params.macro_blocks}.first_pull_ticket();
  pull_pieces(layer, params, plan, ticket, 0, plan.first_tickets());
}

}  // namespace mok
