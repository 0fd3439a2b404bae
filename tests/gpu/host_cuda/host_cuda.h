// Runs CUDA device code on a CPU, one thread block after another, every CUDA thread a fiber of one OS thread.
//
// For tests on machines without a GPU: the portable kernels of cuda_src/ are compiled with the system's C++
// compiler against this header instead of NVRTC. Integer and float32 instructions are the same IEEE operations
// (compiled with -ffp-contract=off); tensor-core instructions are not imitated but evaluated by tc_group.
// A block's fibers run until they meet at __syncthreads, a warp's until they meet at a warp collective.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__

using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct float4 {
  float x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

// ---- fibers ----

namespace host_cuda {

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Fiber {
  ucontext_t start;  // only the first switch into a fiber; later ones are jumps, which need no system call
  jmp_buf place;
  bool started = false;
  std::unique_ptr<char[]> stack;
  State state = State::kReady;
  uint64_t deposit[16];
};

constexpr size_t kStackBytes = 128 * 1024;
inline std::vector<Fiber> fibers;
inline jmp_buf scheduler;
inline size_t current;
inline const std::function<void()>* body;

inline void wait(State state) {
  Fiber& self = fibers[current];
  self.state = state;
  if (_setjmp(self.place) == 0) _longjmp(scheduler, 1);
}

inline void resume(size_t index) {
  current = index;
  threadIdx.x = static_cast<unsigned>(index);
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = fibers[index];
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void fiber_main() {
  (*body)();
  fibers[current].state = State::kDone;
  _longjmp(scheduler, 1);
}

// Releases the fibers [first, last) if all that are alive wait in `state`.
inline bool release(size_t first, size_t last, State state) {
  bool any = false;
  for (size_t i = first; i < last; ++i) {
    if (fibers[i].state == State::kDone) continue;
    if (fibers[i].state != state) return false;
    any = true;
  }
  for (size_t i = first; i < last && any; ++i)
    if (fibers[i].state == state) fibers[i].state = State::kReady;
  return any;
}

inline void run_block() {
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    fiber.started = false;
    fiber.state = State::kReady;
    makecontext(&fiber.start, fiber_main, 0);
  }
  while (true) {
    bool ran = false, alive = false;
    for (size_t i = 0; i < fibers.size(); ++i) {
      if (fibers[i].state == State::kReady) {
        resume(i);
        ran = true;
      }
      alive = alive || fibers[i].state != State::kDone;
    }
    if (!alive) return;
    for (size_t i = 0; i < fibers.size(); i += 32)
      ran = release(i, std::min(i + 32, fibers.size()), State::kAtWarp) || ran;
    ran = release(0, fibers.size(), State::kAtBlock) || ran;
    if (!ran) {
      std::fprintf(stderr, "host_cuda: deadlock, threads of block %u wait for each other\n", blockIdx.x);
      std::abort();
    }
  }
}

inline void run_grid(const unsigned* shape, const std::function<void()>& function) {
  gridDim = {shape[0], shape[1], 1};
  blockDim = {shape[2], 1, 1};
  if (fibers.size() != shape[2]) fibers = std::vector<Fiber>(shape[2]);
  body = &function;
  for (blockIdx.y = 0; blockIdx.y < shape[1]; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < shape[0]; ++blockIdx.x) run_block();
}

// Leaves `value` for the other lanes of the warp and waits until all have done so.
template <class T>
void deposit(const T& value) {
  static_assert(sizeof(T) <= sizeof(Fiber::deposit), "deposit too large");
  std::memcpy(fibers[current].deposit, &value, sizeof(T));
  wait(State::kAtWarp);
}

// What `lane` of this warp has left.
template <class T>
T collected(unsigned lane) {
  T value;
  std::memcpy(&value, fibers[current / 32 * 32 + lane].deposit, sizeof(T));
  return value;
}

}  // namespace host_cuda

inline void __syncthreads() { host_cuda::wait(host_cuda::State::kAtBlock); }
inline void __syncwarp(unsigned = 0) { host_cuda::wait(host_cuda::State::kAtWarp); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  host_cuda::deposit(value);
  const T other = host_cuda::collected<T>(threadIdx.x % 32 ^ mask);
  __syncwarp();
  return other;
}

template <class T, class Better>
T host_reduce(T value, Better better) {
  host_cuda::deposit(value);
  T result = host_cuda::collected<T>(0);
  for (unsigned lane = 1; lane < 32; ++lane) {
    const T other = host_cuda::collected<T>(lane);
    if (better(other, result)) result = other;
  }
  __syncwarp();
  return result;
}

template <class T>
T __reduce_max_sync(unsigned, T value) {
  return host_reduce(value, [](T a, T b) { return a > b; });
}

inline unsigned __ballot_sync(unsigned, int predicate) {
  host_cuda::deposit(predicate);
  unsigned mask = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (host_cuda::collected<int>(lane)) mask |= 1u << lane;
  __syncwarp();
  return mask;
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  host_cuda::deposit(value);
  const T other = host_cuda::collected<T>(lane % 32);
  __syncwarp();
  return other;
}

template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  host_cuda::deposit(value);
  const unsigned lane = threadIdx.x % 32;
  const T other = lane < delta ? value : host_cuda::collected<T>(lane - delta);
  __syncwarp();
  return other;
}

