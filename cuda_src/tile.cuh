// tile.cuh: which tile a CTA computes next, and how its warps hand tiles and operands to each other.
//
//   ticket -> Tile        by arithmetic on the schedule's sizes, no task table                     (TileWalk)
//   Tile                  loader lane -> math warpgroups, epilogue warps                           (TileQueue)
//   operands              TMA -> math warpgroups, kStages k-blocks of 64 deep                      (OperandRing)
//   products, as bf16     math warpgroups -> epilogue warps, half a tile at a time                 (StagingBuffer)
//
// NumPy twin     mok_ref/schedule.py: walk, forward_task_order
// Order          shared gate/up, shared down; then for walk position q: gate/up(q), down(q - 1), or the other
//                way round where gate/up(q) needs the ring slot of q - 1. Inside a minibatch expert by expert, each
//                column by column. Every tile depends on smaller tickets only, so any subset of CTAs makes progress.
// A cluster of two draws one ticket for two tiles that share an operand: two row blocks of an expert and one column of
// its weights, or the expert's odd row block and two columns. Each CTA loads half of what is shared and multicasts it
// into both shared memories.
#pragma once
#include "check.cuh"
#include "numerics.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "sync.cuh"

namespace mok {

constexpr i32 kTileM = kRowTile;   // rows of a tile
constexpr i32 kTileN = 256;        // weight rows of a tile: 128 gate and 128 up, or 256 of down
constexpr i32 kTileK = 64;         // k-block: 128 bytes of bf16, one swizzle span
constexpr i32 kHiddenTile = 128;   // columns of h that a gate/up tile makes
constexpr i32 kStages = 4;
constexpr i32 kTileSlots = 4;
constexpr i32 kMailSlots = 8;      // tickets on their way to a partner
constexpr i32 kMathWarps = 8;      // two warpgroups, 64 rows of the tile each
constexpr i32 kEpilogueWarps = 2;
constexpr i32 kEpilogueRows = 64 / kEpilogueWarps;  // of either math warpgroup, per epilogue warp
constexpr i32 kForwardThreads = 384;

constexpr u32 kHalfTileBytes = 64 * kTileK * 2;                // 64 rows of one operand
constexpr u32 kOperandABytes = 2 * kHalfTileBytes;
constexpr u32 kOperandBBytes = 4 * kHalfTileBytes;
constexpr u32 kStageBytes = kOperandABytes + kOperandBBytes;

// A finished tile leaves the accumulators in four chunks of 64 columns. Half 0 is chunks 0 and 2, half 1 is
// chunks 1 and 3: for a gate/up tile that is gate and up of the same 64 columns of h.
constexpr i32 kChunkColumns = 64;
constexpr u32 kChunkBytes = 64 * kChunkColumns * 2;  // of one warpgroup's 64 rows, 128-byte swizzled
constexpr u32 kStagingBytes = 2 * 2 * kChunkBytes;   // half a tile of both warpgroups

MOK_DEVICE i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------- counters of one forward call

// All zero at the start of a call. Indices are global row blocks or minibatches, so nothing wraps.
// Python twin: mok_ref/gpu/hopper.py: num_forward_counters
struct ForwardCounters {
  u32* tile_ticket;
  u32* pull_ticket;
  u32* first_pull_ticket;    // of the row blocks that all warps pull at the start
  u32* rows_ready;           // [max_row_blocks] rows pulled                     dispatch -> gate/up
  u32* hidden_ready;         // [max_row_blocks] gate/up tiles done              gate/up -> down
  u32* rows_done;            // [max_row_blocks] down tiles done, by minibatch   down -> dispatch (ring slot)
                             // both count every epilogue warp of a tile
  u32* shared_hidden_ready;  // [ceil(max_tokens / 128)]                         shared gate/up -> shared down
};

MOK_DEVICE ForwardCounters forward_counters(const LayerParams& params) {
  constexpr i32 kTicketStride = 32;  // one 128-byte line each
  u32* tables = params.counters + 2 * kTicketStride;
  const i64 blocks = params.max_row_blocks;
  u32* const pulls = params.counters + kTicketStride;
  return ForwardCounters{params.counters, pulls, pulls + kTicketStride / 2, tables, tables + blocks,
                         tables + 2 * blocks, tables + 3 * blocks};
}

// ---------------------------------------------------------------- order of minibatches

// Macrobatches last to first, minibatches of one macrobatch ascending; only the last minibatch may be short.
struct MinibatchWalk {
  i32 num_row_blocks, mini_blocks, macro_blocks, minis_per_macro, num_minis;
  i32 head;  // minibatches of the last macrobatch, which is walked first

