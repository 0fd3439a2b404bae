// Rows of a finished tile, rounded to bf16 and stored where they belong: into the owner's slot for dx.
//
//   dx_r = bf16(tc([d_gate | d_up], [W_gate ; W_up]^T))  ->  combine_peer[peer_rank[r]][peer_row[r]]
//
// The same store serves dx of the shared expert and gate and up that are made again: only the row addresses differ.
// Weight gradients leave by the same fragments through the copy engine, or by this store where they have no tensor map.
// NumPy twin: mok_ref/experts.py: expert_backward; mok_ref/dispatch.py: push_rows.
// Executed by: the 8 multiplying warps, 16 rows each; every warp turns its fragment into rows through 4 KB of
// shared memory of its own. In dgrad the storing warp takes them from there, 128 columns at a time, and stores 128
// contiguous bytes per row; elsewhere the multiplying warps do.
// Synchronisation: none inside; peers see the rows after the barrier behind the backward kernels.
#pragma once
#include "backward_pipeline.cuh"
#include "schedule.cuh"
#include "numerics.cuh"

namespace mok {

// Target of the four rows a lane stores (row 4 j + lane / 8 of the warp's 16): null for rows to leave out.
struct TargetRows {
  u16* row[4];
};

// The four 16-byte units that a lane stores of a chunk: 128 bytes of each of the warp's 16 rows.
struct RowUnits {
  uint4 unit[4];
};

// All four before the first is used: one latency, not four.
MOK_DEVICE RowUnits read_units(u32 buffer) {
  const i32 lane = threadIdx.x % kWarpSize;
  RowUnits units;
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const i32 r = 4 * j + lane / 8;
    units.unit[j] = ld_shared_v4(buffer + r * 128 + ((lane % 8 ^ (r & 7)) << 4));
  }
  return units;
}

// Into rows of kUnitElements-element units; columns at and behind `columns` are left out.
template <i32 kUnitElements, typename T>
MOK_DEVICE void write_units(const RowUnits& units, T* const (&row)[4], i32 column, i32 columns) {
  const i32 at = column + static_cast<i32>(threadIdx.x % 8) * kUnitElements;
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    if (row[j] != nullptr && at < columns) st_global_v4(row[j] + at, units.unit[j]);
  }
}

// 64 columns of a warp's 16 rows, 16 pairs of bf16 from `words`: into shared memory as rows.
MOK_DEVICE void stage_pairs(const u32* words, u32 buffer) {
  const i32 lane = threadIdx.x % kWarpSize, row = lane % 16;
#pragma unroll
  for (i32 u = 0; u < 8; u += 2) {
    const u32* unit = words + 2 * u;
    stmatrix_x4(buffer + row * 128 + (((u + lane / 16) ^ (row & 7)) << 4), unit[0], unit[1], unit[2], unit[3]);
  }
}

// kPairs pairs of accumulators from `d`, rounded to bf16.
template <i32 kPairs>
MOK_DEVICE void round_pairs(u32 (&words)[kPairs], const float* d) {
#pragma unroll
  for (i32 i = 0; i < kPairs; ++i) words[i] = pack_bf16x2(d[2 * i], d[2 * i + 1]);
}

// The same 64 columns from 32 accumulators: rounded to bf16, into shared memory as rows.
MOK_DEVICE void stage_bf16(const float* d, u32 buffer) {
  u32 words[16];
  round_pairs(words, d);
  stage_pairs(words, buffer);
}

// Address of 8 bytes of a float32 fragment: row `row` of the warp's 16, elements 2 q and 2 q + 1 of unit pair i.
MOK_DEVICE u32 float_slot(u32 buffer, i32 row, i32 i, i32 q) {
  return buffer + row * 128 + (((2 * i + q / 2) ^ (row & 7)) << 4) + (q & 1) * 8;
}

// 32 columns of float32, 16 accumulators from `d`.
MOK_DEVICE void stage_float32(const float* d, u32 buffer) {
  const i32 lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    st_shared_v2_f32(float_slot(buffer, lane / 4, i, lane % 4), d[4 * i], d[4 * i + 1]);
    st_shared_v2_f32(float_slot(buffer, lane / 4 + 8, i, lane % 4), d[4 * i + 2], d[4 * i + 3]);
  }
}

