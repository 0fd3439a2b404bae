// Who pulls which row, in which order: the tables of one rank, built on the device.
//
//   canonical:    walk g' = 0, 1, ...; g = bitreverse(g'), g >= N skipped; slots ascending; append each route
//                 of a local expert to that expert's segment.
//   round_robin:  inside an expert the ranks take turns, each giving its next route in (token, slot) order.
//
// NumPy twin: mok_ref/schedule.py. Both orders are a stable counting sort in three kernels:
//   schedule_count   one warp per chunk of kChunkTokens walk positions: routes per expert and chunk
//   schedule_scan    one CTA: exclusive prefix over chunks, then over experts (padded to kRowTile)
//   schedule_fill    one warp per chunk again: position = prefix + rank inside the chunk; then one warp per
//                    expert writes padding rows and row-block entries
// A segment is a run of chunks that is counted on its own: the whole walk (canonical) or one source rank
// (round_robin). Integers only, no atomics on global memory, so repeated runs give the same tables.
// Reads: all_ids, topk weights of the owners (peer memory). Writes: the tables of LayerParams.
// Synchronisation: kernel boundaries; a barrier between ranks before `gather_routes`.
#pragma once
#include "check.cuh"
#include "params.cuh"

namespace mok {

constexpr i32 kChunkTokens = 32;

// Chunks of one segment on this problem's largest batch, a multiple of 4 (the scan loads four at a time).
struct ChunkGrid {
  i32 segments;
  i32 chunks;
};

MOK_DEVICE i32 bits_for(i32 num_tokens) { return num_tokens <= 2 ? 1 : 32 - __clz(num_tokens - 1); }

MOK_DEVICE ChunkGrid chunk_grid(const LayerParams& params) {
  const bool canonical = params.row_order == kCanonical;
  const i32 walk = canonical ? 1 << bits_for(params.ep_size * params.max_tokens) : params.max_tokens;
  const i32 chunks = (walk + kChunkTokens - 1) / kChunkTokens;
  return ChunkGrid{canonical ? 1 : params.ep_size, (chunks + 3) / 4 * 4};
}

MOK_DEVICE i32* chunk_counts(const LayerParams& params, ChunkGrid grid, i32 expert, i32 segment) {
  return params.chunk_count + (static_cast<i64>(expert) * grid.segments + segment) * grid.chunks;
}

// Routes per (expert, segment), behind the chunk counts.
MOK_DEVICE i32* segment_counts(const LayerParams& params, ChunkGrid grid) {
  return chunk_counts(params, grid, params.num_local_experts, 0);
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

// Local expert of a route at walk position `walk` of a segment, or -1; g is its global token.
struct WalkRoute {
  i32 expert;
  i32 g;
  i32 slot;
};

MOK_DEVICE WalkRoute walk_route(const LayerParams& params, const i32* token_offset, i32 bits, i32 segment,
                                i32 chunk, i32 position) {
  const i32 walk = chunk * kChunkTokens + position / params.top_k;
  WalkRoute route{-1, 0, position % params.top_k};
  bool inside;
  if (params.row_order == kCanonical) {
    route.g = static_cast<i32>(__brev(static_cast<u32>(walk)) >> (32 - bits));
    inside = walk < (1 << bits) && route.g < token_offset[params.ep_size];
  } else {
    route.g = token_offset[segment] + walk;
    inside = route.g < token_offset[segment + 1];
  }
  if (!inside || position >= kChunkTokens * params.top_k) return route;
  const i32 id = __ldg(params.all_ids + static_cast<i64>(route.g) * params.top_k + route.slot);
  if (id >= 0 && id < params.num_experts) route.expert = __ldg(params.local_expert + id);
  return route;
}

// ---- kernels' bodies ----

// Copies the ids of all ranks into all_ids by global token and records N and the token offsets.
// Grid (any, ep_size): CTAs of row y copy from rank (y + rank) % ep_size, so that ranks start on
// different links. With one rank all_ids is that rank's buffer and only the info is written.
MOK_DEVICE void gather_routes_body(const LayerParams& params, i32* token_offset) {
  load_token_offsets(params, token_offset);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (i32 rank = threadIdx.x; rank <= params.ep_size; rank += blockDim.x)
      params.info->token_offset[rank] = token_offset[rank];
    if (threadIdx.x == 0) params.info->num_tokens_total = token_offset[params.ep_size];
  }
  if (params.ep_size == 1) return;
  const i32 source = (blockIdx.y + params.rank) % params.ep_size;
  const i32* ids = peer_buffer<const i32>(params, kTopkIds, source);
  const i32 count = (token_offset[source + 1] - token_offset[source]) * params.top_k;
  i32* target = params.all_ids + static_cast<i64>(token_offset[source]) * params.top_k;
  const i32 step = gridDim.x * blockDim.x;
  for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) target[i] = ids[i];
}

