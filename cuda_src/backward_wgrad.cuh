// Weight gradients: products whose K axis is rows, chains that may begin where an earlier launch ended.
//
//   dW_down[e] = start + dy^T hw      dW_gate[e] = start + d_gate^T x      dW_up[e] = start + d_up^T x
//   over the rows of expert e, ascending, groups of 16 from the segment's start; start = +0 or main_grad
//
// NumPy twin: mok_ref/experts.py: weight_gradient.
// Executed by: the pipeline of backward_pipeline.cuh, tile 128 x 256, both operands MN-major; warp 0 loads, warp 1
// finds tiles, the multiplying warps store what they finished through the copy engine. One launch covers one
// macrobatch. A chain whose expert goes on in the next macrobatch is stored as float32 (in dW itself when that is
// float32, else in a buffer for straddling chains) and continued there: the bits are those of an unbroken chain.
// An expert without rows: +0 everywhere, or left alone when gradients accumulate.
// K runs in groups of 16 to the last route, a single k-block of 64 whole; rows behind the last route are +0 in both
// operands as far as K runs.
// Reads: rings written by the dgrad kernel before it in the stream. Writes: dW. Synchronisation: tickets, and where
// the kernel is launched early, the count of dgrad's hidden tiles.
#pragma once
#include "backward_dx.cuh"
#include "backward_schedule.cuh"
#include "mxfp8_backward_pipeline.cuh"

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

constexpr i32 kGroupRows = 2048;  // rows of dW whose tiles are walked together for one tile of N

struct WgradTile {
  i32 product, row, column;
};

// How dW is cut: tiles of kRows x kTileColumns.
template <i32 kRows>
MOK_DEVICE i32 product_tiles(const WgradParams& params, i32 product) {
  return ceil_div(params.rows[product], kRows) * ceil_div(params.columns[product], kTileColumns);
}

template <i32 kRows>
MOK_DEVICE i32 tiles_per_expert(const WgradParams& params) {
  i32 tiles = 0;
  for (i32 p = 0; p < params.num_products; ++p) tiles += product_tiles<kRows>(params, p);
  return tiles;
}

// Products walked as one matrix from `product` on: dW_gate with dW_up below it, which take the same rows of x.
MOK_DEVICE i32 stacked_products(i32 product) { return product == 1 ? 2 : 1; }

