// The pipeline of backward_pipeline.cuh for MXFP8 operands: codes travel, bf16 values are multiplied.
//
//   value = code * 2^(scale - 127), exact in bf16                                          (spec eq. 7.2)
//
// NumPy twin: mok_ref/mxfp8.py: dequantize; mok_ref/tensor_core.py: tc.
// The loading lane brings a k-block's codes and scales into one of two code stages. All 256 multiplying threads expand
// k-block i + 1 into a stage of the ring while the tensor cores multiply k-block i, whoever has rows in the tile:
// both warpgroups share operand B. A stage of the ring is full once every multiplying warp has arrived, or
// (`announce_stage`) when TMA has filled it with bf16; both kinds may follow each other in any order.
//
// A code stage: 384 rows (128 of A, 256 of B) of 64 codes, then as many pairs of scale bytes. A row of an MN-major
// tile is a row of its 64 x 64 boxes, so row r becomes bytes 128 r .. 128 r + 127 of the stage for either major.
// Maps: codes as in backward_params.cuh with boxes of bytes, not swizzled; scales [batch, ceil(columns / 64), rows] of
// pairs of bytes, whose map lies `kScaleMaps` maps behind that of the codes. Outside a matrix both read as 0, a zero.
#pragma once
#include "backward_params.cuh"
#include "backward_pipeline.cuh"
#include "expand.cuh"

namespace mok {

constexpr u32 kCodeBoxBytes = 64 * 64;
constexpr u32 kScaleOffset = kCodeRows * kDepthBlock;  // of the pairs of scales in a code stage
constexpr u32 kCodeRowBytes = kDepthBlock + 2;         // one row with its scales
static_assert(!kMxfp8 || kCodeStages < kStages, "a loader further ahead than that could miss a phase of `empty`");

// Maps of one wgrad launch: rows as codes (hw as bf16), and behind them their scales (none of hw).
struct MxfpWgradMaps {
  WgradMaps codes, scales;
};

// ---- loading lane ----

// Codes and scales of k-block k; `first_row` is the operand's first row in the code stage.
template <Major kMajor, i32 kBoxes>
MOK_DEVICE void load_codes(u32 stage, u32 first_row, const Operand& operand, i32 scale_maps, i32 k, u32 barrier) {
  const u32 codes = stage + first_row * kDepthBlock, scales = stage + kScaleOffset + 2 * first_row;
  const i32 block = operand.column / 64;
  if constexpr (kMajor == Major::kK) {
    tma_load_3d(codes, operand.map, operand.column + kDepthBlock * k, operand.row, operand.batch, barrier);
    tma_load_3d(scales, operand.map + scale_maps, operand.row, block + k, operand.batch, barrier);
    return;
  }
  const i32 row = operand.row + kDepthBlock * k;
  if (operand.whole) {
    tma_load_4d(codes, operand.map, 0, row, block, operand.batch, barrier);
  } else {
    for (i32 box = 0; box < kBoxes; ++box) {
      tma_load_4d(codes + box * kCodeBoxBytes, operand.map, operand.column + 64 * box, row, 0, operand.batch, barrier);
    }
  }
  tma_load_3d(scales, operand.map + scale_maps, row, block, operand.batch, barrier);
}

// K-blocks first .. end - 1 of A, and of B as codes (kCodesB) or as bf16 straight into the ring.
template <Major kMajorA, Major kMajorB, bool kCodesB>
MOK_DEVICE void load_coded_product(const SharedLayout& layout, StageCursor& cursor, const Operand& a, const Operand& b,
                                   i32 scale_maps, i32 first, i32 end) {
  for (i32 k = first; k < end; ++k) {
    if constexpr (!kCodesB) {  // before the codes: nobody arrives at `full` without them
      const u32 full = layout.full(cursor.index);
      mbarrier_wait(layout.empty(cursor.index), cursor.parity ^ 1);
      mbarrier_expect_tx(full, kTileBBytes);
      load_operand<kMajorB, 4>(layout.tile_b(cursor.index), b, k, full);
    }
    const u32 stage = layout.code_stage(cursor.codes.index), full = layout.code_full(cursor.codes.index);
    mbarrier_wait(layout.code_empty(cursor.codes.index), cursor.codes.parity ^ 1);
    mbarrier_arrive_expect_tx(full, (kTileRows + (kCodesB ? kTileColumns : 0)) * kCodeRowBytes);
    load_codes<kMajorA, 2>(stage, 0, a, scale_maps, k, full);
    if constexpr (kCodesB) load_codes<kMajorB, 4>(stage, kTileRows, b, scale_maps, k, full);
    cursor.codes.advance();
    cursor.advance();
  }
}

// ---- multiplying warps ----

// The next k-block's first `rows` rows (128: A alone, 384: both operands) from codes to bf16; this warp's part of it.
// A thread takes 16 codes of every 64th row. Eight lanes write two rows: all 32 banks.
MOK_DEVICE void expand_k_block(const SharedLayout& layout, StageCursor& cursor, i32 rows) {
  const u32 thread = threadIdx.x - 4 * kWarpSize, row = thread / 4, quarter = thread % 4;
  const u32 stage = layout.code_stage(cursor.codes.index);
  const u32 codes = stage + thread * 16, scales = stage + kScaleOffset + 2 * row + quarter / 2;
  const u32 target = layout.tile_a(cursor.index) + row * 128 + (((2 * quarter) ^ (row & 7)) << 4);
  mbarrier_wait(layout.code_full(cursor.codes.index), cursor.codes.parity);
  mbarrier_wait(layout.empty(cursor.index), cursor.parity ^ 1);
  uint4 run = ld_shared_v4(codes);
  u32 scale = ld_shared_u8(scales);
  for (i32 r = 0; r < rows; r += 64) {
    const i32 next = min(r + 64, rows - 64);  // on its way while this one is expanded
    const uint4 next_run = ld_shared_v4(codes + next * kDepthBlock);
    const u32 next_scale = ld_shared_u8(scales + 2 * next);
    u32 pairs[8];
    expand_run(pairs, run, scale);
    st_shared_v4(target + r * 128, pairs[0], pairs[1], pairs[2], pairs[3]);
    st_shared_v4((target ^ 16) + r * 128, pairs[4], pairs[5], pairs[6], pairs[7]);
    run = next_run;
    scale = next_scale;
  }
  fence_proxy_async_shared();
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) {
    mbarrier_arrive(layout.full(cursor.index));
    mbarrier_arrive(layout.code_empty(cursor.codes.index));
  }
  cursor.codes.advance();
  cursor.advance();
}

