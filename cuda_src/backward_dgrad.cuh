// dhu and everything that follows from it element by element, before it leaves the registers.
//
//   dhu = tc(dy, W_down^T)                       float32, in the accumulators of a 64 x 256 warpgroup tile
//   h = bf16((gate * s) * up), s = sigmoid(gate)     dh = w * dhu     hw = bf16(w * h)
//   d_up = bf16(dh * (gate * s))     d_gate = bf16((dh * up) * (s * (1 + gate * (1 - s))))
//   d_topk_weights = dot128(dhu * h): block sums here, their sum in `push_d_weights`
//
// NumPy twin: mok_ref/experts.py: expert_backward, mok_ref/swiglu.py: swiglu_backward.
// Executed by: multiplying warps. gate and up arrive by TMA as four more stages of the operand ring (64 columns
// each: gate in the first 16 KB, up in the second); a warp reads its 16 rows by ldmatrix and writes d_gate, d_up
// (in place) and hw (third 16 KB) by stmatrix. A storing warp sends the stage's three tiles to global memory
// and gives the stage back.
// Rows behind `valid` and columns behind I come out as +0 whatever the weights hold: dW reads them.
#pragma once
#include "backward_dx.cuh"
#include "backward_pull.cuh"

namespace mok {

constexpr u32 kHalfStage = 2 * kBoxBytes;  // 128 rows of 64 columns
constexpr u32 kParkedUnit = 16 * kWarpSize;  // four accumulators of every lane of a warp
static_assert(8 * kParkedUnit <= kStagingBytes, "a chunk of accumulators is parked in the warp's staging buffer");

// Clamp of gate and up (spec eq. 5.1c); sigmoid(limit) apart, because the limit need not be a bf16 value.
struct SwigluLimit {
  float limit, sigmoid_of_limit;
};

struct HiddenElement {
  float d_gate, d_up, h;
};

template <bool kClamp>
MOK_DEVICE HiddenElement hidden_backward(float gate, float up, float dh, const SwigluLimit& clamp) {
  if constexpr (!kClamp) {
    const SwigluGradient g = swiglu_backward_element(gate, up, dh);
    return HiddenElement{g.d_gate, g.d_up, g.h};
  } else {
    const float g = clamp_gate(gate, clamp.limit), u = clamp_up(up, clamp.limit);
    const bool gate_clamped = gate > clamp.limit, up_clamped = up > clamp.limit || up < -clamp.limit;
    const float s = gate_clamped ? clamp.sigmoid_of_limit : sigmoid_bf16(gate);
    const float silu = __fmul_rn(g, s);
    const float slope = __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(g, __fsub_rn(1.0f, s))));
    return HiddenElement{gate_clamped ? 0.0f : __fmul_rn(__fmul_rn(dh, u), slope),
                         up_clamped ? 0.0f : __fmul_rn(dh, silu), __fmul_rn(silu, u)};
  }
}

// Two adjacent columns of one row: packed d_gate, d_up, hw; `dot` continues S_q of dot128.
struct HiddenPair {
  u32 d_gate, d_up, hw;
};

template <bool kClamp>
MOK_DEVICE HiddenPair hidden_backward_pair(u32 gate, u32 up, float dhu_low, float dhu_high, float weight,
                                           const SwigluLimit& clamp, float& dot) {
  const HiddenElement a =
      hidden_backward<kClamp>(bf16_low(gate), bf16_low(up), __fmul_rn(weight, dhu_low), clamp);
  const HiddenElement b =
      hidden_backward<kClamp>(bf16_high(gate), bf16_high(up), __fmul_rn(weight, dhu_high), clamp);
  const u32 h = pack_bf16x2(a.h, b.h);
  dot = __fadd_rn(dot, __fmul_rn(dhu_low, bf16_low(h)));
  dot = __fadd_rn(dot, __fmul_rn(dhu_high, bf16_high(h)));
  return HiddenPair{pack_bf16x2(a.d_gate, b.d_gate), pack_bf16x2(a.d_up, b.d_up),
                    pack_bf16x2(__fmul_rn(weight, bf16_low(h)), __fmul_rn(weight, bf16_high(h)))};
}

// What a thread needs of its two rows (r and r + 8 of the warp's 16).
struct HiddenRows {
  float weight[2];
  u32 keep[2];  // all ones for a route, 0 for padding: dhu, gate and up of padding are whatever memory held
};

// Where the block sums of the first row go (the second's lie 8 further); null: none (shared expert).
struct DotTarget {
  float* partial;
  i64 stride;  // between column blocks
};

// (S_0 + S_1) + (S_2 + S_3) over the four lanes that share a row.
MOK_DEVICE void store_block_sum(float s, float* target) {
  s = __fadd_rn(s, __shfl_xor_sync(kFullWarp, s, 1));
  s = __fadd_rn(s, __shfl_xor_sync(kFullWarp, s, 2));
  if (threadIdx.x % 4 == 0 && target != nullptr) *target = s;
}

// Accumulators of one chunk (64 columns) into this thread's own 128 bytes of shared memory, unit by unit.
MOK_DEVICE void park_chunk(const float (&d)[128], u32 own, i32 chunk) {
#pragma unroll
  for (i32 u = 0; u < 8; ++u) {
    const i32 o = chunk * 32 + u * 4;
    st_shared_v4(own + u * kParkedUnit, __float_as_uint(d[o]), __float_as_uint(d[o + 1]), __float_as_uint(d[o + 2]),
                 __float_as_uint(d[o + 3]));
  }
}

