// Who pulls which row, in which order: the tables of one rank, built on the device.
//
//   canonical:    walk g' = 0, 1, ...; g = bitreverse(g'), g >= N skipped; slots ascending; append each route
//                 of a local expert to that expert's segment.
//   round_robin:  inside an expert the ranks take turns, each giving its next route in (token, slot) order.
//
// NumPy twin: mok_ref/schedule.py. Both orders are a stable counting sort:
//   schedule_count   one CTA per block of walk positions: routes per local expert
//   schedule_turns   (round_robin, several ranks) routes per expert and source rank
//   schedule_fill    the CTAs again: every one adds up the counts of all blocks, so that it knows where each
//                    expert's rows begin and how many of them come from the blocks before its own; its warps count
//                    their positions and place them, position = rows before + rank inside the warp
// A segment is a run of blocks that is counted on its own: the whole walk (canonical) or one source rank
// (round_robin). One block alone (few tokens of one rank) needs schedule_fill only. Integers only, no atomics on
// global memory, so repeated runs give the same tables.
// Reads: all_ids, topk weights of the owners (peer memory); one rank alone reads the caller's routes and checks
// them on the way (stage_route). Writes: the tables of LayerParams.
// Synchronisation: kernel boundaries; a barrier between ranks before `gather_routes`.
#pragma once
#include "check.cuh"
#include "params.cuh"

namespace mok {

constexpr i32 kWarpTokens = 4;  // walk positions of a warp; those of a CTA's warps make a block

struct WalkGrid {
  i32 segments;
  i32 blocks;   // of each segment, for this problem's largest batch
  i32 segment;  // this CTA's
  i32 block;

  MOK_DEVICE i32 row() const { return segment * blocks + block; }
};

MOK_DEVICE i32 bits_for(i32 num_tokens) { return num_tokens <= 2 ? 1 : 32 - __clz(num_tokens - 1); }

MOK_DEVICE WalkGrid walk_grid(const LayerParams& params) {
  const bool canonical = params.row_order == kCanonical;
  const i32 walk = canonical ? 1 << bits_for(params.ep_size * params.max_tokens) : params.max_tokens;
  const i32 tokens = kWarpTokens * static_cast<i32>(blockDim.x) / kWarpSize;
  const i32 blocks = (walk + tokens - 1) / tokens, index = blockIdx.x;
  return WalkGrid{canonical ? 1 : params.ep_size, blocks, index / blocks, index % blocks};
}

// Routes per local expert of a block: [segments][blocks][L].
MOK_DEVICE i32* block_counts(const LayerParams& params, i32 row) {
  return params.block_count + static_cast<i64>(row) * params.num_local_experts;
}

// Routes per (expert, segment), behind the block counts.
MOK_DEVICE i32* segment_counts(const LayerParams& params, const WalkGrid& grid) {
  return block_counts(params, grid.segments * grid.blocks);
}

template <typename T>
MOK_DEVICE T* peer_buffer(const LayerParams& params, SymmetricBuffer buffer, i32 rank) {
  return reinterpret_cast<T*>(params.peer_table[buffer * params.ep_size + rank]);
}

// Rank that holds global token g: the last one whose offset is <= g and that has tokens.
MOK_DEVICE i32 rank_of_token(const i32* token_offset, i32 ep_size, i32 g) {
  i32 low = 0, high = ep_size;  // invariant: offset[low] <= g < offset[high]
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    (token_offset[middle] <= g ? low : high) = middle;
  }
  return low;
}

// Exclusive prefix of all ranks' token counts into shared memory; every thread of the CTA calls it.
MOK_DEVICE void load_token_offsets(const LayerParams& params, i32* token_offset) {
  for (i32 rank = threadIdx.x; rank < params.ep_size; rank += blockDim.x) {
    const i32 tokens = *peer_buffer<const i32>(params, kNumTokens, rank);
    token_offset[rank + 1] = min(max(tokens, 0), params.max_tokens);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    token_offset[0] = 0;
    for (i32 rank = 0; rank < params.ep_size; ++rank) token_offset[rank + 1] += token_offset[rank];
  }
  __syncthreads();
}

