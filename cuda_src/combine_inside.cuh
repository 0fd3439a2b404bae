// combine_inside.cuh: the forward megakernel sums a token into y as soon as all its rows are there.
//
//   acc = shared_y[t] or +0;  acc = acc + w[t,k] * y[t,k], k ascending, routes only;  y[t] = bf16(acc)   (spec eq. 5.4)
//
// NumPy twin     mok_ref/combine.py: combine_forward
// Where          one rank alone, whose rows are all its own: no other rank is waited for (LayerParams.combines)
// Executed by    arrivals: epilogue warps behind their down tiles, pull warps for slots without a route.
//                sums: pull warps that have nothing left to pull, and every warp of a CTA that is out of tiles
// Reads          this rank's combine buffer, shared_y
// Writes         y
// Hand-over      rows of y -> (rows_pushed, the last warp of a row block goes on) -> arrived, per token -> ready entry,
//                each by an atomic or store that releases and, before it, acquires -> ld.acquire of the entry
// Order          a token is summed by one warp per part of its columns, whoever draws the part: the same bits always
// A sum waits for tiles only, tiles never for sums: whatever number of CTAs runs, all of them end.
#pragma once
#include "combine.cuh"
#include "tile.cuh"
#include "trace.cuh"

namespace mok {

constexpr i32 kGroupColumns = 8 * kWarpSize;      // 16 bytes a lane
constexpr i32 kStepColumns = 2 * kGroupColumns;   // whose rows are under way at once
constexpr i32 kFewTokens = 4096;                  // fewer are cut into parts, so that all warps have one
constexpr u32 kReadyPauseNs = 200;

// All zero at the start of a call, behind ForwardCounters. Python twin: mok_ref/gpu/hopper.py: num_combine_counters
struct CombineCounters {
  u32* part_ticket;
  u32* num_ready;      // entries of `ready` that are taken
  u32* slots_ticket;   // of warps' worths of tokens whose slots without a route are counted
  u32* rows_pushed;    // [max_row_blocks] epilogue warps that have stored their part of a down tile
  u32* shared_pushed;  // [ceil(max_tokens / 128)] the same of the shared expert
  u32* arrived;        // [max_tokens] slots that are there or have no route; + 1 for the shared expert's row
  u32* ready;          // [max_tokens] complete tokens + 1 in the order of their completion; 0: not yet
};

MOK_DEVICE CombineCounters combine_counters(const LayerParams& params) {
  constexpr i32 kTicketStride = 32;  // one 128-byte line each
  const i64 blocks = params.max_row_blocks, shared_blocks = ceil_div(params.max_tokens, kTileM);
  const i64 before = forward_counters(params).shared_hidden_ready + shared_blocks - params.counters;
  u32* const tickets = params.counters + (before + kTicketStride - 1) / kTicketStride * kTicketStride;
  u32* const pushed = tickets + 3 * kTicketStride;
  u32* const arrived = pushed + blocks + shared_blocks;
  return CombineCounters{tickets, tickets + kTicketStride, tickets + 2 * kTicketStride, pushed, pushed + blocks,
                         arrived, arrived + params.max_tokens};
}

// ---------------------------------------------------------------- arrivals

// `slots` more of a token are there; the last arrival makes it ready.
MOK_DEVICE void arrive_token(const LayerParams& params, const CombineCounters& counters, i32 token, u32 slots) {
  const u32 all = params.top_k + (params.shared_intermediate_size > 0 ? 1 : 0);
  if (atom_acq_rel_gpu(counters.arrived + token, slots) + slots != all) return;
  st_release_gpu(counters.ready + draw_ticket(counters.num_ready), token + 1);
}

// Whole epilogue warp, behind the last store of its part of a down tile. The warp that completes a row block goes on
// to the tokens of its rows.
MOK_DEVICE void arrive_rows(const LayerParams& params, const Tile& tile, i32 lane) {
  const CombineCounters counters = combine_counters(params);
  const bool routed = tile.kind == kDown;
  u32* const pushed = (routed ? counters.rows_pushed : counters.shared_pushed) + tile.row_block;
  __syncwarp();
  const u32 before = __shfl_sync(kFullWarp, lane == 0 ? atom_acq_rel_gpu(pushed, 1) : 0, 0);
  if (before + 1 != ceil_div(params.hidden_size, kTileN) * kEpilogueWarps) return;
#pragma unroll 1
  for (i32 row = lane; row < tile.valid_rows; row += kWarpSize) {
    const i32 index = tile.row_block * kTileM + row;
    arrive_token(params, counters, routed ? __ldg(params.peer_row + index) / params.top_k : index, 1);
  }
}

// All lanes of a pull warp. Waits for nobody.
MOK_DEVICE void arrive_slots_without_route(const LayerParams& params) {
  const CombineCounters counters = combine_counters(params);
  const i32 lane = threadIdx.x % kWarpSize;
  while (true) {
    const u32 ticket = __shfl_sync(kFullWarp, lane == 0 ? draw_ticket(counters.slots_ticket) : 0, 0);
    if (ticket >= ceil_div(params.num_tokens, kWarpSize)) return;
    const i32 token = ticket * kWarpSize + lane;
    u32 missing = 0;
    if (token < params.num_tokens) {
      const i32* const ids = params.topk_ids + static_cast<i64>(token) * params.top_k;
#pragma unroll 8
      for (i32 k = 0; k < params.top_k; ++k) missing += __ldg(ids + k) < 0;
    }
    if (missing > 0) arrive_token(params, counters, token, missing);
  }
}

// ---------------------------------------------------------------- sums

// `add_slots` of combine.cuh in three steps, so that two groups of columns are under way before the first is added.
// (Made of these, add_slots itself would take registers that the weight gradients' kernels do not have.)
struct SlotRows {
  Bf16Vector<8> row[kSlotsInFlight];

