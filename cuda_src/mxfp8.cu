// Quantiser kernels: bf16 rows to MXFP8 and back (docs/spec.md, section 7).
//
// NumPy twin: mok_ref/mxfp8.py. Launched by mok_ref/gpu/mxfp8.py: x and dy by their owner before they travel,
// weights once per step. Executed by: eight elements a lane where rows are aligned, else one.
#include "expand.cuh"

using namespace mok;

namespace mok {

// Walks the blocks of a [rows, columns] matrix, one warp each: visit(row, block, column, is_inside).
template <class Visit>
MOK_DEVICE void for_each_block(i64 rows, i32 columns, Visit visit) {
  const i32 lane = threadIdx.x % kWarpSize, blocks = num_scale_blocks(columns);
  const i64 warps = static_cast<i64>(gridDim.x) * blockDim.x / kWarpSize;
  const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
  for (i64 item = first; item < rows * blocks; item += warps) {
    const i32 block = static_cast<i32>(item % blocks), column = block * kScaleBlock + lane;
    visit(item / blocks, block, column, column < columns);
  }
}

// Where rows are 16-byte aligned: eight neighbouring elements a lane, eight blocks a warp.
MOK_DEVICE void quantize_runs(const u16* values, u8* codes, u8* scales, i64 rows, i32 columns, i32 rule) {
  const i32 lane = threadIdx.x % kWarpSize, blocks = num_scale_blocks(columns);
  const i64 warps = static_cast<i64>(gridDim.x) * blockDim.x / kWarpSize, items = (rows * blocks + 7) / 8;
  const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
#pragma unroll 2
  for (i64 item = first; item < items; item += warps) {
    const i64 block = 8 * item + lane / 4, row = block / blocks;
    const i32 column = static_cast<i32>(block % blocks) * kScaleBlock + lane % 4 * 8;
    const bool is_inside = row < rows && column < columns;
    const i64 element = row * columns + column;
    const QuantizedRun run =
        quantize_run(is_inside ? *reinterpret_cast<const uint4*>(values + element) : make_uint4(0, 0, 0, 0), rule);
    if (!is_inside) continue;
    *reinterpret_cast<u64*>(codes + element) = run.codes[0] | static_cast<u64>(run.codes[1]) << 32;
    if (lane % 4 == 0) scales[block] = static_cast<u8>(run.scale);
  }
}

}  // namespace mok

extern "C" __global__ void __launch_bounds__(256)
    mxfp8_quantize(const u16* values, u8* codes, u8* scales, i64 rows, i32 columns, i32 rule) {
  if (columns % 8 == 0 && reinterpret_cast<u64>(values) % 16 == 0 && reinterpret_cast<u64>(codes) % 8 == 0) {
    quantize_runs(values, codes, scales, rows, columns, rule);
    return;
  }
  for_each_block(rows, columns, [&](i64 row, i32 block, i32 column, bool is_inside) {
    const i64 element = row * columns + column;
    const QuantizedElement quantized = quantize_block(is_inside ? values[element] : 0, rule);
    if (is_inside) codes[element] = quantized.code;
    if (column % kScaleBlock == 0) scales[row * num_scale_blocks(columns) + block] = quantized.scale;
  });
}

extern "C" __global__ void __launch_bounds__(256)
    mxfp8_dequantize(const u8* codes, const u8* scales, u16* values, i64 rows, i32 columns) {
  for_each_block(rows, columns, [&](i64 row, i32 block, i32 column, bool is_inside) {
    if (!is_inside) return;
    const i64 element = row * columns + column;
    values[element] = dequantize(codes[element], scales[row * num_scale_blocks(columns) + block]);
  });
}

// As mxfp8_quantize, with the scale words of the Hopper kernels: [matrices][ceil(columns / 64)][rows] u16, the scale
// bytes of a row's two blocks of 32, the first one low; 0 where a block does not exist. columns: a multiple of 8.
// *wide becomes 1 if a scale is not plain (expand.cuh); null: nobody asks.
// Executed by: eight lanes per row and 64 columns; a warp four neighbouring rows.
extern "C" __global__ void __launch_bounds__(256)
    mxfp8_quantize64(const u16* values, u8* codes, u16* scales, i64 matrices, i32 rows, i32 columns, i32 rule,
                     u32* wide) {
  const i32 lane = threadIdx.x % kWarpSize, unit = lane % 8, words = (columns + 63) / 64;
  const i64 warps = static_cast<i64>(gridDim.x) * blockDim.x / kWarpSize, groups = (matrices * rows + 3) / 4;
  const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
#pragma unroll 4
  for (i64 item = first; item < groups * words; item += warps) {
    const i64 row = item / words * 4 + lane / 8;
    const i32 word = static_cast<i32>(item % words), column = 64 * word + 8 * unit;
    const bool is_inside = row < matrices * rows && column < columns;
    const i64 element = row * columns + column;
    const QuantizedRun run =
        quantize_run(is_inside ? *reinterpret_cast<const uint4*>(values + element) : make_uint4(0, 0, 0, 0), rule);
    const u32 second = __shfl_sync(kFullWarp, run.scale, lane | 4);
    if (!is_plain(run.scale) && wide != nullptr) *wide = 1;
    if (!is_inside) continue;
    *reinterpret_cast<u64*>(codes + element) = run.codes[0] | static_cast<u64>(run.codes[1]) << 32;
    const u32 bytes = run.scale | (column + kScaleBlock < columns ? second << 8 : 0);
    if (unit == 0) scales[(row / rows * words + word) * rows + row % rows] = static_cast<u16>(bytes);
  }
}