// ---- the caller's arrays ----

// A route of this rank as the layer uses it: ids outside -1..E-1 and non-finite weights are reported and count as
// "no route" (-1, weight +0). It goes into the symmetric buffers; returns the id.
MOK_DEVICE i32 stage_route(const LayerParams& params, i32 i) {
  i32 id = params.ids_in[i];
  float weight = params.weights_in[i];
  if (id < -1 || id >= params.num_experts) {
    report_input(params.input_error, kBadId, i, static_cast<u32>(id));
    id = -1;
  }
  if ((__float_as_uint(weight) & 0x7f800000u) == 0x7f800000u) {
    report_input(params.input_error, kBadWeight, i, __float_as_uint(weight));
    id = -1;
    weight = 0.0f;
  }
  params.topk_ids[i] = id;
  params.topk_weights[i] = weight;
  return id;
}

// One rank alone: the layer pulls rows from the caller's array instead of a copy of it. Kernels that follow on the
// stream see the address; nobody reads it in the kernel that calls this.
MOK_DEVICE void use_in_place(const LayerParams& params, SymmetricBuffer buffer, const u16* array) {
  const_cast<u64*>(params.peer_table)[buffer] = reinterpret_cast<u64>(array);
}

MOK_DEVICE void clear_words(u32* words, i64 count, i64 thread, i64 threads) {
  for (i64 i = thread; i < count; i += threads) words[i] = 0;
}

// What one rank alone does in the first kernel of its schedule, beside its routes.
MOK_DEVICE void stage_in_place(const LayerParams& params) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread == 0) use_in_place(params, kX, params.x_in);
  clear_words(params.counters, params.num_counters, thread, static_cast<i64>(gridDim.x) * blockDim.x);
}

// ---- walks ----

// Token offsets of all ranks. One rank alone knows them (`own` holds two words, written by all threads of the
// CTA, who meet before they are read); else gather_routes wrote them.
MOK_DEVICE const i32* token_offsets(const LayerParams& params, i32* own) {
  if (params.ep_size > 1) return params.info->token_offset;
  if (threadIdx.x < 2) own[threadIdx.x] = threadIdx.x * params.num_tokens;
  return own;
}

// A CTA's walk over its block's routes.
struct Walk {
  const i32* token_offset;
  i32 bits;
  i32 first;  // walk position at which the warp (fill) or the CTA (count) begins
  bool stages;  // reads the caller's routes and stages them
};

MOK_DEVICE Walk walk_of(const LayerParams& params, const i32* token_offset, i32 first, bool stages) {
  return Walk{token_offset, bits_for(token_offset[params.ep_size]), first, stages};
}

// The route `position` (token * K + slot) places behind the walk's beginning; g is its global token.
struct WalkRoute {
  i32 g;
  i32 slot;
  bool inside;  // there is such a token
};

MOK_DEVICE WalkRoute walk_route(const LayerParams& params, const Walk& walk, i32 segment, i32 position) {
  const i32 place = walk.first + position / params.top_k;
  WalkRoute route{0, position % params.top_k, false};
  if (params.row_order == kCanonical) {
    route.g = static_cast<i32>(__brev(static_cast<u32>(place)) >> (32 - walk.bits));
    route.inside = place < (1 << walk.bits) && route.g < walk.token_offset[params.ep_size];
  } else {
    route.g = walk.token_offset[segment] + place;
    route.inside = route.g < walk.token_offset[segment + 1];
  }
  return route;
}

// Local expert of an id, or -1.
MOK_DEVICE i32 local_expert_of(const LayerParams& params, i32 id) {
  return id >= 0 && id < params.num_experts ? __ldg(params.local_expert + id) : -1;
}