  MOK_DEVICE explicit MinibatchWalk(const LayerParams& params)
      : num_row_blocks(params.info->num_row_blocks),
        mini_blocks(params.mini_blocks),
        macro_blocks(params.macro_blocks) {
    minis_per_macro = macro_blocks / mini_blocks;
    num_minis = ceil_div(num_row_blocks, mini_blocks);
    head = num_minis - (num_minis - 1) / minis_per_macro * minis_per_macro;
  }

  // Minibatch at walk position q.
  MOK_DEVICE i32 at(i32 q) const {
    if (q < head) return num_minis - head + q;
    const i32 macro = (num_minis - head) / minis_per_macro - 1 - (q - head) / minis_per_macro;
    return macro * minis_per_macro + (q - head) % minis_per_macro;
  }

  MOK_DEVICE i32 blocks_in(i32 mini) const { return min(mini_blocks, num_row_blocks - mini * mini_blocks); }

  // Row block number `sequence` in walk order.
  MOK_DEVICE i32 row_block(i32 sequence) const {
    const i32 missing = num_minis * mini_blocks - num_row_blocks;
    const i32 padded = sequence < head * mini_blocks - missing ? sequence : sequence + missing;
    return at(padded / mini_blocks) * mini_blocks + padded % mini_blocks;
  }

  MOK_DEVICE i32 ring_row(i32 row_block) const { return row_block % macro_blocks * kTileM; }

  // The ring slot of a minibatch was used before, if at all, by the one a macrobatch later.
  MOK_DEVICE i32 previous_user(i32 mini) const { return mini + minis_per_macro; }

  // What rows_done counts of a minibatch: every epilogue warp of its down tiles.
  MOK_DEVICE u32 down_signals(i32 mini, i32 hidden_size) const {
    return blocks_in(mini) * ceil_div(hidden_size, kTileN) * kEpilogueWarps;
  }

  MOK_DEVICE bool ring_is_reused() const { return num_minis > minis_per_macro; }

  // Whether walk position q reuses the ring slot of position q - 1.
  MOK_DEVICE bool reuses_slot_of_previous(i32 q) const {
    return q >= 1 && q < num_minis && (minis_per_macro == 1 || (q == 1 && head == 1));
  }
};

// ---------------------------------------------------------------- tiles

// What both CTAs of a cluster multiply.
enum SharedOperand : i32 { kSharesNothing, kSharesWeights, kSharesRows };

enum TileKind : i32 { kSharedGateUp, kSharedDown, kGateUp, kDown, kStop };

struct alignas(16) Tile {
  i32 kind;
  i32 row_block;       // global row block, or block of 128 local tokens for the shared expert
  i32 column;          // column tile of the product
  i32 valid_rows;      // 0: nothing to do for this CTA, its cluster partner has the last row block or column
  i32 expert;
  i32 first_row;       // row of operand A: ring row, or token
  i32 k_blocks;
  i32 shared;          // SharedOperand
};

constexpr u32 kNoTicket = ~0u;

// Neighbouring row blocks whose tiles follow each other: a minibatch, whose borders give way to those of experts.
struct RowBlockRange {
  i32 begin, end;
};

// A ticket on its way to its tile, one look-up in the schedule's tables per step: what a step asks for has come from
// memory when the next one is taken, if other work lies between them.
struct TileSearch {
  Tile tile;    // valid when no step is left
  i32 steps_left;
  RowBlockRange range;
  i32 unit;     // of the range's tiles of this kind, or pairs of them
  i32 expert;
  i32 offset, end, count;  // of the expert's rows
};

constexpr i32 kSearchSteps = 2;  // behind the first look-up

// Turns ascending tickets into tiles; executed by the loader lane alone.
struct TileWalk {
  const LayerParams& params;
  MinibatchWalk minis;
  i32 cluster_rank;
  i32 step;             // walk position of gate/up; down trails by one
  RowBlockRange gate_up_range, down_range;
  bool down_first;
  u32 begin;            // first ticket of `step`
  u32 first_units, step_units;
  u32 shared_gate_up_units, shared_units;

