// tile.cuh: which tile a CTA computes next, and how its warps hand tiles and operands to each other.
//
//   ticket -> Tile        by arithmetic on the schedule's sizes, no task table          (TileWalk)
//   Tile                  producer lane -> math warpgroups -> signal warp               (TileQueue)
//   operands              TMA -> math warpgroups, kStages k-blocks of 64 deep           (OperandRing)
//
// NumPy twin     mok_ref/schedule.py: minibatch_walk (the order of minibatches)
// Order          shared gate/up, shared down; then for walk position q: gate/up(q), down(q - 1), or the other
//                way round where gate/up(q) needs the ring slot of q - 1. Inside a minibatch column-major over
//                its row blocks: neighbours in time share a weight tile, and the minibatch's rows stay in L2.
//                Every tile depends on smaller tickets only, so any subset of CTAs makes progress.
// A cluster of two draws one ticket for two row blocks of the same column; if they belong to one expert each
// CTA loads half of the weight tile and multicasts it into both shared memories.
#pragma once
#include "check.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "sync.cuh"

namespace mok {

constexpr i32 kTileM = kRowTile;   // rows of a tile
constexpr i32 kTileN = 256;        // weight rows of a tile: 128 gate and 128 up, or 256 of down
constexpr i32 kTileK = 64;         // k-block: 128 bytes of bf16, one swizzle span
constexpr i32 kHiddenTile = 128;   // columns of h that a gate/up tile makes
constexpr i32 kStages = 4;
constexpr i32 kTileSlots = 8;
constexpr i32 kMathWarps = 8;      // two warpgroups, 64 rows of the tile each
constexpr i32 kForwardThreads = 384;

constexpr u32 kHalfTileBytes = 64 * kTileK * 2;                // 64 rows of one operand
constexpr u32 kOperandABytes = 2 * kHalfTileBytes;
constexpr u32 kOperandBBytes = 4 * kHalfTileBytes;
constexpr u32 kStageBytes = kOperandABytes + kOperandBBytes;

MOK_DEVICE i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------- counters of one forward call

// All zero at the start of a call. Indices are global row blocks or minibatches, so nothing wraps.
// Python twin: mok_ref/gpu/hopper.py: num_forward_counters
struct ForwardCounters {
  u32* tile_ticket;
  u32* pull_ticket;
  u32* rows_ready;           // [max_row_blocks] rows pulled                     dispatch -> gate/up
  u32* hidden_ready;         // [max_row_blocks] gate/up tiles done              gate/up -> down
  u32* rows_done;            // [max_row_blocks] down tiles done, by minibatch   down -> dispatch (ring slot)
  u32* shared_hidden_ready;  // [ceil(max_tokens / 128)]                         shared gate/up -> shared down
};

MOK_DEVICE ForwardCounters forward_counters(const LayerParams& params) {
  constexpr i32 kTicketStride = 32;  // one 128-byte line each
  u32* tables = params.counters + 2 * kTicketStride;
  const i64 blocks = params.max_row_blocks;
  return ForwardCounters{params.counters, params.counters + kTicketStride, tables, tables + blocks,
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

  // Whether walk position q reuses the ring slot of position q - 1.
  MOK_DEVICE bool reuses_slot_of_previous(i32 q) const {
    return q >= 1 && q < num_minis && (minis_per_macro == 1 || (q == 1 && head == 1));
  }
};

// ---------------------------------------------------------------- tiles

enum TileKind : i32 { kSharedGateUp, kSharedDown, kGateUp, kDown, kStop };

struct alignas(16) Tile {
  i32 kind;
  i32 row_block;       // global row block, or block of 128 local tokens for the shared expert
  i32 column;          // column tile of the product
  i32 valid_rows;      // 0: nothing to do for this CTA, its cluster partner has the last row block
  i32 expert;
  i32 first_row;       // row of operand A: ring row, or token
  i32 k_blocks;
  i32 shares_weights;  // both CTAs of the cluster use the same weight tile
};

constexpr u32 kNoTicket = ~0u;

// Turns ascending tickets into tiles; executed by the producer lane alone.
struct TileWalk {
  const LayerParams& params;
  MinibatchWalk minis;
  i32 cluster_rank;
  i32 step;             // walk position of gate/up; down trails by one
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
    enter(0, shared_units);
  }

  MOK_DEVICE Tile locate(u32 ticket) {
    if (ticket == kNoTicket) return Tile{kStop};
    if (ticket < shared_units) return shared_tile(ticket);
    while (ticket - begin >= step_units) {
      if (step >= minis.num_minis) return Tile{kStop};
      enter(step + 1, begin + step_units);
    }
    const u32 unit = ticket - begin;
    const bool first = unit < first_units;
    if (first != down_first) return routed_tile(kGateUp, minis.at(step), first ? unit : unit - first_units);
    return routed_tile(kDown, minis.at(step - 1), first ? unit : unit - first_units);
  }

 private:
  MOK_DEVICE void enter(i32 new_step, u32 first_ticket) {
    step = new_step;
    begin = first_ticket;
    down_first = minis.reuses_slot_of_previous(step);
    const u32 gate_up = units(step, ceil_div(params.intermediate_size, kHiddenTile));
    const u32 down = units(step - 1, ceil_div(params.hidden_size, kTileN));
    first_units = down_first ? down : gate_up;
    step_units = gate_up + down;
  }

  MOK_DEVICE u32 units(i32 q, i32 columns) const {
    if (q < 0 || q >= minis.num_minis) return 0;
    return ceil_div(minis.blocks_in(minis.at(q)), kClusterSize) * columns;
  }

  MOK_DEVICE Tile routed_tile(TileKind kind, i32 mini, i32 unit) const {
    const i32 blocks = minis.blocks_in(mini), groups = ceil_div(blocks, kClusterSize);
    const i32 column = unit / groups, first = mini * minis.mini_blocks;
    const i32 pair = first + (unit - column * groups) * kClusterSize;
    const bool whole = pair + kClusterSize <= first + blocks;
    const bool present = whole || cluster_rank == 0;
    const i32 block = present ? pair + cluster_rank : pair;
    const i32 expert = params.row_block_expert[block];
    const bool shares = kClusterSize == 2 && whole &&
                        params.row_block_expert[pair] == params.row_block_expert[pair + kClusterSize - 1];
    const i32 depth = kind == kGateUp ? params.hidden_size : params.intermediate_size;
    return Tile{kind, block, column, present ? params.row_block_valid[block] : 0, expert,
                minis.ring_row(block), ceil_div(depth, kTileK), shares};
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
                kClusterSize == 2 && whole};
  }
};

