// The epilogue of hidden tiles when rows rest as MXFP8: what leaves the registers is quantised first.
//
//   h, d_gate, d_up as in backward_dgrad.cuh, then quantised along I in blocks of 32            (spec eq. 7.1)
//   hw = bf16(w * h'), d_topk_weights = dot128(dhu * h'), h' = the dequantised h
//
// NumPy twin: mok_ref/experts.py: expert_backward (operand_values); mok_ref/mxfp8.py: quantize.
// Executed by: multiplying warps. A block of 32 columns of one row lies in four lanes (8 columns each): the largest
// magnitude takes two shuffles, a transpose within the four lanes makes 8 neighbouring codes of each, which go to
// memory from registers; hw leaves through the stage as in bf16.
#pragma once
#include "backward_dgrad.cuh"
#include "mxfp8_backward_pipeline.cuh"

namespace mok {

// ---- epilogue of a hidden tile ----

MOK_DEVICE u32 max_u16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// 32 columns of a thread's two rows as packed bf16: pair[2 i + r] holds columns 8 i + 2 q, + 1 of row r (q = lane % 4).
struct RowBlocks {
  u32 pair[8];

  // Bits of the largest magnitude: row 0 in the low half, row 1 in the high half. The same in the four lanes of a row.
  MOK_DEVICE u32 amax() const {
    constexpr u32 kMagnitude = 0x7fff7fffu;
    u32 rows[2] = {pair[0] & kMagnitude, pair[1] & kMagnitude};
#pragma unroll
    for (i32 i = 2; i < 8; ++i) rows[i & 1] = max_u16x2(rows[i & 1], pair[i] & kMagnitude);
    u32 both = max_u16x2(__byte_perm(rows[0], rows[1], 0x5410), __byte_perm(rows[0], rows[1], 0x7632));
    both = max_u16x2(both, __shfl_xor_sync(kFullWarp, both, 1));
    return max_u16x2(both, __shfl_xor_sync(kFullWarp, both, 2));
  }
};

// Scale bytes of the two rows.
struct RowScales {
  u32 byte[2];

  MOK_DEVICE RowScales(u32 amax, i32 rule)
      : byte{scale_byte(amax & 0xffffu, rule), scale_byte(amax >> 16, rule)} {}

  // What a row's elements are multiplied by before they become codes. Meaningless for a NaN block, as its codes are.
  MOK_DEVICE float inverse(i32 row) const { return power_of_two(kScaleBias - static_cast<i32>(byte[row])); }
  // And what its codes are multiplied by. Never below 2^-124, so a normal number or NaN.
  MOK_DEVICE float factor(i32 row) const {
    return __uint_as_float(byte[row] == kNanScale ? 0x7fc00000u : byte[row] << 23);
  }
};

// E4M3 codes of two bf16 elements times `inverse`, low byte first: nearest even, saturating.
MOK_DEVICE u32 quantize_pair(u32 pair, float inverse) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(codes)
      : "f"(__fmul_rn(bf16_high(pair), inverse)), "f"(__fmul_rn(bf16_low(pair), inverse)));
  return codes;
}

// The numbers that two E4M3 codes stand for, exact.
MOK_DEVICE float2 e4m3_pair_values(u32 codes) {
  u32 halves;
  float2 values;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(codes)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(values.x) : "h"(static_cast<u16>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(values.y) : "h"(static_cast<u16>(halves >> 16)));
  return values;
}

// Transposes codes among the four lanes of a row: lane q gives columns 8 i + 2 q, + 1 as codes[i], and gets
// 8 q .. 8 q + 7.
MOK_DEVICE uint2 gather_codes(const u32 (&codes)[4]) {
  const u32 q = threadIdx.x % 4;
  const bool odd = q & 1, upper = q & 2;
  const u32 first = codes[0] | codes[1] << 16, second = codes[2] | codes[3] << 16;
  const u32 own = upper ? second : first;
  // Of lane q ^ 2, for this half of the lanes.
  const u32 across = __shfl_xor_sync(kFullWarp, upper ? first : second, 2);
  const u32 mine = __byte_perm(own, across, odd ? 0x7632 : 0x5410);          // from lanes q, q ^ 2
  const u32 next = __shfl_xor_sync(kFullWarp, __byte_perm(own, across, odd ? 0x5410 : 0x7632), 1);  // q ^ 1, q ^ 3
  const u32 low = __byte_perm(mine, next, odd ? 0x1054 : 0x5410);   // lanes 0, 1 for the lower half, else 2, 3
  const u32 high = __byte_perm(mine, next, odd ? 0x3276 : 0x7632);
  return upper ? make_uint2(high, low) : make_uint2(low, high);
}

