// The three kinds of warps of the dgrad kernel: what each does with a task.
//
//   gate/up tile   gate = bf16(tc(x, W_gate)), up likewise, where forward did not keep them
//   hidden tile    dhu = tc(dy, W_down^T) -> d_gate, d_up, hw, block sums of dot128   (backward_dgrad.cuh)
//   input tile     dx = one chain over [d_gate | d_up] with [W_gate ; W_up], gate half first  (backward_dx.cuh)
//
// NumPy twin: mok_ref/experts.py: expert_gate_up, expert_backward.
// Each half of the dx chain is padded with +0 to a multiple of 64, which leaves the bits of a chain padded to 16:
// a group of zero products changes no accumulator.
#pragma once
#include "backward_dgrad.cuh"
#include "mxfp8_backward_dgrad.cuh"

namespace mok {

enum DgradFlags : i32 { kSharedTile = 1, kMadeAgain = 2, kSharesWeights = 4 };

struct DgradContext {
  const LayerParams& layer;
  const DgradParams& params;
  const DgradMaps& maps;
  SharedLayout layout;

  MOK_DEVICE DgradCounters counters() const { return DgradCounters{params.counters, params.macro_blocks}; }
  MOK_DEVICE i32 first_block() const { return params.macro_index * params.macro_blocks; }
  MOK_DEVICE const DgradOperands& operands(bool shared) const { return shared ? maps.shared : maps.routed; }
  MOK_DEVICE i32 intermediate_size(bool shared) const {
    return shared ? layer.shared_intermediate_size : layer.intermediate_size;
  }
  MOK_DEVICE u32* again_ready(bool shared, i32 block) const {
    return shared ? counters().shared_again_ready(block) : counters().again_ready(block);
  }
  MOK_DEVICE u32* hidden_ready(bool shared, i32 block) const {
    return shared ? counters().shared_hidden_ready(block, params.shared_blocks) : counters().hidden_ready(block);
  }
};

// Multiplying warpgroups that have rows in a tile.
MOK_DEVICE i32 groups_of(i32 valid) { return valid > 64 ? 2 : valid > 0 ? 1 : 0; }

// ---- producer: warp 0, one lane ----

// Rows and expert of a task; whether the CTAs of the cluster multiply with the same weights.
MOK_DEVICE void find_rows(const DgradContext& c, const DgradTile& tile, TileTask& task) {
  bool shares = kClusterSize > 1 && tile.partner >= 0 && task.kind != kTaskGateUp;
  if (task.flags & kSharedTile) {
    task.valid = max(0, min(kRowTile, c.layer.num_tokens - task.block * kRowTile));
  } else {
    const i32* const experts = c.layer.row_block_expert + c.first_block();
    task.valid = ld_global_s32(c.layer.row_block_valid + c.first_block() + task.block);
    task.batch = ld_global_s32(experts + task.block);
    if (shares) shares = ld_global_s32(experts + tile.partner) == task.batch;
  }
  if (shares) task.flags |= kSharesWeights;
  if (!tile.exists) task.valid = 0;
}

// The task of a ticket; moves `walk` from the shared expert to the routed rows when that is where it lies.
MOK_DEVICE TileTask dgrad_task(const DgradContext& c, DgradWalk& walk, bool& shared, u32 ticket) {
  TileTask task{};
  while (!walk.seek(ticket)) {
    if (!shared) return task;
    const u32 first = walk.first;
    walk = routed_walk(c.layer, c.params);
    walk.begin(first);
    shared = false;
  }
  const DgradTile tile = walk.tile(ticket, cluster_rank());
  task.kind = tile.kind;
  task.block = tile.block;
  task.column = tile.column * kTileColumns;
  task.flags = (shared ? kSharedTile : 0) | (tile.made_again ? kMadeAgain : 0);
  find_rows(c, tile, task);
  const i32 half = ceil_div(c.intermediate_size(shared), kDepthBlock);
  task.depth = tile.kind == kTaskInput ? 2 * half : ceil_div(c.layer.hidden_size, kDepthBlock);
  return task;
}

// gate and up of the tile's 256 columns as four more stages: 64 columns of both.
MOK_DEVICE void load_gate_up(const DgradContext& c, const TileTask& task, StageCursor& stage) {
  const bool shared = task.flags & kSharedTile, again = task.flags & kMadeAgain;
  const DgradOperands& maps = c.operands(shared);
  const TensorMap* gate = again ? &maps.gate_again : &maps.gate_saved;
  const TensorMap* up = again ? &maps.up_again : &maps.up_saved;
  const i32 row = (task.block + (again || shared ? 0 : c.first_block())) * kRowTile;
  for (i32 chunk = 0; chunk < 4; ++chunk) {
    mbarrier_wait(c.layout.empty(stage.index), stage.parity ^ 1);
    const u32 full = c.layout.full(stage.index), tile = c.layout.tile_a(stage.index);
    announce_stage(full, 2 * kHalfStage);
    tma_load_3d(tile, gate, task.column + chunk * kDepthBlock, row, 0, full);
    tma_load_3d(tile + kHalfStage, up, task.column + chunk * kDepthBlock, row, 0, full);
    stage.advance();
  }
}

// What must be complete before a tile's operands may be loaded; `ready` null: nothing.
struct Dependency {
  const u32* ready;
  u32 needed, phase;
};

MOK_DEVICE Dependency dependency_of(const DgradContext& c, const TileTask& task) {
  const bool shared = task.flags & kSharedTile;
  const DgradCounters counters = c.counters();
  const u32 hidden_tiles = ceil_div(c.intermediate_size(shared), kTileColumns), rows = pulled_rows(task.valid);
  if (task.valid == 0) return Dependency{nullptr, 0, kPhaseNone};
  if (task.kind == kTaskInput) return Dependency{c.hidden_ready(shared, task.block), hidden_tiles, kPhaseDgradReady};
  if (shared) return Dependency{nullptr, 0, kPhaseNone};
  if (task.kind == kTaskHidden) return Dependency{counters.dy_ready(task.block), rows, kPhaseRowsReady};
  return Dependency{c.params.x_in_ring ? nullptr : counters.x_ready(task.block), rows, kPhaseRowsReady};
}

// Asks without waiting: a tile may depend on the very tile that this warp is loading.
MOK_DEVICE bool is_ready(const Dependency& dependency) {
  return dependency.ready == nullptr ||
         static_cast<i32>(ld_acquire_gpu(dependency.ready) - dependency.needed) >= 0;
}

MOK_DEVICE void wait_for(const DgradContext& c, const Dependency& dependency, i32 block) {
  wait_gpu(dependency.ready, dependency.needed, wait_context(c.layer), dependency.phase, block);
}

// A product of a tile: both operands at k-block 0.
struct Product {
  Operand a, b;
};

// `half` 1: the second half of a dx chain.
MOK_DEVICE Product product_of(const DgradContext& c, const TileTask& task, i32 half) {
  const bool shared = task.flags & kSharedTile;
  const DgradOperands& maps = c.operands(shared);
  const i32 row = task.block * kRowTile;
  const i32 H = c.layer.hidden_size, I = c.intermediate_size(shared);
  if (task.kind == kTaskHidden) {
    return Product{Operand{&maps.dy, 0, row, 0, true},
                   Operand{&maps.w_down, task.column, 0, task.batch, I % 64 == 0}};
  }
  if (task.kind == kTaskInput) {
    return Product{Operand{half ? &maps.d_up : &maps.d_gate, 0, row, 0, true},
                   Operand{half ? &maps.w_up : &maps.w_gate, task.column, 0, task.batch, H % 64 == 0}};
  }
  const i32 columns = ceil_div(I, kTileColumns) * kTileColumns;
  const bool gate = task.column < columns;
  return Product{
      Operand{&maps.x, 0, row, 0, true},
      Operand{gate ? &maps.w_gate_rows : &maps.w_up_rows, 0, task.column - (gate ? 0 : columns), task.batch, true}};
}

// K-blocks first .. end - 1 of one product. MXFP8: the shared expert has a launch of its own, and in its place
// DgradMaps holds the maps of the scales.
template <Major kMajorB>
MOK_DEVICE void load_blocks(const DgradContext& c, const TileTask& task, const Product& product, i32 first, i32 end,
                            StageCursor& stage) {
  constexpr i32 kScaleMaps = sizeof(DgradOperands) / sizeof(TensorMap);
  if constexpr (kMxfp8) {
    load_coded_product<Major::kK, kMajorB, true>(c.layout, stage, product.a, product.b, kScaleMaps, first, end);
  } else {
    load_product<Major::kK, kMajorB>(c.layout, stage, product.a, product.b, first, end, task.flags & kSharesWeights);
  }
}

MOK_DEVICE void load_dgrad_product(const DgradContext& c, const TileTask& task, const Product& product, i32 first,
                                   i32 end, StageCursor& stage) {
  if (task.kind == kTaskGateUp) {
    load_blocks<Major::kK>(c, task, product, first, end, stage);
  } else {
    load_blocks<Major::kMN>(c, task, product, first, end, stage);
  }
}

// The rest of a tile, behind the first `ahead` k-blocks.
MOK_DEVICE void load_rest(const DgradContext& c, const TileTask& task, i32 ahead, StageCursor& stage) {
  const bool shared = task.flags & kSharedTile;
  const i32 depth = task.kind == kTaskInput ? task.depth / 2 : task.depth;
  load_dgrad_product(c, task, product_of(c, task, 0), ahead, depth, stage);
  if (task.kind == kTaskInput) {
    load_dgrad_product(c, task, product_of(c, task, 1), 0, depth, stage);
  } else if (task.kind == kTaskHidden) {
    if ((task.flags & kMadeAgain) && task.valid > 0) {
      const u32 needed = 2 * ceil_div(c.intermediate_size(shared), kTileColumns);
      wait_for(c, Dependency{c.again_ready(shared, task.block), needed, kPhaseHiddenReady}, task.block);
      fence_proxy_async_global();
    }
    load_gate_up(c, task, stage);
  }
}

constexpr i32 kLookUpBlocks = 4;  // k-blocks between locating the next tile and asking for its dependency

// Producer lane. While the first stages of a tile are on their way, the next tile is located and asked for its
// dependency, so that no look-up stands between two tiles. Not both at once: the ring holds four k-blocks, and each
// look-up takes the time of one or two.
MOK_DEVICE void produce_dgrad(const DgradContext& c) {
  StageCursor stage;
  TaskCursor queue;
  DgradWalk walk = shared_walk(c.layer, c.params);
  walk.begin(0);
  bool shared = true;
  TicketMail mail(c.layout, c.counters().tile_ticket(), c.layer.abort_flag);
  mail.draw();
  TileTask task = dgrad_task(c, walk, shared, mail.next());
  mail.draw();
  bool ready = false;
  if (task.kind == kTaskEnd) let_next_kernel_in();
  while (task.kind != kTaskEnd) {
    publish_task(c.layout, queue, task);
    if (!ready) {
      const Dependency dependency = dependency_of(c, task);
      if (dependency.ready != nullptr) wait_for(c, dependency, task.block);
      trace_task(kTraceWaitRows, task.block, task.column);
    }
    fence_proxy_async_global();
    const i32 depth = task.kind == kTaskInput ? task.depth / 2 : task.depth;
    const i32 ahead = min(depth, kStages), later = min(depth, kStages + kLookUpBlocks);
    const Product product = product_of(c, task, 0);
    load_dgrad_product(c, task, product, 0, ahead, stage);
    const TileTask next = dgrad_task(c, walk, shared, mail.next());
    mail.draw();
    if (next.kind == kTaskEnd) let_next_kernel_in();  // every tile that is left is under way on some SM
    load_dgrad_product(c, task, product, ahead, later, stage);
    ready = next.kind != kTaskEnd && is_ready(dependency_of(c, next));
    load_rest(c, task, later, stage);
    trace_task(kTraceLoad, task.block, task.column);
    task = next;
  }
  publish_task(c.layout, queue, TileTask{});
}

// ---- storing warp: 1 ----

// d_gate, d_up and hw of four stages to global memory; gives each stage back on behalf of the warpgroups that have
// rows. `turns`: bit g is the parity of warpgroup g's pieces, which completes once per hidden tile it works on.
MOK_DEVICE void store_hidden(const DgradContext& c, const TileTask& task, StageCursor& stage, u32& turns) {
  const DgradOperands& maps = c.operands(task.flags & kSharedTile);
  const i32 groups = groups_of(task.valid);
  for (i32 chunk = 0; chunk < 4; ++chunk) {
    for (i32 group = 0; group < groups; ++group) {
      mbarrier_wait(c.layout.piece_full(group, chunk), turns >> group & 1);
      if (elect_one()) {
        const u32 tile = c.layout.tile_a(stage.index) + group * kBoxBytes;
        const i32 column = task.column + chunk * kDepthBlock, row = task.block * kRowTile + group * 64;
        if constexpr (!kMxfp8) {  // codes left from registers
          tma_store_3d(&maps.d_gate_out, tile, column, row, 0);
          tma_store_3d(&maps.d_up_out, tile + kHalfStage, column, row, 0);
        }
        tma_store_3d(&maps.hw_out, tile + 2 * kHalfStage, column, row, 0);
        bulk_commit_group();
      }
    }
    if (elect_one()) bulk_wait_group_read<0>();
    __syncwarp();
    release_stage(c.layout, stage.index, 4 * groups);
    stage.advance();
  }
  turns ^= (1 << groups) - 1;
  if (groups > 0 && elect_one()) {
    bulk_wait_group<0>();
    fence_proxy_async_global();
    red_release_gpu(c.hidden_ready(task.flags & kSharedTile, task.block), 1);
    if (!(task.flags & kSharedTile)) red_release_gpu(c.counters().hidden_done(), 1);
  }
}

// Where the rows of a gate/up or dx tile go.
MOK_DEVICE TileRows target_rows(const DgradContext& c, const TileTask& task) {
  const bool shared = task.flags & kSharedTile;
  const i64 row = static_cast<i64>(task.block) * kRowTile;
  if (task.kind == kTaskInput) {
    if (!shared) return owner_slots(c.layer, c.first_block() + task.block);
    return local_rows(c.params.shared_dx, row, task.valid, c.layer.hidden_size);
  }
  const bool gate = task.column < ceil_div(c.intermediate_size(shared), kTileColumns) * kTileColumns;
  u16* matrix = shared ? (gate ? c.params.shared_gate_again : c.params.shared_up_again)
                       : (gate ? c.params.gate_again : c.params.up_again);
  return local_rows(matrix, row, task.valid, c.intermediate_size(shared));
}

// Rows of a gate/up or dx tile, half by half as the multiplying warps hand them over. `turns` as in `store_hidden`.
MOK_DEVICE void store_tile_rows(const DgradContext& c, const TileTask& task, u32& turns) {
  const i32 I = c.intermediate_size(task.flags & kSharedTile), groups = groups_of(task.valid);
  if (groups == 0) return;
  const i32 hidden_columns = ceil_div(I, kTileColumns) * kTileColumns;
  const bool input = task.kind == kTaskInput, up = !input && task.column >= hidden_columns;
  const i32 column = task.column - (up ? hidden_columns : 0), columns = input ? c.layer.hidden_size : I;
  const TileRows rows = target_rows(c, task);
  for (i32 half = 0; half < 2; ++half) {
    for (i32 group = 0; group < groups; ++group) {
      mbarrier_wait(c.layout.half_full(group, half), turns >> group & 1);
      store_half(c.layout, rows, group, half, column, columns);
    }
  }
  turns ^= (1 << groups) - 1;
}

// gate or up of a tile is in global memory.
MOK_DEVICE void signal_again(const DgradContext& c, const TileTask& task) {
  fence_proxy_async_global();
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) red_release_gpu(c.again_ready(task.flags & kSharedTile, task.block), 1);
}