// Warpgroup without rows in this tile: its share of the expansion, nothing else.
MOK_DEVICE void expand_only(const SharedLayout& layout, StageCursor& cursor, i32 depth, i32 rows) {
  for (i32 k = 0; k < depth; ++k) {
    const RingCursor<kStages> stage = cursor;
    expand_k_block(layout, cursor, rows);
    mbarrier_wait(layout.full(stage.index), stage.parity);  // or a later wait for this stage could pass a turn early
    release_stage(layout, stage.index);
  }
}

// The products of one k-block, once it is full.
template <Major kMajorA, Major kMajorB>
MOK_DEVICE void multiply_k_block(float (&d)[128], const SharedLayout& layout, const RingCursor<kStages>& cursor,
                                 i32 group, i32 scale_d) {
  mbarrier_wait(layout.full(cursor.index), cursor.parity);
  wgmma_fence();
  tc_k64<kMajorA, kMajorB>(d, layout.tile_a(cursor.index) + group * kBoxBytes, layout.tile_b(cursor.index), scale_d);
  wgmma_commit();
}

// Behind the expansion of k-block k: k - 2 is through, its stage goes back. It is the one that `cursor` is about to
// fill.
static_assert(!kMxfp8 || kStages == 3, "two k-blocks multiply while a third is expanded");
MOK_DEVICE void release_last_but_one(const SharedLayout& layout, const StageCursor& cursor, i32 k) {
  wgmma_wait<1>();
  if (k >= 2) release_stage(layout, cursor.index);
}

// d = tc(a, b, scale_d ? d : +0) as `multiply_groups` of backward_pipeline.cuh: K of `depth` >= 1 groups of 16, of the
// last k-block only those that hold anything unless it is the only one. `rows` as in `expand_k_block`. `shadow` is
// called once per k-block with products under way; it must not touch d.
template <Major kMajorA, Major kMajorB, typename Shadow>
MOK_DEVICE void multiply_codes(float (&d)[128], const SharedLayout& layout, StageCursor& cursor, i32 depth, i32 group,
                               i32 scale_d, i32 rows, Shadow&& shadow) {
  const i32 last = (depth - 1) / 4, tail = (depth - 1) & 3;
  RingCursor<kStages> product = cursor;
  expand_k_block(layout, cursor, rows);
  trace_task<4 * kWarpSize>(kTraceWaitOperands, 0, 0);
  multiply_k_block<kMajorA, kMajorB>(d, layout, product, group, scale_d);
  shadow();
  product.advance();
  for (i32 k = 1; k < last; ++k) {
    expand_k_block(layout, cursor, rows);
    release_last_but_one(layout, cursor, k);
    multiply_k_block<kMajorA, kMajorB>(d, layout, product, group, 1);
    shadow();
    product.advance();
  }
  if (last > 0) {
    expand_k_block(layout, cursor, rows);
    release_last_but_one(layout, cursor, last);
    mbarrier_wait(layout.full(product.index), product.parity);
    const u64 a = matrix_descriptor<kMajorA>(layout.tile_a(product.index) + group * kBoxBytes);
    const u64 b = matrix_descriptor<kMajorB>(layout.tile_b(product.index));
    constexpr u64 kStepA = kDescriptorStepK16<kMajorA>, kStepB = kDescriptorStepK16<kMajorB>;
    wgmma_fence();
    wgmma_m64n256k16<kMajorA, kMajorB>(d, a, b, 1);
    wgmma_commit();
#pragma unroll
    for (i32 step = 1; step < 4; ++step) {
      if (tail >= step) {
        wgmma_fence();
        wgmma_m64n256k16<kMajorA, kMajorB>(d, a + step * kStepA, b + step * kStepB, 1);
        wgmma_commit();
      }
    }
    product.advance();
  }
  wgmma_wait<0>();
  if (last > 0) release_stage(layout, (product.index + 1) % kStages);
  release_stage(layout, (product.index + 2) % kStages);
}

}  // namespace mok
