// expand.cuh: MXFP8 codes to the bf16 values they stand for, two per 32-bit word.
//
//   value = bf16(code * 2^(scale - 127)), scale 255: NaN                                       (spec eq. 7.2)
//
//   placed   the bits of a code where bf16 has sign, exponent and fraction: code * 2^-120, subnormal codes too
//   first    2^(scale - 7), a bf16 for scale bytes up to kLastPlainScale: placed * first is the value
//   second   for greater bytes first stays at 2^127 and second = 2^(scale - 134); NaN for scale 255
//
// Both products are bf16 multiplications that round once at most: placed * 2^127 is exact.
// A NaN code is expected only where the scale is 255 (spec eq. 7.1 makes no other): it is not looked for.
//
// NumPy twin     mok_ref/mxfp8.py: dequantize. One code at a time: mxfp8.cuh: dequantize.
// Executed by    any thread, on registers only; 8 instructions for four codes
#pragma once
#include "mxfp8.cuh"

namespace mok {

constexpr u32 kLastPlainScale = 134;

// Rounded to nearest even, subnormals kept.
MOK_DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + (-0): exact
  return product;
}

// Byte i of the result: byte `selector >> 4 i & 7` of `word`, or eight copies of its sign where bit 3 is set too.
MOK_DEVICE u32 permute_bytes(u32 word, u32 selector) {
  u32 result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "r"(selector));
  return result;
}

// ---------------------------------------------------------------- scales

MOK_DEVICE u32 twice_u16(u32 bits) { return bits * 0x00010001u; }

MOK_DEVICE bool is_plain(u32 scale) { return scale <= kLastPlainScale; }

// 2^(scale - 7), not above 2^127, in both halves.
MOK_DEVICE u32 first_factor(u32 scale) { return twice_u16(min(scale + 120u, 254u) << 7); }

// The same of a plain scale, in one instruction.
MOK_DEVICE u32 plain_factor(u32 scale) { return scale * 0x00800080u + 0x3c003c00u; }

// What is left of a scale that is not plain, in both halves; 1 for a plain one.
MOK_DEVICE u32 second_factor(u32 scale) {
  const u32 exponent = is_plain(scale) ? 127u : scale - 7;
  return twice_u16(scale == kNanScale ? 0x7fc0u : exponent << 7);
}

// ---------------------------------------------------------------- codes

// Codes 0 and 1 of a word, or 2 and 3, placed: each with copies of its sign above it, moved to exponent and fraction.
template <i32 kFirst>
MOK_DEVICE u32 place_codes(u32 codes) {
  static_assert(kFirst == 0 || kFirst == 2, "codes go in pairs");
  return permute_bytes(codes, kFirst == 0 ? 0x9180u : 0xb3a2u) << 4 & 0x87f087f0u;
}

// Four codes under a plain scale: low holds 0 and 1, high 2 and 3.
MOK_DEVICE void expand_word(u32 codes, u32 first, u32& low, u32& high) {
  low = multiply_bf16x2(place_codes<0>(codes), first);
  high = multiply_bf16x2(place_codes<2>(codes), first);
}

// The second multiplication of `kPairs` expanded words, for scales that are not plain.
template <i32 kPairs>
MOK_DEVICE void expand_again(u32 (&pairs)[kPairs], u32 second) {
#pragma unroll
  for (i32 i = 0; i < kPairs; ++i) pairs[i] = multiply_bf16x2(pairs[i], second);
}

// Sixteen neighbouring codes of one block, any scale: pairs[i] holds elements 2i and 2i + 1.
MOK_DEVICE void expand_run(u32 (&pairs)[8], const uint4& codes, u32 scale) {
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  const u32 first = first_factor(scale);
#pragma unroll
  for (i32 i = 0; i < 4; ++i) expand_word(words[i], first, pairs[2 * i], pairs[2 * i + 1]);
  if (!is_plain(scale)) expand_again(pairs, second_factor(scale));
}

}  // namespace mok
