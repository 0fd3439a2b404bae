// Rows of a finished tile, rounded to bf16 and stored where they belong: into the owner's slot for dx.
//
//   dx_r = bf16(tc([d_gate | d_up], [W_gate ; W_up]^T))  ->  combine_peer[peer_rank[r]][peer_row[r]]
//
// The same store serves dx of the shared expert, gate and up that are made again, and weight gradients: only the
// row addresses differ. Ordinary stores from the multiplying warps themselves wait for nobody, which made the
// short tiles of fine-grained experts faster than staging for TMA.
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

// d (64 x 256 of a warpgroup) -> bf16 -> rows; columns column .. column + 255 below `columns`.
MOK_DEVICE void store_rows(const float (&d)[128], u32 staging, const TargetRows& target, i32 column, i32 columns) {
  const i32 lane = threadIdx.x % kWarpSize;
  const i32 fragment_row = lane % 16, unit_half = lane / 16;
  const i32 unit = lane % 8;
#pragma unroll
  for (i32 chunk = 0; chunk < 4; ++chunk) {
    const u32 buffer = staging + (chunk & 1) * (kStagingBytes / 2);
#pragma unroll
    for (i32 u = 0; u < 8; u += 2) {
      const i32 o = chunk * 32 + u * 4;
      stmatrix_x4(buffer + fragment_row * 128 + (((u + unit_half) ^ (fragment_row & 7)) << 4),
                  pack_bf16x2(d[o], d[o + 1]), pack_bf16x2(d[o + 2], d[o + 3]), pack_bf16x2(d[o + 4], d[o + 5]),
                  pack_bf16x2(d[o + 6], d[o + 7]));
    }
    __syncwarp();
    const i32 at = column + chunk * 64 + unit * 8;
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
      const i32 r = 4 * j + lane / 8;
      const uint4 v = ld_shared_v4(buffer + r * 128 + ((unit ^ (r & 7)) << 4));
      if (target.row[j] != nullptr && at < columns) st_global_v4(target.row[j] + at, v.x, v.y, v.z, v.w);
    }
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

// Slots of the owners for dx rows of a routed row block.
MOK_DEVICE TargetRows owner_slots(const LayerParams& layer, i64 first_row) {
  TargetRows target;
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const i64 row = first_row + first_row_of_warp() + 4 * j + threadIdx.x % kWarpSize / 8;
    const i32 peer = layer.peer_rank[row];
    target.row[j] = peer < 0 ? nullptr
                             : peer_buffer<u16>(layer, kCombine, peer) +
                                   static_cast<i64>(layer.peer_row[row]) * layer.hidden_size;
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