// The same for any chunk: registers must be named by constants.
MOK_DEVICE void park_any_chunk(const float (&d)[128], u32 own, i32 chunk) {
  switch (chunk) {
    case 0: park_chunk(d, own, 0); break;
    case 1: park_chunk(d, own, 1); break;
    case 2: park_chunk(d, own, 2); break;
    default: park_chunk(d, own, 3); break;
  }
}

// Units u and u + 1 (16 columns) of a warp's 16 rows: gate and up at `at` become d_gate and d_up; hw behind them.
// `columns` of them and of those behind exist, a multiple of 8.
template <bool kClamp>
MOK_DEVICE void hidden_units(u32 at, u32 parked, const HiddenRows& rows, i32 columns, const SwigluLimit& clamp,
                             float (&dot)[2]) {
  const uint4 first = ld_shared_v4(parked), second = ld_shared_v4(parked + kParkedUnit);
  const u32 dhu[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  u32 gate[4], up[4];
  ldmatrix_x4(at, gate[0], gate[1], gate[2], gate[3]);
  ldmatrix_x4(at + kHalfStage, up[0], up[1], up[2], up[3]);
  HiddenPair pair[4];
#pragma unroll
  for (i32 j = 0; j < 4; ++j) {
    const u32 keep = columns > 8 * (j >> 1) ? rows.keep[j & 1] : 0;
    pair[j] = hidden_backward_pair<kClamp>(gate[j] & keep, up[j] & keep, __uint_as_float(dhu[2 * j] & keep),
                                           __uint_as_float(dhu[2 * j + 1] & keep), rows.weight[j & 1], clamp,
                                           dot[j & 1]);
  }
  stmatrix_x4(at, pair[0].d_gate, pair[1].d_gate, pair[2].d_gate, pair[3].d_gate);
  stmatrix_x4(at + kHalfStage, pair[0].d_up, pair[1].d_up, pair[2].d_up, pair[3].d_up);
  stmatrix_x4(at + 2 * kHalfStage, pair[0].hw, pair[1].hw, pair[2].hw, pair[3].hw);
}

// The whole epilogue of a hidden tile for one multiplying warp: four stages of 64 columns. The units of a stage are a
// loop that stays one, over accumulators parked in shared memory: unrolled, the epilogue has 90 KB of code, and its
// warps spend three quarters of their time waiting for instructions.
template <bool kClamp>
MOK_DEVICE void hidden_epilogue(const float (&d)[128], const SharedLayout& layout, StageCursor& cursor, i32 group,
                                const HiddenRows& rows, i32 columns, const DotTarget& target,
                                const SwigluLimit& clamp) {
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const i32 fragment_row = warp * 16 + lane % 16;
  const u32 row_offset = group * kBoxBytes + fragment_row * 128;
  const u32 own = layout.staging(threadIdx.x / kWarpSize - 4) + lane * 16;
  float dot[2] = {0.0f, 0.0f};
#pragma unroll
  for (i32 chunk = 0; chunk < 4; ++chunk) {
    park_chunk(d, own, chunk);
    mbarrier_wait(layout.full(cursor.index), cursor.parity);
    const u32 base = layout.tile_a(cursor.index) + row_offset;
#pragma unroll 1
    for (i32 u = 0; u < 8; u += 2) {
      const u32 at = base + (((u + lane / 16) ^ (fragment_row & 7)) << 4);
      hidden_units<kClamp>(at, own + u * kParkedUnit, rows, columns - 64 * chunk - 8 * u, clamp, dot);
    }
    // Before the arrival: the storing warp's release of hidden_ready covers these sums too.
    if (chunk & 1) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        float* partial = target.partial;
        store_block_sum(dot[r], partial == nullptr ? nullptr : partial + (chunk >> 1) * target.stride + 8 * r);
        dot[r] = 0.0f;
      }
    }
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(layout.piece_full(group, chunk));
    cursor.advance();
  }
}

// Storing warp: block sums of a row block in ascending order, pushed to the owners of the tokens.
// Executed by one warp, once per row block, after all hidden tiles of the block.
MOK_DEVICE void push_d_weights(const LayerParams& layer, const DgradParams& params, i32 block, i32 valid) {
  const i64 ring_rows = static_cast<i64>(params.macro_blocks) * kRowTile;
  const i64 macro_row = params.macro_index * ring_rows;
  const i32 num_blocks = ceil_div(layer.intermediate_size, kDotBlock);
  for (i32 r = threadIdx.x % kWarpSize; r < valid; r += kWarpSize) {
    const i64 ring_row = static_cast<i64>(block) * kRowTile + r;
    float acc = 0.0f;
    for (i32 b = 0; b < num_blocks; ++b) acc = __fadd_rn(acc, __ldcg(params.dot_partial + b * ring_rows + ring_row));
    const i32 peer = layer.peer_rank[macro_row + ring_row];
    if (peer >= 0) peer_buffer<float>(layer, kDTopkWeights, peer)[layer.peer_row[macro_row + ring_row]] = acc;
  }
}

}  // namespace mok
