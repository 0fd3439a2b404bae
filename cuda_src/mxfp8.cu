// Quantiser kernels: bf16 rows to MXFP8 and back (docs/spec.md, section 7).
//
// NumPy twin: mok_ref/mxfp8.py. Launched by mok_ref/gpu/mxfp8.py: x and dy by their owner before they travel,
// weights once per step. Executed by: one warp per block of 32 elements, one lane per element.
#include "mxfp8.cuh"

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

}  // namespace mok

extern "C" __global__ void __launch_bounds__(256)
    mxfp8_quantize(const u16* values, u8* codes, u8* scales, i64 rows, i32 columns, i32 rule) {
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
