// mxfp8_experts.cuh: the expert products of the MXFP8 forward megakernel, and the push of their results.
//
//   gate/up tile   128 rows x (128 columns of gate | the same 128 of up), SwiGLU, h quantised  (spec eq. 5.1, 5.2, 7.1)
//   down tile      128 rows x 256 columns:  y = bf16(tc(h, W_down)), pushed as in experts.cuh  (spec eq. 5.3)
//
// Operands are the values that codes and scales stand for (expand.cuh), expanded on their way to the products:
// weights into registers, tokens into shared memory. The shared expert is not quantised: its tiles run in a launch of
// the bf16 kernel.
//
// NumPy twin     mok_ref/experts.py: experts_forward
// Executed by    loader lane, two math warpgroups (half of the tile's columns each), epilogue warps
// Before, after  as in experts.cuh
#pragma once
#include "expand.cuh"
#include "experts.cuh"
#include "mxfp8_tensor_core.cuh"
#include "mxfp8_tile.cuh"

namespace mok {

// Tensor maps of one rank, by value. Python twin: mok_ref/gpu/hopper_mxfp8.py: CODE_MAPS
struct CodeMaps {
  TensorMap x_codes, x_half_codes, x_scales;    // boxes of 128 rows, of 64 (codes alone), 64 codes or a word along K
  TensorMap h_codes, h_half_codes, h_scales;
  TensorMap w_gate_up_codes, w_gate_up_scales;  // boxes of 128 weight rows of both of one expert
  TensorMap w_down_codes, w_down_scales;        // boxes of 256 weight rows of one expert
};

// ---------------------------------------------------------------- loader lane

// Which matrices a tile multiplies, and its first weight row.
struct CodeOperands {
  const TensorMap *tokens, *token_scales;  // 128 rows, or the first 64 if there are no more
  const TensorMap *weights, *weight_scales;
  i32 row;
};

MOK_DEVICE CodeOperands code_operands(const Tile& tile, const CodeMaps& maps) {
  const bool whole = tile.valid_rows > 64;
  if (tile.kind == kGateUp) {
    return CodeOperands{whole ? &maps.x_codes : &maps.x_half_codes, &maps.x_scales, &maps.w_gate_up_codes,
                        &maps.w_gate_up_scales, tile.column * kHiddenTile};
  }
  return CodeOperands{whole ? &maps.h_codes : &maps.h_half_codes, &maps.h_scales, &maps.w_down_codes,
                      &maps.w_down_scales, tile.column * kTileN};
}

// One k-block of a tile into the ring, in four copies. Rows beyond the first 64 are loaded only if they are used.
MOK_DEVICE void load_codes(const Tile& tile, const CodeOperands& o, i32 block, CodeRing& ring) {
  constexpr u32 kScales = kWeightScaleBytes + kTokenScaleBytes;
  const i32 k = block * kTileK;
  const u32 full = ring.full(), codes = ring.codes();
  mbarrier_wait(ring.empty(), ring.phase);
  mbarrier_arrive_expect_tx(full, kWeightCodeBytes + kScales + (tile.valid_rows > 64 ? 2 : 1) * kCodeChunkBytes);
  tma_load_2d(codes + kTokenCodes, o.tokens, k, tile.first_row, full);
  tma_load_2d(codes + kTokenScales, o.token_scales, tile.first_row, block, full);
  tma_load_4d(codes, o.weights, k, o.row, tile.expert, 0, full);
  tma_load_4d(codes + kWeightScales, o.weight_scales, o.row, block, tile.expert, 0, full);
  ring.advance();
}

// Whether every scale that a tile meets is plain (expand.cuh), once its rows are complete.
MOK_DEVICE bool scales_are_plain(const LayerParams& params, const CodeParams& codes) {
  return (ld_relaxed_gpu(rows_are_wide(params)) | ld_relaxed_gpu(codes.weights_are_wide)) == 0;
}

// Draws tickets, announces tiles, loads their operands, as load_tiles of experts.cuh.
MOK_DEVICE void load_code_tiles(const LayerParams& params, const CodeParams& codes, const CodeMaps& maps,
                                unsigned char* bytes) {
  constexpr i32 kLookAhead = kCodeStages + 2;
  const ForwardCounters counters = forward_counters(params);
  TileWalk walk(params, 0);
  TileQueue queue(bytes);
  TicketMail mail(counters.tile_ticket, params.abort_flag, queue.shared, 0);
  CodeRing ring{queue.shared, queue.shared, 1};
  Tile tile = walk.locate(mail.next());
  bool is_ready = false, is_plain = false;
  while (true) {
    const RowsAwaited rows = rows_awaited(tile, params, counters);
    if (!is_ready && rows.counter != nullptr) {
      wait_gpu(rows.counter, rows.expected, wait_context(params), rows.phase, tile.row_block);
      is_plain = scales_are_plain(params, codes);
      trace_task(kTraceWaitRows, tile.row_block, tile.column);
    }
    set_plain(tile, is_plain);
    queue.put(tile);
    if (tile.kind == kStop) break;
    mail.draw();
    fence_proxy_async_global();  // the rows were written by ordinary stores
    const CodeOperands operands = code_operands(tile, maps);
    Tile next;
    is_ready = false;
    const i32 look = max(tile.k_blocks - kLookAhead, 0);
    for (i32 block = 0; block < tile.k_blocks; ++block) {
      if (block == look) next = walk.locate(mail.next());
      if (block == look + 2) {  // the tables' answers are here by now: one latency at a time
        const RowsAwaited awaited = rows_awaited(next, params, counters);
        is_ready = awaited.counter == nullptr || ld_acquire_gpu(awaited.counter) >= awaited.expected;
        is_plain = scales_are_plain(params, codes);
      }
      load_codes(tile, operands, block, ring);
    }
    trace_task(kTraceLoad, tile.row_block, tile.column);
    tile = next;
  }
}

// ---------------------------------------------------------------- expansion

// Tiles whose scales are all plain (expand.cuh) take a path without a branch, others a slow one: a tile as a whole,
// since all warps of a warpgroup must issue the same products.

// A warp's 16 weight rows of both chunks, 32 codes along K, four to a word: words[chunk][2 s + j] of group s (16 along
// K) and row lane / 4 + 8 j holds codes 4 (lane % 4) and the three after it.
struct WeightCodes {
  u32 words[2][4];

