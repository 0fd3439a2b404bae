// tc() without Hopper's instructions: the tensor-core product from integer instructions, any GPU from sm_80.
//
//   tc_group: acc <- acc + sum of 16 products, as a Hopper tensor core adds them:
//     1. NaN and Inf follow IEEE (finite products never overflow)
//     2. E = max exponent of the products (sum of the operands' exponents) and of acc; zero acc: -133
//     3. each term truncated toward zero to a multiple of 2^(E-25), added exactly
//     4. the sum truncated toward zero to float32; |sum| >= 2^128 is Inf; zero is +0
//
// NumPy twin: mok_ref/tensor_core.py (tc). Two tiles with one interface compute it: SoftTile (these functions)
// and MmaTile (mma.sync, whose arithmetic was measured to be the same on Hopper, see docs/device_checks.md).
// Executed by: a CTA of kPortableThreads threads, one tile of outputs; operands pass through shared memory.
#pragma once
#include "config.cuh"
#include "mxfp8.cuh"
#include "numerics.cuh"

namespace mok {

constexpr i32 kPortableThreads = 256;

// ---------------------------------------------------------------- one group of 16 products

constexpr i32 kFractionBits = 25;
constexpr i32 kZeroAccExponent = -133;
constexpr i32 kMinExponent = -126;
constexpr i32 kMaxExponent = 127;
constexpr i32 kNoExponent = -2000;      // a zero operand: no sum with it can be the greatest
constexpr i32 kSpecialExponent = 8000;  // Inf or NaN: every sum with it is at least kSpecialLimit
constexpr i32 kSpecialLimit = 4000;

// An operand as two 16-bit fields: exponent (high) and signed significand in units of 2^(exponent - 7) (low).
// Inf has significand +-1, NaN 0.
MOK_DEVICE u32 operand_word(u16 bits) {
  const i32 field = (bits >> 7) & 255;
  const i32 fraction = bits & 127;
  i32 exponent = field - 127;
  i32 significand = fraction | 128;
  if (field == 0) {
    exponent = fraction == 0 ? kNoExponent : kMinExponent;
    significand = fraction;
  } else if (field == 255) {
    exponent = kSpecialExponent;
    significand = fraction == 0 ? 1 : 0;
  }
  if (bits & 0x8000) significand = -significand;
  return static_cast<u32>(exponent) << 16 | (static_cast<u32>(significand) & 0xffffu);
}

MOK_DEVICE i32 word_exponent(u32 word) { return static_cast<i32>(word) >> 16; }
MOK_DEVICE i32 word_significand(u32 word) { return static_cast<i32>(word << 16) >> 16; }

// Exponent of the accumulator, at least -126; zero counts as -133.
MOK_DEVICE i32 acc_exponent(float acc) {
  const u32 magnitude = __float_as_uint(acc) & 0x7fffffffu;
  const i32 field = static_cast<i32>(magnitude >> 23);
  if (magnitude == 0) return kZeroAccExponent;
  if (field == 255) return kSpecialExponent;
  return field == 0 ? kMinExponent : field - 127;
}

// One product in units of 2^(E - 25), truncated toward zero.  |result| < 2^27
MOK_DEVICE i32 aligned_product(i32 a_significand, i32 b_significand, i32 below) {
  const i32 product = a_significand * b_significand;       // exact, in units of 2^(e - 14)
  const i32 sign = product >> 31;
  const u32 magnitude = static_cast<u32>((product ^ sign) - sign) << (kFractionBits - 14);
  const i32 kept = static_cast<i32>(magnitude >> min(below, 31));  // RZ: `below` = E - e
  return (kept ^ sign) - sign;
}

// The accumulator in units of 2^(E - 25), truncated toward zero.  |result| < 2^26
MOK_DEVICE i32 aligned_acc(float acc, i32 below) {
  const u32 bits = __float_as_uint(acc);
  const u32 fraction = bits & 0x7fffffu;
  const u32 significand = (bits & 0x7f800000u) ? (fraction | 0x800000u) : fraction;
  const i32 kept = static_cast<i32>((significand << (kFractionBits - 23)) >> min(below, 31));  // RZ
  return bits >> 31 ? -kept : kept;
}

// sum * 2^(exponent - 25) truncated toward zero to float32.  |sum| < 2^32
MOK_DEVICE float truncated_sum(i64 sum, i32 exponent) {
  if (sum == 0) return 0.0f;
  const u32 sign = sum < 0 ? 0x80000000u : 0u;
  const u32 magnitude = static_cast<u32>(sum < 0 ? -sum : sum);
  const i32 top = 31 - __clz(static_cast<i32>(magnitude));
  const i32 result_exponent = exponent - kFractionBits + top;
  if (result_exponent > kMaxExponent) return __uint_as_float(sign | 0x7f800000u);
  if (result_exponent < kMinExponent) {  // subnormal: units of 2^-149
    const i32 up = exponent - kFractionBits + 149;
    const u32 kept = up >= 0 ? magnitude << up : magnitude >> -up;  // RZ
    return __uint_as_float(kept == 0 ? 0u : sign | kept);
  }
  const u32 significand = top > 23 ? magnitude >> (top - 23) : magnitude << (23 - top);  // RZ to 24 bits
  return __uint_as_float(sign | static_cast<u32>(result_exponent + 127) << 23 | (significand & 0x7fffffu));
}

// What has been seen of Inf and NaN in one group.
struct SpecialTerms {
  bool nan = false, positive = false, negative = false;

