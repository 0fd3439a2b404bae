// The float32 rules of the layer, one device function per equation; nothing else rounds.
//
// NumPy twin: mok_ref/numerics.py, same names. Compiled without flush-to-zero and without FMA contraction;
// every operation is an explicit round-to-nearest intrinsic all the same, so that no flag can change a bit.
// Executed by: any thread, on registers only.
#pragma once
#include "config.cuh"

namespace mok {

// ---- bf16: stored as u16 or as pairs in a u32 (low half = lower address) ----

MOK_DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
MOK_DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
MOK_DEVICE float bf16_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// Two float32 rounded to nearest even, packed; NaN stays NaN, overflow becomes Inf.
MOK_DEVICE u32 pack_bf16x2(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// bf16(v): one float32 rounded the same way, as its bits.
MOK_DEVICE u16 float_to_bf16(float value) { return static_cast<u16>(pack_bf16x2(value, 0.0f) & 0xffffu); }

// ---- exp, sigmoid, silu ----

// exp(x) of the contract: clamp, n = round(x / ln 2), two-part reduction, degree-5 polynomial, exponent add.
// NaN is clamped to -87 like the reference. fmaxf(NaN, -87) = -87 by IEEE 754 maximumNumber.
MOK_DEVICE float exp_rn(float x) {
  x = fminf(fmaxf(x, -87.0f), 88.0f);
  const float shifted = __fmaf_rn(x, 1.44269504f, 12582912.0f);
  const float n = __fsub_rn(shifted, 12582912.0f);
  float r = __fmaf_rn(n, -0.693359375f, x);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  const float y = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
  // 12582912 = 1.5 * 2^23, so the low bits of `shifted` hold n; shifting drops everything above them.
  return __uint_as_float(__float_as_uint(y) + (__float_as_uint(shifted) << 23));
}

// sigmoid(x) = 1 / (1 + exp(-x)) for any float32.
MOK_DEVICE float sigmoid(float x) { return __frcp_rn(__fadd_rn(1.0f, exp_rn(-x))); }

// sigmoid(gate) for a gate that is a bf16 value: the same bits without the division's slow path.
// Scaling by 1/4 keeps 1 + exp in the normal range of the approximation; one Newton step makes it exact
// for all 65,536 bf16 values (tests/gpu compares every one).
MOK_DEVICE float sigmoid_bf16(float gate) {
  const float d = __fmaf_rn(exp_rn(-gate), 0.25f, 0.25f);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  r = __fmaf_rn(__fmaf_rn(-d, r, 1.0f), r, r);
  return __fmul_rn(r, 0.25f);
}

// ---- SwiGLU elements; gate and up are bf16 values held in float32 ----

// gate = gate > limit ? limit : gate; NaN stays.
MOK_DEVICE float clamp_gate(float gate, float limit) { return gate > limit ? limit : gate; }

// up into [-limit, limit]; NaN stays.
MOK_DEVICE float clamp_up(float up, float limit) { return up > limit ? limit : (up < -limit ? -limit : up); }

// h before its rounding to bf16: (gate * sigmoid(gate)) * up, of clamped values.
MOK_DEVICE float swiglu_forward_element(float gate, float up) {
  return __fmul_rn(__fmul_rn(gate, sigmoid_bf16(gate)), up);
}

// Forward line: h = (gate * s) * up, s = sigmoid(gate). Gradients before their rounding to bf16:
//   d_up = dh * (gate * s);  d_gate = (dh * up) * (s * (1 + gate * (1 - s)))
struct SwigluGradient {
  float d_gate, d_up, h;
};

MOK_DEVICE SwigluGradient swiglu_backward_element(float gate, float up, float dh) {
  const float s = sigmoid_bf16(gate);
  const float silu = __fmul_rn(gate, s);
  const float slope = __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(gate, __fsub_rn(1.0f, s))));
  return SwigluGradient{__fmul_rn(__fmul_rn(dh, up), slope), __fmul_rn(dh, silu), __fmul_rn(silu, up)};
}

// One term of the weighted sum over slots: product rounded, then sum rounded.
MOK_DEVICE float add_weighted(float acc, float weight, float value) {
  return __fadd_rn(acc, __fmul_rn(weight, value));
}

// ---- dot128 ----

// One block of 128 products, summed in the order of a tensor-core accumulator fragment: column
// c = 8i + 2q + j belongs to S_q, which adds i ascending, j = 0 then 1, from +0; the block's sum is
// (S_0 + S_1) + (S_2 + S_3). A whole warp calls it; every lane gets the sum.
// dot128 of a row adds its blocks' sums in ascending order from +0.
MOK_DEVICE float dot128_block(const float* products, i32 lane) {
  const i32 q = lane % 4;  // lanes 4..31 repeat the work of lanes 0..3
  float sum = 0.0f;
  for (i32 i = 0; i < kDotBlock / 8; ++i) {
    sum = __fadd_rn(sum, products[8 * i + 2 * q]);
    sum = __fadd_rn(sum, products[8 * i + 2 * q + 1]);
  }
  const float pair = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, 1));  // addition commutes
  return __fadd_rn(pair, __shfl_xor_sync(kFullWarp, pair, 2));
}

}  // namespace mok
