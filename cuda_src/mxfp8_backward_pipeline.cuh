// The pipeline of backward_pipeline.cuh for MXFP8 operands: codes travel, bf16 values are multiplied.
//
//   value = code * 2^(scale - 127), exact in bf16                                          (spec eq. 7.2)
//
// NumPy twin: mok_ref/mxfp8.py: dequantize; mok_ref/tensor_core.py: tc.
// The loading lane brings a k-block's codes and scales into one of two code stages. All 256 multiplying threads expand
// k-block i + 1 into a stage of the ring between the products of k-block i, whoever has rows in the tile:
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

// A wait ends after this many tries, far beyond any limit a caller may set (mbarrier_wait): each may suspend the warp.
constexpr u32 kMostTries = 1u << 31;

// An mbarrier and the parity of the phase to wait for.
struct Awaited {
  u32 barrier, parity;

  MOK_DEVICE bool is_over() const { return mbarrier_try_wait(barrier, parity); }
};

// One latency, not three.
MOK_DEVICE void wait_for_all(const Awaited& first, const Awaited& second, const Awaited& third) {
  u32 tries = 0;
  bool over;
#pragma unroll 1
  do {
    const bool one = first.is_over(), two = second.is_over();
    over = third.is_over() && one && two;
  } while (!over && ++tries < kMostTries);
  if (!over) __trap();
}

// A multiplying thread's part of the expansion of one k-block: 16 codes of every 64th of its first 64 kRuns rows (2: A
// alone, 6: both operands). Eight lanes write two rows: all 32 banks. It goes in parts, so that products can be
// issued between them: a warp that issues one waits until the tensor core has room for it. Nothing in it branches:
// scales that need a second multiplication are few, and what they belong to is expanded once more before it counts.
template <i32 kRuns>
struct Expansion {
  u32 codes, scales, target;
  u32 scale[kRuns];
  uint4 run[kRuns];

  MOK_DEVICE Expansion(const SharedLayout& layout, const StageCursor& cursor) {
    const u32 thread = threadIdx.x - 4 * kWarpSize, row = thread / 4, quarter = thread % 4;
    const u32 stage = layout.code_stage(cursor.codes.index);
    codes = stage + thread * 16;
    scales = stage + kScaleOffset + 2 * row + quarter / 2;
    target = layout.tile_a(cursor.index) + row * 128 + (((2 * quarter) ^ (row & 7)) << 4);
  }

  // Codes are there and so is room; the first codes are on their way.
  MOK_DEVICE void begin() {
#pragma unroll
    for (i32 i = 0; i < kRuns; ++i) scale[i] = ld_shared_u8(scales + 128 * i);
    load<0>();
    load<1>();
  }

  template <i32 kRun>
  MOK_DEVICE void load() {
    if constexpr (kRun < kRuns) run[kRun] = ld_shared_v4(codes + kRun * kCodeBoxBytes);
  }

  MOK_DEVICE void store(i32 i, const u32 (&pairs)[8]) const {
    const u32 row = target + i * kBoxBytes;
    st_shared_v4(row, pairs[0], pairs[1], pairs[2], pairs[3]);
    st_shared_v4(row ^ 16, pairs[4], pairs[5], pairs[6], pairs[7]);
  }

  // Rows 64 kRun .. 64 kRun + 63; the codes of the run after the next are asked for before.
  template <i32 kRun>
  MOK_DEVICE void expand() {
    if constexpr (kRun < kRuns) {
      load<kRun + 2>();
      const u32 words[4] = {run[kRun].x, run[kRun].y, run[kRun].z, run[kRun].w}, first = plain_factor(scale[kRun]);
      u32 pairs[8];
#pragma unroll
      for (i32 i = 0; i < 4; ++i) expand_word(words[i], first, pairs[2 * i], pairs[2 * i + 1]);
      store(kRun, pairs);
    }
  }

  // Once more, for any scale.
  MOK_DEVICE void expand_wide() const {
#pragma unroll 1
    for (i32 i = 0; i < kRuns; ++i) {
      u32 pairs[8];
      expand_run(pairs, ld_shared_v4(codes + i * kCodeBoxBytes), ld_shared_u8(scales + 128 * i));
      store(i, pairs);
    }
  }

  // The k-block is full and its codes are free, as far as this warp is concerned.
  MOK_DEVICE void finish(const SharedLayout& layout, StageCursor& cursor) const {
    u32 largest = 0;
#pragma unroll
    for (i32 i = 0; i < kRuns; ++i) largest = max(largest, scale[i]);
    if (!is_plain(largest)) expand_wide();
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      mbarrier_arrive(layout.full(cursor.index));
      mbarrier_arrive(layout.code_empty(cursor.codes.index));
    }
    cursor.codes.advance();
    cursor.advance();
  }
};

// The next k-block as a whole.
template <i32 kRuns>
MOK_DEVICE void expand_k_block(const SharedLayout& layout, StageCursor& cursor) {
  mbarrier_wait(layout.code_full(cursor.codes.index), cursor.codes.parity);
  mbarrier_wait(layout.empty(cursor.index), cursor.parity ^ 1);
  Expansion<kRuns> next(layout, cursor);
  next.begin();
  next.template expand<0>();
  next.template expand<1>();
  next.template expand<2>();
  next.template expand<3>();
  next.template expand<4>();
  next.template expand<5>();
  next.finish(layout, cursor);
}

// Warpgroup without rows in this tile: its share of the expansion, nothing else.
template <i32 kRuns>
MOK_DEVICE void expand_share(const SharedLayout& layout, StageCursor& cursor, i32 depth) {
  for (i32 k = 0; k < depth; ++k) {
    const RingCursor<kStages> product = cursor;
    expand_k_block<kRuns>(layout, cursor);
    mbarrier_wait(layout.full(product.index), product.parity);
    release_stage(layout, product.index);
  }
}

