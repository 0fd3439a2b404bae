// The whole layer as a sequence of launches, for any GPU from sm_80 and any hidden and intermediate size.
//
// One launch per step and macrobatch, in stream order: no counters, no tickets, no waiting. It reads and
// writes the same tables, heap buffers and saved tensors as the megakernels and gives the same bits; it is
// also what the megakernels are checked against at production sizes.
//
// NumPy twins: mok_ref/dispatch.py, experts.py, swiglu.py. Launched by mok_ref/gpu/portable.py.
// Synchronisation: a barrier between the ranks before the first and after the last launch of a step.
#include "numerics.cuh"
#include "params.cuh"
#include "portable.cuh"
#include "schedule.cuh"

using namespace mok;

namespace mok {

// Rows that a launch treats. Routed: one macrobatch of the schedule. Dense (dense_rows >= 0): rows
// 0..dense_rows-1 of one expert, without a schedule (shared expert, router).
struct RowRange {
  i64 first_row;    // schedule row of the macrobatch's first row
  i32 num_rows;     // rows of the macrobatch (grid size); routed rows beyond the schedule are skipped
  i32 dense_rows;
};

struct RowTile {
  i32 expert;
  i32 valid;   // rows of the tile that are routes; the others are padding and written as +0
  i32 stored;  // rows of the tile that exist in the output
};

MOK_DEVICE RowTile row_tile_at(const LayerParams& layer, const RowRange& range, i32 row, i32 tile_rows) {
  if (range.dense_rows >= 0) {
    const i32 left = min(range.dense_rows - row, tile_rows);
    return RowTile{0, left, left};
  }
  const i32 block = static_cast<i32>((range.first_row + row) / kRowTile);
  if (block >= layer.info->num_row_blocks) return RowTile{0, 0, 0};
  const i32 valid = layer.row_block_valid[block] - row % kRowTile;
  return RowTile{layer.row_block_expert[block], min(max(valid, 0), tile_rows), tile_rows};
}

// Rows of `range` that the schedule fills (padding included).
MOK_DEVICE i32 rows_in_use(const LayerParams& layer, const RowRange& range) {
  if (range.dense_rows >= 0) return range.dense_rows;
  const i64 left = layer.info->num_rows - range.first_row;
  return static_cast<i32>(left < 0 ? 0 : (left < range.num_rows ? left : range.num_rows));
}

// ---------------------------------------------------------------- pull

struct PullParams {
  RowRange rows;
  u16* ring;      // [num_rows, H] bf16
  i32 buffer;     // SymmetricBuffer of the rows: bf16, or E4M3 codes
  i32 scales;     // SymmetricBuffer of the scale bytes, -1: rows are bf16
};

// One element of a peer's row: bf16 as it is, MXFP8 expanded to the value it stands for.
MOK_DEVICE u16 peer_element(const LayerParams& layer, const PullParams& pull, i32 rank, i64 token, i32 column) {
  const i32 hidden = layer.hidden_size;
  const auto buffer = static_cast<SymmetricBuffer>(pull.buffer);
  const i64 element = token * hidden + column;
  if (pull.scales < 0) return peer_buffer<u16>(layer, buffer, rank)[element];
  const u8 code = peer_buffer<u8>(layer, buffer, rank)[element];
  const i64 scale = token * num_scale_blocks(hidden) + column / kScaleBlock;
  return dequantize(code, peer_buffer<u8>(layer, static_cast<SymmetricBuffer>(pull.scales), rank)[scale]);
}

// dispatch: ring[row] = x of the row's token, from its owner's memory; padding rows are zero.
// One CTA per row.
MOK_DEVICE void pull_row(const LayerParams& layer, const PullParams& pull) {
  const i32 row = blockIdx.x;
  if (row >= rows_in_use(layer, pull.rows)) return;
  const i32 rank = layer.peer_rank[pull.rows.first_row + row];
  const i64 token = rank < 0 ? 0 : layer.peer_row[pull.rows.first_row + row] / layer.top_k;
  u16* ring = pull.ring + static_cast<i64>(row) * layer.hidden_size;
  if (pull.scales < 0 && layer.hidden_size % kRun == 0) {  // 16 bytes at a time
    const auto buffer = static_cast<SymmetricBuffer>(pull.buffer);
    const uint4* source = reinterpret_cast<const uint4*>(
        rank < 0 ? nullptr : peer_buffer<u16>(layer, buffer, rank) + token * layer.hidden_size);
    for (i32 i = threadIdx.x; i < layer.hidden_size / kRun; i += blockDim.x)
      reinterpret_cast<uint4*>(ring)[i] = rank < 0 ? uint4{} : source[i];
    return;
  }
  for (i32 column = threadIdx.x; column < layer.hidden_size; column += blockDim.x)
    ring[column] = rank < 0 ? 0 : peer_element(layer, pull, rank, token, column);
}

// ---------------------------------------------------------------- products along rows

enum ProductOutput : i32 { kStoreBf16 = 0, kStoreFloat = 1, kPushBf16 = 2 };

// out[row, n] = tc(a[row, :], b[expert][n, :]), with a second pair of operands continuing the chain (dx).
struct ProductParams {
  RowRange rows;
  Operand a[2];         // rows of the macrobatch
  Operand b[2];         // the experts' weights
  i32 num_segments;     // 1 or 2
  i32 num_columns;      // N
  i32 output;           // ProductOutput
  i32 reserved;
  void* out;            // [num_rows, N] bf16 or float32; unused by kPushBf16
};

MOK_DEVICE void store_product(const LayerParams& layer, const ProductParams& product, i32 row, i32 column,
                              bool is_route, float value) {
  const i64 element = static_cast<i64>(row) * product.num_columns + column;
  if (product.output == kStoreFloat) {
    static_cast<float*>(product.out)[element] = is_route ? value : 0.0f;
  } else if (product.output == kStoreBf16) {
    static_cast<u16*>(product.out)[element] = is_route ? float_to_bf16(value) : 0;
  } else if (is_route) {  // push: every route owns its row of the owner's combine buffer
    const i64 slot = layer.peer_row[product.rows.first_row + row];
    u16* combine = peer_buffer<u16>(layer, kCombine, layer.peer_rank[product.rows.first_row + row]);
    combine[slot * product.num_columns + column] = float_to_bf16(value);
  }
}

template <class Tile>
MOK_DEVICE void grouped_product(const LayerParams& layer, const ProductParams& product) {
  __shared__ typename Tile::Shared shared;
  const i32 first_row = blockIdx.y * Tile::kM, first_column = blockIdx.x * Tile::kN;
  const RowTile rows = row_tile_at(layer, product.rows, first_row, Tile::kM);
  if (rows.stored <= 0) return;
  Tile tile;
  tile.start([](i32, i32) { return 0.0f; });
  for (i32 segment = 0; segment < product.num_segments; ++segment) {
    Operand a = product.a[segment];
    a.num_mn = first_row + rows.valid;
    tile.multiply(shared, a, product.b[segment].part(rows.expert, 0), first_row, first_column);
  }
  tile.for_each([&](i32 row, i32 column, float& value) {
    if (row < rows.stored && first_column + column < product.num_columns)
      store_product(layer, product, first_row + row, first_column + column, row < rows.valid, value);
  });
}

// ---------------------------------------------------------------- products over rows (weight gradients)

// out[expert][m, n] = tc over the expert's rows of this macrobatch of (a[:, m], b[:, n]), continuing from
// start[expert][m, n]: rows ascending, one chain over all macrobatches (and over all ranks, for the weights
// that every rank holds).
struct GradientParams {
  RowRange rows;
  Operand a;            // [num_rows, M], MN-major
  Operand b;            // [num_rows, N], MN-major
  const float* start;   // may be `out`; null: +0
  float* out;
  i32 num_m;
  i32 num_n;
  i32 first_tile;       // tiles numbered along n, then m; the grid covers [first_tile, end_tile)
  i32 end_tile;
};

struct RowSpan {
  i32 begin, end;  // relative to the macrobatch's first row
};

MOK_DEVICE RowSpan expert_rows(const LayerParams& layer, const RowRange& range, i32 expert) {
  if (range.dense_rows >= 0) return RowSpan{0, range.dense_rows};
  const i64 begin = layer.expert_offset[expert] - range.first_row;
  const i64 end = begin + layer.expert_count[expert];
  return RowSpan{static_cast<i32>(begin > 0 ? begin : 0),
                 static_cast<i32>(end < range.num_rows ? end : range.num_rows)};
}

template <class Tile>
MOK_DEVICE void weight_gradient(const LayerParams& layer, const GradientParams& gradient) {
  __shared__ typename Tile::Shared shared;
  const i32 tile_index = gradient.first_tile + static_cast<i32>(blockIdx.x), expert = blockIdx.y;
  if (tile_index >= gradient.end_tile) return;
  const RowSpan rows = expert_rows(layer, gradient.rows, expert);
  const bool has_rows = rows.begin < rows.end;
  if (!has_rows && gradient.start == gradient.out) return;
  const i32 tiles_n = (gradient.num_n + Tile::kN - 1) / Tile::kN;
  const i32 first_m = tile_index / tiles_n * Tile::kM, first_n = tile_index % tiles_n * Tile::kN;
  const i64 matrix = static_cast<i64>(expert) * gradient.num_m * gradient.num_n;
  const auto is_inside = [&](i32 m, i32 n) { return m < gradient.num_m && n < gradient.num_n; };
  const auto element = [&](i32 m, i32 n) { return matrix + static_cast<i64>(m) * gradient.num_n + n; };
  Tile tile;
  tile.start([&](i32 row, i32 column) {
    const i32 m = first_m + row, n = first_n + column;
    return gradient.start != nullptr && is_inside(m, n) ? gradient.start[element(m, n)] : 0.0f;
  });
  if (has_rows) {
    Operand a = gradient.a.part(0, rows.begin), b = gradient.b.part(0, rows.begin);
    a.num_k = b.num_k = rows.end - rows.begin;
    tile.multiply(shared, a, b, first_m, first_n);
  }
  tile.for_each([&](i32 row, i32 column, float& value) {
    const i32 m = first_m + row, n = first_n + column;
    if (is_inside(m, n)) gradient.out[element(m, n)] = value;
  });
}

// ---------------------------------------------------------------- SwiGLU

struct SwigluParams {
  RowRange rows;
  const u16* gate;      // [num_rows, I] bf16, not clamped
  const u16* up;
  u16* h;               // forward: h; backward: hw = bf16(w * h)
  const float* dhu;     // backward: [num_rows, I]
  u16* d_gate;
  u16* d_up;
  i32 width;            // I
  i32 scale_rule;       // ScaleRule, -1: not quantised
};

// What a bf16 result means once stored: itself, or its MXFP8 value. A warp holds one block of 32.
MOK_DEVICE u16 stored_value(u16 bits, i32 scale_rule) {
  return scale_rule < 0 ? bits : quantized_value(bits, scale_rule);
}

// h = bf16((gate * sigmoid(gate)) * up) of the clamped gate and up. One warp per block of 32 columns.
MOK_DEVICE void swiglu_forward_rows(const LayerParams& layer, const SwigluParams& swiglu) {
  const i32 lane = threadIdx.x % kWarpSize;
  const i32 blocks = num_scale_blocks(swiglu.width);
  const i64 num_items = static_cast<i64>(rows_in_use(layer, swiglu.rows)) * blocks;
  const i64 warps = static_cast<i64>(gridDim.x) * blockDim.x / kWarpSize;
  for (i64 item = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize; item < num_items;
       item += warps) {
    const i32 column = static_cast<i32>(item % blocks) * kScaleBlock + lane;
    const i64 element = item / blocks * swiglu.width + column;
    const bool is_inside = column < swiglu.width;
    float gate = is_inside ? bf16_to_float(swiglu.gate[element]) : 0.0f;
    float up = is_inside ? bf16_to_float(swiglu.up[element]) : 0.0f;
    if (layer.has_limit) {
      gate = clamp_gate(gate, layer.swiglu_limit);
      up = clamp_up(up, layer.swiglu_limit);
    }
    const u16 h = stored_value(float_to_bf16(swiglu_forward_element(gate, up)), swiglu.scale_rule);
    if (is_inside) swiglu.h[element] = h;
  }
}

// One element of the SwiGLU backward: writes d_gate, d_up, hw and returns the product dhu * h of dot128.
MOK_DEVICE float swiglu_backward_at(const LayerParams& layer, const SwigluParams& swiglu, i64 row, i32 column,
                                    float weight) {
  const i64 element = row * swiglu.width + column;
  const bool is_inside = column < swiglu.width;
  const float raw_gate = is_inside ? bf16_to_float(swiglu.gate[element]) : 0.0f;
  const float raw_up = is_inside ? bf16_to_float(swiglu.up[element]) : 0.0f;
  const float dhu = is_inside ? swiglu.dhu[element] : 0.0f;
  const float limit = layer.swiglu_limit;
  const float gate = layer.has_limit ? clamp_gate(raw_gate, limit) : raw_gate;
  const float up = layer.has_limit ? clamp_up(raw_up, limit) : raw_up;
  SwigluGradient gradient = swiglu_backward_element(gate, up, __fmul_rn(weight, dhu));
  if (layer.has_limit && raw_gate > limit) gradient.d_gate = 0.0f;
  if (layer.has_limit && fabsf(raw_up) > limit) gradient.d_up = 0.0f;
  const u16 h = stored_value(float_to_bf16(gradient.h), swiglu.scale_rule);
  const u16 d_gate = stored_value(float_to_bf16(gradient.d_gate), swiglu.scale_rule);
  const u16 d_up = stored_value(float_to_bf16(gradient.d_up), swiglu.scale_rule);
  if (!is_inside) return 0.0f;
  swiglu.d_gate[element] = d_gate;
  swiglu.d_up[element] = d_up;
  swiglu.h[element] = float_to_bf16(__fmul_rn(weight, bf16_to_float(h)));
  return __fmul_rn(dhu, bf16_to_float(h));
}

// SwiGLU backward of one row and its router weight's gradient, d_topk_weights = dot128(dhu * h), which goes
// to the token's owner. One warp per row; `products` is 128 floats of the warp's shared memory.
MOK_DEVICE void swiglu_backward_row(const LayerParams& layer, const SwigluParams& swiglu, i32 row,
                                    float* products) {
  const i32 lane = threadIdx.x % kWarpSize;
  const bool is_routed = swiglu.rows.dense_rows < 0;
  const i64 schedule_row = swiglu.rows.first_row + row;
  const float weight = is_routed ? layer.row_weight[schedule_row] : 1.0f;  // 1 * v is exact
  float total = 0.0f;
  for (i32 first = 0; first < swiglu.width; first += kDotBlock) {
    for (i32 i = lane; i < kDotBlock; i += kWarpSize)
      products[i] = swiglu_backward_at(layer, swiglu, row, first + i, weight);
    __syncwarp();
    total = __fadd_rn(total, dot128_block(products, lane));
    __syncwarp();
  }
  if (!is_routed || lane != 0 || layer.peer_rank[schedule_row] < 0) return;
  peer_buffer<float>(layer, kDTopkWeights, layer.peer_rank[schedule_row])[layer.peer_row[schedule_row]] = total;
}

}  // namespace mok

