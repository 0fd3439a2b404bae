// Pull of the scales that belong to pulled codes (backward_pull.cuh copies the codes like rows of half the width).
//
//   dy_scales[b][r] = scales of columns 64 b .. 64 b + 63 of the token of row r;  x_scales likewise;  padding rows 0
//
// NumPy twin: mok_ref/dispatch.py: dispatch_forward.
// In the ring pairs of scale bytes rest by blocks of 64 columns, [ceil(H / 64)][macro rows]: what a tile needs of
// them lies side by side for either major (mxfp8_backward_pipeline.cuh). A missing block's byte is 0.
// Executed by: the pulling warps, two rows at a time. Reads: peer memory. Writes: the ring's scales, before the
// release add of the rows.
#pragma once
#include "backward_params.cuh"
#include "mxfp8.cuh"

namespace mok {

// DgradParams::dy_ring and x_ring hold codes; their scales and the quantised results:
struct MxfpDgradParams : DgradParams {
  u16* dy_scales;      // [ceil(H / 64)][macro rows]
  u16* x_scales;
  u8* d_gate;          // [macro rows, I] codes
  u8* d_up;
  u16* d_gate_scales;  // [ceil(I / 64)][macro rows]
  u16* d_up_scales;
  i32 scale_rule;      // ScaleRule
  i32 reserved;
};

MOK_DEVICE const MxfpDgradParams& mxfp_params(const DgradParams& params) {
  return static_cast<const MxfpDgradParams&>(params);
}

// Scales of two neighbouring rows; they lie side by side in the ring.
struct ScalePiece {
  const u8* source[2];  // null: padding
  u32* target;          // of column block 0
};

// `ring_row` is even; peer and peer_row are the table's entries of the two rows.
MOK_DEVICE ScalePiece scale_piece(const LayerParams& layer, const DgradParams& params, bool dy, i32 ring_row,
                                  const i32 (&peer)[2], const i32 (&peer_row)[2]) {
  const MxfpDgradParams& own = mxfp_params(params);
  ScalePiece piece;
  piece.target = reinterpret_cast<u32*>((dy ? own.dy_scales : own.x_scales) + ring_row);
#pragma unroll
  for (i32 i = 0; i < 2; ++i) {
    const u64 base = __ldg(layer.peer_table + (dy ? kDyScales : kXScales) * layer.ep_size + max(peer[i], 0));
    const i64 token = peer_row[i] / layer.top_k;
    piece.source[i] =
        peer[i] < 0 ? nullptr : reinterpret_cast<const u8*>(base) + token * num_scale_blocks(layer.hidden_size);
  }
  return piece;
}

// The scales of columns 64 block .. 64 block + 63 of a row with `num_scales` scales.
MOK_DEVICE u32 scale_pair(const u8* scales, i32 block, i32 num_scales) {
  if (scales == nullptr) return 0;
  if (num_scales % 2 == 0) return __ldg(reinterpret_cast<const u16*>(scales) + block);  // rows start at even addresses
  const u32 low = __ldg(scales + 2 * block);
  return 2 * block + 1 < num_scales ? low | __ldg(scales + 2 * block + 1) << 8 : low;
}

// Copies the scales of a piece; between its first loads and stores the codes are copied.
template <typename Between>
MOK_DEVICE void copy_scales(const ScalePiece& piece, i32 hidden_size, i32 ring_rows, Between&& between) {
  constexpr i32 kLoads = 4;
  const i32 num_scales = num_scale_blocks(hidden_size), blocks = (num_scales + 1) / 2;
  const i32 lane = threadIdx.x % kWarpSize;
  for (i32 first = lane; first < blocks + lane; first += kLoads * kWarpSize) {
    u32 pair[kLoads];
#pragma unroll
    for (i32 i = 0; i < kLoads; ++i) {
      const i32 block = first + i * kWarpSize;
      pair[i] = 0;
      if (block < blocks) {
        pair[i] = scale_pair(piece.source[0], block, num_scales) | scale_pair(piece.source[1], block, num_scales) << 16;
      }
    }
    if (first == lane) between();
#pragma unroll
    for (i32 i = 0; i < kLoads; ++i) {
      const i32 block = first + i * kWarpSize;
      if (block < blocks) piece.target[static_cast<i64>(block) * (ring_rows / 2)] = pair[i];
    }
  }
}

}  // namespace mok