template <class T>
unsigned __match_any_sync(unsigned, T value) {
  host_cuda::deposit(value);
  unsigned mask = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (host_cuda::collected<T>(lane) == value) mask |= 1u << lane;
  __syncwarp();
  return mask;
}

template <class T>
T __reduce_min_sync(unsigned, T value) {
  return host_reduce(value, [](T a, T b) { return a < b; });
}

// ---- intrinsics ----

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
// The device's maximum and minimum: the other operand of any NaN, signalling ones too (the C library's differ).
inline float host_fmaxf(float a, float b) { return a != a ? b : (b != b ? a : std::fmax(a, b)); }
inline float host_fminf(float a, float b) { return a != a ? b : (b != b ? a : std::fmin(a, b)); }
#define fmaxf host_fmaxf
#define fminf host_fminf
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __brev(unsigned value) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (value >> i & 1u) << (31 - i);
  return result;
}

inline unsigned long long atomicMin(unsigned long long* address, unsigned long long value) {
  const unsigned long long old = *address;
  *address = std::min(old, value);
  return old;
}
inline unsigned atomicCAS(unsigned* address, unsigned expected, unsigned value) {
  const unsigned old = *address;
  if (old == expected) *address = value;
  return old;
}

// ---- PTX instructions: translate.py turns asm statements into calls of these, outputs first ----

inline void ptx_cvt_rn_bf16x2_f32(unsigned& pair, float high, float low) {
  const auto round = [](float value) -> unsigned {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  pair = round(high) << 16 | round(low);
}

// Two bf16 products plus sums, each rounded once: exact in float64, which holds any bf16 product.
inline void ptx_fma_rn_bf16x2(unsigned& result, unsigned a, unsigned b, unsigned c) {
  const auto value = [](unsigned pair, int half) -> double {
    return __uint_as_float(half ? pair & 0xffff0000u : pair << 16);
  };
  unsigned halves[2];
  for (int half = 0; half < 2; ++half) {
    const double exact = std::fma(value(a, half), value(b, half), value(c, half));
    // To odd in float32 first, so that rounding to bf16 is the only rounding.
    float narrow = static_cast<float>(exact);
    if (std::isfinite(narrow) && narrow != exact) {
      if (std::abs(static_cast<double>(narrow)) > std::abs(exact)) narrow = std::nextafter(narrow, 0.0f);
      narrow = __uint_as_float(__float_as_uint(narrow) | 1u);
    }
    unsigned pair;
    ptx_cvt_rn_bf16x2_f32(pair, 0.0f, narrow);
    halves[half] = pair & 0xffffu;
  }
  result = halves[1] << 16 | halves[0];
}

// Bytes of a word (and of 0) by selector; with bit 3 of a selector eight copies of the byte's sign.
inline void ptx_prmt_b32(unsigned& result, unsigned word, unsigned selectors) {
  const unsigned long long bytes = word;
  result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned selector = selectors >> 4 * i & 15, byte = bytes >> 8 * (selector & 7) & 0xff;
    result |= (selector & 8 ? (byte & 0x80 ? 0xff : 0u) : byte) << 8 * i;
  }
}