  // `place`: offset in a stage of this lane's row of chunk 0 and of the block of 32.
  MOK_DEVICE void load(u32 place, u32 stage) {
#pragma unroll
    for (i32 chunk = 0; chunk < 2; ++chunk) {
      u32* w = words[chunk];
      ldmatrix_x4(stage + place + chunk * (kWeightCodeBytes / 2), w[0], w[1], w[2], w[3]);
    }
  }

  // After this point, not before it, may the codes be expanded: their targets are in use until then.
  MOK_DEVICE void hold() {
#pragma unroll
    for (i32 i = 0; i < 8; ++i) keep_in_register(words[i / 4][i % 4]);
  }
};

// Offset in a stage of 16-byte unit `unit` of row `row` of 64-byte rows, as TMA's 64-byte swizzle places it.
MOK_DEVICE u32 code_offset(i32 row, i32 unit) { return row * kTileK + ((unit ^ (row >> 1 & 3)) << 4); }

// Scales of this thread's four weight rows: words[chunk] holds the two bytes of row lane / 4 and those of the row 8 on.
struct WeightScales {
  u32 words[2];

  // `place`: offset in a stage of this thread's first row of chunk 0.
  MOK_DEVICE void load(u32 place, u32 stage) {
#pragma unroll
    for (i32 chunk = 0; chunk < 2; ++chunk) {
      const u32 address = stage + place + chunk * (kWeightScaleBytes / 2);
      words[chunk] = ld_shared_u16(address) | ld_shared_u16(address + 16) << 16;
    }
  }

  MOK_DEVICE u32 byte(i32 chunk, i32 j, i32 half) const { return words[chunk] >> (16 * j + 8 * half) & 255u; }
};

// What the weights of one block of 32 along K are multiplied by: [chunk], of row j in half j.
struct WeightFactors {
  u32 first[2];

