// Weight gradients: products whose K axis is rows, chains that may begin where an earlier launch ended.
//
//   dW_down[e] = start + dy^T hw      dW_gate[e] = start + d_gate^T x      dW_up[e] = start + d_up^T x
//   over the rows of expert e, ascending, groups of 16 from the segment's start; start = +0 or main_grad
//
// NumPy twin: mok_ref/experts.py: weight_gradient.
// Executed by: the pipeline of backward_pipeline.cuh, tile 128 x 256, both operands MN-major. One launch covers one
// macrobatch. A chain whose expert goes on in the next macrobatch is stored as float32 (in dW itself when that is
// float32, else in a buffer for straddling chains) and continued there: the bits are those of an unbroken chain.
// An expert without rows: +0 everywhere, or left alone when gradients accumulate.
// K runs in groups of 16 to the last route, a single k-block of 64 whole; rows behind the last route are +0 in both
// operands as far as K runs.
// Reads: rings written by the dgrad kernel before it in the stream. Writes: dW. Synchronisation: tickets only.
#pragma once
#include "backward_dx.cuh"
#include "backward_schedule.cuh"

namespace mok {

enum ChainBegin : i32 { kBeginZero = 0, kBeginStart = 1, kBeginStraddling = 2 };
enum ChainEnd : i32 { kEndFloat32 = 0, kEndBf16 = 1, kEndStraddling = 2 };

// flags of a wgrad task: product | begin << 4 | end << 8 | begin slot << 12 | end slot << 13
MOK_DEVICE i32 flags_of(i32 product, i32 begin, i32 end, i32 begin_slot, i32 end_slot) {
  return product | begin << 4 | end << 8 | begin_slot << 12 | end_slot << 13;
}
MOK_DEVICE i32 product_of(i32 flags) { return flags & 15; }
MOK_DEVICE i32 begin_of(i32 flags) { return flags >> 4 & 15; }
MOK_DEVICE i32 end_of(i32 flags) { return flags >> 8 & 15; }
MOK_DEVICE i32 begin_slot_of(i32 flags) { return flags >> 12 & 1; }
MOK_DEVICE i32 end_slot_of(i32 flags) { return flags >> 13 & 1; }

constexpr i32 kTileGroup = 16;  // tiles of M walked together for one tile of N

struct WgradTile {
  i32 product, row, column;
};

MOK_DEVICE i32 product_tiles(const WgradParams& params, i32 product) {
  return ceil_div(params.rows[product], kTileRows) * ceil_div(params.columns[product], kTileColumns);
}

MOK_DEVICE i32 tiles_per_expert(const WgradParams& params) {
  i32 tiles = 0;
  for (i32 p = 0; p < params.num_products; ++p) tiles += product_tiles(params, p);
  return tiles;
}

MOK_DEVICE WgradTile wgrad_tile(const WgradParams& params, i32 index) {
  i32 product = 0;
  while (index >= product_tiles(params, product)) index -= product_tiles(params, product++);
  const i32 tiles_m = ceil_div(params.rows[product], kTileRows);
  const i32 tiles_n = ceil_div(params.columns[product], kTileColumns);
  const i32 group = index / (kTileGroup * tiles_n), inside = index - group * kTileGroup * tiles_n;
  const i32 group_rows = min(kTileGroup, tiles_m - group * kTileGroup);
  const i32 m = group * kTileGroup + inside % group_rows, n = inside / group_rows;
  return WgradTile{product, m * kTileRows, n * kTileColumns};
}

// ---- which experts a macrobatch treats ----

struct ExpertRange {
  i32 first, end;
};

// Experts whose rows lie in the macrobatch, and idle ones in front of them; the last macrobatch takes the idle
// ones behind as well, so that every expert is treated.
MOK_DEVICE ExpertRange experts_of_macrobatch(const LayerParams& layer, const WgradParams& params) {
  const i32 total = layer.info->num_row_blocks, first_block = params.macro_index * params.macro_blocks;
  if (params.macro_index > 0 && first_block >= total) return ExpertRange{0, 0};
  i32 first = 0;
  if (first_block > 0) {
    const i32 before = layer.row_block_expert[first_block - 1];
    first = before == layer.row_block_expert[first_block] ? before : before + 1;
  }
  const i32 end_block = first_block + params.macro_blocks;
  return ExpertRange{first, end_block >= total ? layer.num_local_experts : layer.row_block_expert[end_block - 1] + 1};
}

// Rows of one expert inside the macrobatch.
struct ExpertRows {
  i32 ring_row, count;
  bool begun, ends;  // the chain began in an earlier macrobatch; it ends in this one
};

MOK_DEVICE ExpertRows expert_rows(const LayerParams& layer, const WgradParams& params, i32 expert) {
  const i64 macro_rows = static_cast<i64>(params.macro_blocks) * kRowTile;
  const i64 macro_first = params.macro_index * macro_rows;
  const i64 first = layer.expert_offset[expert], end = first + layer.expert_count[expert];
  const i64 low = max(first, macro_first), high = min(end, macro_first + macro_rows);
  return ExpertRows{static_cast<i32>(low - macro_first), static_cast<i32>(max(static_cast<i64>(0), high - low)),
                    first < macro_first && end > macro_first, end <= macro_first + macro_rows};
}

struct WgradContext {
  const LayerParams& layer;
  const WgradParams& params;
  const WgradMaps& maps;
  SharedLayout layout;
};

// ---- producer ----

MOK_DEVICE i32 chain_flags(const WgradParams& params, const ExpertRows& rows, i32 product) {
  const bool in_place = params.gradient_type == kFloat32Gradient;
  i32 begin = params.accumulate ? kBeginStart : kBeginZero;
  if (rows.begun) begin = in_place ? kBeginStart : kBeginStraddling;
  i32 end = in_place ? kEndFloat32 : kEndBf16;
  if (!rows.ends && !in_place) end = kEndStraddling;
  return flags_of(product, begin, end, params.macro_index & 1, (params.macro_index + 1) & 1);
}

// A tile to make and the ring row where its K begins.
struct LocatedTile {
  TileTask task;
  i32 ring_row;
};

// K-blocks first .. end - 1 of one tile: rows of both matrices along K.
MOK_DEVICE void load_wgrad_tile(const WgradContext& c, const LocatedTile& tile, i32 first, i32 end,
                                StageCursor& stage) {
  const i32 product = product_of(tile.task.flags);
  load_product<Major::kMN, Major::kMN>(c.layout, stage,
                                       Operand{&c.maps.rows_out[product], tile.task.block, tile.ring_row, 0,
                                               c.params.rows[product] % 64 == 0},
                                       Operand{&c.maps.rows_in[product], tile.task.column, tile.ring_row, 0,
                                               c.params.columns[product] % 64 == 0},
                                       first, end);
}

MOK_DEVICE TileTask weight_task(const WgradParams& params, const WgradTile& tile, i32 expert, i32 num_rows, i32 flags) {
  return TileTask{kTaskWeight,
                  tile.row,
                  tile.column,
                  min(kTileRows, params.rows[tile.product] - tile.row),
                  ceil_div(num_rows, kChainStep),
                  expert,
                  flags,
                  0};
}

// Tickets of one wgrad launch over the experts of its macrobatch.
struct ExpertTickets {
  const WgradContext& c;
  ExpertRange experts;
  u32 tiles;  // per expert

