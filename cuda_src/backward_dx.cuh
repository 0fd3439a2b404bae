// Rows of a finished tile, rounded to bf16 and stored where they belong: into the owner's slot for dx.
//
//   dx_r = bf16(tc([d_gate | d_up], [W_gate ; W_up]^T))  ->  combine_peer[peer_rank[r]][peer_row[r]]
//
// The same store serves dx of the shared expert, gate and up that are made again, and weight gradients: only the
// row addresses differ.
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

// 64 columns of a warp's 16 rows: fragment -> shared memory -> 128 contiguous bytes per row. `fragment(i)` gives
// packed pair i of the chunk's 16 in the order of the accumulators.
template <typename Fragment>
MOK_DEVICE void store_chunk(Fragment&& fragment, u32 buffer, const TargetRows& target, i32 column, i32 columns) {
  const i32 lane = threadIdx.x % kWarpSize, unit = lane % 8, row = lane % 16;
#pragma unroll
  for (i32 u = 0; u < 8; u += 2) {
    stmatrix_x4(buffer + row * 128 + (((u + lane / 16) ^ (row & 7)) << 4), fragment(2 * u), fragment(2 * u + 1),
                fragment(2 * u + 2), fragment(2 * u + 3));
  }
  __syncwarp();
  const i32 at = column + unit * 8;
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const i32 r = 4 * j + lane / 8;
    const uint4 v = ld_shared_v4(buffer + r * 128 + ((unit ^ (r & 7)) << 4));
    if (target.row[j] != nullptr && at < columns) st_global_v4(target.row[j] + at, v.x, v.y, v.z, v.w);
  }
}

// d (64 x 256 of a warpgroup) -> bf16 -> rows; columns column .. column + 255 below `columns`.
MOK_DEVICE void store_rows(const float (&d)[128], u32 staging, const TargetRows& target, i32 column, i32 columns) {
#pragma unroll
  for (i32 chunk = 0; chunk < 4; ++chunk) {
    const auto fragment = [&](i32 i) { return pack_bf16x2(d[chunk * 32 + 2 * i], d[chunk * 32 + 2 * i + 1]); };
    store_chunk(fragment, staging + (chunk & 1) * (kStagingBytes / 2), target, column + 64 * chunk, columns);
  }
}

// Address of 8 bytes of a float32 fragment: row `row` of the warp's 16, elements 2 q and 2 q + 1 of unit pair i.
MOK_DEVICE u32 float_slot(u32 buffer, i32 row, i32 i, i32 q) {
  return buffer + row * 128 + (((2 * i + q / 2) ^ (row & 7)) << 4) + (q & 1) * 8;
}

// The same without rounding: `target` are rows of float32.
MOK_DEVICE void store_rows_float32(const float (&d)[128], u32 staging, float* const (&target)[4], i32 column,
                                   i32 columns) {
  const i32 lane = threadIdx.x % kWarpSize, unit = lane % 8;
#pragma unroll
  for (i32 chunk = 0; chunk < 8; ++chunk) {
    const u32 buffer = staging + (chunk & 1) * (kStagingBytes / 2);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const i32 o = chunk * 16 + i * 4;
      st_shared_v2_f32(float_slot(buffer, lane / 4, i, lane % 4), d[o], d[o + 1]);
      st_shared_v2_f32(float_slot(buffer, lane / 4 + 8, i, lane % 4), d[o + 2], d[o + 3]);
    }
    __syncwarp();
    const i32 at = column + chunk * 32 + unit * 4;
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
      const i32 r = 4 * j + lane / 8;
      const uint4 v = ld_shared_v4(buffer + r * 128 + ((unit ^ (r & 7)) << 4));
      if (target[j] != nullptr && at < columns) st_global_v4(target[j] + at, v.x, v.y, v.z, v.w);
    }
  }
}

// First of the 16 tile rows of a multiplying warp.
MOK_DEVICE i32 first_row_of_warp() { return (threadIdx.x / kWarpSize - 4) * 16; }

// Owner and slot of the four rows a lane stores. Loaded before the product and waited for behind it.
struct RowOwners {
  i32 peer[4], slot[4];
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
    const i32 peer = owners.peer[j];
    const u64 base = __ldg(layer.peer_table + kCombine * layer.ep_size + max(peer, 0));
    target.row[j] = peer < 0 ? nullptr
                             : reinterpret_cast<u16*>(base) + static_cast<i64>(owners.slot[j]) * layer.hidden_size;
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
