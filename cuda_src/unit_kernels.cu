// One kernel per device function, so that each equation is compared with NumPy alone (tests/gpu/test_units_gpu.py).
//
// Every kernel calls the very function that the fused kernels call. Executed by: one thread per element unless
// said otherwise; reads and writes plain arrays in global memory; no synchronisation.
#include "expand.cuh"
#include "numerics.cuh"
#include "portable.cuh"
#include "trace.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "tensor_core.cuh"
#endif

using namespace mok;

namespace mok {

MOK_DEVICE i64 global_thread() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }

// One product of a batch: d = tc(a [M, K], b [N, K], c [M, N]); sizes are those of every product.
struct UnitProduct {
  const u16* a;
  const u16* b;
  const float* c;
  float* d;
  i32 num_m;
  i32 num_n;
  i32 num_k;
  i32 a_is_k_major;  // 0: a is stored [K, M]
  i32 b_is_k_major;  // 0: b is stored [K, N]
  i32 reserved;
};

MOK_DEVICE Operand unit_operand(const u16* data, i32 num_mn, i32 num_k, i32 is_k_major) {
  return Operand{data, nullptr, 0, 0, num_mn, num_k, is_k_major ? num_k : num_mn, is_k_major};
}

// Tile (blockIdx.x, blockIdx.y) of a product: x counts tiles along N, then M; y is the product in the batch.
template <class Tile>
MOK_DEVICE void unit_tile(const UnitProduct& unit) {
  __shared__ typename Tile::Shared shared;
  const i64 batch = blockIdx.y;
  const i32 tiles_n = (unit.num_n + Tile::kN - 1) / Tile::kN;
  const i32 first_m = blockIdx.x / tiles_n * Tile::kM, first_n = blockIdx.x % tiles_n * Tile::kN;
  const float* c = unit.c + batch * unit.num_m * unit.num_n;
  float* d = unit.d + batch * unit.num_m * unit.num_n;
  const auto is_inside = [&](i32 m, i32 n) { return m < unit.num_m && n < unit.num_n; };
  Tile tile;
  tile.start([&](i32 row, i32 column) {
    const i32 m = first_m + row, n = first_n + column;
    return is_inside(m, n) ? c[m * unit.num_n + n] : 0.0f;
  });
  tile.multiply(shared,
                unit_operand(unit.a + batch * unit.num_m * unit.num_k, unit.num_m, unit.num_k, unit.a_is_k_major),
                unit_operand(unit.b + batch * unit.num_n * unit.num_k, unit.num_n, unit.num_k, unit.b_is_k_major),
                first_m, first_n);
  tile.for_each([&](i32 row, i32 column, float& value) {
    const i32 m = first_m + row, n = first_n + column;
    if (is_inside(m, n)) d[m * unit.num_n + n] = value;
  });
}

}  // namespace mok

// ---------------------------------------------------------------- float32 rules

extern "C" __global__ void unit_exp(const float* x, float* result, i64 count) {
  if (global_thread() < count) result[global_thread()] = exp_rn(x[global_thread()]);
}

extern "C" __global__ void unit_sigmoid(const float* x, float* result, i64 count) {
  if (global_thread() < count) result[global_thread()] = sigmoid(x[global_thread()]);
}

extern "C" __global__ void unit_sigmoid_bf16(const u16* gate, float* result, i64 count) {
  if (global_thread() < count) result[global_thread()] = sigmoid_bf16(bf16_to_float(gate[global_thread()]));
}

extern "C" __global__ void unit_to_bf16(const float* x, u16* result, i64 count) {
  if (global_thread() < count) result[global_thread()] = float_to_bf16(x[global_thread()]);
}

extern "C" __global__ void unit_add_weighted(const float* acc, const float* weight, const float* value,
                                             float* result, i64 count) {
  const i64 i = global_thread();
  if (i < count) result[i] = add_weighted(acc[i], weight[i], value[i]);
}