  template <bool kPlain>
  MOK_DEVICE void take(const WeightScales& scales, i32 half) {
#pragma unroll
    for (i32 chunk = 0; chunk < 2; ++chunk) {
      if constexpr (kPlain) {  // (scale + 120) << 7 of both rows at once
        first[chunk] = permute_bytes(scales.words[chunk], half == 0 ? 0x4240u : 0x4341u) * 128u + 0x3c003c00u;
      } else {
        first[chunk] = (first_factor(scales.byte(chunk, 0, half)) & 0xffffu) |
                       (first_factor(scales.byte(chunk, 1, half)) & 0xffff0000u);
      }
    }
  }

  MOK_DEVICE u32 of(i32 chunk, i32 j) const {
    return j == 0 ? both_halves<0>(first[chunk]) : both_halves<1>(first[chunk]);
  }
};

// The bf16 fragments of one group of 16 along K: [chunk], four words each.
struct WeightFragments {
  u32 words[2][4];

  // Group `group` (0 or 1) of the 32 along K in `codes`, which are block `half` of the k-block.
  template <bool kPlain>
  MOK_DEVICE void expand(const WeightCodes& codes, const WeightFactors& factors, const WeightScales& scales, i32 half,
                         i32 group) {
#pragma unroll
    for (i32 chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
      for (i32 j = 0; j < 2; ++j) {
        expand_word(codes.words[chunk][2 * group + j], factors.of(chunk, j), words[chunk][j], words[chunk][j + 2]);
      }
    }
    if constexpr (!kPlain) {
#pragma unroll
      for (i32 i = 0; i < 8; ++i) {
        u32& w = words[i / 4][i % 4];
        w = multiply_bf16x2(w, second_factor(scales.byte(i / 4, i % 2, half)));
      }
    }
  }
};

// What a math thread expands of the tokens: one block of 32 of the tile's 128 rows x 2, sixteen codes at a time.
// Offsets in a stage and in a tile of the ring.
struct TokenPlace {
  u32 codes[2];   // of either half of the block
  u32 scale;
  u32 target[4];  // 16-byte units of the block

  MOK_DEVICE TokenPlace(i32 row, i32 half) : scale(kTokenScales + 2 * row + half) {
#pragma unroll
    for (i32 i = 0; i < 2; ++i) codes[i] = kTokenCodes + code_offset(row, 2 * half + i);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) target[i] = row * 128 + (((4 * half + i) ^ (row & 7)) << 4);
  }

  // Codes of half `group` of the block.
  MOK_DEVICE uint4 load(u32 stage, i32 group) const { return ld_shared_v4(stage + codes[group]); }

  // Expanded and stored in the order of the weights' fragments: codes 0, 1, 4, 5, 8, 9, 12, 13, then the rest.
  template <bool kPlain>
  MOK_DEVICE void expand(const uint4& run, u32 scale_byte, u32 tile, i32 group) const {
    const u32 words[4] = {run.x, run.y, run.z, run.w};
    const u32 first = kPlain ? plain_factor(scale_byte) : first_factor(scale_byte);
    u32 pairs[8];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) expand_word(words[i], first, pairs[i], pairs[i + 4]);
    if constexpr (!kPlain) expand_again(pairs, second_factor(scale_byte));
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const u32* p = pairs + 4 * i;
      st_shared_v4(tile + target[2 * group + i], p[0], p[1], p[2], p[3]);
    }
  }
};

// ---------------------------------------------------------------- math warpgroups

// What a math thread knows of its places in a stage.
struct MathPlaces {
  u32 codes[2], scales;  // WeightCodes, WeightScales: rows 64 warpgroup of the first and of the second 128 weight rows
  TokenPlace tokens;
  u32 row;               // of the tokens
  u32 lane;