// Local expert of a route, or -1.
MOK_DEVICE i32 expert_of_route(const LayerParams& params, const Walk& walk, const WalkRoute& route) {
  if (!route.inside) return -1;
  const i64 at = static_cast<i64>(route.g) * params.top_k + route.slot;
  return local_expert_of(params, walk.stages ? stage_route(params, static_cast<i32>(at)) : params.all_ids[at]);
}

// Adds the walk's first `count` routes to a histogram in shared memory: `threads` threads, `thread` of them.
MOK_DEVICE void count_routes(const LayerParams& params, const Walk& walk, i32 segment, i32 count, i32 thread,
                             i32 threads, i32* histogram) {
#pragma unroll 2
  for (i32 position = thread; position < count; position += threads) {
    const i32 expert = expert_of_route(params, walk, walk_route(params, walk, segment, position));
    if (expert >= 0) atomicAdd(histogram + expert, 1);  // integers
  }
}

// ---- kernels' bodies ----

// Several ranks: copies the ids of all of them into all_ids by global token and records N and the token offsets.
// Grid (any, ep_size): CTAs of row y copy from rank (y + rank) % ep_size, so that ranks start on
// different links.
MOK_DEVICE void gather_routes_body(const LayerParams& params, i32* token_offset) {
  load_token_offsets(params, token_offset);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (i32 rank = threadIdx.x; rank <= params.ep_size; rank += blockDim.x)
      params.info->token_offset[rank] = token_offset[rank];
    if (threadIdx.x == 0) params.info->num_tokens_total = token_offset[params.ep_size];
  }
  const i32 source = (blockIdx.y + params.rank) % params.ep_size;
  const i32* ids = peer_buffer<const i32>(params, kTopkIds, source);
  const i32 count = (token_offset[source + 1] - token_offset[source]) * params.top_k;
  i32* target = params.all_ids + static_cast<i64>(token_offset[source]) * params.top_k;
  const i32 step = gridDim.x * blockDim.x;
  for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) target[i] = ids[i];
}

// One CTA: counts of its block. `histogram` holds [L] words. One rank alone stages its routes here: the walk meets
// each of them once.
MOK_DEVICE void schedule_count_body(const LayerParams& params, i32* own_offset, i32* histogram) {
  const WalkGrid grid = walk_grid(params);
  const i32* token_offset = token_offsets(params, own_offset);
  for (i32 expert = threadIdx.x; expert < params.num_local_experts; expert += blockDim.x) histogram[expert] = 0;
  __syncthreads();
  const i32 tokens = kWarpTokens * static_cast<i32>(blockDim.x) / kWarpSize;
  const Walk walk = walk_of(params, token_offset, grid.block * tokens, params.ep_size == 1);
  count_routes(params, walk, grid.segment, tokens * params.top_k, threadIdx.x, blockDim.x, histogram);
  __syncthreads();
  i32* counts = block_counts(params, grid.row());
  for (i32 expert = threadIdx.x; expert < params.num_local_experts; expert += blockDim.x)
    counts[expert] = histogram[expert];
}

