// What the two Hopper backward kernels are given beside LayerParams: tensor maps, buffers, counters.
//
// NumPy twin: mok_ref/gpu/hopper_backward.py (DGRAD_PARAMS, WGRAD_PARAMS and the map names, same order).
// Add fields at the END only, in both files.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

namespace mok {

// Maps of bf16 matrices [experts, rows, columns], boxes of 64 columns (128 bytes, 128-byte swizzle):
//   K-major operand    (columns, rows, experts), box of all rows of the tile: 128 of A, 256 of B
//   MN-major operand   columns % 64 == 0: (64, rows, columns / 64, experts), box (64, 64, n): n 8 KB blocks of 64 rows
//                      along K, n = 2 for A and 4 for B; otherwise (columns, rows, 1, experts), box (64, 64, 1)
//   stored tile        (columns, rows, experts), box of 64 rows
// so nothing is ever transposed in memory. What lies outside a matrix arrives as +0 and is not stored: H and I need
// only be multiples of 8.
struct DgradOperands {
  TensorMap dy, x, d_gate, d_up;     // A, K-major
  TensorMap w_gate, w_up, w_down;    // B, MN-major: [experts, I, H], [experts, I, H], [experts, H, I]
  TensorMap w_gate_rows, w_up_rows;  // B, K-major, where gate and up are made again
  TensorMap gate_saved, up_saved;    // [max_saved_rows, I] by global row, 128 rows at a time
  TensorMap gate_again, up_again;    // [rows, I] by ring row: made again by this kernel
  TensorMap d_gate_out, d_up_out, hw_out;  // [rows, I], stored
};

struct DgradMaps {
  DgradOperands routed;   // rows = ring rows of the macrobatch
  DgradOperands shared;   // rows = this rank's tokens, one expert; no map of it is used without a shared expert
};

struct DgradParams {
  i32 macro_index;         // macrobatch that this launch treats; the shared expert goes with macrobatch 0
  i32 macro_blocks;        // row blocks of the rings
  i32 mini_blocks;         // row blocks walked together
  i32 x_in_ring;           // 1: forward left the x rows of this macrobatch in the ring
  i32 shared_saved_rows;   // tokens whose shared gate and up forward kept: all or none
  i32 shared_blocks;       // row blocks that `counters` has room for on the shared expert's side
  u32* counters;           // DgradCounters, zero at launch
  u16* dy_ring;            // [macro rows, H]
  u16* x_ring;             // [macro rows, H]
  u16* gate_again;         // [macro rows, I]
  u16* up_again;           // [macro rows, I]
  u16* shared_gate_again;  // [tokens, Is]
  u16* shared_up_again;    // [tokens, Is]
  u16* shared_dx;          // [tokens, H]
  float* dot_partial;      // [ceil(I / 128)][macro rows] block sums of dot128
};

// The counters of one dgrad launch. All of them only grow, and none is shared between launches.
struct DgradCounters {
  u32* base;
  i32 macro_blocks;

  MOK_DEVICE u32* tile_ticket() const { return base; }
  MOK_DEVICE u32* hidden_done() const { return base + 16; }  // routed hidden tiles that are stored
  MOK_DEVICE u32* pull_ticket() const { return base + 32; }
  MOK_DEVICE u32* first_pull_ticket() const { return base + 48; }
  MOK_DEVICE u32* dy_ready(i32 block) const { return base + 64 + block; }
  MOK_DEVICE u32* x_ready(i32 block) const { return base + 64 + macro_blocks + block; }
  MOK_DEVICE u32* again_ready(i32 block) const { return base + 64 + 2 * macro_blocks + block; }
  MOK_DEVICE u32* hidden_ready(i32 block) const { return base + 64 + 3 * macro_blocks + block; }
  MOK_DEVICE u32* shared_again_ready(i32 block) const { return base + 64 + 4 * macro_blocks + block; }
  MOK_DEVICE u32* shared_hidden_ready(i32 block, i32 shared_blocks) const {
    return base + 64 + 4 * macro_blocks + shared_blocks + block;
  }
};

// Products whose K axis is rows: dW = rows_out^T rows_in.
constexpr i32 kWgradProducts = 4;

struct WgradMaps {
  TensorMap rows_out[kWgradProducts];  // A, MN-major, [rows, M]: dy, d_gate, d_up (, d_logits)
  TensorMap rows_in[kWgradProducts];   // B, MN-major, [rows, N]: hw, x, x (, x)
  TensorMap gradient[kWgradProducts];  // [experts, M, N] of `gradient_type`, stored: 16 rows of 128 bytes
};

enum GradientType : i32 { kFloat32Gradient = 0, kBf16Gradient = 1 };

struct WgradParams {
  i32 macro_index;              // routed: macrobatch of this launch
  i32 macro_blocks;
  i32 num_products;
  i32 gradient_type;            // what the finished chain is stored as
  i32 start_type;               // GradientType of `start`
  i32 accumulate;               // 1: chains begin with `start` instead of +0
  i32 first_tile;               // chain kernel: its share of the tiles
  i32 end_tile;
  i32 num_rows;                 // chain kernel: tokens of this rank
  i32 rows[kWgradProducts];     // M of each product
  i32 columns[kWgradProducts];  // N of each product
  u32* ticket;                  // zero at launch
  const void* start[kWgradProducts];  // [experts, M, N] where a chain begins
  void* gradient[kWgradProducts];     // [experts, M, N] where it ends
  float* straddling[kWgradProducts];  // [2, M, N]: chains that end in a later launch, gradients being bf16
  i32 bulk_stores;                    // 1: `gradient` maps exist, finished tiles leave through the copy engine (always
                                      // where gradients are bf16)
  i32 with_dx;                        // 1: dx rows of all ranks are here; dx is made beside the weight gradients
  const u32* hidden_done;             // of the dgrad launch that may still be making dx; null: it is over
};

}  // namespace mok