MOK_DEVICE void finish_d_weights(const DgradContext& c, const TileTask& task) {
  if (threadIdx.x % kWarpSize == 0) {
    const u32 needed = ceil_div(c.layer.intermediate_size, kTileColumns);
    wait_gpu(c.hidden_ready(false, task.block), needed, wait_context(c.layer), kPhaseDgradReady, task.block);
  }
  __syncwarp();
  push_d_weights(c.layer, c.params, task.block, task.valid);
}

MOK_DEVICE void store_dgrad(const DgradContext& c) {
  StageCursor stage;
  TaskCursor queue;
  u32 hidden_turns = 0, row_turns = 0;
  while (true) {
    const TileTask task = read_task(c.layout, queue);
    if (task.kind == kTaskEnd) return;
    stage.skip(task.depth);
    trace_task(kTraceWaitTile, task.block, task.column);
    if (task.kind == kTaskHidden) {
      store_hidden(c, task, stage, hidden_turns);
    } else {
      store_tile_rows(c, task, row_turns);
      if (task.kind == kTaskGateUp && task.valid > 0) signal_again(c, task);
      const bool routed = !(task.flags & kSharedTile);
      if (task.kind == kTaskInput && task.column == 0 && routed && task.valid > 0) finish_d_weights(c, task);
    }
    trace_task(kTraceStore, task.block, task.column);
    release_task(c.layout, queue);
  }
}