MOK_DEVICE void expand_only(const SharedLayout& layout, StageCursor& cursor, i32 depth, i32 rows) {
  if (rows == kCodeRows) {
    expand_share<kCodeRows / 64>(layout, cursor, depth);
  } else {
    expand_share<kTileRows / 64>(layout, cursor, depth);
  }
}

// Operands of the four groups of 16 of a k-block.
template <Major kMajorA, Major kMajorB>
struct GroupOperands {
  u64 a, b;

  MOK_DEVICE GroupOperands(const SharedLayout& layout, u32 stage, i32 group)
      : a(matrix_descriptor<kMajorA>(layout.tile_a(stage) + group * kBoxBytes)),
        b(matrix_descriptor<kMajorB>(layout.tile_b(stage))) {}

  // Steps stay inside the address field.
  MOK_DEVICE static u64 step_by(u64 descriptor, u32 step) {
    return (descriptor & 0xffffffff00000000ull) | (static_cast<u32>(descriptor) + step);
  }
  MOK_DEVICE void issue(float (&d)[128], i32 step) const {
    wgmma_m64n256k16<kMajorA, kMajorB>(d, step_by(a, step * kDescriptorStepK16<kMajorA>),
                                       step_by(b, step * kDescriptorStepK16<kMajorB>), 1);
  }
  // A batch of its own.
  MOK_DEVICE void multiply(float (&d)[128], i32 step) const {
    wgmma_fence();
    issue(d, step);
    wgmma_commit();
  }
};

// Before k-block k: k - 2 is through, its stage goes back. It is the one that `cursor` is about to fill.
static_assert(!kMxfp8 || kStages == 3, "two k-blocks multiply while a third is expanded");
MOK_DEVICE void release_last_but_one(const SharedLayout& layout, const StageCursor& cursor, i32 k) {
  wgmma_wait<4>();
  if (k >= 2) release_stage(layout, cursor.index);
}

// The products of k-block `product`, and between them the expansion of the next.
template <Major kMajorA, Major kMajorB, i32 kRuns>
MOK_DEVICE void multiply_and_expand(float (&d)[128], const SharedLayout& layout, RingCursor<kStages>& product,
                                    StageCursor& cursor, i32 group) {
  wait_for_all(Awaited{layout.full(product.index), product.parity},
               Awaited{layout.code_full(cursor.codes.index), cursor.codes.parity},
               Awaited{layout.empty(cursor.index), cursor.parity ^ 1});
  Expansion<kRuns> next(layout, cursor);
  next.begin();
  const GroupOperands<kMajorA, kMajorB> operands(layout, product.index, group);
  operands.multiply(d, 0);
  next.template expand<0>();
  next.template expand<1>();
  operands.multiply(d, 1);
  next.template expand<2>();
  next.template expand<3>();
  operands.multiply(d, 2);
  next.template expand<4>();
  next.template expand<5>();
  operands.multiply(d, 3);
  next.finish(layout, cursor);
  product.advance();
}

template <Major kMajorA, Major kMajorB, i32 kRuns>
MOK_DEVICE void multiply_runs(float (&d)[128], const SharedLayout& layout, StageCursor& cursor, i32 depth, i32 group,
                              i32 scale_d) {
  const i32 last = (depth - 1) / 4, tail = (depth - 1) & 3;
  RingCursor<kStages> product = cursor;
  expand_k_block<kRuns>(layout, cursor);
  trace_task<4 * kWarpSize>(kTraceWaitOperands, 0, 0);
  mbarrier_wait(layout.full(product.index), product.parity);
  wgmma_fence();
  tc_k64<kMajorA, kMajorB>(d, layout.tile_a(product.index) + group * kBoxBytes, layout.tile_b(product.index), scale_d);
  wgmma_commit();
  if (last > 0) {
    expand_k_block<kRuns>(layout, cursor);
    product.advance();
#pragma unroll 1
    for (i32 k = 1; k < last; ++k) {
      release_last_but_one(layout, cursor, k);
      multiply_and_expand<kMajorA, kMajorB, kRuns>(d, layout, product, cursor, group);
    }
    release_last_but_one(layout, cursor, last);
    mbarrier_wait(layout.full(product.index), product.parity);
    const GroupOperands<kMajorA, kMajorB> operands(layout, product.index, group);
    operands.multiply(d, 0);
#pragma unroll
    for (i32 step = 1; step < 4; ++step) {
      if (tail >= step) operands.multiply(d, step);
    }
  }
  wgmma_wait<0>();
  if (last > 0) release_stage(layout, (product.index + kStages - 1) % kStages);
  release_stage(layout, product.index);
}

// d = tc(a, b, scale_d ? d : +0) as `multiply_groups` of backward_pipeline.cuh: K of `depth` >= 1 groups of 16, of the
// last k-block only those that hold anything unless it is the only one. `rows`: kTileRows if B rests as bf16, else
// kCodeRows.
template <Major kMajorA, Major kMajorB>
MOK_DEVICE void multiply_codes(float (&d)[128], const SharedLayout& layout, StageCursor& cursor, i32 depth, i32 group,
                               i32 scale_d, i32 rows) {
  if (rows == kCodeRows) {
    multiply_runs<kMajorA, kMajorB, kCodeRows / 64>(d, layout, cursor, depth, group, scale_d);
  } else {
    multiply_runs<kMajorA, kMajorB, kTileRows / 64>(d, layout, cursor, depth, group, scale_d);
  }
}

}  // namespace mok