  MOK_DEVICE explicit ExpertTickets(const WgradContext& context)
      : c(context), experts(experts_of_macrobatch(c.layer, c.params)), tiles(tiles_per_expert(c.params)) {}

  // The tile of a ticket, or of the next one that has something to do.
  MOK_DEVICE LocatedTile locate(u32 ticket) const {
    const u32 total = (experts.end - experts.first) * tiles;
    for (; ticket < total; ticket = draw_ticket(c.params.ticket)) {
      const i32 expert = experts.first + static_cast<i32>(ticket / tiles);
      const ExpertRows rows = expert_rows(c.layer, c.params, expert);
      if (rows.count == 0 && c.params.accumulate) continue;
      const WgradTile tile = wgrad_tile(c.params, static_cast<i32>(ticket % tiles));
      return LocatedTile{weight_task(c.params, tile, expert, rows.count, chain_flags(c.params, rows, tile.product)),
                         rows.ring_row};
    }
    return LocatedTile{};
  }
};

// Producer lane. While the first stages of a tile are on their way, the next tile is located, so that no look-up
// stands between two tiles.
template <typename Tickets>
MOK_DEVICE void produce_weights(const WgradContext& c, const Tickets& tickets) {
  StageCursor stage;
  TaskCursor queue;
  LocatedTile tile = tickets.locate(draw_ticket(c.params.ticket));
  u32 ticket = draw_ticket(c.params.ticket);  // not before: locate may draw on to the end
  while (tile.task.kind != kTaskEnd) {
    publish_task(c.layout, queue, tile.task);
    const i32 blocks = ceil_div(tile.task.depth, kDepthBlock / kChainStep), ahead = min(blocks, kStages);
    load_wgrad_tile(c, tile, 0, ahead, stage);
    LocatedTile next = tickets.locate(ticket);
    ticket = draw_ticket(c.params.ticket);
    if (aborted(c.layer.abort_flag)) next.task.kind = kTaskEnd;
    load_wgrad_tile(c, tile, ahead, blocks, stage);
    tile = next;
  }
  publish_task(c.layout, queue, TileTask{});
}

// ---- multiplying warps ----

// First element of the tile's chain start, and its matrix (M x N, row-major).
template <typename T>
MOK_DEVICE const T* matrix_of(const void* base, i64 index, const WgradParams& params, i32 product) {
  return static_cast<const T*>(base) + index * params.rows[product] * params.columns[product];
}

MOK_DEVICE void load_pair(const float* at, float& low, float& high) {
  const float2 pair = __ldcg(reinterpret_cast<const float2*>(at));
  low = pair.x;
  high = pair.y;
}

MOK_DEVICE void load_pair(const u16* at, float& low, float& high) {
  const u32 pair = __ldcg(reinterpret_cast<const u32*>(at));
  low = bf16_low(pair);
  high = bf16_high(pair);
}

// The accumulators a chain resumes from; +0 outside the matrix.
template <typename T>
MOK_DEVICE void load_accumulators(float (&d)[128], const T* matrix, i32 row, i32 column, i32 rows, i32 columns) {
#pragma unroll
  for (i32 j = 0; j < 2; ++j) {
    const T* line = matrix + static_cast<i64>(row + 8 * j) * columns + column;
#pragma unroll
    for (i32 i = 0; i < 32; ++i) {
      float low = 0.0f, high = 0.0f;
      if (row + 8 * j < rows && column + 8 * i < columns) load_pair(line + 8 * i, low, high);
      d[4 * i + 2 * j] = low;
      d[4 * i + 2 * j + 1] = high;
    }
  }
}

MOK_DEVICE void begin_chain(float (&d)[128], const WgradContext& c, const TileTask& task) {
  const i32 lane = threadIdx.x % kWarpSize, product = product_of(task.flags);
  const i32 row = task.block + (threadIdx.x / kWarpSize - 4) * 16 + lane / 4, column = task.column + 2 * (lane % 4);
  const i32 rows = c.params.rows[product], columns = c.params.columns[product];
  if (begin_of(task.flags) == kBeginStraddling) {
    const float* matrix = matrix_of<float>(c.params.straddling[product], begin_slot_of(task.flags), c.params, product);
    load_accumulators(d, matrix, row, column, rows, columns);
  } else if (c.params.start_type == kFloat32Gradient) {
    load_accumulators(d, matrix_of<float>(c.params.start[product], task.batch, c.params, product), row, column, rows,
                      columns);
  } else {
    load_accumulators(d, matrix_of<u16>(c.params.start[product], task.batch, c.params, product), row, column, rows,
                      columns);
  }
}

// A finished bf16 tile that is not stored yet: it waits in registers and leaves 64 columns at a time while the next
// tile's products run, so that short chains (few rows per expert) do not pay for their stores.
struct PendingTile {
  u32 pairs[64];
  u16* rows;     // first row that this lane stores, at column 0
  i32 left;      // chunks of 64 columns not stored yet
  i32 valid;     // rows behind the lane's first that exist: row 4 j is stored if 4 j < valid
  i32 column, columns;