  MOK_DEVICE TileWalk(const LayerParams& p, i32 rank_in_cluster)
      : params(p), minis(p), cluster_rank(rank_in_cluster) {
    const i32 width = params.shared_intermediate_size;
    const i32 groups = width > 0 ? ceil_div(ceil_div(params.num_tokens, kTileM), kClusterSize) : 0;
    shared_gate_up_units = groups * ceil_div(width, kHiddenTile);
    shared_units = shared_gate_up_units + groups * ceil_div(params.hidden_size, kTileN);
    gate_up_range = RowBlockRange{0, 0};
    enter(0, shared_units);
  }

  MOK_DEVICE Tile locate(u32 ticket) {
    TileSearch search = begin_search(ticket);
    while (search.steps_left > 0) advance(search);
    return search.tile;
  }

  MOK_DEVICE TileSearch begin_search(u32 ticket) {
    TileSearch search;
    search.steps_left = 0;
    if (ticket == kNoTicket || (ticket >= shared_units && !seek(ticket))) {
      search.tile = Tile{kStop};
    } else if (ticket < shared_units) {
      search.tile = shared_tile(ticket);
    } else {
      const u32 unit = ticket - begin;
      const bool first = unit < first_units;
      const bool gate_up = first != down_first;
      search.tile.kind = gate_up ? kGateUp : kDown;
      search.range = gate_up ? gate_up_range : down_range;
      search.unit = first ? unit : unit - first_units;
      search.steps_left = kSearchSteps;
      const i32 block = search.range.begin + search.unit / ceil_div(columns(search.tile.kind), kClusterSize);
      search.expert = ld_global_s32(params.row_block_expert + block);
    }
    return search;
  }

  MOK_DEVICE void advance(TileSearch& search) const {
    if (search.steps_left == 2) {
      search.offset = ld_global_s32(params.expert_offset + search.expert);
      search.end = ld_global_s32(params.expert_offset + search.expert + 1);
      search.count = ld_global_s32(params.expert_count + search.expert);
      search.steps_left = 1;
    } else if (search.steps_left == 1) {
      search.tile = kClusterSize == 1 ? routed_tile(search) : paired_tile(search);
      search.steps_left = 0;
    }
  }

 private:
  // To the step of this ticket; false: it lies behind the last one.
  MOK_DEVICE bool seek(u32 ticket) {
    while (ticket - begin >= step_units) {
      if (step >= minis.num_minis) return false;
      enter(step + 1, begin + step_units);
    }
    return true;
  }

  MOK_DEVICE void enter(i32 new_step, u32 first_ticket) {
    step = new_step;
    begin = first_ticket;
    down_first = minis.reuses_slot_of_previous(step);
    down_range = gate_up_range;
    gate_up_range = range_of(step);
    const u32 gate_up = units(gate_up_range, columns(kGateUp));
    const u32 down = units(down_range, columns(kDown));
    first_units = down_first ? down : gate_up;
    step_units = gate_up + down;
  }

  MOK_DEVICE i32 columns(i32 kind) const {
    return kind == kGateUp ? ceil_div(params.intermediate_size, kHiddenTile) : ceil_div(params.hidden_size, kTileN);
  }

  MOK_DEVICE RowBlockRange range_of(i32 q) const {
    if (q >= minis.num_minis) return RowBlockRange{0, 0};
    if (!minis.ring_is_reused()) return RowBlockRange{q == 0 ? 0 : gate_up_range.end, border(q + 1)};
    const i32 begin = minis.at(q) * minis.mini_blocks;
    return RowBlockRange{begin, begin + minis.blocks_in(minis.at(q))};
  }

  // Where minibatch q begins: at a border of experts if there is one nearby, else their weights are read twice.
  MOK_DEVICE i32 border(i32 q) const {
    const i32 exact = q * minis.mini_blocks;
    if (exact >= minis.num_row_blocks) return minis.num_row_blocks;
    const i32 expert = params.row_block_expert[exact];
    const i32 before = params.expert_offset[expert] / kTileM, behind = params.expert_offset[expert + 1] / kTileM;
    const i32 nearest = exact - before < behind - exact ? before : behind;
    return abs(nearest - exact) < ceil_div(minis.mini_blocks, 2) ? nearest : exact;
  }

  // A cluster's unit is two tiles, and a row block has an even number of columns, the last one perhaps empty.
  MOK_DEVICE u32 units(RowBlockRange range, i32 columns) const {
    return (range.end - range.begin) * ceil_div(columns, kClusterSize);
  }

  // The row blocks of one expert in a range, and which of their tiles (or pairs) is meant. Expert by expert: an expert's
  // tiles are under way at the same time, and each of its rows and weights comes from memory once.
  struct ExpertPart {
    i32 first, blocks;
    i32 unit;
  };