// ---------------------------------------------------------------- kernels

extern "C" __global__ void __launch_bounds__(kPortableThreads)
    portable_pull(const __grid_constant__ LayerParams layer, const __grid_constant__ PullParams pull) {
  if (!aborted(layer.abort_flag)) pull_row(layer, pull);
}

extern "C" __global__ void __launch_bounds__(kPortableThreads, 2)
    portable_product_soft(const __grid_constant__ LayerParams layer,
                          const __grid_constant__ ProductParams product) {
  if (!aborted(layer.abort_flag)) grouped_product<SoftTile>(layer, product);
}

extern "C" __global__ void __launch_bounds__(kPortableThreads, 2)
    portable_product_mma(const __grid_constant__ LayerParams layer,
                         const __grid_constant__ ProductParams product) {
  if (!aborted(layer.abort_flag)) grouped_product<MmaTile>(layer, product);
}

extern "C" __global__ void __launch_bounds__(kPortableThreads, 2)
    portable_gradient_soft(const __grid_constant__ LayerParams layer,
                           const __grid_constant__ GradientParams gradient) {
  if (!aborted(layer.abort_flag)) weight_gradient<SoftTile>(layer, gradient);
}

extern "C" __global__ void __launch_bounds__(kPortableThreads, 2)
    portable_gradient_mma(const __grid_constant__ LayerParams layer,
                          const __grid_constant__ GradientParams gradient) {
  if (!aborted(layer.abort_flag)) weight_gradient<MmaTile>(layer, gradient);
}