// kChunks chunks of a tile through two buffers: while a chunk is on its way to memory the next one is staged.
// `stage(chunk, buffer)`, `write(chunk, units)`.
template <i32 kChunks, typename Stage, typename Write>
MOK_DEVICE void store_chunks(u32 staging, Stage&& stage, Write&& write) {
  static_assert(kChunks % 2 == 0, "the next tile begins with the first buffer");
  stage(0, staging);
#pragma unroll
  for (i32 chunk = 0; chunk < kChunks; ++chunk) {
    __syncwarp();
    const RowUnits units = read_units(staging + (chunk & 1) * (kStagingBytes / 2));
    if (chunk + 1 < kChunks) stage(chunk + 1, staging + (chunk + 1 & 1) * (kStagingBytes / 2));
    write(chunk, units);
  }
}

// Before a warp that used `store_chunks_bulk` touches its staging buffers again, and before it ends.
template <bool kLanded>
MOK_DEVICE void wait_bulk_stores() {
  if (elect_one()) {
    if constexpr (kLanded) {
      bulk_wait_group<0>();
    } else {
      bulk_wait_group_read<0>();
    }
  }
  __syncwarp();
}

// kChunks chunks of 16 rows x kColumns columns (128 bytes) of a stack of matrices, through the copy engine: a chunk is
// staged while the one before leaves, and the last two leave while the warp goes on. `row`: the warp's first.
template <i32 kChunks, i32 kColumns, typename Stage>
MOK_DEVICE void store_chunks_bulk(u32 staging, const TensorMap* map, i32 batch, i32 row, i32 column, Stage&& stage) {
#pragma unroll
  for (i32 chunk = 0; chunk < kChunks; ++chunk) {
    const u32 buffer = staging + (chunk & 1) * (kStagingBytes / 2);
    if (elect_one()) bulk_wait_group_read<1>();
    __syncwarp();
    stage(chunk, buffer);
    fence_proxy_async_shared();
    __syncwarp();
    if (elect_one()) {
      tma_store_3d(map, buffer, column + kColumns * chunk, row, batch);
      bulk_commit_group();
    }
  }
}

// d (64 rows of a warpgroup, 32 columns per 16 accumulators) -> rows of float32; columns from `column` below `columns`.
template <i32 kCount>
MOK_DEVICE void store_rows_float32(const float (&d)[kCount], u32 staging, float* const (&target)[4], i32 column,
                                   i32 columns) {
  store_chunks<kCount / 16>(
      staging, [&](i32 chunk, u32 buffer) { stage_float32(d + chunk * 16, buffer); },
      [&](i32 chunk, const RowUnits& units) { write_units<4>(units, target, column + 32 * chunk, columns); });
}

// First of the 16 tile rows of a multiplying warp.
MOK_DEVICE i32 first_row_of_warp() { return (threadIdx.x / kWarpSize - 4) * 16; }

// ---- rows that the storing warp stores on behalf of the multiplying warps (dgrad) ----

// Where the rows of a tile go, row lane + 32 i of it in this lane of the storing warp: null for rows to leave out.
struct TileRows {
  u16* row[kRowTile / kWarpSize];
};

// Slots of the owners for dx rows of a routed row block; padding rows are left out.
MOK_DEVICE TileRows owner_slots(const LayerParams& layer, i32 row_block) {
  constexpr i32 kRows = kRowTile / kWarpSize;
  const i64 first = static_cast<i64>(row_block) * kRowTile + threadIdx.x % kWarpSize;
  i32 peer[kRows], slot[kRows];
#pragma unroll
  for (i32 i = 0; i < kRows; ++i) {
    peer[i] = ld_global_s32(layer.peer_rank + first + i * kWarpSize);
    slot[i] = ld_global_s32(layer.peer_row + first + i * kWarpSize);
  }
  TileRows rows;
#pragma unroll
  for (i32 i = 0; i < kRows; ++i) {
    const u64 slots = ld_global_u64(layer.peer_table + kCombine * layer.ep_size + max(peer[i], 0));
    rows.row[i] =
        peer[i] < 0 ? nullptr : reinterpret_cast<u16*>(slots) + static_cast<i64>(slot[i]) * layer.hidden_size;
  }
  return rows;
}