// limit = 0: no clamp.
extern "C" __global__ void unit_swiglu_forward(const u16* gate, const u16* up, u16* h, float limit, i64 count) {
  const i64 i = global_thread();
  if (i >= count) return;
  float g = bf16_to_float(gate[i]), u = bf16_to_float(up[i]);
  if (limit > 0.0f) {
    g = clamp_gate(g, limit);
    u = clamp_up(u, limit);
  }
  h[i] = float_to_bf16(swiglu_forward_element(g, u));
}

extern "C" __global__ void unit_swiglu_backward(const u16* gate, const u16* up, const float* dh, u16* d_gate,
                                                u16* d_up, i64 count) {
  const i64 i = global_thread();
  if (i >= count) return;
  const SwigluGradient gradient = swiglu_backward_element(bf16_to_float(gate[i]), bf16_to_float(up[i]), dh[i]);
  d_gate[i] = float_to_bf16(gradient.d_gate);
  d_up[i] = float_to_bf16(gradient.d_up);
}

// One warp per CTA and row; columns a multiple of 128.
extern "C" __global__ void unit_dot128(const float* products, float* result, i32 columns) {
  float total = 0.0f;
  for (i32 first = 0; first < columns; first += kDotBlock)
    total = __fadd_rn(total, dot128_block(products + static_cast<i64>(blockIdx.x) * columns + first, threadIdx.x));
  if (threadIdx.x == 0) result[blockIdx.x] = total;
}

// ---------------------------------------------------------------- MXFP8