template <i32 kRows>
MOK_DEVICE WgradTile wgrad_tile(const WgradParams& params, i32 index) {
  constexpr i32 kGroup = kGroupRows / kRows;
  i32 product = 0;
  while (index >= stacked_products(product) * product_tiles<kRows>(params, product)) {
    index -= stacked_products(product) * product_tiles<kRows>(params, product);
    product += stacked_products(product);
  }
  const i32 tiles_of_one = ceil_div(params.rows[product], kRows), tiles_m = stacked_products(product) * tiles_of_one;
  const i32 tiles_n = ceil_div(params.columns[product], kTileColumns);
  const i32 group = index / (kGroup * tiles_n), inside = index - group * kGroup * tiles_n;
  const i32 group_rows = min(kGroup, tiles_m - group * kGroup);
  const i32 m = group * kGroup + inside % group_rows, n = inside / group_rows;
  return WgradTile{product + m / tiles_of_one, m % tiles_of_one * kRows, n * kTileColumns};
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

template <typename Layout>
struct WgradContextOn {
  const LayerParams& layer;
  const WgradParams& params;
  const WgradMaps& maps;
  Layout layout;
};
using WgradContext = WgradContextOn<SharedLayout>;

// ---- tasks and operands ----

MOK_DEVICE i32 chain_flags(const WgradParams& params, const ExpertRows& rows, i32 product) {
  const bool in_place = params.gradient_type == kFloat32Gradient;
  i32 begin = params.accumulate ? kBeginStart : kBeginZero;
  if (rows.begun) begin = in_place ? kBeginStart : kBeginStraddling;
  i32 end = in_place ? kEndFloat32 : kEndBf16;
  if (!rows.ends && !in_place) end = kEndStraddling;
  return flags_of(product, begin, end, params.macro_index & 1, (params.macro_index + 1) & 1);
}

// MXFP8: every product but dW_down has codes on both sides; hw is bf16.
MOK_DEVICE bool is_all_codes(i32 product) { return product != 0; }

MOK_DEVICE i32 depth_blocks(const TileTask& task) { return ceil_div(task.depth, kDepthBlock / kChainStep); }

// One tile: rows of both matrices along K.
MOK_DEVICE void load_wgrad_tile(const WgradContext& c, const TileTask& task, StageCursor& stage) {
  constexpr Major kMN = Major::kMN;
  constexpr i32 kScaleMaps = sizeof(WgradMaps) / sizeof(TensorMap);  // MXFP8: a second WgradMaps, of the scales
  const i32 product = product_of(task.flags), blocks = depth_blocks(task);
  const Operand a{&c.maps.rows_out[product], task.block, task.ring_row, 0, c.params.rows[product] % 64 == 0};
  const Operand b{&c.maps.rows_in[product], task.column, task.ring_row, 0, c.params.columns[product] % 64 == 0};
  if constexpr (!kMxfp8) {
    load_product<kMN, kMN>(c.layout, stage, a, b, 0, blocks, true);
  } else if (is_all_codes(product)) {
    load_coded_product<kMN, kMN, true>(c.layout, stage, a, b, kScaleMaps, 0, blocks);
  } else {
    load_coded_product<kMN, kMN, false>(c.layout, stage, a, b, kScaleMaps, 0, blocks);
  }
}

template <i32 kRows>
MOK_DEVICE TileTask weight_task(const WgradParams& params, const WgradTile& tile, i32 expert, i32 ring_row,
                                i32 num_rows, i32 flags) {
  return TileTask{kTaskWeight,
                  tile.row,
                  tile.column,
                  min(kRows, params.rows[tile.product] - tile.row),
                  ceil_div(num_rows, kChainStep),
                  expert,
                  flags,
                  ring_row};
}

// Tickets of one wgrad launch over the experts of its macrobatch, tiles of kRows x kTileColumns.
template <i32 kRows>
struct ExpertTickets {
  const LayerParams& layer;
  const WgradParams& params;
  ExpertRange experts;
  u32 tiles;  // per expert

  MOK_DEVICE ExpertTickets(const LayerParams& layer_params, const WgradParams& wgrad_params)
      : layer(layer_params),
        params(wgrad_params),
        experts(experts_of_macrobatch(layer, params)),
        tiles(tiles_per_expert<kRows>(params)) {}

  // The tile of the next ticket of `draw()` that has something to do.
  template <typename Draw>
  MOK_DEVICE TileTask locate(Draw&& draw) const {
    const u32 total = (experts.end - experts.first) * tiles;
    for (u32 ticket = draw(); ticket < total; ticket = draw()) {
      const i32 expert = experts.first + static_cast<i32>(ticket / tiles);
      const ExpertRows rows = expert_rows(layer, params, expert);
      if (rows.count == 0 && params.accumulate) continue;
      const WgradTile tile = wgrad_tile<kRows>(params, static_cast<i32>(ticket % tiles));
      const i32 flags = chain_flags(params, rows, tile.product);
      return weight_task<kRows>(params, tile, expert, rows.ring_row, rows.count, flags);
    }
    return TileTask{};
  }
};

using WgradTaskCursor = RingCursor<2>;  // slots of the task queue in use

// Warp 1, one lane: finds tiles and hands them to the loading and the multiplying warps. A ticket is drawn when the
// tile before the last is done with, so that no CTA sits on tiles when the others run out of them.
template <typename Tickets>
MOK_DEVICE void draw_weights(const WgradContext& c, const Tickets& tickets) {
  WgradTaskCursor queue;
  TicketMail mail(c.layout, c.params.ticket, c.layer.abort_flag);
  TileTask task;
  do {
    wait_task_slot(c.layout, queue);
    task = tickets.locate([&] {
      mail.draw();
      return mail.next();
    });
    const i32 above = cluster_rank() * kTileRows;  // rows of a cluster's tile that are the partner's
    task.block += above;
    task.valid = min(task.valid - above, kTileRows);
    publish_task(c.layout, queue, task);
  } while (task.kind != kTaskEnd);
}

// Loading lane, before its first copy: the rows of this macrobatch are complete. The kernel may have begun while dgrad
// was making its last dx tiles, which nobody waits for here; all CTAs that make them are running by then.
MOK_DEVICE void wait_hidden_rows(const LayerParams& layer, const WgradParams& params) {
  if (params.hidden_done == nullptr) return;
  const i32 blocks = macro_row_blocks(layer, params.macro_index, params.macro_blocks);
  const u32 tiles = blocks * ceil_div(layer.intermediate_size, kTileColumns);
  wait_gpu(params.hidden_done, tiles, wait_context(layer), kPhaseGradTile, 0);
  fence_proxy_async_global();
}

// Warp 0, one lane: K-blocks of all tiles, without a pause between two of them.
MOK_DEVICE void load_weights(const WgradContext& c) {
  wait_hidden_rows(c.layer, c.params);
  StageCursor stage;
  WgradTaskCursor queue;
  while (true) {
    const TileTask task = read_task(c.layout, queue);
    if (task.kind == kTaskEnd) return;
    mbarrier_arrive(c.layout.task_empty(queue.index));
    queue.advance();
    load_wgrad_tile(c, task, stage);
    trace_task(kTraceLoad, task.batch, task.column);
  }
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
template <typename T, i32 kCount>
MOK_DEVICE void load_accumulators(float (&d)[kCount], const T* matrix, i32 row, i32 column, i32 rows, i32 columns) {
#pragma unroll
  for (i32 j = 0; j < 2; ++j) {
    const T* line = matrix + static_cast<i64>(row + 8 * j) * columns + column;
#pragma unroll
    for (i32 i = 0; i < kCount / 4; ++i) {
      float low = 0.0f, high = 0.0f;
      if (row + 8 * j < rows && column + 8 * i < columns) load_pair(line + 8 * i, low, high);
      d[4 * i + 2 * j] = low;
      d[4 * i + 2 * j + 1] = high;
    }
  }
}

// `row`, `column`: of the warp's first row and column in dW.
template <i32 kCount>
MOK_DEVICE void begin_chain(float (&d)[kCount], const WgradParams& params, const TileTask& task, i32 row, i32 column) {
  const i32 lane = threadIdx.x % kWarpSize, product = product_of(task.flags);
  const i32 rows = params.rows[product], columns = params.columns[product];
  row += lane / 4;
  column += 2 * (lane % 4);
  if (begin_of(task.flags) == kBeginStraddling) {
    const float* matrix = matrix_of<float>(params.straddling[product], begin_slot_of(task.flags), params, product);
    load_accumulators(d, matrix, row, column, rows, columns);
  } else if (params.start_type == kFloat32Gradient) {
    load_accumulators(d, matrix_of<float>(params.start[product], task.batch, params, product), row, column, rows,
                      columns);
  } else {
    load_accumulators(d, matrix_of<u16>(params.start[product], task.batch, params, product), row, column, rows,
                      columns);
  }
}

// First element of an [M, N] matrix of a stack of them.
template <typename T>
MOK_DEVICE T* matrix_at(void* base, i64 index, const WgradParams& params, i32 product) {
  return static_cast<T*>(base) + index * params.rows[product] * params.columns[product];
}

// Where a chain ends as float32: in dW itself, or in the buffer of chains that go on.
MOK_DEVICE float* float32_end(const WgradParams& params, const TileTask& task) {
  const i32 product = product_of(task.flags);
  return end_of(task.flags) == kEndStraddling
             ? matrix_at<float>(params.straddling[product], end_slot_of(task.flags), params, product)
             : matrix_at<float>(params.gradient[product], task.batch, params, product);
}

// The four rows of a matrix that a lane stores, `first` being the warp's first of 16; null behind the matrix.
template <typename T>
MOK_DEVICE void matrix_rows(T* (&target)[4], T* matrix, i32 first, i32 rows, i32 columns) {
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const i32 row = first + 4 * j + threadIdx.x % kWarpSize / 8;
    target[j] = row < rows ? matrix + static_cast<i64>(row) * columns : nullptr;
  }
}

// A finished chain to dW as float32: 64 rows of a warpgroup, `row` the warp's first in dW.
template <i32 kCount>
MOK_DEVICE void end_chain_float32(const float (&d)[kCount], const WgradParams& params, const WgradMaps& maps,
                                  const TileTask& task, u32 staging, i32 row, i32 column) {
  const i32 product = product_of(task.flags), columns = params.columns[product];
  if (params.bulk_stores && end_of(task.flags) != kEndStraddling) {
    store_chunks_bulk<kCount / 16, 32>(staging, &maps.gradient[product], task.batch, row, column,
                                       [&](i32 chunk, u32 buffer) { stage_float32(d + chunk * 16, buffer); });
    return;
  }
  wait_bulk_stores<false>();
  float* target[4];
  matrix_rows(target, float32_end(params, task), row, params.rows[product], columns);
  store_rows_float32(d, staging, target, column, columns);
}

// The same as float32 or, after the one rounding at its end, as bf16.
template <i32 kCount>
MOK_DEVICE void end_chain(const float (&d)[kCount], const WgradParams& params, const WgradMaps& maps,
                          const TileTask& task, u32 staging, i32 row, i32 column) {
  if (end_of(task.flags) == kEndBf16) {
    store_chunks_bulk<kCount / 32, 64>(staging, &maps.gradient[product_of(task.flags)], task.batch, row, column,
                                       [&](i32 chunk, u32 buffer) { stage_bf16(d + chunk * 32, buffer); });
  } else {
    end_chain_float32(d, params, maps, task, staging, row, column);
  }
}

// The second half of a finished bf16 tile, stored while the products of the next tile run: the shared memory of a warp
// holds the first half only, and to wait until that has left would leave the tensor cores idle.
struct HeldHalf {
  u32 words[32];  // columns 128 .. 255 of the warp's 16 rows, rounded
  i32 matrix, corner;  // batch and product, -1: nothing is held; row and column in units of 8
};

// 128 columns of a warp's 16 rows through the copy engine; `stage(half, buffer)` puts 64 of them into shared memory.
template <typename Stage>
MOK_DEVICE void store_half_bulk(const WgradMaps& maps, i32 product, i32 batch, i32 row, i32 column, u32 staging,
                           Stage&& stage) {
  wait_bulk_stores<false>();
  stage(0, staging);
  stage(1, staging + kStagingBytes / 2);
  fence_proxy_async_shared();
  __syncwarp();
  if (elect_one()) {
    tma_store_3d(&maps.gradient[product], staging, column, row, batch);
    tma_store_3d(&maps.gradient[product], staging + kStagingBytes / 2, column + 64, row, batch);
    bulk_commit_group();
  }
}

MOK_DEVICE void store_held(HeldHalf& held, const WgradMaps& maps, u32 staging) {
  if (held.matrix < 0) return;
  store_half_bulk(maps, held.matrix % kWgradProducts, held.matrix / kWgradProducts, held.corner % 65536 * 8,
                  held.corner / 65536 * 8, staging,
             [&](i32 chunk, u32 buffer) { stage_pairs(held.words + 16 * chunk, buffer); });
  held.matrix = -1;
}

// `end_chain` for a whole bf16 tile: its first half leaves, its second is held. What was held before has left.
MOK_DEVICE void end_first_half(const float (&d)[128], HeldHalf& held, const WgradMaps& maps, const TileTask& task,
                               u32 staging, i32 row) {
  store_half_bulk(maps, product_of(task.flags), task.batch, row, task.column, staging,
             [&](i32 chunk, u32 buffer) { stage_bf16(d + 32 * chunk, buffer); });
  round_pairs(held.words, d + 64);
  held.matrix = task.batch * kWgradProducts + product_of(task.flags);
  held.corner = (task.column + kTileColumns / 2) / 8 * 65536 + row / 8;
}

// Accumulators of a tile's chain, over all its k-blocks.
template <typename Layout, typename Shadow>
MOK_DEVICE void run_chain(float (&d)[128], const WgradContextOn<Layout>& c, const TileTask& task, StageCursor& stage,
                          i32 group, Shadow&& shadow) {
  const i32 resumed = begin_of(task.flags) != kBeginZero;
  if (resumed) {
    begin_chain(d, c.params, task, task.block + first_row_of_warp(), task.column);
  } else if (task.depth == 0) {
#pragma unroll
    for (i32 i = 0; i < 128; ++i) d[i] = 0.0f;
  }
  if (task.depth == 0) return;
  if constexpr (kMxfp8) {
    const i32 rows = is_all_codes(product_of(task.flags)) ? kCodeRows : kTileRows;
    multiply_codes<Major::kMN, Major::kMN>(d, c.layout, stage, task.depth, group, resumed, rows);
  } else {
    multiply_groups<Major::kMN, Major::kMN>(d, c.layout, stage, task.depth, group, resumed, shadow);
  }
}

// kHold: bf16 tiles leave in two halves.
template <bool kHold, typename Layout>
MOK_DEVICE void multiply_wgrad(const WgradContextOn<Layout>& c, i32 group) {
  StageCursor stage;
  WgradTaskCursor queue;
  const u32 staging = c.layout.staging(threadIdx.x / kWarpSize - 4);
  HeldHalf held;
  held.matrix = -1;
  while (true) {
    const TileTask task = read_task(c.layout, queue);
    if (task.kind == kTaskEnd) break;
    if (task.valid <= 64 * group) {
      if constexpr (kHold) store_held(held, c.maps, staging);
      release_task(c.layout, queue);
      const i32 blocks = depth_blocks(task);
      if constexpr (kMxfp8) {
        expand_only(c.layout, stage, blocks, is_all_codes(product_of(task.flags)) ? kCodeRows : kTileRows);
      } else {
        skip_stages(c.layout, stage, blocks);
      }
      continue;
    }
    float d[128];
    if constexpr (kHold) {
      run_chain(d, c, task, stage, group, [&] { store_held(held, c.maps, staging); });
      store_held(held, c.maps, staging);  // of a chain too short to have done it
    } else {
      run_chain(d, c, task, stage, group, NoShadow{});
    }
    const TileTask finished = read_task(c.layout, queue);  // again, rather than in registers all the while
    release_task(c.layout, queue);
    trace_task<4 * kWarpSize>(kTraceWeight, finished.batch, finished.column);
    const i32 row = finished.block + first_row_of_warp();
    if constexpr (!kHold) {
      end_chain(d, c.params, c.maps, finished, staging, row, finished.column);
    } else if (end_of(finished.flags) == kEndBf16) {
      end_first_half(d, held, c.maps, finished, staging, row);
    } else {
      end_chain_float32(d, c.params, c.maps, finished, staging, row, finished.column);
    }
    trace_task<4 * kWarpSize>(kTraceStore, finished.batch, finished.column);
  }
  if constexpr (kHold) store_held(held, c.maps, staging);
  wait_bulk_stores<true>();
}

}  // namespace mok