// ---- multiplying warps ----

// What a thread looks up for a hidden tile, before the product so that the loads are over when it ends.
MOK_DEVICE HiddenRows hidden_rows(const DgradContext& c, const TileTask& task) {
  const bool shared = task.flags & kSharedTile;
  const i32 row = first_row_of_warp() + threadIdx.x % kWarpSize / 4;
  HiddenRows rows;
#pragma unroll
  for (i32 j = 0; j < 2; ++j) {
    const i64 global_row = static_cast<i64>(c.first_block() + task.block) * kRowTile + row + 8 * j;
    rows.weight[j] = shared ? 1.0f : ld_global_f32(c.layer.row_weight + global_row);
    rows.keep[j] = row + 8 * j < task.valid ? ~0u : 0u;
  }
  return rows;
}

// Block sums of dot128 for this thread's two rows: [column block][ring row].
MOK_DEVICE DotTarget dot_target(const DgradContext& c, const TileTask& task) {
  if (task.flags & kSharedTile) return DotTarget{nullptr, 0};
  const i64 ring_rows = static_cast<i64>(c.params.macro_blocks) * kRowTile;
  const i64 ring_row = static_cast<i64>(task.block) * kRowTile + first_row_of_warp() + threadIdx.x % kWarpSize / 4;
  return DotTarget{c.params.dot_partial + task.column / kDotBlock * ring_rows + ring_row, ring_rows};
}

