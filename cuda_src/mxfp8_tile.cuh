// mxfp8_tile.cuh: shared memory of the MXFP8 forward megakernel, and how its warps hand operands to each other.
//
//   codes and scales       TMA -> math warps, kCodeStages k-blocks of 64 deep                    (CodeRing)
//   tokens, expanded       half a k-block by either math warpgroup -> wgmma of both              (ExpandedRing)
//   products, as bf16      math warpgroups -> epilogue warps, a whole tile at a time             (HandOver)
//
// Tiles, tickets and their queue are those of tile.cuh. The products are turned round: weight rows are the
// rows of wgmma, expanded from codes into its register operand, and tokens are its columns, so that the
// larger operand never goes back to shared memory.
//
//   math warpgroup w   weight rows 64 w .. 64 w + 63 of the tile's first 128 (chunk 0) and of its second 128 (chunk 1):
//                      gate and up of the same 64 columns of h, or 2 x 64 columns of y
//
// Order of shared accesses: codes are read by ordinary loads before TMA overwrites them, tokens are written by
// ordinary stores before wgmma reads them; one proxy fence a k-block stands before both arrivals.
#pragma once
#include "mxfp8.cuh"
#include "tile.cuh"

namespace mok {

static_assert(kClusterSize == 1, "the MXFP8 kernel's CTAs share nothing");

// ---------------------------------------------------------------- parameters

// Arrays of codes and scales. Scales lie by blocks of 64 columns, [ceil(columns / 64)][rows] u16: the scale bytes of
// a row's two blocks of 32, the first one low; 0 where a block does not exist.
// Python twin: mok_ref/gpu/hopper_mxfp8.py: CODE_PARAMS
struct CodeParams {
  u8* x_codes;                  // [macro_blocks * 128, H]: pulled rows
  u16* x_scales;
  u8* h_codes;                  // [macro_blocks * 128, I]
  u16* h_scales;
  const u32* weights_are_wide;  // not 0: a scale of the weights is not plain (expand.cuh)
  i32 scale_rule;               // ScaleRule of h
  i32 reserved;
};

// Scale words of a k-block of `rows` rows.
MOK_DEVICE i64 scale_place(i32 k_block, i64 rows, i64 row) { return k_block * rows + row; }

MOK_DEVICE i32 ring_rows(const LayerParams& params) { return params.macro_blocks * kTileM; }

// Not 0: a scale of x or h is not plain. Raised by whoever copies or makes it, before its rows are signalled. A word
// between the tickets of ForwardCounters: 0 at the start of a call.
MOK_DEVICE u32* rows_are_wide(const LayerParams& params) { return params.counters + 16; }

// The loader's word to the math warps, in a field of the tile that only clusters need.
MOK_DEVICE void set_plain(Tile& tile, bool is_plain) { tile.shared = is_plain; }
MOK_DEVICE bool has_plain_scales(const Tile& tile) { return tile.shared != 0; }

// A wait of the math warps ends after this many tries, far beyond any limit a caller may set (mbarrier_wait): each
// may suspend the warp.
constexpr u32 kMostTries = 1u << 31;

// ---------------------------------------------------------------- shared memory of a CTA

constexpr u32 kCodeChunkBytes = 64 * kTileK;             // 64 rows of a k-block, 64-byte swizzled
constexpr u32 kWeightCodeBytes = 4 * kCodeChunkBytes;
constexpr u32 kTokenCodeBytes = 2 * kCodeChunkBytes;
constexpr u32 kWeightScaleBytes = 2 * kTileN;
constexpr u32 kTokenScaleBytes = 2 * kTileM;
constexpr u32 kTokenCodes = kWeightCodeBytes;            // offsets in a stage
constexpr u32 kWeightScales = kTokenCodes + kTokenCodeBytes;
constexpr u32 kTokenScales = kWeightScales + kWeightScaleBytes;
constexpr u32 kCodesFull = kTokenScales + kTokenScaleBytes;  // barriers, in what is left of a stage
constexpr u32 kCodesEmpty = kCodesFull + 8;
constexpr u32 kCodeStageBytes = (kCodesEmpty + 8 + 1023) / 1024 * 1024;

constexpr i32 kExpandedTiles = 3;
constexpr u32 kExpandedBytes = kTileM * kTileK * 2;      // one k-block of tokens in bf16, 128-byte swizzled
constexpr u32 kHandOverChunkBytes = kTileM * kChunkColumns * 2;
constexpr u32 kHandOverBytes = 2 * kHandOverChunkBytes;  // of one math warpgroup

constexpr i32 kCodeStages = 4;
constexpr u32 kExpandedOffset = kCodeStages * kCodeStageBytes;
constexpr u32 kHandOverOffset = kExpandedOffset + kExpandedTiles * kExpandedBytes;
static_assert(kHandOverOffset + 2 * kHandOverBytes <= kTileSlotOffset, "tile slots and their barriers come last");

constexpr u32 kExpandedFull = kForwardSharedBytes;       // barriers, behind those of tile.cuh
constexpr u32 kHandOverFull = kExpandedFull + 8 * kExpandedTiles;
constexpr u32 kHandOverFree = kHandOverFull + 8 * 2;
constexpr u32 kMxfp8SharedBytes = kHandOverFree + 8 * 2;
static_assert(kMxfp8SharedBytes <= 232448, "a CTA has 227 KB of shared memory");

// Executed by one thread before the CTA synchronises, after init_barriers.
MOK_DEVICE void init_code_barriers(u32 shared) {
  for (i32 stage = 0; stage < kCodeStages; ++stage) {
    mbarrier_init(shared + kCodesFull + stage * kCodeStageBytes, 1);
    mbarrier_init(shared + kCodesEmpty + stage * kCodeStageBytes, kMathWarps);
  }
  for (i32 tile = 0; tile < kExpandedTiles; ++tile) {
    mbarrier_init(shared + kExpandedFull + 8 * tile, kMathWarps);
  }
  for (i32 warpgroup = 0; warpgroup < 2; ++warpgroup) {
    mbarrier_init(shared + kHandOverFull + 8 * warpgroup, 4);
    mbarrier_init(shared + kHandOverFree + 8 * warpgroup, kEpilogueWarps);
  }
  fence_mbarrier_init();
}

// ---------------------------------------------------------------- rings

// The ring of k-blocks of codes. `phase` starts at 1 for the producer (every stage is free) and 0 for readers.
struct CodeRing {
  u32 shared;
  u32 stage;  // address
  u32 phase;