  template <i32 kChunk>
  MOK_DEVICE void store(u32 staging) const {
    TargetRows target;
#pragma unroll
    for (i32 j = 0; j < 4; ++j) target.row[j] = 4 * j < valid ? rows + static_cast<i64>(4 * j) * columns : nullptr;
    store_chunk([&](i32 i) { return pairs[kChunk * 16 + i]; }, staging + (kChunk & 1) * (kStagingBytes / 2), target,
                column + 64 * kChunk, columns);
  }

  // Empty. Writing the pairs tells the compiler that they need no registers before this point.
  MOK_DEVICE void clear() {
    left = 0;
#pragma unroll
    for (i32 i = 0; i < 64; ++i) pairs[i] = 0;
  }

  MOK_DEVICE void store_all(u32 staging) {
    while (left > 0) store_next(staging);
  }

  // The next chunk, if any is left.
  MOK_DEVICE void store_next(u32 staging) {
    switch (left) {
      case 4: store<0>(staging); break;
      case 3: store<1>(staging); break;
      case 2: store<2>(staging); break;
      case 1: store<3>(staging); break;
      default: return;
    }
    --left;
  }
};

// First element of an [M, N] matrix of a stack of them.
template <typename T>
MOK_DEVICE T* matrix_at(void* base, i64 index, const WgradParams& params, i32 product) {
  return static_cast<T*>(base) + index * params.rows[product] * params.columns[product];
}

// bf16: the one rounding at the end of a chain.
MOK_DEVICE void keep_bf16(const float (&d)[128], const WgradContext& c, const TileTask& task, PendingTile& pending) {
  const i32 product = product_of(task.flags), columns = c.params.columns[product];
  const i32 row = task.block + first_row_of_warp() + threadIdx.x % kWarpSize / 8;
#pragma unroll
  for (i32 i = 0; i < 64; ++i) pending.pairs[i] = pack_bf16x2(d[2 * i], d[2 * i + 1]);
  pending.rows = matrix_at<u16>(c.params.gradient[product], task.batch, c.params, product) +
                 static_cast<i64>(row) * columns;
  pending.left = 4;
  pending.valid = c.params.rows[product] - row;
  pending.column = task.column;
  pending.columns = columns;
}

// float32: dW itself, or the buffer of chains that go on.
MOK_DEVICE void store_float32(const float (&d)[128], const WgradContext& c, const TileTask& task) {
  const i32 product = product_of(task.flags), rows = c.params.rows[product], columns = c.params.columns[product];
  const bool goes_on = end_of(task.flags) == kEndStraddling;
  float* matrix = goes_on ? matrix_at<float>(c.params.straddling[product], end_slot_of(task.flags), c.params, product)
                          : matrix_at<float>(c.params.gradient[product], task.batch, c.params, product);
  float* target[4];
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const i32 row = task.block + first_row_of_warp() + 4 * j + threadIdx.x % kWarpSize / 8;
    target[j] = row < rows ? matrix + static_cast<i64>(row) * columns : nullptr;
  }
  store_rows_float32(d, c.layout.staging(threadIdx.x / kWarpSize - 4), target, task.column, columns);
}