// One warp: routes per local expert in one chunk. `histogram` is the warp's own [L] words.
MOK_DEVICE void schedule_count_body(const LayerParams& params, i32 chunk_index, i32* histogram) {
  const ChunkGrid grid = chunk_grid(params);
  const i32 lane = threadIdx.x % kWarpSize;
  const i32 segment = chunk_index / grid.chunks, chunk = chunk_index % grid.chunks;
  const i32 bits = bits_for(params.info->num_tokens_total);
  for (i32 expert = lane; expert < params.num_local_experts; expert += kWarpSize) histogram[expert] = 0;
  __syncwarp();
#pragma unroll 4
  for (i32 position = lane; position < kChunkTokens * params.top_k; position += kWarpSize) {
    const WalkRoute route = walk_route(params, params.info->token_offset, bits, segment, chunk, position);
    if (route.expert >= 0) atomicAdd(histogram + route.expert, 1);  // shared memory, integers
  }
  __syncwarp();
  for (i32 expert = lane; expert < params.num_local_experts; expert += kWarpSize)
    chunk_counts(params, grid, expert, segment)[chunk] = histogram[expert];
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

// One warp: turns a segment's chunk counts into exclusive prefixes in place; returns their sum.
MOK_DEVICE i32 scan_segment(i32* counts, i32 chunks) {
  const i32 lane = threadIdx.x % kWarpSize;
  i32 carry = 0;
  for (i32 first = 0; first < chunks; first += 4 * kWarpSize) {
    const i32 index = first + 4 * lane;
    int4 count = index < chunks ? *reinterpret_cast<const int4*>(counts + index) : make_int4(0, 0, 0, 0);
    const i32 mine = count.x + count.y + count.z + count.w;
    const i32 inclusive = warp_inclusive_sum(mine);
    const i32 before = carry + inclusive - mine;
    if (index < chunks) {
      const i32 second = before + count.x, third = second + count.y;
      *reinterpret_cast<int4*>(counts + index) = make_int4(before, second, third, third + count.z);
    }
    carry += __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
  }
  return carry;
}

// One CTA: prefixes over chunks, then over experts; row counts of the rank.
MOK_DEVICE void schedule_scan_body(const LayerParams& params) {
  const ChunkGrid grid = chunk_grid(params);
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const i32 lists = params.num_local_experts * grid.segments;
  i32* totals = segment_counts(params, grid);
  for (i32 list = warp; list < lists; list += warps) {
    const i32 total = scan_segment(params.chunk_count + static_cast<i64>(list) * grid.chunks, grid.chunks);
    if (lane == 0) totals[list] = total;
  }
  __syncthreads();
  if (warp != 0) return;
  i32 rows = 0, routes = 0;
  for (i32 first = 0; first < params.num_local_experts; first += kWarpSize) {
    const i32 expert = first + lane;
    i32 count = 0;
    if (expert < params.num_local_experts)
      for (i32 segment = 0; segment < grid.segments; ++segment)
        count += totals[expert * grid.segments + segment];
    const i32 padded = (count + kRowTile - 1) / kRowTile * kRowTile;
    const i32 inclusive = warp_inclusive_sum(padded);
    if (expert < params.num_local_experts) {
      params.expert_offset[expert] = rows + inclusive - padded;
      params.expert_count[expert] = count;
    }
    rows += __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
    routes += __shfl_sync(kFullWarp, warp_inclusive_sum(count), kWarpSize - 1);
  }
  if (lane == 0) {
    params.expert_offset[params.num_local_experts] = rows;
    params.info->num_rows = rows;
    params.info->num_row_blocks = rows / kRowTile;
    params.info->num_routes = routes;
  }
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

// One warp: writes the rows of one chunk. `cursor` is the warp's own [L] words.
MOK_DEVICE void schedule_fill_body(const LayerParams& params, i32 chunk_index, i32* cursor) {
  const ChunkGrid grid = chunk_grid(params);
  const i32 lane = threadIdx.x % kWarpSize;
  const i32 segment = chunk_index / grid.chunks, chunk = chunk_index % grid.chunks;
  const i32* token_offset = params.info->token_offset;
  const i32 bits = bits_for(params.info->num_tokens_total);
  for (i32 expert = lane; expert < params.num_local_experts; expert += kWarpSize)
    cursor[expert] = chunk_counts(params, grid, expert, segment)[chunk];
  __syncwarp();
  constexpr i32 kBatch = 4;  // ids of four steps are loaded before the first is placed
  for (i32 first = 0; first < kChunkTokens * params.top_k; first += kBatch * kWarpSize) {
    WalkRoute route[kBatch];
#pragma unroll
    for (i32 i = 0; i < kBatch; ++i)
      route[i] = walk_route(params, token_offset, bits, segment, chunk, first + i * kWarpSize + lane);
#pragma unroll
    for (i32 i = 0; i < kBatch; ++i) {
      const i32 expert = route[i].expert;
      const u32 same = __match_any_sync(kFullWarp, expert);
      const i32 before = __popc(same & ((1u << lane) - 1u));
      i32 position = 0;
      if (expert >= 0) position = cursor[expert] + before;
      __syncwarp();
      if (expert >= 0 && before == 0) cursor[expert] += __popc(same);
      __syncwarp();
      if (expert < 0) continue;
      if (params.row_order == kRoundRobin) {
        const i32* counts = segment_counts(params, grid) + static_cast<i64>(expert) * grid.segments;
        position = round_robin_position(counts, grid.segments, segment, position);
      }
      const i32 row = params.expert_offset[expert] + position;
      const i32 source = rank_of_token(token_offset, params.ep_size, route[i].g);
      const i32 source_row = (route[i].g - token_offset[source]) * params.top_k + route[i].slot;
      params.peer_rank[row] = source;
      params.peer_row[row] = source_row;
      params.row_weight[row] = peer_buffer<const float>(params, kTopkWeights, source)[source_row];
    }
  }
}

// One warp: padding rows and row-block entries of one expert.
MOK_DEVICE void schedule_pad_body(const LayerParams& params, i32 expert) {
  const i32 lane = threadIdx.x % kWarpSize;
  const i32 offset = params.expert_offset[expert], end = params.expert_offset[expert + 1];
  const i32 count = params.expert_count[expert];
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

}  // namespace mok