  MOK_DEVICE u32 full() const { return stage + kCodesFull; }
  MOK_DEVICE u32 empty() const { return stage + kCodesEmpty; }
  MOK_DEVICE u32 codes() const { return stage; }
  MOK_DEVICE void advance() {
    stage += kCodeStageBytes;
    if (stage == shared + kCodeStages * kCodeStageBytes) {
      stage = shared;
      phase ^= 1;
    }
  }
};

// The ring of expanded tokens. Nobody waits for a tile to be free: a warpgroup says that its part of k-block b is
// expanded when its products up to k-block b - 2 are through, and both have said so before one of them expands k-block
// b + 1, into the tile of b - 2.
static_assert(kExpandedTiles == 3, "two k-blocks multiply while a third is expanded");
struct ExpandedRing {
  u32 shared;
  u32 tile;
  u32 phase;

  MOK_DEVICE u32 full() const { return shared + kExpandedFull + 8 * tile; }
  MOK_DEVICE u32 address() const { return shared + kExpandedOffset + tile * kExpandedBytes; }
  MOK_DEVICE void advance() {
    if (++tile == kExpandedTiles) {
      tile = 0;
      phase ^= 1;
    }
  }
};

// A finished tile of one math warpgroup: two chunks of 128 token rows x 64 columns, bf16, rows of 128 bytes whose
// 16-byte units are swizzled by the row. `turn` counts the tiles.
struct HandOver {
  u32 shared;
  i32 warpgroup;
  u32 turn;

  MOK_DEVICE u32 full() const { return shared + kHandOverFull + 8 * warpgroup; }
  MOK_DEVICE u32 free() const { return shared + kHandOverFree + 8 * warpgroup; }
  MOK_DEVICE u32 unit(i32 chunk, i32 row, i32 column_unit) const {
    const u32 base = shared + kHandOverOffset + warpgroup * kHandOverBytes + chunk * kHandOverChunkBytes;
    return base + row * 128 + ((column_unit ^ (row & 7)) << 4);
  }

  MOK_DEVICE void wait_free() const { mbarrier_wait(free(), (turn & 1) ^ 1); }
  MOK_DEVICE void wait_full() const { mbarrier_wait(full(), turn & 1); }

  // Whole warp: written, or read.
  MOK_DEVICE void pass(u32 barrier, i32 lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
    ++turn;
  }
};

}  // namespace mok