// MXFP8: where this thread's two rows of codes and scales go.
MOK_DEVICE GradientTarget gradient_target(const DgradContext& c, const TileTask& task) {
  const MxfpDgradParams& own = mxfp_params(c.params);
  const i32 I = c.layer.intermediate_size;
  const i64 ring_rows = static_cast<i64>(c.params.macro_blocks) * kRowTile;
  const i64 row = static_cast<i64>(task.block) * kRowTile + first_row_of_warp() + threadIdx.x % kWarpSize / 4;
  const i64 codes = row * I + task.column, scales = task.column / 64 * ring_rows + row;
  return GradientTarget{own.d_gate + codes, own.d_up + codes, own.d_gate_scales + scales, own.d_up_scales + scales,
                        I, I - task.column, ring_rows, own.scale_rule};
}

template <bool kClamp>
MOK_DEVICE void finish_hidden(float (&d)[128], const DgradContext& c, const TileTask& task, const HiddenRows& rows,
                              StageCursor& stage, i32 group, const SwigluLimit& clamp) {
  const i32 columns = c.intermediate_size(task.flags & kSharedTile) - task.column;
  if constexpr (kMxfp8) {
    quantised_hidden_epilogue<kClamp>(d, c.layout, stage, group, rows, dot_target(c, task), clamp,
                                      gradient_target(c, task));
  } else {
    hidden_epilogue<kClamp>(d, c.layout, stage, group, rows, columns, dot_target(c, task), clamp);
  }
}