// ---------------------------------------------------------------- shared memory of a CTA

// Byte offsets from the 1024-aligned start of dynamic shared memory.
// Python twin: mok_ref/gpu/hopper.py: SHARED_BYTES
constexpr u32 kBarrierOffset = kStages * kStageBytes;
constexpr u32 kStageFull = kBarrierOffset;
constexpr u32 kStageEmpty = kStageFull + 8 * kStages;
constexpr u32 kTileFull = kStageEmpty + 8 * kStages;
constexpr u32 kTileDone = kTileFull + 8 * kTileSlots;
constexpr u32 kTileFree = kTileDone + 8 * kTileSlots;
constexpr u32 kMailFull = kTileFree + 8 * kTileSlots;
constexpr u32 kMail = kMailFull + 8 * kTileSlots;
constexpr u32 kTileSlotOffset = kMail + 8 * kTileSlots;
constexpr u32 kForwardSharedBytes = kTileSlotOffset + sizeof(Tile) * kTileSlots;
static_assert(kTileSlotOffset % alignof(Tile) == 0, "tile slots must be aligned");
static_assert(kForwardSharedBytes <= 232448, "a CTA has 227 KB of shared memory");

// Executed by one thread before the CTA (and its cluster) synchronises.
MOK_DEVICE void init_barriers(u32 shared) {
  for (i32 stage = 0; stage < kStages; ++stage) {
    mbarrier_init(shared + kStageFull + 8 * stage, 1);
    mbarrier_init(shared + kStageEmpty + 8 * stage, kMathWarps * kClusterSize);
  }
  for (i32 slot = 0; slot < kTileSlots; ++slot) {
    mbarrier_init(shared + kTileFull + 8 * slot, 1);
    mbarrier_init(shared + kTileDone + 8 * slot, kMathWarps);
    mbarrier_init(shared + kTileFree + 8 * slot, 1);
    mbarrier_init(shared + kMailFull + 8 * slot, 1);
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

// Tiles in the order of their tickets: the producer puts, math warps get and finish, the signal warp
// releases a slot once all math warps have finished it.
struct TileQueue {
  unsigned char* bytes;
  u32 shared;
  u32 number;  // of the tile that this warp handles next

  MOK_DEVICE void put(const Tile& tile) {
    mbarrier_wait(barrier(kTileFree), parity() ^ 1);
    *slot() = tile;
    mbarrier_arrive(barrier(kTileFull));
    ++number;
  }

  MOK_DEVICE Tile get() const {
    mbarrier_wait(barrier(kTileFull), parity());
    return *slot();
  }

  // Every math warp, after the last lane's stores of this tile.
  MOK_DEVICE void finish(i32 lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier(kTileDone));
    ++number;
  }

  MOK_DEVICE Tile wait_finished() const {
    mbarrier_wait(barrier(kTileFull), parity());
    const Tile tile = *slot();
    if (tile.kind != kStop) mbarrier_wait(barrier(kTileDone), parity());
    return tile;
  }

  MOK_DEVICE void release() {
    mbarrier_arrive(barrier(kTileFree));
    ++number;
  }

 private:
  MOK_DEVICE u32 barrier(u32 kind) const { return shared + kind + 8 * (number % kTileSlots); }
  MOK_DEVICE u32 parity() const { return number / kTileSlots & 1; }
  MOK_DEVICE Tile* slot() const {
    return reinterpret_cast<Tile*>(bytes + kTileSlotOffset) + number % kTileSlots;
  }
};

// Tickets of a CTA or cluster. The leader draws; in a cluster it mails each number to its partner, whose
// arrival counts the eight bytes. At most kTileSlots letters are on their way: the leader runs ahead of its
// partner by less than kStages + 2 tiles, since stages are handed back by both.
// After a time-out anywhere on this rank the leader draws no more: every tile of the kernel ends, then the kernel.
struct TicketMail {
  u32* ticket;
  const u32* abort_flag;
  u32 shared;
  i32 cluster_rank;
  u32 number = 0;   // of the next letter
  u32 drawn = 0;
  u32 aborted = 0;

  MOK_DEVICE TicketMail(u32* counter, const u32* abort, u32 shared_bytes, i32 rank_in_cluster)
      : ticket(counter), abort_flag(abort), shared(shared_bytes), cluster_rank(rank_in_cluster) {
    if (kClusterSize > 1 && cluster_rank != 0) {
      for (i32 slot = 0; slot < kTileSlots; ++slot) expect(slot);
    }
    draw();
  }

  // Asks for the next number; `next` returns it later.
  MOK_DEVICE void draw() {
    if (cluster_rank != 0) return;
    drawn = draw_ticket(ticket);
    aborted = ld_relaxed_gpu(abort_flag);
  }

  MOK_DEVICE u32 next() {
    if (aborted != 0) drawn = kNoTicket;
    if constexpr (kClusterSize == 1) return drawn;
    const u32 slot = number % kTileSlots;
    const u32 parity = number / kTileSlots & 1;
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

// The ring of k-blocks. `phase` starts at 1 for the producer (every stage is free) and 0 for readers.
struct OperandRing {
  u32 shared;
  u32 stage;
  u32 phase;

  MOK_DEVICE u32 full() const { return shared + kStageFull + 8 * stage; }
  MOK_DEVICE u32 empty() const { return shared + kStageEmpty + 8 * stage; }
  MOK_DEVICE u32 a() const { return shared + stage * kStageBytes; }
  MOK_DEVICE u32 b() const { return a() + kOperandABytes; }
  MOK_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// One warp hands a stage back, in a cluster to both CTAs: either may be about to multicast into it.
MOK_DEVICE void release_stage(u32 empty_barrier, i32 lane) {
  if constexpr (kClusterSize == 1) {
    if (lane == 0) mbarrier_arrive(empty_barrier);
  } else {
    if (lane < kClusterSize) mbarrier_arrive_cluster(empty_barrier, lane);
  }
}

// ---------------------------------------------------------------- accumulator fragments to memory

// Eight columns of a thread's fragment row as four bf16 pairs, group j of the row (columns 32 j .. 32 j + 31).
// permuted: the weight tile was loaded through the permuting map (mok_ref/gpu/hopper.py: encode_weights), so
// the pairs are the adjacent columns 32 j + 8 q ..+7, q = lane % 4: one 16-byte store. Otherwise pair u holds
// columns 32 j + 8 u + 2 q, + 1. Columns at or beyond `columns` (a multiple of 8) are not stored.
MOK_DEVICE void store_group(u16* row, i32 j, i32 columns, bool permuted, i32 q, const u32 (&pair)[4]) {
  if (permuted) {
    if (32 * j < columns) st_global_v4(row + 32 * j + 8 * q, pair[0], pair[1], pair[2], pair[3]);
  } else {
#pragma unroll
    for (i32 u = 0; u < 4; ++u) {
      if (32 * j + 8 * u < columns) st_global_u32(row + 32 * j + 8 * u + 2 * q, pair[u]);
    }
  }
}

MOK_DEVICE bool is_permuted(i32 columns) { return columns % 32 == 0; }

}  // namespace mok