  MOK_DEVICE MathPlaces(i32 thread, i32 warpgroup) : tokens(thread, warpgroup), row(thread) {
    const i32 own = thread % kWarpSize, first = 64 * warpgroup + thread / kWarpSize * 16;
    for (i32 half = 0; half < 2; ++half) codes[half] = code_offset(first + own % 16, own / 16 + 2 * half);
    scales = kWeightScales + 2 * (first + own / 4);
    lane = __shfl_sync(kFullWarp, own, own);  // held in a register, where the compiler would look it up again and again
    for (u32* place : {codes, codes + 1, &scales, tokens.codes, tokens.codes + 1, &tokens.scale}) {
      keep_in_register(*place);
    }
    for (u32& unit : tokens.target) keep_in_register(unit);
  }
};

// One group of 16 along K, both chunks; its own commit group.
template <i32 kRows>
MOK_DEVICE void tc_k16(float (&acc)[2][64], const WeightFragments& weights, u64 tokens, i32 scale_d) {
  wgmma_fence();
  wgmma_from_registers<kRows>(acc[0], weights.words[0], tokens, scale_d);
  wgmma_from_registers<kRows>(acc[1], weights.words[1], tokens, scale_d);
  wgmma_commit();
}

// The rings as one math warp sees them.
struct MathRings {
  CodeRing codes;       // next k-block
  ExpandedRing tokens;  // next to multiply; the one behind it is expanded meanwhile
};

// acc = tc(weights of this warpgroup, kRows tokens), from +0 over all k-blocks: acc[chunk] has 64 weight rows and
// kRows token columns. While the products of one group of 16 run, the weights of the next one are expanded, and a
// part of the next k-block's tokens. Everything read from shared memory is asked for a step before it is used, and
// nothing branches: a scheduler has two such warps and little else to fill a latency with.
template <i32 kRows>
struct CodeProduct {
  MathRings& rings;
  const MathPlaces& places;
  WeightCodes codes;
  WeightScales scales;
  uint4 run;
  u32 token_scale;

  MOK_DEVICE CodeProduct(MathRings& math_rings, const MathPlaces& math_places)
      : rings(math_rings), places(math_places) {}

  MOK_DEVICE bool has_tokens() const { return kRows == kTileM || places.row < kRows; }

  MOK_DEVICE void load_weights(u32 stage) {
    codes.load(places.codes[0], stage);
    scales.load(places.scales, stage);
  }

  MOK_DEVICE void load_tokens(u32 stage, i32 group) {
    if (!has_tokens()) return;
    run = places.tokens.load(stage, group);
    if (group == 0) token_scale = ld_shared_u8(stage + places.tokens.scale);
  }

  MOK_DEVICE void expand_tokens(u32 tile, i32 group) {
    if (has_tokens()) places.tokens.expand<true>(run, token_scale, tile, group);
  }

  // Tokens are written before wgmma reads them, codes are read before TMA overwrites them.
  MOK_DEVICE void release(u32 empty, bool hands_back, u32 full, bool has_next) {
    fence_proxy_async_shared();
    __syncwarp();
    mbarrier_arrive_if(empty, hands_back && places.lane == 0);
    mbarrier_arrive_if(full, has_next && places.lane == 0);
  }

  // The first k-block's tokens, and its weights' codes.
  MOK_DEVICE void begin() {
    const u32 stage = rings.codes.codes();
    mbarrier_wait(rings.codes.full(), rings.codes.phase);
#pragma unroll
    for (i32 group = 0; group < 2; ++group) {
      load_tokens(stage, group);
      expand_tokens(rings.tokens.address(), group);
    }
    load_weights(stage);
    release(0, false, rings.tokens.full(), true);
  }

  // This k-block's tokens are expanded and `next`'s codes are there, if it has any.
  MOK_DEVICE void await_operands(const CodeRing& next, bool has_next) const {
    u32 tries = 0;
    bool done;
#pragma unroll 1
    do {
      const bool there = mbarrier_try_wait(rings.tokens.full(), rings.tokens.phase);
      done = there & (mbarrier_try_wait(next.full(), next.phase) | !has_next);
    } while (!done && ++tries < kMostTries);
    if (!done) __trap();
  }