  MOK_DEVICE ExpertPart expert_part(const TileSearch& search, i32 column_units) const {
    const i32 first = max(search.range.begin, search.offset / kTileM);
    const i32 last = min(search.range.end, search.end / kTileM);
    return ExpertPart{first, last - first, search.unit - (first - search.range.begin) * column_units};
  }

  MOK_DEVICE Tile routed_tile(const TileSearch& search) const {
    const ExpertPart part = expert_part(search, columns(search.tile.kind));
    const i32 column = part.unit / part.blocks, block = part.first + part.unit - column * part.blocks;
    return tile_of(search, block, column, kSharesNothing);
  }

  // The expert's row blocks two by two, then its odd one; column pair by column pair.
  MOK_DEVICE Tile paired_tile(const TileSearch& search) const {
    const i32 all_columns = columns(search.tile.kind);
    const ExpertPart part = expert_part(search, ceil_div(all_columns, 2));
    const i32 column_pair = part.unit / part.blocks, place = part.unit - column_pair * part.blocks;
    const i32 pairs = part.blocks / 2;
    const bool odd = place == 2 * pairs;
    const i32 second = !odd && place >= pairs;  // of the two columns
    const i32 block = part.first + (odd ? part.blocks - 1 : 2 * (place - second * pairs) + cluster_rank);
    const i32 column = 2 * column_pair + (odd ? cluster_rank : second);
    const bool whole = 2 * column_pair + 1 < all_columns;
    Tile tile = tile_of(search, block, column, odd ? (whole ? kSharesRows : kSharesNothing) : kSharesWeights);
    if (column >= all_columns) tile.valid_rows = 0;
    return tile;
  }

  MOK_DEVICE Tile tile_of(const TileSearch& search, i32 block, i32 column, SharedOperand shared) const {
    const i32 kind = search.tile.kind;
    const i32 depth = kind == kGateUp ? params.hidden_size : params.intermediate_size;
    const i32 rows_left = search.count - (block * kTileM - search.offset);
    return Tile{kind, block, column, min(rows_left, kTileM), search.expert, minis.ring_row(block),
                ceil_div(depth, kTileK), shared};
  }