  MOK_DEVICE void add(bool is_nan, bool is_negative) {
    nan = nan || is_nan;
    positive = positive || (!is_nan && !is_negative);
    negative = negative || (!is_nan && is_negative);
  }

  // Inf * 0 and NaN * anything are NaN; Inf * finite is Inf with the product's sign.
  MOK_DEVICE void add_product(u32 a, u32 b) {
    const i32 exponent = word_exponent(a) + word_exponent(b);
    if (exponent < kSpecialLimit) return;
    const i32 product = word_significand(a) * word_significand(b);
    add(product == 0, product < 0);
  }

  MOK_DEVICE void add_acc(float acc) {
    const u32 magnitude = __float_as_uint(acc) & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) add(magnitude > 0x7f800000u, __float_as_uint(acc) >> 31);
  }

  MOK_DEVICE float sum() const {
    if (nan || (positive && negative)) return __uint_as_float(0x7fc00000u);
    return __uint_as_float(negative ? 0xff800000u : 0x7f800000u);
  }
};

// One group with a NaN or Inf in it. Not inlined: it is rare, and tiles would hold a copy per output.
__device__ __noinline__ float special_group(const u32* a, i32 a_stride, const u32* b, i32 b_stride, float acc) {
  SpecialTerms terms;
  terms.add_acc(acc);
  for (i32 i = 0; i < kChainStep; ++i) terms.add_product(a[i * a_stride], b[i * b_stride]);
  return terms.sum();
}

// One group for one output: element i of an operand at a[i * a_stride], already as operand words.
MOK_DEVICE float tc_group(const u32* a, i32 a_stride, const u32* b, i32 b_stride, float acc) {
  i32 exponent = acc_exponent(acc);
  for (i32 i = 0; i < kChainStep; ++i)
    exponent = max(exponent, word_exponent(a[i * a_stride]) + word_exponent(b[i * b_stride]));
  if (exponent >= kSpecialLimit) return special_group(a, a_stride, b, b_stride, acc);
  i32 sum = 0;  // 16 products stay below 2^31
  for (i32 i = 0; i < kChainStep; ++i) {
    const u32 left = a[i * a_stride], right = b[i * b_stride];
    const i32 below = exponent - (word_exponent(left) + word_exponent(right));
    sum += aligned_product(word_significand(left), word_significand(right), below);
  }
  const i64 total = static_cast<i64>(sum) + aligned_acc(acc, exponent - acc_exponent(acc));  // exact
  return truncated_sum(total, exponent);
}

// ---------------------------------------------------------------- operands in global memory

constexpr i32 kRun = 8;  // neighbouring elements that load together

union Run {
  uint4 quad;
  u16 bits[kRun];
};

// A matrix operand: element (mn, k) of expert e, row-major storage whose inner axis is K or MN.
// With scales the elements are E4M3 codes and mean code * 2^(scale - 127), exact in bf16.
struct Operand {
  const void* data;     // bf16 bits, or E4M3 codes
  const u8* scales;     // null, or one E8M0 byte per 32 elements of the inner axis
  i64 expert_stride;    // elements between two experts' matrices
  i64 scale_stride;     // scale bytes between two experts' matrices
  i32 num_mn;           // rows outside [0, num_mn) and columns outside [0, num_k) read as +0
  i32 num_k;
  i32 inner_size;       // elements in a stored row
  i32 inner_is_k;       // 1: K-major, 0: MN-major

