// The machine under both backward kernels: a ring of operand tiles in shared memory and a queue of tasks.
//
// Executed by: CTAs of 384 threads. Warpgroup 0 helps: warp 0 loads operands by TMA and in dgrad draws tickets, warp 1
// stores what the multiplying warps left in the ring and signals other CTAs (dgrad) or draws tickets (wgrad), warps 2
// and 3 pull rows (dgrad). Warpgroups 1 and 2 multiply: rows 0..63 and 64..127 of a 128 x 256 tile, K in blocks of 64.
// Synchronisation: one mbarrier pair per ring stage (full: bytes of TMA; empty: 8 arrivals) and per slot of the
// task queue (full: the producer; empty: every warp that reads it). Nothing here waits for another CTA.
#pragma once
#include "check.cuh"
#include "ptx.cuh"
#include "tensor_core.cuh"
#include "trace.cuh"

namespace mok {

constexpr i32 kThreads = 384;
constexpr i32 kTileRows = 128;          // rows of a tile, 64 per multiplying warpgroup
constexpr i32 kTileColumns = 256;
constexpr i32 kDepthBlock = 64;         // K of one ring stage
constexpr u32 kBoxBytes = 8192;         // 64 x 64 bf16
constexpr i32 kStages = kMxfp8 ? 3 : 4;
constexpr u32 kTileABytes = 2 * kBoxBytes;
constexpr u32 kTileBBytes = 4 * kBoxBytes;
constexpr u32 kStageBytes = kTileABytes + kTileBBytes;
constexpr i32 kTaskSlots = 4;
constexpr i32 kMathWarps = 8;
constexpr i32 kMailSlots = kClusterSize > 1 ? 2 : 0;
constexpr u32 kStagingBytes = 4096;     // per multiplying warp
// MXFP8: codes and scales of a k-block arrive in a stage of their own; the multiplying warps expand them into a
// stage of the ring, which is then full once all of them are through.
constexpr i32 kCodeStages = kMxfp8 ? 2 : 0;
constexpr u32 kCodeRows = kTileRows + kTileColumns;  // of 64 codes each, then as many pairs of scales
constexpr u32 kCodeStageBytes = kCodeRows * (kDepthBlock + 2);
constexpr u32 kFullArrivals = kMxfp8 ? kMathWarps : 1;
// Registers per thread of helping and multiplying warps: 128 helpers + 256 math must not pass 64,512 in sum.
constexpr i32 kHelperRegisters = kMxfp8 ? 88 : 96;               // dgrad: two warps keep rows in flight
constexpr i32 kMathRegisters = kMxfp8 ? 208 : 200;
constexpr i32 kLoaderRegisters = 72, kMathOnlyRegisters = 216;   // wgrad
static_assert(128 * kHelperRegisters + 256 * kMathRegisters <= 64512, "over-subscribed registers hang silently");
static_assert(128 * kLoaderRegisters + 256 * kMathOnlyRegisters <= 64512, "over-subscribed registers hang silently");

// One tile to make, written by the producer warp for the other warps of its CTA.
struct alignas(16) TileTask {
  i32 kind;       // TaskKind; kTaskEnd: no more work
  i32 block;      // row block (dgrad) or first row of the tile in dW (wgrad)
  i32 column;     // first column of the tile
  i32 valid;      // rows of the tile that count, 1..128
  i32 depth;      // K in k-blocks of 64 (dgrad) or groups of 16 (wgrad)
  i32 batch;      // expert
  i32 flags;
  i32 ring_row;   // wgrad: where K begins
};

enum TaskKind : i32 {
  kTaskEnd = 0,
  kTaskGateUp = 1,     // gate or up made again
  kTaskHidden = 2,     // dhu and what follows from it
  kTaskInput = 3,      // dx
  kTaskWeight = 4,     // dW
};

// Addresses in dynamic shared memory (1024-byte aligned base).
struct SharedLayout {
  u32 base;

