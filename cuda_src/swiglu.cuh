// swiglu.cuh: from gate and up to h.
//
//   gate = bf16(tc(x, W_gate)), up = bf16(tc(x, W_up))
//   h = bf16((gate * sigmoid(gate)) * up), clamped first if the layer has a limit            (spec eq. 5.2)
//
// NumPy twin     mok_ref/swiglu.py: swiglu_forward
// Executed by    one epilogue warp: 32 rows x 64 columns of h, 4 rows at a time, 8 columns per lane
// Reads          gate and up of the rows from the staging buffer (StagingBuffer::wait_full before)
// Writes         h, and for backward the unclamped gate and up, 16 bytes per store
// After          the warp releases hidden_ready
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
  i32 columns;    // of the tile that exist, a multiple of 8
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
template <bool kClamped>
MOK_DEVICE u32 swiglu_forward_pair(u32 gate, u32 up, const SwigluClamp& clamp) {
  if constexpr (kClamped) {
    return pack_bf16x2(swiglu_clamped_element(bf16_low(gate), bf16_low(up), clamp),
                       swiglu_clamped_element(bf16_high(gate), bf16_high(up), clamp));
  } else {
    return pack_bf16x2(swiglu_forward_element(bf16_low(gate), bf16_low(up)),
                       swiglu_forward_element(bf16_high(gate), bf16_high(up)));
  }
}

// Eight elements. The clamp is decided once for all of them: the chains of eight elements are interleaved, and a
// branch per pair would line them up one after the other.
MOK_DEVICE uint4 swiglu_forward_unit(const uint4& gate, const uint4& up, const SwigluClamp& clamp) {
  if (clamp.active) {
    return make_uint4(swiglu_forward_pair<true>(gate.x, up.x, clamp), swiglu_forward_pair<true>(gate.y, up.y, clamp),
                      swiglu_forward_pair<true>(gate.z, up.z, clamp), swiglu_forward_pair<true>(gate.w, up.w, clamp));
  }
  return make_uint4(swiglu_forward_pair<false>(gate.x, up.x, clamp), swiglu_forward_pair<false>(gate.y, up.y, clamp),
                    swiglu_forward_pair<false>(gate.z, up.z, clamp), swiglu_forward_pair<false>(gate.w, up.w, clamp));
}

// Half `half` of one math warpgroup's rows: this warp's kEpilogueRows of them, 4 at a time.
MOK_DEVICE void swiglu_forward(const StagingBuffer& staging, const HiddenTarget& target,
                               const SwigluClamp& clamp, i32 half, i32 first_row, i32 lane) {
  const i32 unit = lane % 8, column = half * kChunkColumns + 8 * unit;
  const i32 row_in_group = first_row + lane / 8, row = 64 * staging.warpgroup + row_in_group;
  const i32 steps = column < target.columns ? min(kEpilogueRows / 4, ceil_div(target.rows - row, 4)) : 0;
  u32 address = staging.unit(0, row_in_group, unit);
  i64 offset = static_cast<i64>(row) * target.width + column;
  uint4 next_gate = ld_shared_v4(address), next_up = ld_shared_v4(address + kChunkBytes);
#pragma unroll 1
  for (i32 i = 0; i < steps; ++i) {
    const uint4 gate = next_gate, up = next_up;
    if (i + 1 < steps) address = (address ^ 64) + 4 * 128;  // four rows on, where the swizzle has put this unit
    next_gate = ld_shared_v4(address);
    next_up = ld_shared_v4(address + kChunkBytes);
    st_global_v4(target.h + offset, swiglu_forward_unit(gate, up, clamp));
    if (target.gate != nullptr) {
      st_global_v4(target.gate + offset, gate);
      st_global_v4(target.up + offset, up);
    }
    offset += 4 * target.width;
  }
}

}  // namespace mok
