// MXFP8: blocks of 32 elements share a power of two; elements are E4M3 codes.
//
//   scale = 2^e, byte e + 127:  "fit": smallest e in -124..119 with amax / 2^e <= 448, else 119
//                               "ocp": e = floor(log2 amax) - 8, in the same range
//   code  = E4M3 RN-even of x * 2^-e, saturating;  a NaN or Inf in a block: byte 255, a NaN block
//   value = code * 2^e, exact in bf16 for the scales above; other bytes: rounded to bf16
//
// NumPy twin: mok_ref/mxfp8.py. Format: OCP Microscaling Formats (MX) v1.0.
// Executed by: one thread per element; a warp holds one block of 32 in `quantize_block`, eight in `quantize_run`.
#pragma once
#include "config.cuh"
#include "numerics.cuh"

namespace mok {

constexpr i32 kScaleBlock = 32;
constexpr i32 kMinScaleExponent = -124;
constexpr i32 kMaxScaleExponent = 119;
constexpr i32 kScaleBias = 127;
constexpr u8 kNanScale = 255;
constexpr u8 kNanCode = 0x7f;
constexpr u8 kMaxCode = 0x7e;  // 448

enum ScaleRule : i32 { kScaleFit = 0, kScaleOcp = 1 };

MOK_DEVICE i32 num_scale_blocks(i32 elements) { return (elements + kScaleBlock - 1) / kScaleBlock; }

// 2^exponent for -127 <= exponent <= 127, exact.
MOK_DEVICE float power_of_two(i32 exponent) {
  return __uint_as_float(exponent == -127 ? 0x00400000u : static_cast<u32>(exponent + 127) << 23);
}

// The scale byte of a block whose greatest magnitude has the bf16 bits `amax_bits`.
MOK_DEVICE u8 scale_byte(u32 amax_bits, i32 rule) {
  if (amax_bits >= 0x7f80u) return kNanScale;
  const i32 floor_log2 = static_cast<i32>(amax_bits >> 7) - 127;  // subnormal: below every floor anyway
  // 448 = 1.75 * 2^8: a significand up to 1.75 fits with floor_log2 - 8, a greater one needs one more.
  const i32 carry = rule == kScaleFit && (amax_bits & 127u) > 96u ? 1 : 0;
  const i32 exponent = min(max(floor_log2 - 8 + carry, kMinScaleExponent), kMaxScaleExponent);
  return static_cast<u8>(exponent + kScaleBias);
}

// E4M3 code of a float32, round to nearest even, saturating at 448. NaN is handled by the block.
MOK_DEVICE u8 e4m3_code(float value) {
  const u32 bits = __float_as_uint(value);
  const u32 magnitude = bits & 0x7fffffffu;
  const u32 sign = bits >> 24 & 0x80u;
  u32 code;
  if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9; adding 2^14 rounds to them
    code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) & 0xffu;
  } else {
    code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - ((127 - 7) << 3);  // RNE to 3 bits
  }
  return static_cast<u8>(sign | min(code, static_cast<u32>(kMaxCode)));
}

// The code of one bf16 element under its block's scale byte.
MOK_DEVICE u8 quantize(u16 element, u8 scale) {
  if (scale == kNanScale) return kNanCode;
  return e4m3_code(__fmul_rn(bf16_to_float(element), power_of_two(kScaleBias - scale)));
}

// Exact float32 of an E4M3 code (not NaN).
MOK_DEVICE float e4m3_value(u8 code) {
  const u32 exponent = code >> 3 & 15u;
  const u32 fraction = code & 7u;
  const float magnitude = exponent == 0 ? __fmul_rn(static_cast<float>(fraction), 0.001953125f)  // 2^-9
                                        : __uint_as_float((exponent + 120) << 23 | fraction << 20);
  return code & 0x80u ? -magnitude : magnitude;
}

// bf16 bits of code * 2^(scale - 127).
MOK_DEVICE u16 dequantize(u8 code, u8 scale) {
  if (scale == kNanScale || (code & 0x7fu) == kNanCode) return 0x7fc0u;
  return float_to_bf16(__fmul_rn(e4m3_value(code), power_of_two(static_cast<i32>(scale) - kScaleBias)));
}

struct QuantizedElement {
  u8 code;
  u8 scale;  // of the whole block
};

// Quantises the block that a warp holds, one element (or +0) per lane. All lanes take part.
MOK_DEVICE QuantizedElement quantize_block(u16 element, i32 rule) {
  const u32 amax = __reduce_max_sync(kFullWarp, static_cast<u32>(element & 0x7fffu));
  const u8 scale = scale_byte(amax, rule);
  return QuantizedElement{quantize(element, scale), scale};
}

// E4M3 codes of two float32, the first one in the low byte, as e4m3_code rounds; NaN becomes kNanCode.
MOK_DEVICE u32 e4m3_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  const auto code = [](float value) -> u32 { return value != value ? kNanCode : e4m3_code(value); };
  return code(first) | code(second) << 8;
#endif
}

struct QuantizedRun {
  u32 codes[2];  // of this lane's eight elements
  u32 scale;     // byte of the whole block
};

// Quantises the blocks that a warp holds, eight neighbouring elements (or +0) per lane, four lanes a block. All lanes
// take part.
MOK_DEVICE QuantizedRun quantize_run(const uint4& elements, i32 rule) {
  const u32 pairs[4] = {elements.x, elements.y, elements.z, elements.w};
  u32 amax = 0;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) amax = max(amax, max(pairs[i] & 0x7fffu, pairs[i] >> 16 & 0x7fffu));
  amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 1));
  amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 2));
  const u32 scale = scale_byte(amax, rule);
  const float inverse = scale == kNanScale ? __uint_as_float(0x7fc00000u) : power_of_two(kScaleBias - scale);
  const auto codes = [&](u32 pair) {
    return e4m3_pair(__fmul_rn(bf16_low(pair), inverse), __fmul_rn(bf16_high(pair), inverse));
  };
  return QuantizedRun{{codes(pairs[0]) | codes(pairs[1]) << 16, codes(pairs[2]) | codes(pairs[3]) << 16}, scale};
}

// The bf16 value an element stands for after quantisation; one block per warp.
MOK_DEVICE u16 quantized_value(u16 element, i32 rule) {
  const QuantizedElement quantized = quantize_block(element, rule);
  return dequantize(quantized.code, quantized.scale);
}

}  // namespace mok