// d = tc(a, b) of a tile; hands over the rest of the tile before it.
template <Major kMajorB>
MOK_DEVICE void multiply_tile(float (&d)[128], const DgradContext& c, const TileTask& task, StageCursor& stage,
                              i32 group, HeldRows& held) {
  if constexpr (kMxfp8) {
    multiply_codes<Major::kK, kMajorB>(d, c.layout, stage, 4 * task.depth, group, 0, kCodeRows);
  } else {
    multiply<Major::kK, kMajorB>(d, c.layout, stage, task.depth, group, 0,
                                 [&] { hand_over_second(c.layout, group, held); });
    hand_over_second(c.layout, group, held);  // of a product too short to have done it
  }
}

// gate and up go at once: tiles elsewhere wait for them, this warpgroup's next tile may be one that waits for those.
// MXFP8: no registers to hold half a tile in.
MOK_DEVICE void finish_rows(const float (&d)[128], const DgradContext& c, const TileTask& task, i32 group,
                            HeldRows& held) {
  hand_over_first(d, c.layout, group, held);
  if (kMxfp8 || task.kind == kTaskGateUp) hand_over_second(c.layout, group, held);
}

// A warpgroup without rows in the tile.
MOK_DEVICE void pass_tile(const DgradContext& c, const TileTask& task, StageCursor& stage) {
  if constexpr (kMxfp8) {
    expand_only(c.layout, stage, task.depth, kCodeRows);
  } else {
    skip_stages(c.layout, stage, task.depth);
  }
  if (task.kind == kTaskHidden) skip_stages(c.layout, stage, 4);
}

