// swiglu.cuh: from gate and up to h, in the registers that hold the accumulators.
//
//   gate = bf16(tc(x, W_gate)), up = bf16(tc(x, W_up))
//   h = bf16((gate * sigmoid(gate)) * up), clamped first if the layer has a limit            (spec eq. 4)
//
// NumPy twin     mok_ref/swiglu.py: swiglu_forward
// Executed by    one math warpgroup, 64 rows x 128 columns of h; gate and up of an element are in one thread
// Reads          accumulators: acc[0..63] gate, acc[64..127] up (fragment layout: tensor_core.cuh)
// Writes         h, and for backward the unclamped gate and up
// After          TileQueue::finish; the signal warp releases hidden_ready
#pragma once
#include "numerics.cuh"
#include "tile.cuh"

namespace mok {

// Where a tile of h goes; pointers are to the tile's first row and column.
struct HiddenTarget {
  u16* h;
  u16* gate;      // null: not saved
  u16* up;
  i32 width;      // row stride in elements
  i32 columns;    // of the tile that exist
  i32 rows;       // of the tile that may be stored
};

// The optional clamp. The limit is any float32, so its sigmoid is not covered by sigmoid_bf16: kept beside it.
struct SwigluClamp {
  bool active;
  float limit;
  float limit_sigmoid;
};

MOK_DEVICE SwigluClamp swiglu_clamp(const LayerParams& params) {
  const bool active = params.has_limit != 0;
  return SwigluClamp{active, params.swiglu_limit, active ? sigmoid(params.swiglu_limit) : 0.0f};
}

// (gate * sigmoid(gate)) * up of the clamped values, before its rounding to bf16.
MOK_DEVICE float swiglu_clamped_element(float gate, float up, const SwigluClamp& clamp) {
  const float s = gate > clamp.limit ? clamp.limit_sigmoid : sigmoid_bf16(gate);
  return __fmul_rn(__fmul_rn(clamp_gate(gate, clamp.limit), s), clamp_up(up, clamp.limit));
}

// Two elements of h, packed bf16 like their inputs.
MOK_DEVICE u32 swiglu_forward_pair(u32 gate, u32 up, const SwigluClamp& clamp) {
  if (clamp.active) {
    return pack_bf16x2(swiglu_clamped_element(bf16_low(gate), bf16_low(up), clamp),
                       swiglu_clamped_element(bf16_high(gate), bf16_high(up), clamp));
  }
  return pack_bf16x2(swiglu_forward_element(bf16_low(gate), bf16_low(up)),
                     swiglu_forward_element(bf16_high(gate), bf16_high(up)));
}

// One of the thread's two rows: kHalf 0 is row `row`, kHalf 1 its accumulators' row + 8.
template <i32 kHalf>
MOK_DEVICE void swiglu_forward_row(const float (&acc)[128], const HiddenTarget& target, i32 row,
                                   const SwigluClamp& clamp, i32 q) {
  if (row >= target.rows) return;
  const bool permuted = is_permuted(target.width);
  const i64 offset = static_cast<i64>(row) * target.width;
#pragma unroll
  for (i32 j = 0; j < kHiddenTile / 32; ++j) {
    u32 gate[4], up[4], h[4];
#pragma unroll
    for (i32 u = 0; u < 4; ++u) {
      const i32 i = 16 * j + 4 * u + 2 * kHalf;
      gate[u] = pack_bf16x2(acc[i], acc[i + 1]);          // RNE to bf16
      up[u] = pack_bf16x2(acc[64 + i], acc[64 + i + 1]);  // RNE to bf16
      h[u] = swiglu_forward_pair(gate[u], up[u], clamp);
    }
    store_group(target.h + offset, j, target.columns, permuted, q, h);
    if (target.gate != nullptr) {
      store_group(target.gate + offset, j, target.columns, permuted, q, gate);
      store_group(target.up + offset, j, target.columns, permuted, q, up);
    }
  }
}

// The warpgroup's rows of the tile: this thread has `row` and `row` + 8.
MOK_DEVICE void swiglu_forward(const float (&acc)[128], const HiddenTarget& target, const SwigluClamp& clamp,
                               i32 row, i32 lane) {
  swiglu_forward_row<0>(acc, target, row, clamp, lane % 4);
  swiglu_forward_row<1>(acc, target, row + 8, clamp, lane % 4);
}

}  // namespace mok