  // The same operand for one expert, starting at stored row `outer` and with `num_k` of K.
  MOK_DEVICE Operand part(i32 expert, i64 outer) const {
    Operand other = *this;
    const i64 first = expert * expert_stride + outer * inner_size;
    if (scales == nullptr) {
      other.data = static_cast<const u16*>(data) + first;
    } else {
      other.data = static_cast<const u8*>(data) + first;
      other.scales = scales + expert * scale_stride + outer * num_scale_blocks(inner_size);
    }
    return other;
  }

  MOK_DEVICE u16 at(i32 mn, i32 k) const {
    if (mn >= num_mn || k >= num_k) return 0;
    const i64 outer = inner_is_k ? mn : k;
    const i32 inner = inner_is_k ? k : mn;
    const i64 element = outer * inner_size + inner;
    if (scales == nullptr) return static_cast<const u16*>(data)[element];
    return dequantize(static_cast<const u8*>(data)[element], scale_at(outer, inner));
  }

  // Whether kRun elements of the inner axis, starting at a multiple of kRun, are one aligned load.
  MOK_DEVICE bool has_runs() const {
    const u64 alignment = scales == nullptr ? 2 * kRun : kRun;
    return inner_size % kRun == 0 && inner_size == (inner_is_k ? num_k : num_mn) &&
           reinterpret_cast<u64>(data) % alignment == 0;
  }

  // The run of the inner axis that starts at (mn, k).
  MOK_DEVICE Run run_at(i32 mn, i32 k) const {
    Run run{};
    if (mn >= num_mn || k >= num_k) return run;
    const i64 outer = inner_is_k ? mn : k;
    const i32 inner = inner_is_k ? k : mn;
    const i64 element = outer * inner_size + inner;
    if (scales == nullptr) {
      run.quad = *reinterpret_cast<const uint4*>(static_cast<const u16*>(data) + element);
      return run;
    }
    const u64 codes = *reinterpret_cast<const u64*>(static_cast<const u8*>(data) + element);
    const u8 scale = scale_at(outer, inner);  // a run lies inside one block of 32
#pragma unroll
    for (i32 i = 0; i < kRun; ++i) run.bits[i] = dequantize(static_cast<u8>(codes >> 8 * i), scale);
    return run;
  }

 private:
  MOK_DEVICE u8 scale_at(i64 outer, i32 inner) const {
    return scales[outer * num_scale_blocks(inner_size) + inner / kScaleBlock];
  }
};

// Hands every element of a [kMn x kK] piece to `piece`: runs along the operand's inner axis where it has
// them, else single elements, neighbouring threads on neighbouring addresses. Runs along MN go to threads
// with k first, so that their stores to shared memory do not collide.
template <i32 kMn, i32 kK, class Piece>
MOK_DEVICE void load_piece(const Operand& operand, i32 first_mn, i32 first_k, Piece piece) {
  if (operand.has_runs()) {
    for (i32 i = threadIdx.x; i < kMn * kK / kRun; i += kPortableThreads) {
      const i32 mn = operand.inner_is_k ? i / (kK / kRun) : i / kK * kRun;
      const i32 k = operand.inner_is_k ? i % (kK / kRun) * kRun : i % kK;
      piece.store_run(mn, k, operand.inner_is_k, operand.run_at(first_mn + mn, first_k + k));
    }
    return;
  }
#pragma unroll 2
  for (i32 i = threadIdx.x; i < kMn * kK; i += kPortableThreads) {
    const i32 mn = operand.inner_is_k ? i / kK : i % kMn;
    const i32 k = operand.inner_is_k ? i % kK : i / kMn;
    piece.store(mn, k, operand.at(first_mn + mn, first_k + k));
  }
}

// ---------------------------------------------------------------- tiles

// A 64 x 64 tile by tc_group's arithmetic; each thread owns 4 x 4 outputs.
struct SoftTile {
  static constexpr i32 kM = 64, kN = 64, kOwn = 4, kThreadsPerRow = kN / kOwn;
  static constexpr i32 kPitch = 68;  // words; a multiple of 4, so that four operands load at once

  struct Shared {
    alignas(16) u32 a[kChainStep][kPitch];
    alignas(16) u32 b[kChainStep][kPitch];
  };

  // Where load_piece puts an operand's piece: words, k first.
  struct Piece {
    u32 (*words)[kPitch];

    MOK_DEVICE void store(i32 mn, i32 k, u16 bits) const { words[k][mn] = operand_word(bits); }

    MOK_DEVICE void store_run(i32 mn, i32 k, bool along_k, const Run& run) const {
#pragma unroll
      for (i32 i = 0; i < kRun; ++i) {
        if (along_k) {
          store(mn, k + i, run.bits[i]);
        } else {
          store(mn + i, k, run.bits[i]);
        }
      }
    }
  };