  MOK_DEVICE void load(const u16* rows, i32 count, i64 stride) {
#pragma unroll
    for (i32 i = 0; i < kSlotsInFlight; ++i)
      if (i < count) row[i] = Bf16Vector<8>::load(rows + i * stride);
  }
};

// Which of these slots have a route, and its weight.
struct SlotRoutes {
  i32 id[kSlotsInFlight];
  float weight[kSlotsInFlight];

  MOK_DEVICE void load(const i32* ids, const float* weights, i32 count) {
#pragma unroll
    for (i32 i = 0; i < kSlotsInFlight; ++i) {
      id[i] = i < count ? __ldg(ids + i) : -1;
      weight[i] = i < count ? __ldg(weights + i) : 0.0f;
    }
  }
};

// acc + the rows that have a route, in the order of the slots.
MOK_DEVICE void add_rows(float (&acc)[8], const SlotRows& rows, const SlotRoutes& routes) {
#pragma unroll
  for (i32 i = 0; i < kSlotsInFlight; ++i) {
    if (routes.id[i] < 0) continue;
    float value[8];
    rows.row[i].unpack(value);
#pragma unroll
    for (i32 c = 0; c < 8; ++c) acc[c] = add_weighted(acc[c], routes.weight[i], value[c]);
  }
}

// Two groups of columns of one token, 8 per lane from `column` on.
MOK_DEVICE void combine_step(const LayerParams& params, i64 token, i32 column) {
  const i64 H = params.hidden_size, first_slot = token * params.top_k;
  if (column >= H) return;
  const bool has_high = column + kGroupColumns < H;
  const u16* const shared = params.shared_intermediate_size ? params.shared_y + token * H + column : nullptr;
  float low[8], high[8];
  start_from<8>(low, shared);
  start_from<8>(high, has_high && shared != nullptr ? shared + kGroupColumns : nullptr);
#pragma unroll 1
  for (i32 slot = 0; slot < params.top_k; slot += kSlotsInFlight) {
    const i32 count = min(kSlotsInFlight, params.top_k - slot);
    const u16* const rows = params.combine + (first_slot + slot) * H + column;
    SlotRows low_rows, high_rows;
    low_rows.load(rows, count, H);
    high_rows.load(rows + kGroupColumns, has_high ? count : 0, H);
    SlotRoutes routes;
    routes.load(params.topk_ids + first_slot + slot, params.topk_weights + first_slot + slot, count);
    add_rows(low, low_rows, routes);
    if (has_high) add_rows(high, high_rows, routes);
  }
  u16* const y = params.y + token * H + column;
  Bf16Vector<8>::pack(low).store(y);
  if (has_high) Bf16Vector<8>::pack(high).store(y + kGroupColumns);
}

// Token of an entry of the ready list, or -1 after a time-out; whole warp.
MOK_DEVICE i32 await_token(const LayerParams& params, const u32* entry, u32 number, i32 lane) {
  i32 token = -1;
  if (lane == 0 && wait_gpu<kReadyPauseNs>(entry, 1, wait_context(params), kPhaseTokenReady, number))
    token = static_cast<i32>(ld_relaxed_gpu(entry)) - 1;
  return __shfl_sync(kFullWarp, token, 0);
}

// All lanes of any warp, to the end of the tokens. The next ticket is drawn while the last step's rows are under way.
MOK_DEVICE void combine_ready_tokens(const LayerParams& params) {
  const CombineCounters counters = combine_counters(params);
  const i32 lane = lane_id(), steps = ceil_div(params.hidden_size, kStepColumns);
  const i32 parts = min(steps, ceil_div(kFewTokens, max(params.num_tokens, 1)));
  const i32 columns = ceil_div(steps, parts) * kStepColumns;
  const auto draw = [&] { return lane == 0 ? draw_ticket(counters.part_ticket) : 0; };
  __syncwarp();
  u32 drawn = draw();
  while (true) {
    const u32 ticket = __shfl_sync(kFullWarp, drawn, 0), entry = ticket / parts;
    if (entry >= params.num_tokens) return;
    const i32 token = await_token(params, counters.ready + entry, entry, lane);
    if (token < 0) return;
    trace_task(kTraceWaitToken, token, 0);
    const i32 first = (ticket - entry * parts) * columns, end = min(first + columns, params.hidden_size);
#pragma unroll 1
    for (i32 column = first; column < end; column += kStepColumns) {
      if (column + kStepColumns >= end) drawn = draw();
      combine_step(params, token, column + 8 * lane);
    }
    if (first >= end) drawn = draw();
    trace_task(kTraceCombine, token, first);
  }
}

}  // namespace mok