MOK_DEVICE i32 warp_inclusive_sum(i32 value) {
  const i32 lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (i32 step = 1; step < kWarpSize; step *= 2) {
    const i32 other = __shfl_up_sync(kFullWarp, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

struct BlockSum {
  i32 inclusive;  // over the threads up to this one
  i32 total;
};

// All threads of the CTA; `scratch` holds one word per warp.
MOK_DEVICE BlockSum block_sum(i32 value, i32* scratch) {
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  BlockSum sum{warp_inclusive_sum(value), 0};
  __syncthreads();
  if (lane == kWarpSize - 1) scratch[warp] = sum.inclusive;
  __syncthreads();
  const i32 warps_before = warp_inclusive_sum(lane < warps ? scratch[lane] : 0);
  sum.total = __shfl_sync(kFullWarp, warps_before, kWarpSize - 1);
  const i32 before = __shfl_sync(kFullWarp, warps_before, max(warp - 1, 0));
  if (warp > 0) sum.inclusive += before;
  return sum;
}

constexpr i32 kSumLoads = 8;  // counts in flight per thread

// Counts of some blocks: all of them, and those of this CTA's segment before its own block.
struct BlockSums {
  i32 total;
  i32 before;
};

// Blocks [begin, end) of one expert.
MOK_DEVICE BlockSums sum_blocks(const LayerParams& params, const WalkGrid& grid, i32 expert, i32 begin, i32 end) {
  const i32 first_before = grid.segment * grid.blocks, own = grid.row();
  BlockSums sums{0, 0};
  for (i32 first = begin; first < end; first += kSumLoads) {
    i32 count[kSumLoads];
#pragma unroll
    for (i32 i = 0; i < kSumLoads; ++i) count[i] = first + i < end ? block_counts(params, first + i)[expert] : 0;
#pragma unroll
    for (i32 i = 0; i < kSumLoads; ++i) {
      sums.total += count[i];
      if (first + i >= first_before && first + i < own) sums.before += count[i];
    }
  }
  return sums;
}

// Shared memory of schedule_fill, [L] words each.
struct FillTables {
  i32* cursor;  // [warps][L] counts of the warps, then where the next route of an expert goes
  i32* total;   // routed rows
  i32* before;  // of them, those of the blocks before this one
  i32* offset;  // first row
};

MOK_DEVICE FillTables fill_tables(i32* words, i32 num_experts) {
  const i32 warps = blockDim.x / kWarpSize;
  i32* total = words + warps * num_experts;
  return FillTables{words, total, total + num_experts, total + 2 * num_experts};
}

// One CTA: totals and rows before its block, from the counts of all blocks; a column per expert, threads form groups
// with a run of blocks each. `scratch` holds two words per thread.
MOK_DEVICE void sum_columns(const LayerParams& params, const WalkGrid& grid, const FillTables& tables,
                            BlockSums* scratch) {
  const i32 threads = blockDim.x, experts = params.num_local_experts, rows = grid.segments * grid.blocks;
  const i32 width = min(threads, (max(experts, 1) + kWarpSize - 1) / kWarpSize * kWarpSize);
  const i32 groups = threads / width;
  const i32 column = static_cast<i32>(threadIdx.x) % width, group = static_cast<i32>(threadIdx.x) / width;
  for (i32 first = 0; first < experts; first += width) {
    const i32 expert = first + column;
    const bool mine = expert < experts && group < groups;
    __syncthreads();
    if (mine)
      scratch[threadIdx.x] = sum_blocks(params, grid, expert, rows * group / groups, rows * (group + 1) / groups);
    __syncthreads();
    if (!mine || group > 0) continue;
    BlockSums sums = scratch[column];
    for (i32 other = 1; other < groups; ++other) {
      sums.total += scratch[other * width + column].total;
      sums.before += scratch[other * width + column].before;
    }
    tables.total[expert] = sums.total;
    tables.before[expert] = sums.before;
  }
}

// The only block: its warps' counts are all there is.
MOK_DEVICE void sum_warps(const LayerParams& params, const FillTables& tables) {
  const i32 warps = blockDim.x / kWarpSize, experts = params.num_local_experts;
  for (i32 expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    i32 total = 0;
#pragma unroll 8
    for (i32 warp = 0; warp < warps; ++warp) total += tables.cursor[warp * experts + expert];
    tables.total[expert] = total;
    tables.before[expert] = 0;
  }
}

// Counts of the warps become the place of each warp's next route.
MOK_DEVICE void set_cursors(const FillTables& tables, i32 experts) {
  constexpr i32 kBatch = 8;
  const i32 warps = blockDim.x / kWarpSize;
  for (i32 expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    i32 next = tables.before[expert];
    for (i32 first = 0; first < warps; first += kBatch) {
      i32 count[kBatch];
      i32* cursor = tables.cursor + first * experts + expert;
#pragma unroll
      for (i32 i = 0; i < kBatch; ++i) count[i] = first + i < warps ? cursor[i * experts] : 0;
#pragma unroll
      for (i32 i = 0; i < kBatch; ++i) {
        if (first + i < warps) cursor[i * experts] = next;
        next += count[i];
      }
    }
  }
}

// One CTA: where each expert's rows begin. The first CTA writes it down, with the row counts of the rank.
MOK_DEVICE void place_experts(const LayerParams& params, const FillTables& tables, const i32* token_offset,
                              i32* scratch) {
  const bool writes = blockIdx.x == 0;
  i32 rows = 0, routes = 0;
  for (i32 first = 0; first < params.num_local_experts; first += blockDim.x) {
    const i32 expert = first + static_cast<i32>(threadIdx.x);
    const bool mine = expert < params.num_local_experts;
    const i32 count = mine ? tables.total[expert] : 0, padded = (count + kRowTile - 1) / kRowTile * kRowTile;
    const BlockSum before = block_sum(padded, scratch);
    if (mine) tables.offset[expert] = rows + before.inclusive - padded;
    if (mine && writes) {
      params.expert_offset[expert] = tables.offset[expert];
      params.expert_count[expert] = count;
    }
    rows += before.total;
    if (writes) routes += block_sum(count, scratch).total;
  }
  if (!writes || threadIdx.x != 0) return;
  params.expert_offset[params.num_local_experts] = rows;
  params.info->num_rows = rows;
  params.info->num_row_blocks = rows / kRowTile;
  params.info->num_routes = routes;
  if (params.ep_size > 1) return;  // else gather_routes wrote them
  params.info->token_offset[0] = 0;
  params.info->token_offset[1] = params.info->num_tokens_total = token_offset[1];
}

// One CTA per segment: its routes per expert, for ranks that take turns.
MOK_DEVICE void schedule_turns_body(const LayerParams& params, WalkGrid grid) {
  grid.segment = blockIdx.x;
  grid.block = 0;
  for (i32 expert = threadIdx.x; expert < params.num_local_experts; expert += blockDim.x)
    segment_counts(params, grid)[static_cast<i64>(expert) * grid.segments + grid.segment] =
        sum_blocks(params, grid, expert, grid.row(), grid.row() + grid.blocks).total;
}

// Position inside an expert when ranks take turns: the j-th route of `segment` comes after the first j
// routes (as many as they have) of every rank, and after the j-th of each lower rank.
MOK_DEVICE i32 round_robin_position(const i32* counts, i32 segments, i32 segment, i32 j) {
  i32 position = 0;
  for (i32 rank = 0; rank < segments; ++rank) {
    const i32 count = __ldg(counts + rank);
    position += min(count, j) + (rank < segment && count > j ? 1 : 0);
  }
  return position;
}

constexpr i32 kFillBatch = 2;  // routes per lane that are loaded before the first is placed

MOK_DEVICE const float* weights_of(const LayerParams& params, i32 rank) {
  return rank == params.rank ? params.topk_weights : peer_buffer<const float>(params, kTopkWeights, rank);
}

// One warp: writes the rows of its routes. `cursor` says where the next route of each expert goes.
MOK_DEVICE void place_routes(const LayerParams& params, const WalkGrid& grid, const Walk& walk, const i32* offset,
                             i32* cursor) {
  const i32 lane = threadIdx.x % kWarpSize, K = params.top_k;
  for (i32 first = 0; first < kWarpTokens * K; first += kFillBatch * kWarpSize) {
    i32 route_expert[kFillBatch], source[kFillBatch], source_row[kFillBatch];
    float weight[kFillBatch];
#pragma unroll
    for (i32 i = 0; i < kFillBatch; ++i) {
      const i32 position = first + i * kWarpSize + lane;
      WalkRoute route = walk_route(params, walk, grid.segment, position);
      route.inside = route.inside && position < kWarpTokens * K;
      route_expert[i] = expert_of_route(params, walk, route);
      if (route_expert[i] < 0) continue;
      source[i] = rank_of_token(walk.token_offset, params.ep_size, route.g);
      source_row[i] = (route.g - walk.token_offset[source[i]]) * K + route.slot;
      weight[i] = weights_of(params, source[i])[source_row[i]];
    }
#pragma unroll
    for (i32 i = 0; i < kFillBatch; ++i) {
      const i32 expert = route_expert[i];
      const u32 same = __match_any_sync(kFullWarp, expert);
      const i32 before = __popc(same & ((1u << lane) - 1u));
      i32 position = 0;
      if (expert >= 0) position = cursor[expert] + before;
      __syncwarp();
      if (expert >= 0 && before == 0) cursor[expert] += __popc(same);
      __syncwarp();
      if (expert < 0) continue;
      if (grid.segments > 1) {
        const i32* counts = segment_counts(params, grid) + static_cast<i64>(expert) * grid.segments;
        position = round_robin_position(counts, grid.segments, grid.segment, position);
      }
      const i32 row = offset[expert] + position;
      params.peer_rank[row] = source[i];
      params.peer_row[row] = source_row[i];
      params.row_weight[row] = weight[i];
    }
  }
}

// One warp: padding rows and row-block entries of one expert.
MOK_DEVICE void pad_expert(const LayerParams& params, i32 expert, i32 offset, i32 count) {
  const i32 lane = threadIdx.x % kWarpSize, end = offset + (count + kRowTile - 1) / kRowTile * kRowTile;
  for (i32 row = offset + count + lane; row < end; row += kWarpSize) {
    params.peer_rank[row] = -1;
    params.peer_row[row] = -1;
    params.row_weight[row] = 0.0f;
  }
  for (i32 block = offset / kRowTile + lane; block < end / kRowTile; block += kWarpSize) {
    params.row_block_expert[block] = expert;
    params.row_block_valid[block] = min(kRowTile, offset + count - block * kRowTile);
  }
}

// One CTA: the rows of its block; its warps share the padding with those of the other CTAs.
MOK_DEVICE void schedule_fill_body(const LayerParams& params, i32* own_offset, i32* words, BlockSums* scratch) {
  const WalkGrid grid = walk_grid(params);
  const i32 experts = params.num_local_experts, warps = blockDim.x / kWarpSize;
  const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const bool is_only = gridDim.x == 1 && params.ep_size == 1;
  const FillTables tables = fill_tables(words, experts);
  const i32* token_offset = token_offsets(params, own_offset);
  for (i32 i = threadIdx.x; i < warps * experts; i += blockDim.x) tables.cursor[i] = 0;
  if (is_only) stage_in_place(params);
  __syncthreads();
  Walk walk = walk_of(params, token_offset, (grid.block * warps + warp) * kWarpTokens, is_only);
  i32* cursor = tables.cursor + warp * experts;
  count_routes(params, walk, grid.segment, kWarpTokens * params.top_k, lane, kWarpSize, cursor);
  walk.stages = false;
  if (is_only) {
    __syncthreads();
    sum_warps(params, tables);
  } else {
    sum_columns(params, grid, tables, scratch);
  }
  __syncthreads();
  place_experts(params, tables, token_offset, &scratch[0].total);
  set_cursors(tables, experts);
  __syncthreads();
  place_routes(params, grid, walk, tables.offset, cursor);
  for (i32 expert = blockIdx.x * warps + warp; expert < experts; expert += gridDim.x * warps)
    pad_expert(params, expert, tables.offset[expert], tables.total[expert]);
}

}  // namespace mok