  static constexpr u32 kStagingOffset = kStages * kStageBytes;
  static constexpr u32 kCodeOffset = kStagingOffset + kMathWarps * kStagingBytes;
  static constexpr u32 kTaskOffset = kCodeOffset + kCodeStages * kCodeStageBytes;
  static constexpr u32 kBarrierOffset = kTaskOffset + kTaskSlots * sizeof(TileTask);
  static constexpr i32 kNumBarriers = 2 * kStages + 2 * kTaskSlots + 4 * 4 + 2 * kCodeStages;
  static constexpr u32 kMailOffset = kBarrierOffset + 8 * kNumBarriers;
  static constexpr u32 kBytes = kMailOffset + 3 * 8 * kMailSlots;

  MOK_DEVICE u32 tile_a(u32 stage) const { return base + stage * kStageBytes; }
  MOK_DEVICE u32 tile_b(u32 stage) const { return tile_a(stage) + kTileABytes; }
  MOK_DEVICE u32 staging(u32 warp) const { return base + kStagingOffset + warp * kStagingBytes; }
  MOK_DEVICE u32 task(u32 slot) const { return base + kTaskOffset + slot * static_cast<u32>(sizeof(TileTask)); }
  MOK_DEVICE u32 barrier(u32 index) const { return base + kBarrierOffset + 8 * index; }
  MOK_DEVICE u32 full(u32 stage) const { return barrier(stage); }
  MOK_DEVICE u32 empty(u32 stage) const { return barrier(kStages + stage); }
  MOK_DEVICE u32 task_full(u32 slot) const { return barrier(2 * kStages + slot); }
  MOK_DEVICE u32 task_empty(u32 slot) const { return barrier(2 * kStages + kTaskSlots + slot); }
  // Per multiplying warpgroup: pieces of a tile handed to the storing warp (4 arrivals).
  MOK_DEVICE u32 piece_full(u32 group, u32 piece) const {
    return barrier(2 * kStages + 2 * kTaskSlots + group * 4 + piece);
  }
  // Per multiplying warpgroup: half of a tile's columns, rounded, lies in its staging buffers (4 arrivals) or has
  // left them (1 arrival, the storing warp's).
  MOK_DEVICE u32 half_full(u32 group, u32 half) const {
    return barrier(2 * kStages + 2 * kTaskSlots + 8 + group * 4 + half);
  }
  MOK_DEVICE u32 half_free(u32 group, u32 half) const { return half_full(group, 2 + half); }
  // In a cluster: letters from CTA 0 to CTA 1, here (full) or gone (free, CTA 0's).
  MOK_DEVICE u32 letter(u32 slot) const { return base + kMailOffset + 8 * slot; }
  MOK_DEVICE u32 mail_full(u32 slot) const { return letter(kMailSlots + slot); }
  MOK_DEVICE u32 mail_free(u32 slot) const { return letter(2 * kMailSlots + slot); }
  MOK_DEVICE u32 code_stage(u32 stage) const { return base + kCodeOffset + stage * kCodeStageBytes; }
  MOK_DEVICE u32 code_full(u32 stage) const { return barrier(kNumBarriers - 2 * kCodeStages + stage); }
  MOK_DEVICE u32 code_empty(u32 stage) const { return barrier(kNumBarriers - kCodeStages + stage); }
};

constexpr u32 kSharedBytes = SharedLayout::kBytes;
static_assert(kSharedBytes <= 232448, "shared memory of one CTA");

// ---- clusters (kClusterSize 2): two CTAs that make tiles of the same columns deliver half of operand B to each other

MOK_DEVICE i32 cluster_rank() { return kClusterSize == 1 ? 0 : static_cast<i32>(cluster_ctarank()); }

MOK_DEVICE void sync_cluster_or_cta() {
  if constexpr (kClusterSize > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

// Last of all: the partner delivers and arrives in this CTA's shared memory to the end.
MOK_DEVICE void leave_cluster() {
  if constexpr (kClusterSize > 1) {
    __syncwarp();
    cluster_sync();
  }
}

// `queue_readers`: warps that read the task queue.
MOK_DEVICE SharedLayout init_pipeline(const void* shared, u32 queue_readers) {
  const SharedLayout layout{shared_address(shared)};
  if (threadIdx.x == 0) {
    for (i32 s = 0; s < kStages; ++s) {
      mbarrier_init(layout.full(s), kFullArrivals);
      mbarrier_init(layout.empty(s), kMathWarps * kClusterSize);
    }
    for (i32 s = 0; s < kTaskSlots; ++s) {
      mbarrier_init(layout.task_full(s), 1);
      mbarrier_init(layout.task_empty(s), queue_readers);
    }
    for (i32 s = 0; s < kMailSlots; ++s) {
      mbarrier_init(layout.mail_full(s), 1);
      mbarrier_init(layout.mail_free(s), 1);
    }
    for (i32 p = 0; p < 8; ++p) {
      mbarrier_init(layout.piece_full(p >> 2, p & 3), 4);
      mbarrier_init(layout.half_full(p >> 2, p & 3), p & 2 ? 1 : 4);
    }
    for (i32 s = 0; s < kCodeStages; ++s) {
      mbarrier_init(layout.code_full(s), 1);
      mbarrier_init(layout.code_empty(s), kMathWarps);
    }
    fence_mbarrier_init();
  }
  sync_cluster_or_cta();
  return layout;
}

// Position in a ring of `kSize` buffers: index and the parity of its current turn.
template <i32 kSize>
struct RingCursor {
  u32 index = 0, parity = 0;

  MOK_DEVICE void advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
  MOK_DEVICE void skip(u32 count) {
    const u32 position = index + count;
    parity ^= (position / kSize) & 1;
    index = position % kSize;
  }
};

// Position in the ring of operands, and in that of their codes if they have any.
struct StageCursor : RingCursor<kStages> {
  RingCursor<kMxfp8 ? kCodeStages : 1> codes;
};
using TaskCursor = RingCursor<kTaskSlots>;

// ---- task queue ----

// Producer lane: waits until the next slot is free.
template <typename Layout, typename Cursor>
MOK_DEVICE void wait_task_slot(const Layout& layout, const Cursor& cursor) {
  mbarrier_wait(layout.task_empty(cursor.index), cursor.parity ^ 1);
}

// Producer lane: hands `task` to the other warps.
template <typename Cursor>
MOK_DEVICE void publish_task(const SharedLayout& layout, Cursor& cursor, const TileTask& task) {
  wait_task_slot(layout, cursor);
  const u32 slot = layout.task(cursor.index);
  st_shared_v4(slot, task.kind, task.block, task.column, task.valid);
  st_shared_v4(slot + 16, task.depth, task.batch, task.flags, task.ring_row);
  mbarrier_arrive(layout.task_full(cursor.index));
  cursor.advance();
}

// Whole warp: the next task. The warp gives the slot back with `release_task` when it needs it no more.
template <typename Layout, typename Cursor>
MOK_DEVICE TileTask read_task(const Layout& layout, const Cursor& cursor) {
  mbarrier_wait(layout.task_full(cursor.index), cursor.parity);
  const u32 slot = layout.task(cursor.index);
  const uint4 a = ld_shared_v4(slot), b = ld_shared_v4(slot + 16);
  return TileTask{static_cast<i32>(a.x), static_cast<i32>(a.y), static_cast<i32>(a.z), static_cast<i32>(a.w),
                  static_cast<i32>(b.x), static_cast<i32>(b.y), static_cast<i32>(b.z), static_cast<i32>(b.w)};
}

template <typename Cursor>
MOK_DEVICE void release_task(const SharedLayout& layout, Cursor& cursor) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(layout.task_empty(cursor.index));
  cursor.advance();
}

// ---- tickets ----

constexpr u32 kNoTicket = ~0u;  // behind every tile

// Tickets of a CTA or cluster, one lane of each CTA. CTA 0 draws and mails each number to its partner, which makes the
// other tile of the same ticket. After a time-out anywhere on this rank it draws no more.
struct TicketMail {
  const SharedLayout& layout;
  u32* counter;
  const u32* abort_flag;
  RingCursor<2> slot;
  u32 drawn;

  MOK_DEVICE TicketMail(const SharedLayout& shared, u32* ticket_counter, const u32* abort)
      : layout(shared), counter(ticket_counter), abort_flag(abort), drawn(0) {
    if (cluster_rank() != 0) {
      for (i32 s = 0; s < kMailSlots; ++s) expect(s);
    }
  }

  // Asks for the next number, which `next` returns later.
  MOK_DEVICE void draw() {
    if (cluster_rank() == 0) drawn = draw_ticket(counter);
  }

  MOK_DEVICE u32 next() {
    if (cluster_rank() == 0 && aborted(abort_flag)) drawn = kNoTicket;
    if constexpr (kClusterSize == 1) return drawn;
    const u32 letter = layout.letter(slot.index), full = layout.mail_full(slot.index);
    const u32 free = layout.mail_free(slot.index), parity = slot.parity;
    slot.advance();
    if (cluster_rank() == 0) {
      mbarrier_wait(free, parity ^ 1);
      st_async_cluster_u64(letter, full, 1, drawn);
      return drawn;
    }
    mbarrier_wait(full, parity);
    const u32 received = static_cast<u32>(ld_shared_u64(letter));
    expect(slot.index ^ 1);
    mbarrier_arrive_cluster(free, 0);
    return received;
  }

 private:
  MOK_DEVICE void expect(u32 s) { mbarrier_arrive_expect_tx(layout.mail_full(s), 8); }
};

// ---- operands ----

// Where an operand tile lies at k-block 0; k-block k is 64 elements further along K. One copy fetches a whole tile
// of a K-major operand. Of an MN-major one it does when the matrix' columns are a multiple of 64 (`whole`): the map
// then splits them into blocks of 64, each an 8 KB block of the tile. Otherwise a copy fetches one such block, and
// columns behind the matrix arrive as +0.
struct Operand {
  const TensorMap* map;
  i32 column, row, batch;
  bool whole;
};

// kMapBoxes: such blocks in a copy of a whole operand.
template <Major kMajor, i32 kBoxes, i32 kMapBoxes = kBoxes>
MOK_DEVICE void load_operand(u32 tile, const Operand& operand, i32 k, u32 barrier) {
  if constexpr (kMajor == Major::kK) {
    tma_load_3d(tile, operand.map, operand.column + kDepthBlock * k, operand.row, operand.batch, barrier);
  } else if (operand.whole) {
#pragma unroll
    for (i32 box = 0; box < kBoxes; box += kMapBoxes) {
      tma_load_4d(tile + box * kBoxBytes, operand.map, 0, operand.row + kDepthBlock * k, operand.column / 64 + box,
                  operand.batch, barrier);
    }
  } else {
    for (i32 box = 0; box < kBoxes; ++box) {
      tma_load_4d(tile + box * kBoxBytes, operand.map, operand.column + 64 * box, operand.row + kDepthBlock * k, 0,
                  operand.batch, barrier);
    }
  }
}

// Producer lane: `bytes` for a stage are on their way by TMA, on behalf of everybody who fills stages.
MOK_DEVICE void announce_stage(u32 full, u32 bytes) {
  if constexpr (kFullArrivals > 1) mbarrier_arrive_count(full, kFullArrivals - 1);
  mbarrier_arrive_expect_tx(full, bytes);
}

constexpr i32 kBoxesB = 4 / kClusterSize;  // of one copy of B

// This CTA's 128 of B's 256 columns, for both CTAs of the cluster (multicast inside its shared memory, not over links).
MOK_DEVICE void load_half_for_both(u32 tile, const Operand& b, i32 k, u32 barrier) {
  const i32 first = kBoxesB * cluster_rank();
  for (i32 box = first; box < first + kBoxesB; box += b.whole ? kBoxesB : 1) {
    tma_load_4d_cluster(tile + box * kBoxBytes, b.map, b.whole ? 0 : b.column + 64 * box, b.row + kDepthBlock * k,
                        b.whole ? b.column / 64 + box : 0, b.batch, barrier, 3);
  }
}

// Producer lane: k-blocks first .. end - 1 of A (128 rows) and B (256 columns) into the ring. `shares`: the partner
// in the cluster multiplies with the same B (MN-major).
template <Major kMajorA, Major kMajorB>
MOK_DEVICE void load_product(const SharedLayout& layout, StageCursor& cursor, const Operand& a, const Operand& b,
                             i32 first, i32 end, bool shares) {
  for (i32 k = first; k < end; ++k) {
    mbarrier_wait(layout.empty(cursor.index), cursor.parity ^ 1);
    const u32 full = layout.full(cursor.index);
    announce_stage(full, kStageBytes);
    load_operand<kMajorA, 2>(layout.tile_a(cursor.index), a, k, full);
    if (kClusterSize > 1 && shares) {
      load_half_for_both(layout.tile_b(cursor.index), b, k, full);
    } else {
      load_operand<kMajorB, 4, kBoxesB>(layout.tile_b(cursor.index), b, k, full);
    }
    cursor.advance();
  }
}

// ---- products ----

// On behalf of `warps` multiplying warps. In a cluster to both CTAs: either may deliver into it.
MOK_DEVICE void release_stage(const SharedLayout& layout, u32 stage, i32 warps = 1) {
  const i32 lane = threadIdx.x % kWarpSize;
  if (lane >= warps * kClusterSize) return;
  if constexpr (kClusterSize == 1) {
    mbarrier_arrive(layout.empty(stage));
  } else {
    mbarrier_arrive_cluster(layout.empty(stage), lane % kClusterSize);
  }
}

// Multiplying warp without rows in this tile: passes the stages through.
template <typename Layout>
MOK_DEVICE void skip_stages(const Layout& layout, StageCursor& cursor, i32 count) {
  for (i32 k = 0; k < count; ++k) {
    mbarrier_wait(layout.full(cursor.index), cursor.parity);
    __syncwarp();
    release_stage(layout, cursor.index);
    cursor.advance();
  }
}

// Nothing to do while products run.
struct NoShadow {
  MOK_DEVICE void operator()() const {}
};

constexpr i32 kShadowBlock = 3;  // k-block behind whose products the rest of the tile before is stored

// The ring as a multiplying warp walks it through one product. What the k-blocks have in common is computed once: their
// instructions compete with the tensor cores for power.
template <Major kMajorA, Major kMajorB>
struct ProductRing {
  u32 shared, lane;
  u32 first, between;  // low words of descriptors: of A in stage 0, from A to B
  u32 number;          // of the next stage, counted from the cursor's even turn on

  // Warpgroup `group` takes rows 64 group .. 64 group + 63 of the tile.
  MOK_DEVICE ProductRing(const SharedLayout& layout, const StageCursor& cursor, i32 group)
      : shared(layout.base),
        lane(threadIdx.x % kWarpSize),
        first(descriptor_low<kMajorA>(layout.tile_a(0) + group * kBoxBytes)),
        between(descriptor_low<kMajorB>(layout.tile_b(0)) - first),
        number(cursor.index + cursor.parity * kStages) {
    keep_in_register(lane);
    keep_in_register(first);
    keep_in_register(between);
  }

  MOK_DEVICE u32 stage() const { return number % kStages; }
  MOK_DEVICE u32 empty() const { return SharedLayout{shared}.empty(stage()); }
  MOK_DEVICE void wait() const { mbarrier_wait(SharedLayout{shared}.full(stage()), number / kStages & 1); }

  // Descriptors of A and B in the next stage.
  MOK_DEVICE void descriptors(u64& a, u64& b) const {
    const u32 low = first + stage() * (kStageBytes >> 4);
    a = descriptor_of(warp_uniform(low));
    b = descriptor_of(warp_uniform(low + between));
  }

  // One k-block.
  MOK_DEVICE void multiply(float (&d)[128], i32 scale_d) const {
    wgmma_fence();
    u64 a, b;
    descriptors(a, b);
    tc_k64<kMajorA, kMajorB>(d, a, b, scale_d);
    wgmma_commit();
  }

  // A last k-block of which only the first `steps` groups of 16 hold anything, each a batch of its own: the compiler
  // would otherwise make every product wait for the one before.
  MOK_DEVICE void multiply_tail(float (&d)[128], i32 steps) const {
    constexpr u64 kStepA = kDescriptorStepK16<kMajorA>, kStepB = kDescriptorStepK16<kMajorB>;
    wgmma_fence();
    u64 a, b;
    descriptors(a, b);
    wgmma_m64n256k16<kMajorA, kMajorB>(d, a, b, 1);
    wgmma_commit();
#pragma unroll
    for (i32 step = 1; step < 4; ++step) {
      if (step < steps) {
        wgmma_fence();
        wgmma_m64n256k16<kMajorA, kMajorB>(d, a + step * kStepA, b + step * kStepB, 1);
        wgmma_commit();
      }
    }
  }

  // `release_stage` for the stage whose barrier `empty()` was.
  MOK_DEVICE void hand_back(u32 barrier) const {
    if (lane >= kClusterSize) return;
    if constexpr (kClusterSize == 1) {
      mbarrier_arrive(barrier);
    } else {
      mbarrier_arrive_cluster(barrier, lane);
    }
  }
};

// The first `blocks` >= 1 k-blocks of a product, K ascending, one accumulator per output. Ends with the last one under
// way and returns its stage's barrier. `shadow` is called behind the products of k-block kShadowBlock, if that is not
// the first and among them; it must not touch d.
template <typename Ring, typename Shadow>
MOK_DEVICE u32 multiply_blocks(float (&d)[128], Ring& ring, i32 blocks, i32 scale_d, Shadow&& shadow) {
  ring.wait();
  trace_task<4 * kWarpSize>(kTraceWaitOperands, 0, 0);
  ring.multiply(d, scale_d);
  u32 held = ring.empty();
  ++ring.number;
  for (i32 k = 2; k <= blocks; ++k) {
    ring.wait();
    ring.multiply(d, 1);
    if (k == kShadowBlock) shadow();
    wgmma_wait<1>();
    ring.hand_back(held);
    held = ring.empty();
    ++ring.number;
  }
  return held;
}

// d = tc(a, b, scale_d ? d : +0) over `depth` >= 1 k-blocks. `shadow` as above.
template <Major kMajorA, Major kMajorB, typename Shadow>
MOK_DEVICE void multiply(float (&d)[128], const SharedLayout& layout, StageCursor& cursor, i32 depth, i32 group,
                         i32 scale_d, Shadow&& shadow) {
  ProductRing<kMajorA, kMajorB> ring(layout, cursor, group);
  const u32 held = multiply_blocks(d, ring, depth, scale_d, shadow);
  wgmma_wait<0>();
  ring.hand_back(held);
  cursor.skip(depth);
}

// The same for K that ends inside the last k-block: `depth` >= 1 groups of 16. A single k-block is taken whole (its
// rest holds +0); of a later last one only the groups that hold anything.
template <Major kMajorA, Major kMajorB, typename Shadow>
MOK_DEVICE void multiply_groups(float (&d)[128], const SharedLayout& layout, StageCursor& cursor, i32 depth, i32 group,
                                i32 scale_d, Shadow&& shadow) {
  const i32 blocks = (depth + 3) / 4;
  ProductRing<kMajorA, kMajorB> ring(layout, cursor, group);
  u32 held = multiply_blocks(d, ring, max(1, blocks - 1), scale_d, shadow);
  if (blocks > 1) {
    ring.wait();
    ring.multiply_tail(d, ((depth - 1) & 3) + 1);
    wgmma_wait<0>();
    ring.hand_back(held);
    held = ring.empty();
  }
  wgmma_wait<0>();
  ring.hand_back(held);
  cursor.skip(blocks);
}

}  // namespace mok