inline void ptx_rcp_approx_ftz_f32(float& result, float value) { result = 1.0f / value; }

// One OS thread runs everything: memory ordering needs nothing here.
inline void ptx_ld_relaxed_gpu_global_u32(unsigned& value, const unsigned* address) { value = *address; }
inline void ptx_ld_acquire_gpu_global_u32(unsigned& value, const unsigned* address) { value = *address; }
inline void ptx_ld_acquire_sys_global_u32(unsigned& value, const unsigned* address) { value = *address; }
inline void ptx_red_release_gpu_global_add_u32(unsigned* address, unsigned value) { *address += value; }
inline void ptx_red_release_sys_global_add_u32(unsigned* address, unsigned value) { *address += value; }
inline void ptx_atom_relaxed_gpu_global_add_u32(unsigned& old, unsigned* address) { old = (*address)++; }
inline void ptx_atom_acq_rel_gpu_global_add_u32(unsigned& old, unsigned* address, unsigned value) {
  old = *address;
  *address += value;
}
inline void ptx_st_release_gpu_global_u32(unsigned* address, unsigned value) { *address = value; }
inline void ptx_nanosleep_u32(unsigned) {}
inline void ptx_fence_acq_rel_sys() {}
inline void ptx_fence_proxy_async_global() {}
inline void ptx_fence_proxy_async_shared_cta() {}
inline void ptx_mov_u32(unsigned& multiprocessor) { multiprocessor = blockIdx.x; }
inline void ptx_mov_u64(unsigned long long& now) { now = static_cast<unsigned long long>(std::clock()) * 1000; }

// mma.sync.m16n8k16: every lane leaves its operands, then evaluates its four outputs by tc_group.
// Fragment layout from the PTX ISA ("Matrix Fragments for mma.m16n8k16"): g = lane / 4, q = lane % 4.
struct MmaOperands {
  unsigned a[4], b[2];
};

float host_mma_output(const unsigned short* a_row, const unsigned short* b_column, float acc);

inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3,
                                                                    unsigned a0, unsigned a1, unsigned a2,
                                                                    unsigned a3, unsigned b0, unsigned b1) {
  host_cuda::deposit(MmaOperands{{a0, a1, a2, a3}, {b0, b1}});
  const unsigned g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  unsigned short a[2][16], b[2][16];
  for (unsigned lane_q = 0; lane_q < 4; ++lane_q) {
    const auto left = host_cuda::collected<MmaOperands>(g * 4 + lane_q);
    for (unsigned half = 0; half < 2; ++half) {      // rows g and g + 8
      for (unsigned part = 0; part < 2; ++part) {    // k below and above 8
        const unsigned pair = left.a[half + 2 * part];
        a[half][part * 8 + lane_q * 2] = static_cast<unsigned short>(pair);
        a[half][part * 8 + lane_q * 2 + 1] = static_cast<unsigned short>(pair >> 16);
      }
      const auto right = host_cuda::collected<MmaOperands>((2 * q + half) * 4 + lane_q);  // columns 2q, 2q + 1
      for (unsigned part = 0; part < 2; ++part) {
        b[half][part * 8 + lane_q * 2] = static_cast<unsigned short>(right.b[part]);
        b[half][part * 8 + lane_q * 2 + 1] = static_cast<unsigned short>(right.b[part] >> 16);
      }
    }
  }
  __syncwarp();
  d0 = host_mma_output(a[0], b[0], d0);
  d1 = host_mma_output(a[0], b[1], d1);
  d2 = host_mma_output(a[1], b[0], d2);
  d3 = host_mma_output(a[1], b[1], d3);
}
