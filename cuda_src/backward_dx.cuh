// Rows of a finished tile, rounded to bf16 and stored where they belong: into the owner's slot for dx.
//
//   dx_r = bf16(tc([d_gate | d_up], [W_gate ; W_up]^T))  ->  combine_peer[peer_rank[r]][peer_row[r]]
//
// The same store serves dx of the shared expert and gate and up that are made again: only the row addresses differ.
// Weight gradients leave by the same fragments through the copy engine, or by this store where they have no tensor map.
// NumPy twin: mok_ref/experts.py: expert_backward; mok_ref/dispatch.py: push_rows.
// Executed by: the 8 multiplying warps, 16 rows each; every warp turns its fragment into rows through 4 KB of
// shared memory of its own, 64 columns at a time, and stores 128 contiguous bytes per row.
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

// 64 columns of a warp's 16 rows, 32 accumulators from `d`: rounded to bf16, into shared memory as rows.
MOK_DEVICE void stage_bf16(const float* d, u32 buffer) {
  const i32 lane = threadIdx.x % kWarpSize, row = lane % 16;
#pragma unroll
  for (i32 u = 0; u < 8; u += 2) {
    const float* unit = d + 4 * u;
    stmatrix_x4(buffer + row * 128 + (((u + lane / 16) ^ (row & 7)) << 4), pack_bf16x2(unit[0], unit[1]),
                pack_bf16x2(unit[2], unit[3]), pack_bf16x2(unit[4], unit[5]), pack_bf16x2(unit[6], unit[7]));
  }
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
  if (threadIdx.x % kWarpSize == 0) {
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
  const bool first_lane = threadIdx.x % kWarpSize == 0;
#pragma unroll
  for (i32 chunk = 0; chunk < kChunks; ++chunk) {
    const u32 buffer = staging + (chunk & 1) * (kStagingBytes / 2);
    if (first_lane) bulk_wait_group_read<1>();
    __syncwarp();
    stage(chunk, buffer);
    fence_proxy_async_shared();
    __syncwarp();
    if (first_lane) {
      tma_store_3d(map, buffer, column + kColumns * chunk, row, batch);
      bulk_commit_group();
    }
  }
}

// d (64 rows of a warpgroup, 64 columns per 32 accumulators) -> bf16 -> rows; columns from `column` below `columns`.
template <i32 kCount>
MOK_DEVICE void store_rows(const float (&d)[kCount], u32 staging, const TargetRows& target, i32 column, i32 columns) {
  store_chunks<kCount / 32>(
      staging, [&](i32 chunk, u32 buffer) { stage_bf16(d + chunk * 32, buffer); },
      [&](i32 chunk, const RowUnits& units) { write_units<8>(units, target.row, column + 64 * chunk, columns); });
}

// The same without rounding, 32 columns per 16 accumulators: `target` are rows of float32.
template <i32 kCount>
MOK_DEVICE void store_rows_float32(const float (&d)[kCount], u32 staging, float* const (&target)[4], i32 column,
                                   i32 columns) {
  store_chunks<kCount / 16>(
      staging, [&](i32 chunk, u32 buffer) { stage_float32(d + chunk * 16, buffer); },
      [&](i32 chunk, const RowUnits& units) { write_units<4>(units, target, column + 32 * chunk, columns); });
}

// First of the 16 tile rows of a multiplying warp.
MOK_DEVICE i32 first_row_of_warp() { return (threadIdx.x / kWarpSize - 4) * 16; }

// Owner and slot of the four rows a lane stores, and where the owner's slots are. The first two are loaded before the
// product, the third behind its first k-block: nothing of it is waited for when the product ends.
struct RowOwners {
  i32 peer[4], slot[4];
  u64 base[4];

  MOK_DEVICE void find_bases(const LayerParams& layer) {
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
      base[j] = ld_global_u64(layer.peer_table + kCombine * layer.ep_size + max(peer[j], 0));
    }
  }
};

MOK_DEVICE RowOwners row_owners(const LayerParams& layer, i32 row_block) {
  RowOwners owners;
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const i64 row = static_cast<i64>(row_block) * kRowTile + first_row_of_warp() + 4 * j + threadIdx.x % kWarpSize / 8;
    owners.peer[j] = ld_global_s32(layer.peer_rank + row);
    owners.slot[j] = ld_global_s32(layer.peer_row + row);
  }
  return owners;
}

// Slots of the owners for dx rows of a routed row block; padding rows are left out.
MOK_DEVICE TargetRows owner_slots(const LayerParams& layer, const RowOwners& owners) {
  TargetRows target;
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    u16* const slots = reinterpret_cast<u16*>(owners.base[j]);
    target.row[j] = owners.peer[j] < 0 ? nullptr : slots + static_cast<i64>(owners.slot[j]) * layer.hidden_size;
  }
  return target;
}

// Rows of a local row-major matrix; rows at and behind `valid` are left out.
MOK_DEVICE TargetRows local_rows(u16* matrix, i64 first_row, i32 valid, i32 columns) {
  TargetRows target;
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const i32 r = first_row_of_warp() + 4 * j + threadIdx.x % kWarpSize / 8;
    target.row[j] = r < valid ? matrix + (first_row + r) * columns : nullptr;
  }
  return target;
}

}  // namespace mok