// Rows of a local row-major matrix; rows at and behind `valid` are left out.
MOK_DEVICE TileRows local_rows(u16* matrix, i64 first_row, i32 valid, i32 columns) {
  TileRows rows;
#pragma unroll
  for (i32 i = 0; i < kRowTile / kWarpSize; ++i) {
    const i32 r = threadIdx.x % kWarpSize + i * kWarpSize;
    rows.row[i] = r < valid ? matrix + (first_row + r) * columns : nullptr;
  }
  return rows;
}

// Of the 16 rows of multiplying warp `warp`, the four that this lane stores.
MOK_DEVICE TargetRows rows_of_warp(const TileRows& rows, i32 warp) {
  const u64 low = reinterpret_cast<u64>(warp & 4 ? rows.row[2] : rows.row[0]);
  const u64 high = reinterpret_cast<u64>(warp & 4 ? rows.row[3] : rows.row[1]);
  const u64 own = warp & 2 ? high : low;
  TargetRows target;
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const i32 lane = 16 * (warp & 1) + 4 * j + static_cast<i32>(threadIdx.x % kWarpSize / 8);
    target.row[j] = reinterpret_cast<u16*>(__shfl_sync(kFullWarp, own, lane));
  }
  return target;
}

constexpr i32 kHalfColumns = kTileColumns / 2;

// Storing warp: half of a warpgroup's columns out of its four staging buffers; columns from `column` below `columns`.
MOK_DEVICE void store_half(const SharedLayout& layout, const TileRows& rows, i32 group, i32 half, i32 column,
                           i32 columns) {
#pragma unroll 1
  for (i32 warp = 4 * group; warp < 4 * group + 4; ++warp) {
    const TargetRows target = rows_of_warp(rows, warp);
    const u32 staging = layout.staging(warp);
    const RowUnits first = read_units(staging), second = read_units(staging + kStagingBytes / 2);
    write_units<8>(first, target.row, column + half * kHalfColumns, columns);
    write_units<8>(second, target.row, column + half * kHalfColumns + 64, columns);
  }
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(layout.half_free(group, half));
}

// Multiplying warp: the second half of a finished tile, rounded, until the storing warp has taken the first half out of
// shared memory. By then the products of the next tile run.
struct HeldRows {
  u32 words[32];
  bool full;
  u32 turn;  // parity of the tiles handed over
};

// The staging buffer of this warp is free.
MOK_DEVICE void wait_handed_over(const SharedLayout& layout, i32 group, const HeldRows& held) {
  mbarrier_wait(layout.half_free(group, 1), held.turn ^ 1);
}

template <typename Stage>
MOK_DEVICE void hand_over(const SharedLayout& layout, i32 group, i32 half, Stage&& stage) {
  const u32 staging = layout.staging(threadIdx.x / kWarpSize - 4);
  stage(0, staging);
  stage(1, staging + kStagingBytes / 2);
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(layout.half_full(group, half));
}

MOK_DEVICE void hand_over_first(const float (&d)[128], const SharedLayout& layout, i32 group, HeldRows& held) {
  wait_handed_over(layout, group, held);
  hand_over(layout, group, 0, [&](i32 chunk, u32 buffer) { stage_bf16(d + 32 * chunk, buffer); });
  round_pairs(held.words, d + 64);
  held.full = true;
}

MOK_DEVICE void hand_over_second(const SharedLayout& layout, i32 group, HeldRows& held) {
  if (!held.full) return;
  mbarrier_wait(layout.half_free(group, 0), held.turn);
  hand_over(layout, group, 1, [&](i32 chunk, u32 buffer) { stage_pairs(held.words + 16 * chunk, buffer); });
  held.full = false;
  held.turn ^= 1;
}

}  // namespace mok