// Where this thread's two rows of d_gate and d_up go; the second row lies 8 further.
struct GradientTarget {
  u8* d_gate;          // first row, first column of the tile
  u8* d_up;
  u16* d_gate_scales;  // first row, first block of 64 columns of the tile
  u16* d_up_scales;
  i32 width;           // bytes between rows
  i32 columns;         // of the tile that exist, a multiple of 16
  i64 ring_rows;       // pairs of scales between blocks of 64 columns
  i32 scale_rule;
};

// Codes of one block of d_gate or d_up: 8 bytes per lane and row.
MOK_DEVICE void store_codes(const RowBlocks& block, const RowScales& scales, u8* target, i32 width, bool inside) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    u32 codes[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) codes[i] = quantize_pair(block.pair[2 * i + r], scales.inverse(r));
    const uint2 eight = gather_codes(codes);
    if (inside) *reinterpret_cast<uint2*>(target + static_cast<i64>(8 * r) * width) = eight;
  }
}

// h of one block becomes hw in place; `dot` continues S_q of dot128 for both rows. `parked` as in `hidden_blocks`.
MOK_DEVICE void weight_hidden(RowBlocks& h, u32 parked, const HiddenRows& rows, i32 columns, float (&dot)[2],
                              i32 rule) {
  const RowScales scales(h.amax(), rule);
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    const uint4 unit = ld_shared_v4(parked + i * kParkedUnit);
    const u32 dhu[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const u32 keep = columns > 8 * i ? rows.keep[r] : 0;
      const float2 code = e4m3_pair_values(quantize_pair(h.pair[2 * i + r], scales.inverse(r)));
      const float low = __fmul_rn(code.x, scales.factor(r)), high = __fmul_rn(code.y, scales.factor(r));
      dot[r] = __fadd_rn(dot[r], __fmul_rn(__uint_as_float(dhu[2 * r] & keep), low));
      dot[r] = __fadd_rn(dot[r], __fmul_rn(__uint_as_float(dhu[2 * r + 1] & keep), high));
      h.pair[2 * i + r] = pack_bf16x2(__fmul_rn(rows.weight[r], low), __fmul_rn(rows.weight[r], high));
    }
  }
}

// gate, up, dhu -> h, d_gate, d_up of 32 columns.
struct HiddenBlocks {
  RowBlocks h, d_gate, d_up;
};

// `gate_up`: this lane's row of the stage. `parked`: the block's accumulators in this thread's own shared memory.
// `columns` of the block exist.
template <bool kClamp>
MOK_DEVICE HiddenBlocks hidden_blocks(u32 gate_up, i32 first_unit, u32 parked, const HiddenRows& rows, i32 columns,
                                      const SwigluLimit& clamp) {
  const i32 lane = threadIdx.x % kWarpSize;
  HiddenBlocks out;
#pragma unroll
  for (i32 u = 0; u < 4; u += 2) {
    const u32 at = gate_up + (((first_unit + u + lane / 16) ^ (lane & 7)) << 4);
    const uint4 first = ld_shared_v4(parked + u * kParkedUnit), second = ld_shared_v4(parked + (u + 1) * kParkedUnit);
    const u32 dhu[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    u32 gate[4], up[4];
    ldmatrix_x4(at, gate[0], gate[1], gate[2], gate[3]);
    ldmatrix_x4(at + kHalfStage, up[0], up[1], up[2], up[3]);
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
      const i32 pair = 2 * u + j, r = j & 1;
      const u32 keep = columns > 8 * (pair / 2) ? rows.keep[r] : 0;
      const u32 g = gate[j] & keep, v = up[j] & keep;
      const float low = __fmul_rn(rows.weight[r], __uint_as_float(dhu[2 * j] & keep));
      const float high = __fmul_rn(rows.weight[r], __uint_as_float(dhu[2 * j + 1] & keep));
      const HiddenElement a = hidden_backward<kClamp>(bf16_low(g), bf16_low(v), low, clamp);
      const HiddenElement b = hidden_backward<kClamp>(bf16_high(g), bf16_high(v), high, clamp);
      out.h.pair[pair] = pack_bf16x2(a.h, b.h);
      out.d_gate.pair[pair] = pack_bf16x2(a.d_gate, b.d_gate);
      out.d_up.pair[pair] = pack_bf16x2(a.d_up, b.d_up);
    }
  }
  return out;
}