extern "C" __global__ void __launch_bounds__(kPortableThreads)
    portable_swiglu_forward(const __grid_constant__ LayerParams layer,
                            const __grid_constant__ SwigluParams swiglu) {
  if (!aborted(layer.abort_flag)) swiglu_forward_rows(layer, swiglu);
}

extern "C" __global__ void __launch_bounds__(kPortableThreads)
    portable_swiglu_backward(const __grid_constant__ LayerParams layer,
                             const __grid_constant__ SwigluParams swiglu) {
  __shared__ float products[kPortableThreads / kWarpSize][kDotBlock];
  const i32 warp = static_cast<i32>(threadIdx.x) / kWarpSize;
  const i32 row = static_cast<i32>(blockIdx.x) * (kPortableThreads / kWarpSize) + warp;
  if (aborted(layer.abort_flag)) return;
  if (row < rows_in_use(layer, swiglu.rows)) swiglu_backward_row(layer, swiglu, row, products[warp]);
}

// to[i] = from[i], exact: a bf16 gradient that a chain continues.
extern "C" __global__ void __launch_bounds__(kPortableThreads)
    portable_widen(const u16* from, float* to, i64 num_elements) {
  const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_elements; i += stride)
    to[i] = bf16_to_float(from[i]);
}

// to[i] = bf16(from[i]): the one rounding of a gradient that is wanted in bf16.
extern "C" __global__ void __launch_bounds__(kPortableThreads)
    portable_round(const float* from, u16* to, i64 num_elements) {
  const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_elements; i += stride)
    to[i] = float_to_bf16(from[i]);
}

// Sizes of the parameter structs above, compared with mok_ref/gpu/portable.py by a test.
extern "C" __global__ void portable_layout(u64* words) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  words[0] = sizeof(Operand);
  words[1] = sizeof(PullParams);
  words[2] = sizeof(ProductParams);
  words[3] = sizeof(GradientParams);
  words[4] = sizeof(SwigluParams);
}