  float acc[kOwn][kOwn];

  template <class Start>
  MOK_DEVICE void start(Start value) {
    for_each([&](i32 row, i32 column, float& own) { own = value(row, column); });
  }

  // Visits this thread's outputs as (row in tile, column in tile, accumulator).
  template <class Visit>
  MOK_DEVICE void for_each(Visit visit) {
    const i32 row = static_cast<i32>(threadIdx.x) / kThreadsPerRow * kOwn;
    const i32 column = static_cast<i32>(threadIdx.x) % kThreadsPerRow * kOwn;
#pragma unroll
    for (i32 i = 0; i < kOwn; ++i)
#pragma unroll
      for (i32 j = 0; j < kOwn; ++j) visit(row + i, column + j, acc[i][j]);
  }

  // acc <- tc(a, b, acc) over all of the operands' K.
  MOK_DEVICE void multiply(Shared& shared, const Operand& a, const Operand& b, i32 first_m, i32 first_n) {
    for (i32 k = 0; k < a.num_k; k += kChainStep) {
      load_piece<kM, kChainStep>(a, first_m, k, Piece{shared.a});
      load_piece<kN, kChainStep>(b, first_n, k, Piece{shared.b});
      __syncthreads();
      group(shared);
      __syncthreads();
    }
  }

  // tc_group for 4 x 4 outputs at once, sharing the loads of their operands.
  MOK_DEVICE void group(const Shared& shared) {
    const u32* a = &shared.a[0][threadIdx.x / kThreadsPerRow * kOwn];
    const u32* b = &shared.b[0][threadIdx.x % kThreadsPerRow * kOwn];
    i32 exponent[kOwn][kOwn];
    i32 sum[kOwn][kOwn];
#pragma unroll
    for (i32 i = 0; i < kOwn; ++i)
#pragma unroll
      for (i32 j = 0; j < kOwn; ++j) {
        exponent[i][j] = acc_exponent(acc[i][j]);
        sum[i][j] = 0;
      }
    largest_exponents(a, b, exponent);
    add_products(a, b, exponent, sum);
#pragma unroll
    for (i32 i = 0; i < kOwn; ++i)
#pragma unroll
      for (i32 j = 0; j < kOwn; ++j)
        acc[i][j] = finish(a + i, b + j, acc[i][j], exponent[i][j], sum[i][j]);
  }

 private:
  MOK_DEVICE static void largest_exponents(const u32* a, const u32* b, i32 (&exponent)[kOwn][kOwn]) {
#pragma unroll 4
    for (i32 k = 0; k < kChainStep; ++k) {
      const uint4 left = *reinterpret_cast<const uint4*>(a + k * kPitch);
      const uint4 right = *reinterpret_cast<const uint4*>(b + k * kPitch);
      const i32 rows[kOwn] = {word_exponent(left.x), word_exponent(left.y), word_exponent(left.z),
                              word_exponent(left.w)};
      const i32 columns[kOwn] = {word_exponent(right.x), word_exponent(right.y), word_exponent(right.z),
                                 word_exponent(right.w)};
#pragma unroll
      for (i32 i = 0; i < kOwn; ++i)
#pragma unroll
        for (i32 j = 0; j < kOwn; ++j) exponent[i][j] = max(exponent[i][j], rows[i] + columns[j]);
    }
  }

  MOK_DEVICE static void add_products(const u32* a, const u32* b, const i32 (&exponent)[kOwn][kOwn],
                                      i32 (&sum)[kOwn][kOwn]) {
#pragma unroll 4
    for (i32 k = 0; k < kChainStep; ++k) {
      const uint4 left = *reinterpret_cast<const uint4*>(a + k * kPitch);
      const uint4 right = *reinterpret_cast<const uint4*>(b + k * kPitch);
      const u32 rows[kOwn] = {left.x, left.y, left.z, left.w};
      const u32 columns[kOwn] = {right.x, right.y, right.z, right.w};
#pragma unroll
      for (i32 i = 0; i < kOwn; ++i)
#pragma unroll
        for (i32 j = 0; j < kOwn; ++j) {
          const i32 below = exponent[i][j] - word_exponent(rows[i]) - word_exponent(columns[j]);
          sum[i][j] += aligned_product(word_significand(rows[i]), word_significand(columns[j]), below);
        }
    }
  }

