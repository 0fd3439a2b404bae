// Parameter blocks handed to the kernels by value, and the tables they point to.
//
// NumPy twin: mok_ref/gpu/params.py mirrors every struct here; the kernel `params_layout` in support.cu
// reports sizes and offsets so that a test compares both. Add fields at the END only, in both files.
#pragma once
#include "config.cuh"

namespace mok {

// Index of a symmetric buffer in the peer table: peer_table[buffer * ep_size + rank] is its address on
// `rank`, as seen from this rank.
enum SymmetricBuffer : i32 {
  kX = 0,             // [max_tokens, H] bf16
  kDy = 1,            // [max_tokens, H] bf16
  kTopkIds = 2,       // [max_tokens, K] i32, -1 = no route
  kTopkWeights = 3,   // [max_tokens, K] f32
  kNumTokens = 4,     // [1] i32
  kCombine = 5,       // [max_tokens * K, H] bf16: y rows, later dx rows
  kDTopkWeights = 6,  // [max_tokens * K] f32
  kBarrierFlags = 7,  // [kBarrierWords] u32, one arrival counter per source rank
  kXCodes = 8,        // [max_tokens, H] e4m3            (mxfp8)
  kXScales = 9,       // [max_tokens, ceil(H/32)] e8m0   (mxfp8)
  kDyCodes = 10,      // as kXCodes, for dy
  kDyScales = 11,     // as kXScales, for dy
  kChain = 12,        // [chain_tile] f32: accumulators handed from rank to rank
  kNumSymmetric = 16,
};

constexpr i32 kBarrierWords = kMaxRanks;

enum RowOrder : i32 { kCanonical = 0, kRoundRobin = 1 };

// What the schedule found, written on the device by `gather_routes` and `schedule_fill`.
struct ScheduleInfo {
  i32 num_row_blocks;                // row blocks in use on this rank
  i32 num_rows;                      // = num_row_blocks * kRowTile
  i32 num_tokens_total;              // N, over all ranks
  i32 num_routes;                    // routed rows on this rank, padding not counted
  i32 token_offset[kMaxRanks + 1];   // exclusive prefix of num_tokens; [ep_size] = N
};

// First time-out of this rank, in pinned host memory. `code` is written last, after a system fence.
struct ErrorRecord {
  u32 code;           // 0: nothing happened; else ErrorCode
  i32 rank;           // who waited
  i32 peer;           // whom it waited for, -1: nobody in particular
  u32 phase;          // Phase
  u32 counter;        // index of the counter inside its phase
  u32 expected;
  u32 seen;
  u32 epoch;          // barrier epoch (the step, for a wait inside a kernel)
  u32 wait_us;        // how long it waited
  u32 reserved[7];
};

// First bad input in (token, slot) order since the host last looked, in device memory.
// The word is min'ed: kind in bits 62..60, place in bits 59..32 (token * K + slot, of a logit token * E + expert),
// value bits in 31..0.
constexpr u64 kNoInputError = ~0ull;

enum ErrorCode : u32 { kNoError = 0, kTimeout = 1, kSelfTest = 2 };

enum InputErrorKind : u32 { kBadId = 0, kBadWeight = 1, kBadLogit = 2 };

// What a wait was for. Names for people: mok_ref/gpu/errors.py PHASES.
enum Phase : u32 {
  kPhaseNone = 0,
  kPhaseBarrierInputs = 1,      // before the forward kernel: inputs are in place
  kPhaseBarrierCombine = 2,     // after the forward kernel: all y rows have arrived
  kPhaseBarrierDy = 3,          // before the backward kernels
  kPhaseBarrierDx = 4,          // after the backward kernels
  kPhaseBarrierChain = 5,       // between two launches of the ordered chain
  kPhaseBarrierUser = 6,        // heap.barrier()
  kPhaseRowsReady = 7,          // gate/up waits for pulled rows
  kPhaseHiddenReady = 8,        // down waits for h
  kPhaseRingFree = 9,           // a pull waits for its ring slot
  kPhaseTileFull = 10,          // a math warp waits for operands in shared memory
  kPhaseTileEmpty = 11,         // a producer warp waits for a free stage
  kPhaseDgradReady = 12,        // backward: dx or wgrad waits for d_gate, d_up
  kPhaseBackwardRing = 13,      // backward: a pull waits for its ring slot
  kPhaseGradTile = 14,          // backward: wgrad waits for rows
  kPhaseTokenReady = 15,        // a sum waits for a complete token
};

// What a wait is for, so that an expired one can say it (check.cuh).
struct WaitContext {
  u64 timeout_ns;
  u32* abort_flag;
  ErrorRecord* record;
  i32 rank;
};

// The barrier kernel of a heap.
struct BarrierParams {
  WaitContext wait;
  i32 size;
  const u64* flags;                // [size] address of each rank's kBarrierWords flags
  u32* epoch;                      // device memory: epochs completed
};

// One layer on one rank. Forward kernels, schedule kernels and epilogues all take this struct.
// Pointers are device addresses; sizes in elements unless the name says bytes.
struct LayerParams {
  i32 rank;
  i32 ep_size;                     // R
  i32 num_tokens;                  // T of this rank
  i32 max_tokens;
  i32 hidden_size;                 // H
  i32 intermediate_size;           // I
  i32 shared_intermediate_size;    // 0: no shared expert
  i32 num_experts;                 // E
  i32 num_local_experts;           // L
  i32 top_k;                       // K
  i32 mini_blocks;                 // minibatch in row blocks
  i32 macro_blocks;                // macrobatch in row blocks, a multiple of mini_blocks
  i32 max_row_blocks;              // P_max / kRowTile
  i32 row_order;                   // RowOrder
  i32 has_limit;
  float swiglu_limit;
  u64 timeout_ns;                  // limit of every single wait
  // Heap and schedule
  const u64* peer_table;           // [kNumSymmetric][ep_size]
  const i32* local_expert;         // [E] local index of an expert on this rank, or -1
  i32* all_ids;                    // [ep_size * max_tokens, K] ids of all ranks, by global token
  i32* peer_rank;                  // [P_max] source rank of a row, -1: padding
  i32* peer_row;                   // [P_max] token * K + slot in the source rank's numbering, -1: padding
  float* row_weight;               // [P_max] topk weight of the route, +0 for padding
  i32* expert_offset;              // [L + 1] first row of an expert, multiples of kRowTile
  i32* expert_count;               // [L] routed rows
  i32* row_block_expert;           // [max_row_blocks] local expert of a row block
  i32* row_block_valid;            // [max_row_blocks] rows of the block that are routes, 1..128
  ScheduleInfo* info;
  i32* block_count;                // [segments][blocks][L] and [L][segments]: scratch of the schedule
  // Control
  u32* counters;                   // zeroed before each kernel that uses them
  u64* input_error;                // kNoInputError or the first bad input
  ErrorRecord* error_record;       // pinned host memory
  u32* abort_flag;                 // device memory; not 0: this rank has given up
  u32* barrier_epoch;              // device memory; epochs completed
  // Forward
  u16* x_ring;                     // [macro_blocks * 128, H] bf16
  u16* h_ring;                     // [macro_blocks * 128, I] bf16
  u16* gate_saved;                 // [max_saved_rows, I] bf16 or null
  u16* up_saved;                   // [max_saved_rows, I] bf16 or null
  i64 max_saved_rows;
  const u16* w_gate;               // [L, I, H] bf16
  const u16* w_up;                 // [L, I, H] bf16
  const u16* w_down;               // [L, H, I] bf16
  const u16* shared_w_gate;        // [Is, H] bf16
  const u16* shared_w_up;          // [Is, H] bf16
  const u16* shared_w_down;        // [H, Is] bf16
  u16* shared_h;                   // [max_tokens, Is] bf16
  u16* shared_y;                   // [max_tokens, H] bf16
  u16* shared_gate;                // [max_tokens, Is] bf16, kept for backward, or null
  u16* shared_up;                  // [max_tokens, Is] bf16, kept for backward, or null
  u16* y;                          // [num_tokens, H] bf16, the layer's output
  // Inputs of the caller; with several ranks staged into the symmetric buffers (equal to them: nothing is copied)
  const u16* x_in;                 // [num_tokens, H], 16-byte aligned
  const i32* ids_in;               // [num_tokens, K]
  const float* weights_in;         // [num_tokens, K]
  i64 num_counters;                // words in `counters`
  // This rank's own symmetric buffers: kernels that use no others spare a look-up
  u16* combine;                    // [max_tokens * K, H]
  i32* topk_ids;                   // [max_tokens, K]
  float* topk_weights;             // [max_tokens, K]
  i32 combines;                    // 1: the forward kernel makes y (combine_inside.cuh), 0: the kernel behind it
};

// What backward needs beside LayerParams.
struct BackwardParams {
  u16* dy_ring;                    // [macro_blocks * 128, H] bf16: pulled dy rows
  u16* hw_ring;                    // [macro_blocks * 128, I] bf16: bf16(w * h)
  u16* d_gate_ring;                // [macro_blocks * 128, I] bf16
  u16* d_up_ring;                  // [macro_blocks * 128, I] bf16
  const u16* dy_in;                // [num_tokens, H] bf16 of the caller, 16-byte aligned
  u16* dx;                         // [num_tokens, H] bf16
  float* d_topk_weights;           // [num_tokens, K] f32 of this rank: the layer's output
  void* dw_gate;                   // [L, I, H] f32 or bf16
  void* dw_up;                     // [L, I, H]
  void* dw_down;                   // [L, H, I]
  u16* shared_dx;                  // [max_tokens, H] bf16
  u16* shared_d_gate;              // [max_tokens, Is] bf16
  u16* shared_d_up;                // [max_tokens, Is] bf16
  float* shared_dw_gate;           // [Is, H] f32
  float* shared_dw_up;             // [Is, H] f32
  float* shared_dw_down;           // [H, Is] f32
  i32 dw_is_bf16;                  // one rounding at the end of the chain
  i32 dw_accumulate;               // 1: the buffers hold the chain's start (main_grad)
  i32 first_macro;                 // walk position of the macrobatch that a launch treats
  i32 recompute;                   // 1: gate and up are not saved, recompute them
  const u16* router_dx;            // [num_tokens, H] bf16 or null: added last
};

}  // namespace mok