// Pairs of scale bytes of a block of 64 columns, per row: what `add` has been given, first 32 columns first.
struct ScalePairs {
  u32 row[2];

  MOK_DEVICE void add(const RowScales& scales, i32 half) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) row[r] |= scales.byte[r] << (8 * half);
  }
};

// One store per lane: lane q of four for (d_gate, d_up) x row.
MOK_DEVICE void store_scales(const ScalePairs& d_gate, const ScalePairs& d_up, const GradientTarget& target,
                             i32 block) {
  const bool second = threadIdx.x & 1, is_up = threadIdx.x & 2;
  const u32 gate = second ? d_gate.row[1] : d_gate.row[0], up = second ? d_up.row[1] : d_up.row[0];
  u16* const scales = (is_up ? target.d_up_scales : target.d_gate_scales) + block * target.ring_rows + (second ? 8 : 0);
  if (64 * block < target.columns) *scales = static_cast<u16>(is_up ? up : gate);
}

// Half a stage, 32 columns: everything but the sums of dot128.
template <bool kClamp>
MOK_DEVICE void finish_half_stage(u32 gate_up, i32 half, i32 column, u32 parked, const HiddenRows& rows,
                                  const SwigluLimit& clamp, const GradientTarget& target, ScalePairs& gate_scales,
                                  ScalePairs& up_scales, float (&dot)[2]) {
  const i32 lane = threadIdx.x % kWarpSize, own_column = column + 8 * (lane % 4);
  const bool inside = own_column < target.columns;
  HiddenBlocks block = hidden_blocks<kClamp>(gate_up, 4 * half, parked, rows, target.columns - column, clamp);
  const RowScales gate(block.d_gate.amax(), target.scale_rule), up(block.d_up.amax(), target.scale_rule);
  gate_scales.add(gate, half);
  up_scales.add(up, half);
  store_codes(block.d_gate, gate, target.d_gate + own_column, target.width, inside);
  store_codes(block.d_up, up, target.d_up + own_column, target.width, inside);
  weight_hidden(block.h, parked, rows, target.columns - column, dot, target.scale_rule);
#pragma unroll
  for (i32 u = 0; u < 4; u += 2) {
    const u32* hw = block.h.pair + 2 * u;
    stmatrix_x4(gate_up + 2 * kHalfStage + (((4 * half + u + lane / 16) ^ (lane & 7)) << 4), hw[0], hw[1], hw[2],
                hw[3]);
  }
}

// The whole epilogue of a hidden tile for one multiplying warp: `hidden_epilogue` with quantised results.
template <bool kClamp>
MOK_DEVICE void quantised_hidden_epilogue(const float (&d)[128], const SharedLayout& layout, StageCursor& cursor,
                                          i32 group, const HiddenRows& rows, const DotTarget& dot_target,
                                          const SwigluLimit& clamp, const GradientTarget& target) {
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  const u32 row_offset = group * kBoxBytes + (warp * 16 + lane % 16) * 128;
  const u32 own = layout.staging(threadIdx.x / kWarpSize - 4) + lane * 16;
  float dot[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (i32 chunk = 0; chunk < 4; ++chunk) {
    park_any_chunk(d, own, chunk);
    mbarrier_wait(layout.full(cursor.index), cursor.parity);
    const u32 gate_up = layout.tile_a(cursor.index) + row_offset;
    ScalePairs gate_scales{}, up_scales{};
#pragma unroll 1
    for (i32 half = 0; half < 2; ++half) {
      finish_half_stage<kClamp>(gate_up, half, 64 * chunk + 32 * half, own + 4 * half * kParkedUnit, rows, clamp,
                                target, gate_scales, up_scales, dot);
    }
    store_scales(gate_scales, up_scales, target, chunk);
    // Before the arrival: the storing warp's release of hidden_ready covers sums, codes and scales too.
    if (chunk & 1) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        float* partial = dot_target.partial;
        store_block_sum(dot[r], partial == nullptr ? nullptr : partial + (chunk >> 1) * dot_target.stride + 8 * r);
        dot[r] = 0.0f;
      }
    }
    if (chunk == 3) fence_proxy_async_global();  // codes and scales are read by TMA
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(layout.piece_full(group, chunk));
    cursor.advance();
  }
}

}  // namespace mok
