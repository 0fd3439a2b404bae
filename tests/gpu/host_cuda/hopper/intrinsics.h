// What Hopper kernels use of CUDA beyond host_cuda.h.
#pragma once
#include "host_cuda.h"

struct float2 {
  float x, y;
};
struct uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

[[noreturn]] inline void __trap() { std::abort(); }
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

template <class T>
T __ldcg(const T* address) {
  return *address;
}

// Byte i of the result: byte `selector >> 4 i & 7` of low (0..3) and high (4..7).
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

inline void ptx_max_u16x2(unsigned& larger, unsigned a, unsigned b) {
  larger = max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}

// E4M3 by the functions of mxfp8.cuh, defined behind the kernels. Half floats appear between two conversions only:
// here they are the codes themselves.
unsigned char host_e4m3_code(float value);
float host_e4m3_value(unsigned char code);

inline void ptx_cvt_rn_satfinite_e4m3x2_f32(unsigned short& codes, float high, float low) {
  codes = static_cast<unsigned short>(host_e4m3_code(high) << 8 | host_e4m3_code(low));
}
inline void ptx_cvt_rn_f16x2_e4m3x2(unsigned& halves, unsigned short codes) {
  halves = static_cast<unsigned>(codes >> 8) << 16 | (codes & 0xffu);
}
inline void ptx_cvt_f32_f16(float& value, unsigned short half) {
  value = host_e4m3_value(static_cast<unsigned char>(half));
}