  MOK_DEVICE static float finish(const u32* a, const u32* b, float acc, i32 exponent, i32 sum) {
    if (exponent >= kSpecialLimit) return special_group(a, kPitch, b, kPitch, acc);
    const i64 total = static_cast<i64>(sum) + aligned_acc(acc, exponent - acc_exponent(acc));  // exact
    return truncated_sum(total, exponent);
  }
};

// A 128 x 128 tile by mma.sync.m16n8k16: 8 warps of 64 x 32 outputs each.
struct MmaTile {
  static constexpr i32 kM = 128, kN = 128, kDepth = 32;
  static constexpr i32 kPitch = 40;  // bf16; rows start 20 words apart: fragments load without conflicts
  static constexpr i32 kWarpM = 64, kWarpN = 32, kFragM = kWarpM / 16, kFragN = kWarpN / 8;

  struct Shared {
    alignas(16) u16 a[kM][kPitch];
    alignas(16) u16 b[kN][kPitch];
  };

  // Where load_piece puts an operand's piece: bf16, row by row.
  struct Piece {
    u16 (*rows)[kPitch];

    MOK_DEVICE void store(i32 mn, i32 k, u16 bits) const { rows[mn][k] = bits; }

    MOK_DEVICE void store_run(i32 mn, i32 k, bool along_k, const Run& run) const {
      if (along_k) {
        *reinterpret_cast<uint4*>(&rows[mn][k]) = run.quad;
        return;
      }
#pragma unroll
      for (i32 i = 0; i < kRun; ++i) store(mn + i, k, run.bits[i]);
    }
  };

  float acc[kFragM][kFragN][4];

  template <class Start>
  MOK_DEVICE void start(Start value) {
    for_each([&](i32 row, i32 column, float& own) { own = value(row, column); });
  }

  // A fragment's registers are (row g, columns 2q and 2q+1) and (row g + 8, the same columns).
  template <class Visit>
  MOK_DEVICE void for_each(Visit visit) {
    const i32 lane = threadIdx.x % kWarpSize;
    const i32 row = warp_m() + lane / 4, column = warp_n() + lane % 4 * 2;
#pragma unroll
    for (i32 i = 0; i < kFragM; ++i)
#pragma unroll
      for (i32 j = 0; j < kFragN; ++j)
#pragma unroll
        for (i32 r = 0; r < 4; ++r) visit(row + i * 16 + r / 2 * 8, column + j * 8 + r % 2, acc[i][j][r]);
  }

  // acc <- tc(a, b, acc) over all of the operands' K. A group of zeros changes nothing, so K may be
  // padded to kDepth instead of 16.
  MOK_DEVICE void multiply(Shared& shared, const Operand& a, const Operand& b, i32 first_m, i32 first_n) {
    for (i32 k = 0; k < a.num_k; k += kDepth) {
      load_piece<kM, kDepth>(a, first_m, k, Piece{shared.a});
      load_piece<kN, kDepth>(b, first_n, k, Piece{shared.b});
      __syncthreads();
#pragma unroll
      for (i32 step = 0; step < kDepth; step += kChainStep) group(shared, step);
      __syncthreads();
    }
  }

 private:
  MOK_DEVICE static i32 warp_m() { return static_cast<i32>(threadIdx.x) / kWarpSize / 4 * kWarpM; }
  MOK_DEVICE static i32 warp_n() { return static_cast<i32>(threadIdx.x) / kWarpSize % 4 * kWarpN; }

  MOK_DEVICE void group(const Shared& shared, i32 step) {
    const i32 lane = threadIdx.x % kWarpSize;
    const i32 row = lane / 4, k = step + lane % 4 * 2;
    u32 b[kFragN][2];
#pragma unroll
    for (i32 j = 0; j < kFragN; ++j) {
      b[j][0] = pair(&shared.b[warp_n() + j * 8 + row][k]);
      b[j][1] = pair(&shared.b[warp_n() + j * 8 + row][k + 8]);
    }
#pragma unroll
    for (i32 i = 0; i < kFragM; ++i) {
      const u16* low = &shared.a[warp_m() + i * 16 + row][k];
      const u16* high = low + 8 * kPitch;
      const u32 a[4] = {pair(low), pair(high), pair(low + 8), pair(high + 8)};
#pragma unroll
      for (i32 j = 0; j < kFragN; ++j) mma_sync_m16n8k16(acc[i][j], a, b[j]);
    }
  }

  MOK_DEVICE static u32 pair(const u16* address) { return *reinterpret_cast<const u32*>(address); }

 public:
  // acc[0..3] <- one group of 16 products on the tensor core, a 16 x 8 fragment.
  MOK_DEVICE static void mma_sync_m16n8k16(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

}  // namespace mok