  MOK_DEVICE void run_block(float (&acc)[2][64], WeightFragments& even, WeightFragments& odd, bool is_first,
                            bool has_next) {
    constexpr u64 kStep = kDescriptorStepK16<Major::kK>;
    const u32 stage = rings.codes.codes(), empty = rings.codes.empty();
    CodeRing next = rings.codes;
    ExpandedRing next_tokens = rings.tokens;
    next.advance();
    next_tokens.advance();
    await_operands(next, has_next);  // without a next k-block whatever is there is expanded, for nothing
    load_tokens(next.codes(), 0);
    WeightFactors factors;
    factors.take<true>(scales, 0);
    const u64 tokens = matrix_descriptor<Major::kK>(rings.tokens.address());
    wgmma_wait<1>();  // `even` is free
    codes.hold();
    even.expand<true>(codes, factors, scales, 0, 0);
    tc_k16<kRows>(acc, even, tokens, !is_first);
    expand_tokens(next_tokens.address(), 0);
    load_tokens(next.codes(), 1);

    wgmma_wait<1>();  // `odd` is free
    codes.hold();
    odd.expand<true>(codes, factors, scales, 0, 1);
    tc_k16<kRows>(acc, odd, tokens + kStep, 1);
    codes.load(places.codes[1], stage);
    expand_tokens(next_tokens.address(), 1);
    factors.take<true>(scales, 1);

    wgmma_wait<1>();
    codes.hold();
    even.expand<true>(codes, factors, scales, 1, 0);
    tc_k16<kRows>(acc, even, tokens + 2 * kStep, 1);
    release(empty, true, next_tokens.full(), has_next);

    wgmma_wait<1>();
    codes.hold();
    odd.expand<true>(codes, factors, scales, 1, 1);
    tc_k16<kRows>(acc, odd, tokens + 3 * kStep, 1);
    rings = {next, next_tokens};
    load_weights(next.codes());
  }

  MOK_DEVICE void run_blocks(float (&acc)[2][64], i32 k_blocks) {
    WeightFragments even, odd;
    begin();
#pragma unroll 1
    for (i32 block = 0; block < k_blocks; ++block) {
      run_block(acc, even, odd, block == 0, block + 1 < k_blocks);
    }
    wgmma_wait<0>();
  }
};

// The same for scales of any size and kTileM tokens, one thing after the other.
MOK_DEVICE void multiply_any_scales(float (&acc)[2][64], MathRings& rings, const MathPlaces& places, i32 k_blocks) {
#pragma unroll 1
  for (i32 block = 0; block < k_blocks; ++block) {
    const u32 stage = rings.codes.codes();
    mbarrier_wait(rings.codes.full(), rings.codes.phase);
    const u32 token_scale = ld_shared_u8(stage + places.tokens.scale);
    for (i32 group = 0; group < 2; ++group) {
      places.tokens.expand<false>(places.tokens.load(stage, group), token_scale, rings.tokens.address(), group);
    }
    fence_proxy_async_shared();
    __syncwarp();
    mbarrier_arrive_if(rings.tokens.full(), places.lane == 0);
    mbarrier_wait(rings.tokens.full(), rings.tokens.phase);
    const u64 tokens = matrix_descriptor<Major::kK>(rings.tokens.address());
    WeightScales scales;
    scales.load(places.scales, stage);
#pragma unroll
    for (i32 group = 0; group < 4; ++group) {
      WeightCodes codes;
      WeightFactors factors;
      WeightFragments weights;
      codes.load(places.codes[group / 2], stage);
      factors.take<false>(scales, group / 2);
      weights.expand<false>(codes, factors, scales, group / 2, group % 2);
      tc_k16<kTileM>(acc, weights, tokens + group * kDescriptorStepK16<Major::kK>, block > 0 || group > 0);
      wgmma_wait<0>();
    }
    fence_proxy_async_shared();
    __syncwarp();
    mbarrier_arrive_if(rings.codes.empty(), places.lane == 0);
    rings.codes.advance();
    rings.tokens.advance();
  }
}