template <bool kClamp>
MOK_DEVICE void multiply_dgrad(const DgradContext& c, i32 group) {
  StageCursor stage;
  TaskCursor queue;
  HeldRows held;
  held.full = false;
  held.turn = 0;
  const float limit = c.layer.swiglu_limit;
  const SwigluLimit clamp{limit, kClamp ? sigmoid(limit) : 0.0f};
  while (true) {
    const TileTask task = read_task(c.layout, queue);
    if (task.kind == kTaskEnd) break;
    release_task(c.layout, queue);
    if (task.valid <= 64 * group) {
      hand_over_second(c.layout, group, held);
      pass_tile(c, task, stage);
    } else {
      float d[128];
      if (task.kind == kTaskHidden) {
        const HiddenRows rows = hidden_rows(c, task);
        multiply_tile<Major::kMN>(d, c, task, stage, group, held);
        trace_task<4 * kWarpSize>(kTraceHidden, task.block, task.column);
        wait_handed_over(c.layout, group, held);
        finish_hidden<kClamp>(d, c, task, rows, stage, group, clamp);
      } else {
        if (task.kind == kTaskInput) {
          multiply_tile<Major::kMN>(d, c, task, stage, group, held);
        } else {
          multiply_tile<Major::kK>(d, c, task, stage, group, held);
        }
        trace_task<4 * kWarpSize>(kTraceAgain - kTaskGateUp + task.kind, task.block, task.column);
        finish_rows(d, c, task, group, held);
      }
      trace_task<4 * kWarpSize>(kTraceStore, task.block, task.column);
    }
  }
  hand_over_second(c.layout, group, held);
}

}  // namespace mok