// Sixteen codes per thread under one scale byte.
extern "C" __global__ void unit_expand(const uint4* codes, const u8* scales, uint4* values, i64 count) {
  const i64 i = global_thread();
  if (i >= count) return;
  u32 pairs[8];
  expand_run(pairs, codes[i], scales[i]);
  values[2 * i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  values[2 * i + 1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// ---------------------------------------------------------------- tc

// tc_group itself, one thread per output, K a multiple of 16, both operands K-major.
extern "C" __global__ void unit_tc_group(const __grid_constant__ UnitProduct unit) {
  const i64 outputs = static_cast<i64>(unit.num_m) * unit.num_n, i = global_thread();
  if (i >= outputs) return;
  const i64 batch = blockIdx.y;
  const u16* a = unit.a + (batch * unit.num_m + i / unit.num_n) * unit.num_k;
  const u16* b = unit.b + (batch * unit.num_n + i % unit.num_n) * unit.num_k;
  float acc = unit.c[batch * outputs + i];
  for (i32 k = 0; k < unit.num_k; k += kChainStep) {
    u32 left[kChainStep], right[kChainStep];
    for (i32 j = 0; j < kChainStep; ++j) {
      left[j] = operand_word(a[k + j]);
      right[j] = operand_word(b[k + j]);
    }
    acc = tc_group(left, 1, right, 1, acc);
  }
  unit.d[batch * outputs + i] = acc;
}

extern "C" __global__ void __launch_bounds__(kPortableThreads)
    unit_tc_soft(const __grid_constant__ UnitProduct unit) {
  unit_tile<SoftTile>(unit);
}

extern "C" __global__ void __launch_bounds__(kPortableThreads)
    unit_tc_mma(const __grid_constant__ UnitProduct unit) {
  unit_tile<MmaTile>(unit);
}

// ---------------------------------------------------------------- wgmma (Hopper only)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace mok {

constexpr i32 kSpan = 64;  // bf16 of one 128-byte swizzled row

// Element `column` of row `row` in a tile of 128-byte rows, as TMA's 128-byte swizzle places it.
MOK_DEVICE i32 swizzled(i32 row, i32 column) { return row * kSpan + ((column / 8) ^ (row % 8)) * 8 + column % 8; }

// One operand of `num_mn` rows, k-block of 64 from k on, in the layout that kMajor's descriptors expect.
template <Major kMajor>
MOK_DEVICE void unit_fill(u16* tile, const Operand& operand, i32 num_mn, i32 k) {
  for (i32 i = threadIdx.x; i < num_mn * kSpan; i += blockDim.x) {
    const i32 mn = i / kSpan, depth = i % kSpan;
    const i32 place = kMajor == Major::kK ? swizzled(mn, depth)
                                          : mn / kSpan * kSpan * kSpan + swizzled(depth, mn % kSpan);
    tile[place] = operand.at(mn, k + depth);
  }
}

// The chain by wgmma.m64n128k16: M = 64, N = 128, one warpgroup per CTA.
template <Major kMajorA, Major kMajorB>
MOK_DEVICE void unit_wgmma(const UnitProduct& unit, u16* tile_a, u16* tile_b) {
  constexpr i32 kM = 64, kN = 128;
  const i64 batch = blockIdx.y;
  const Operand a = unit_operand(unit.a + batch * kM * unit.num_k, kM, unit.num_k, kMajorA == Major::kK);
  const Operand b = unit_operand(unit.b + batch * kN * unit.num_k, kN, unit.num_k, kMajorB == Major::kK);
  const i32 row = static_cast<i32>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  const auto element = [&](i32 i) {  // fragment register i: (row, row + 8) x (2 columns), every 8 columns
    return (batch * kM + row + i % 4 / 2 * 8) * kN + i / 4 * 8 + column + i % 2;
  };
  float d[64];
#pragma unroll
  for (i32 i = 0; i < 64; ++i) d[i] = unit.c[element(i)];
  for (i32 k = 0; k < unit.num_k; k += kSpan) {
    unit_fill<kMajorA>(tile_a, a, kM, k);
    unit_fill<kMajorB>(tile_b, b, kN, k);
    fence_proxy_async_shared();
    __syncthreads();
    const u64 left = matrix_descriptor<kMajorA>(shared_address(tile_a));
    const u64 right = matrix_descriptor<kMajorB>(shared_address(tile_b));
    for (i32 step = 0; step < min(kSpan, unit.num_k - k) / kChainStep; ++step) {
      wgmma_fence();
      wgmma_m64n128k16<kMajorA, kMajorB>(d, left + step * kDescriptorStepK16<kMajorA>,
                                         right + step * kDescriptorStepK16<kMajorB>, 1);
      wgmma_commit();
      wgmma_wait<0>();
    }
    __syncthreads();
  }
#pragma unroll
  for (i32 i = 0; i < 64; ++i) unit.d[element(i)] = d[i];
}

}  // namespace mok

extern "C" __global__ void __launch_bounds__(128) unit_tc_wgmma(const __grid_constant__ UnitProduct unit) {
  __shared__ __align__(1024) u16 tile_a[64 * kSpan];
  __shared__ __align__(1024) u16 tile_b[128 * kSpan];
  if (unit.a_is_k_major && unit.b_is_k_major) {
    unit_wgmma<Major::kK, Major::kK>(unit, tile_a, tile_b);
  } else if (unit.a_is_k_major) {
    unit_wgmma<Major::kK, Major::kMN>(unit, tile_a, tile_b);
  } else {
    unit_wgmma<Major::kMN, Major::kMN>(unit, tile_a, tile_b);
  }
}
#endif

// Clock stamps: every warp records `tasks` tasks, every pair of warps as many. Without MOK_TRACE: nothing.
extern "C" __global__ void unit_trace(i32 rank, i32 tasks) {
  trace_start(rank);
  for (i32 i = 0; i < tasks; ++i) {
    trace_task(kTraceStore, blockIdx.x, i);
    trace_task<2 * kWarpSize>(kTraceGateUp, blockIdx.x, i);
  }
}

// Size of UnitProduct, compared with tests/gpu/units.py by a test.
extern "C" __global__ void unit_layout(u64* words) {
  if (threadIdx.x == 0 && blockIdx.x == 0) words[0] = sizeof(UnitProduct);
}