// Accumulators of a tile's chain, over all its k-blocks; `pending` leaves meanwhile.
MOK_DEVICE void run_chain(float (&d)[128], const WgradContext& c, const TileTask& task, StageCursor& stage, i32 group,
                          u32 staging, PendingTile& pending) {
  const i32 resumed = begin_of(task.flags) != kBeginZero;
  if (resumed) {
    pending.store_all(staging);
    begin_chain(d, c, task);
    pending.clear();
  } else if (task.depth == 0) {
#pragma unroll
    for (i32 i = 0; i < 128; ++i) d[i] = 0.0f;
  }
  if (task.depth > 0) {
    multiply_groups<Major::kMN, Major::kMN>(d, c.layout, stage, task.depth, group, resumed,
                                            [&] { pending.store_next(staging); });
  }
  pending.store_all(staging);
}

MOK_DEVICE void multiply_wgrad(const WgradContext& c, i32 group) {
  StageCursor stage;
  TaskCursor queue;
  PendingTile pending;
  pending.clear();
  const u32 staging = c.layout.staging(threadIdx.x / kWarpSize - 4);
  while (true) {
    const TileTask task = read_task(c.layout, queue);
    if (task.kind == kTaskEnd) break;
    if (task.valid <= 64 * group) {
      release_task(c.layout, queue);
      skip_stages(c.layout, stage, ceil_div(task.depth, kDepthBlock / kChainStep));
      continue;
    }
    float d[128];
    run_chain(d, c, task, stage, group, staging, pending);
    const TileTask finished = read_task(c.layout, queue);  // again, rather than in registers all the while
    release_task(c.layout, queue);
    if (end_of(finished.flags) == kEndBf16) {
      keep_bf16(d, c, finished, pending);
    } else {
      store_float32(d, c, finished);
      pending.clear();
    }
  }
  pending.store_all(staging);
}

}  // namespace mok