  MOK_DEVICE Tile shared_tile(u32 ticket) const {
    const bool gate_up = ticket < shared_gate_up_units;
    const i32 unit = gate_up ? ticket : ticket - shared_gate_up_units;
    const i32 blocks = ceil_div(params.num_tokens, kTileM), groups = ceil_div(blocks, kClusterSize);
    const i32 column = unit / groups, pair = (unit - column * groups) * kClusterSize;
    const bool whole = pair + kClusterSize <= blocks;
    const bool present = whole || cluster_rank == 0;
    const i32 block = present ? pair + cluster_rank : pair;
    const i32 depth = gate_up ? params.hidden_size : params.shared_intermediate_size;
    return Tile{gate_up ? kSharedGateUp : kSharedDown,
                block,
                column,
                present ? min(kTileM, params.num_tokens - block * kTileM) : 0,
                0,
                block * kTileM,
                ceil_div(depth, kTileK),
                kClusterSize == 2 && whole ? kSharesWeights : kSharesNothing};
  }
};

// ---------------------------------------------------------------- shared memory of a CTA

// Byte offsets from the 1024-aligned start of dynamic shared memory.
// Python twin: mok_ref/gpu/hopper.py: SHARED_BYTES
constexpr u32 kStagingOffset = kStages * kStageBytes;
constexpr u32 kTileSlotOffset = kStagingOffset + kStagingBytes;
constexpr u32 kStageFull = kTileSlotOffset + 32 * kTileSlots;
constexpr u32 kStageEmpty = kStageFull + 8 * kStages;
constexpr u32 kTileFull = kStageEmpty + 8 * kStages;
constexpr u32 kTileDone = kTileFull + 8 * kTileSlots;
constexpr u32 kStagingFull = kTileDone + 8 * kTileSlots;
constexpr u32 kStagingFree = kStagingFull + 8 * 2;
constexpr u32 kMailFull = kStagingFree + 8 * 2;
constexpr u32 kMail = kMailFull + 8 * kMailSlots;
constexpr u32 kForwardSharedBytes = kMail + 8 * kMailSlots;
static_assert(sizeof(Tile) == 32, "a tile slot has 32 bytes");
static_assert(kForwardSharedBytes <= 232448, "a CTA has 227 KB of shared memory");

// Executed by one thread before the CTA (and its cluster) synchronises.
MOK_DEVICE void init_barriers(u32 shared) {
  for (i32 stage = 0; stage < kStages; ++stage) {
    mbarrier_init(shared + kStageFull + 8 * stage, 1);
    mbarrier_init(shared + kStageEmpty + 8 * stage, kMathWarps * kClusterSize);
  }
  for (i32 slot = 0; slot < kTileSlots; ++slot) {
    mbarrier_init(shared + kTileFull + 8 * slot, 1);
    mbarrier_init(shared + kTileDone + 8 * slot, kMathWarps + kEpilogueWarps);
  }
  for (i32 slot = 0; slot < kMailSlots; ++slot) mbarrier_init(shared + kMailFull + 8 * slot, 1);
  for (i32 warpgroup = 0; warpgroup < 2; ++warpgroup) {
    mbarrier_init(shared + kStagingFull + 8 * warpgroup, 4);
    mbarrier_init(shared + kStagingFree + 8 * warpgroup, kEpilogueWarps);
  }
  fence_mbarrier_init();
}

MOK_DEVICE void sync_cluster_or_cta() {
  if constexpr (kClusterSize > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

// Tiles in the order of their tickets: the loader puts, math and epilogue warps get. A slot is free again when
// every one of them has finished its tile.
struct TileQueue {
  unsigned char* bytes;
  u32 shared;
  u32 number;  // of the tile that this warp handles next

  MOK_DEVICE explicit TileQueue(unsigned char* shared_bytes)
      : bytes(shared_bytes), shared(shared_address(shared_bytes)), number(0) {}

  MOK_DEVICE void put(const Tile& tile) {
    mbarrier_wait(barrier(kTileDone), parity() ^ 1);
    *slot() = tile;
    mbarrier_arrive(barrier(kTileFull));
    ++number;
  }

  MOK_DEVICE bool ready() const { return mbarrier_test_wait(barrier(kTileFull), parity()); }

  MOK_DEVICE Tile get() const {
    mbarrier_wait(barrier(kTileFull), parity());
    return *slot();
  }

  // Whole math or epilogue warp: needs the slot no more.
  MOK_DEVICE void finish(i32 lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier(kTileDone));
    ++number;
  }

  MOK_DEVICE Tile take(i32 lane) {
    const Tile tile = get();
    finish(lane);
    return tile;
  }

 private:
  MOK_DEVICE u32 barrier(u32 kind) const { return shared + kind + 8 * (number % kTileSlots); }
  MOK_DEVICE u32 parity() const { return number / kTileSlots & 1; }
  MOK_DEVICE Tile* slot() const {
    return reinterpret_cast<Tile*>(bytes + kTileSlotOffset) + number % kTileSlots;
  }
};

// Tickets of a CTA or cluster. The leader draws; in a cluster it mails each number to its partner, whose barrier
// counts the eight bytes. At most kTileSlots + 1 letters are on their way: the leader posts a tile's number when it has
// loaded the tile before last, and that needs stages which the partner's math warps have handed back.
// After a time-out anywhere on this rank the leader draws no more: every tile of the kernel ends, then the kernel.
struct TicketMail {
  u32* ticket;
  const u32* abort_flag;
  u32 shared;
  i32 cluster_rank;
  u32 number = 0;   // of the next letter
  u32 drawn = 0;
  bool stopped = false;

  MOK_DEVICE TicketMail(u32* counter, const u32* abort, u32 shared_bytes, i32 rank_in_cluster)
      : ticket(counter), abort_flag(abort), shared(shared_bytes), cluster_rank(rank_in_cluster) {
    if (kClusterSize > 1 && cluster_rank != 0) {
      for (i32 slot = 0; slot < kMailSlots; ++slot) expect(slot);
    }
    draw();
  }

  // Asks for the next number; `next` returns it later.
  MOK_DEVICE void draw() {
    if (cluster_rank != 0) return;
    drawn = draw_ticket(ticket);
    stopped = aborted(abort_flag);
  }

  MOK_DEVICE u32 next() {
    if (stopped) drawn = kNoTicket;
    if constexpr (kClusterSize == 1) return drawn;
    const u32 slot = number % kMailSlots;
    const u32 parity = number / kMailSlots & 1;
    ++number;
    const u32 letter = shared + kMail + 8 * slot, barrier = shared + kMailFull + 8 * slot;
    if (cluster_rank == 0) {
      st_async_cluster_u64(letter, barrier, 1, drawn);
      return drawn;
    }
    mbarrier_wait(barrier, parity);
    const u32 received = static_cast<u32>(ld_shared_u64(letter));
    expect(slot);
    return received;
  }

 private:
  MOK_DEVICE void expect(u32 slot) { mbarrier_arrive_expect_tx(shared + kMailFull + 8 * slot, 8); }
};

// The ring of k-blocks. A reader waits for `full` with `parity`, the producer for `empty` with the other one: at the
// start every stage is free.
struct OperandRing {
  u32 shared;
  u32 number;  // of the next k-block, from the kernel's start

  MOK_DEVICE u32 stage() const { return number % kStages; }
  MOK_DEVICE u32 parity() const { return number / kStages & 1; }
  MOK_DEVICE u32 full() const { return shared + kStageFull + 8 * stage(); }
  MOK_DEVICE u32 empty() const { return shared + kStageEmpty + 8 * stage(); }
  MOK_DEVICE u32 a() const { return shared + stage() * kStageBytes; }
  MOK_DEVICE u32 b() const { return a() + kOperandABytes; }
};
static_assert((kStages & (kStages - 1)) == 0, "stage and parity are bits of the k-block's number");

// One warp hands a stage back, in a cluster to both CTAs: either may be about to multicast into it.
MOK_DEVICE void release_stage(u32 empty_barrier, i32 lane) {
  if constexpr (kClusterSize == 1) {
    if (lane == 0) mbarrier_arrive(empty_barrier);
  } else {
    if (lane < kClusterSize) mbarrier_arrive_cluster(empty_barrier, lane);
  }
}

// ---------------------------------------------------------------- from accumulators to the epilogue

// Half a tile in shared memory: per math warpgroup two chunks of 64 rows x 64 columns, bf16, rows of 128 bytes whose
// 16-byte units are swizzled by the row. Its barriers turn once per half, twice per tile: half 0 has always parity 0.
struct StagingBuffer {
  u32 shared;
  i32 warpgroup;   // whose half

  MOK_DEVICE u32 full() const { return shared + kStagingFull + 8 * warpgroup; }
  MOK_DEVICE u32 free() const { return shared + kStagingFree + 8 * warpgroup; }
  MOK_DEVICE u32 unit(i32 chunk, i32 row, i32 column_unit) const {
    const u32 base = shared + kStagingOffset + (2 * warpgroup + chunk) * kChunkBytes;
    return base + row * 128 + ((column_unit ^ (row & 7)) << 4);
  }

  // Room for a half: the half before is gone.
  MOK_DEVICE bool is_free(i32 half) const { return mbarrier_test_wait(free(), half ^ 1); }
  MOK_DEVICE void wait_free(i32 half) const { mbarrier_wait(free(), half ^ 1); }
  MOK_DEVICE void wait_full(i32 half) const { mbarrier_wait(full(), half); }

  // Whole warp: written, or read.
  MOK_DEVICE void pass(u32 barrier, i32 lane) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  }
};

// Half a tile of one math thread as bf16 pairs: pair[16 c + 2 i] row r, [16 c + 2 i + 1] row r + 8 of columns
// 8 i + 2 (lane % 4), + 1 of the half's chunk c.
struct HalfTile {
  u32 pair[32];
};

template <i32 kHalf>
MOK_DEVICE void take_half(HalfTile& half, const float (&acc)[128]) {
#pragma unroll
  for (i32 chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
    for (i32 i = 0; i < 16; ++i) {
      const i32 source = 64 * chunk + 32 * kHalf + 2 * i;
      half.pair[16 * chunk + i] = pack_bf16x2(acc[source], acc[source + 1]);  // RNE to bf16
    }
  }
}

// Whole math warp: its 16 rows of the half into the staging buffer, which is free.
MOK_DEVICE void stage_half(const StagingBuffer& staging, const HalfTile& half, i32 lane) {
  const i32 row = threadIdx.x / kWarpSize % 4 * 16 + lane % 16;
  u32 address = staging.unit(0, row, lane / 16);
  keep_in_register(address);  // one register instead of four: the row's other units are one bit or two away
#pragma unroll
  for (i32 chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
    for (i32 unit = 0; unit < 8; unit += 2) {
      const u32* pair = half.pair + 16 * chunk + 2 * unit;
      stmatrix_x4((address ^ unit << 4) + chunk * kChunkBytes, pair[0], pair[1], pair[2], pair[3]);
    }
  }
  staging.pass(staging.full(), lane);
}

}  // namespace mok