// Whole math warp: its 16 columns of both chunks into the hand-over buffer, which is free, rows of tokens.
template <i32 kRows>
MOK_DEVICE void hand_over_tile(HandOver& target, const float (&acc)[2][64], const MathPlaces& places) {
  const i32 lane = places.lane, warp = places.row / kWarpSize;
#pragma unroll
  for (i32 chunk = 0; chunk < 2; ++chunk) {
    const u32 place = target.unit(chunk, lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (i32 i = 0; i < kRows / 16; ++i) {
      const float* d = acc[chunk] + 8 * i;  // tokens 16 i + ..: two tiles of 8 x 8 along tokens, two along columns
      stmatrix_x4_trans(place + i * 16 * 128, pack_bf16x2(d[0], d[1]), pack_bf16x2(d[2], d[3]),
                        pack_bf16x2(d[4], d[5]), pack_bf16x2(d[6], d[7]));  // RNE to bf16
    }
  }
  target.pass(target.full(), lane);
}

template <i32 kRows, bool kPlain>
MOK_DEVICE void multiply_code_tile(const Tile& tile, MathRings& rings, const MathPlaces& places, HandOver& target) {
  float acc[2][64];
  if constexpr (kPlain) {
    CodeProduct<kRows>(rings, places).run_blocks(acc, tile.k_blocks);
  } else {
    multiply_any_scales(acc, rings, places, tile.k_blocks);
  }
  trace_task<4 * kWarpSize>(kTraceSharedGateUp + tile.kind, tile.row_block, tile.column);
  target.wait_free();
  trace_task<4 * kWarpSize>(kTraceWaitStore, tile.row_block, tile.column);
  hand_over_tile<kRows>(target, acc, places);
}

// One math warpgroup: products in, bf16 tiles out.
MOK_DEVICE void multiply_code_tiles(unsigned char* bytes, i32 warpgroup) {
  TileQueue queue(bytes);
  MathRings rings{{queue.shared, queue.shared, 0}, {queue.shared, 0, 0}};
  HandOver target{queue.shared, warpgroup, 0};
  const MathPlaces places(threadIdx.x % 128, warpgroup);
  while (true) {
    const Tile tile = queue.get();
    if (tile.kind == kStop) break;
    if (!has_plain_scales(tile)) {
      multiply_code_tile<kTileM, false>(tile, rings, places, target);
    } else if (tile.valid_rows > 64) {
      multiply_code_tile<kTileM, true>(tile, rings, places, target);
    } else {
      multiply_code_tile<64, true>(tile, rings, places, target);
    }
    queue.finish(places.lane);
  }
}

// ---------------------------------------------------------------- epilogue warps

// Row `i` of an epilogue warp's rows of a tile: four at a time, eight lanes a row.
MOK_DEVICE i32 epilogue_row(i32 i, i32 warp, i32 lane) { return 8 * i + 4 * warp + lane / 8; }

// Where a tile of h goes as codes and scales; from the tile's first row.
struct CodeTarget {
  u8* codes;
  u16* scales;
};

// h of one math warpgroup's 64 columns: gate and up from the hand-over buffer, h quantised and stored, gate and up
// kept for backward.
MOK_DEVICE void swiglu_codes(const HandOver& source, const HiddenTarget& target, const CodeTarget& codes,
                             const SwigluClamp& clamp, i32 scale_rule, u32* wide, i32 warp, i32 lane) {
  const i32 unit = lane % 8, column = source.warpgroup * kChunkColumns + 8 * unit;
  const bool is_inside = column < target.columns, has_second = column + kScaleBlock < target.columns;
#pragma unroll 1
  for (i32 i = 0; i < target.rows / 8; ++i) {
    const i32 row = epilogue_row(i, warp, lane);
    const uint4 gate = ld_shared_v4(source.unit(0, row, unit)), up = ld_shared_v4(source.unit(1, row, unit));
    const uint4 h = swiglu_forward_unit(gate, up, clamp);
    const QuantizedRun run = quantize_run(is_inside ? h : make_uint4(0, 0, 0, 0), scale_rule);
    const u32 second = __shfl_sync(kFullWarp, run.scale, lane | 4);
    if (!is_plain(run.scale)) *wide = 1;
    if (!is_inside) continue;
    const i64 offset = static_cast<i64>(row) * target.width + column;
    *reinterpret_cast<uint2*>(codes.codes + offset) = make_uint2(run.codes[0], run.codes[1]);
    if (unit == 0) codes.scales[row] = static_cast<u16>(run.scale | (has_second ? second << 8 : 0));
    if (target.gate != nullptr) {
      st_global_v4(target.gate + offset, gate);
      st_global_v4(target.up + offset, up);
    }
  }
}

// y of one math warpgroup's 2 x 64 columns to the rows' owners. Lane l holds the targets of this warp's rows number l
// and 32 + l.
MOK_DEVICE void push_code_rows(const HandOver& source, u16* const (&lane_target)[2], i32 first_column, i32 hidden_size,
                               i32 num_rows, i32 warp, i32 lane) {
  const i32 unit = lane % 8;
#pragma unroll
  for (i32 part = 0; part < 2; ++part) {
    if (64 * part >= num_rows) break;
#pragma unroll 4
    for (i32 i = 0; i < 8; ++i) {
      const u64 target = __shfl_sync(kFullWarp, reinterpret_cast<u64>(lane_target[part]), 4 * i + lane / 8);
#pragma unroll
      for (i32 chunk = 0; chunk < 2; ++chunk) {
        const i32 column = first_column + (2 * chunk + source.warpgroup) * kChunkColumns + 8 * unit;
        if (target == 0 || column >= hidden_size) continue;
        const uint4 y = ld_shared_v4(source.unit(chunk, epilogue_row(8 * part + i, warp, lane), unit));
        st_global_v4(reinterpret_cast<u16*>(target) + column, y);
      }
    }
  }
}

// One epilogue warp: half the rows of every tile.
MOK_DEVICE void finish_code_tiles(const LayerParams& params, const CodeParams& codes, unsigned char* bytes, i32 warp) {
  const i32 lane = threadIdx.x % kWarpSize;
  const ForwardCounters counters = forward_counters(params);
  const MinibatchWalk minis(params);
  const bool ring_is_reused = minis.num_minis > minis.minis_per_macro;
  const SwigluClamp clamp = swiglu_clamp(params);
  TileQueue queue(bytes);
  HandOver source[2] = {{queue.shared, 0, 0}, {queue.shared, 1, 0}};
  while (true) {
    const Tile tile = queue.get();
    if (tile.kind == kStop) break;
    const bool gate_up = tile.kind == kGateUp;
    HiddenTarget hidden = hidden_target(tile, params);
    hidden.rows = tile.valid_rows > 64 ? kTileM : 64;
    u16* target[2];
#pragma unroll
    for (i32 part = 0; part < 2; ++part) {
      target[part] = gate_up ? nullptr
                             : push_target(tile, params, epilogue_row(8 * part + lane / 4, warp, lane % 4 * 8));
    }
#pragma unroll
    for (i32 group = 0; group < 2; ++group) {
      source[group].wait_full();
      trace_task(kTraceWaitTile, tile.row_block, tile.column);
      if (gate_up) {
        const i64 first = static_cast<i64>(tile.first_row) * params.intermediate_size + tile.column * kHiddenTile;
        const i64 words = scale_place(2 * tile.column + group, ring_rows(params), tile.first_row);
        const CodeTarget place{codes.h_codes + first, codes.h_scales + words};
        if (group * kChunkColumns < hidden.columns) {
          swiglu_codes(source[group], hidden, place, clamp, codes.scale_rule, rows_are_wide(params), warp, lane);
        }
      } else {
        push_code_rows(source[group], target, tile.column * kTileN, params.hidden_size, hidden.rows, warp, lane);
      }
      source[group].pass(source[group].free(), lane);
      trace_task(kTraceStore, tile.row_block, tile.column);
    }
    signal_tile(tile, counters, minis.mini_blocks, ring_is_reused, lane);
    queue.finish(lane);
  }
}

}  // namespace mok
