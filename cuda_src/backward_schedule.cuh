// Which tile a ticket of the dgrad kernel stands for.
//
// Tickets walk first the shared expert's row blocks, then those of the macrobatch, in steps of one minibatch:
//   step s:  gate and up of minibatch s (where they are made again), dhu of minibatch s - 1, dx of minibatch s - 2
// so that every tile depends on smaller tickets only, and those were drawn about a minibatch ago. Inside a
// minibatch tiles go by groups of row blocks, column by column over the group: row blocks of one expert share the
// weight tile.
// Executed by: the producer warp of every CTA. Tickets ascend, so a cursor moves over the steps.
// In clusters a ticket stands for kClusterSize row blocks that follow each other, one for each CTA: row blocks are
// walked in such units. The last unit may have a row block too few; its CTA then has a tile without rows.
#pragma once
#include "backward_params.cuh"
#include "backward_pipeline.cuh"

namespace mok {

MOK_DEVICE i32 ceil_div(i32 value, i32 unit) { return (value + unit - 1) / unit; }

// Row blocks whose tiles are walked together, column by column: with about 16 of them the tiles under way on 132 SMs
// share about as many rows as columns, and rows do not leave the L2 before their last column has been made.
constexpr i32 kBlockGroup = 16;
constexpr i32 kUnitGroup = kBlockGroup / kClusterSize;

struct DgradTile {
  i32 kind;      // TaskKind, kTaskEnd past the last one
  i32 unit;      // of row blocks of the macrobatch, or of the shared expert's tokens
  i32 column;    // column tile; gate/up: the gate's, then the up's
  bool made_again;  // gate and up of its minibatch are
};

// Row blocks of the macrobatch that this launch treats; 0 when routing needs fewer macrobatches.
MOK_DEVICE i32 macro_row_blocks(const LayerParams& layer, i32 macro_index, i32 macro_blocks) {
  return max(0, min(macro_blocks, layer.info->num_row_blocks - macro_index * macro_blocks));
}

// Units of one minibatch.
struct Minibatch {
  i32 first = 0, end = 0;

  MOK_DEVICE i32 units() const { return end - first; }
};

// The border of experts that is nearest to unit `wanted` and no more than `slack` units away, else `wanted`: weights
// of an expert that two minibatches share are fetched from memory twice.
MOK_DEVICE i32 nearest_border(const LayerParams& layer, i32 first_block, i32 wanted, i32 slack) {
  const i32 expert = ld_global_s32(layer.row_block_expert + first_block + wanted * kClusterSize);
  const i32* const offset = layer.expert_offset + expert;
  const i32 begin = ceil_div(max(0, ld_global_s32(offset) / kRowTile - first_block), kClusterSize);
  const i32 end = ceil_div(ld_global_s32(offset + 1) / kRowTile - first_block, kClusterSize);
  const i32 before = wanted - begin, behind = end - wanted;
  if (min(before, behind) > slack) return wanted;
  return before <= behind ? begin : end;
}

struct DgradWalk {
  i32 units;           // of this walk
  i32 mini_units;      // of a minibatch, about
  i32 saved_units;     // leading units whose gate and up forward kept
  i32 hidden_columns;  // column tiles of I
  i32 input_columns;   // column tiles of H
  const LayerParams* layer;  // of the routed experts; null: one expert has all rows
  i32 first_block;
  u32 first = 0;       // the step begins at this ticket
  Minibatch again{}, hidden{}, input{};  // of the step: made again, dhu, dx

  MOK_DEVICE Minibatch minibatch_from(i32 begin) const {
    i32 end = begin + mini_units;
    if (end < units && layer != nullptr) end = nearest_border(*layer, first_block, end, mini_units / 2);
    return Minibatch{begin, min(end, units)};
  }
  // A minibatch is made again as a whole when one of its blocks was not kept.
  MOK_DEVICE bool made_again(const Minibatch& minibatch) const { return minibatch.end > saved_units; }

  MOK_DEVICE u32 gate_up_tiles() const { return made_again(again) ? 2 * hidden_columns * again.units() : 0; }
  MOK_DEVICE u32 hidden_tiles() const { return hidden_columns * hidden.units(); }
  MOK_DEVICE u32 input_tiles() const { return input_columns * input.units(); }

  // Before the first ticket.
  MOK_DEVICE void begin(u32 first_ticket) {
    first = first_ticket;
    again = minibatch_from(0);
  }

  // Moves to the step that holds `ticket`; false when the ticket lies behind this walk.
  MOK_DEVICE bool seek(u32 ticket) {
    while (again.units() + hidden.units() + input.units() > 0) {
      const u32 tiles = gate_up_tiles() + hidden_tiles() + input_tiles();
      if (ticket - first < tiles) return true;
      first += tiles;
      input = hidden;
      hidden = again;
      again = minibatch_from(again.end);
    }
    return false;
  }

  // The tile of a ticket inside the current step.
  MOK_DEVICE DgradTile tile(u32 ticket) const {
    u32 index = ticket - first;
    DgradTile result{kTaskGateUp, 0, 0, false};
    Minibatch minibatch = again;
    i32 columns = 2 * hidden_columns;
    if (index >= gate_up_tiles()) {
      index -= gate_up_tiles();
      result.kind = kTaskHidden;
      minibatch = hidden;
      columns = hidden_columns;
      if (index >= hidden_tiles()) {
        index -= hidden_tiles();
        result.kind = kTaskInput;
        minibatch = input;
        columns = input_columns;
      }
    }
    const i32 units_here = minibatch.units(), groups = max(1, (units_here + kUnitGroup / 2) / kUnitGroup);
    const i32 group = ceil_div((static_cast<i32>(index) / columns + 1) * groups, units_here) - 1;
    const i32 begin = group * units_here / groups, width = (group + 1) * units_here / groups - begin;
    const i32 inside = static_cast<i32>(index) - begin * columns;
    result.column = inside / width;
    result.unit = minibatch.first + begin + inside - result.column * width;
    result.made_again = made_again(minibatch);
    return result;
  }
};

MOK_DEVICE DgradWalk routed_walk(const LayerParams& layer, const DgradParams& params) {
  const i32 first_block = params.macro_index * params.macro_blocks;
  const i32 blocks = macro_row_blocks(layer, params.macro_index, params.macro_blocks);
  const i64 saved = layer.max_saved_rows / kRowTile - first_block;
  const i32 kept = static_cast<i32>(max(static_cast<i64>(0), min(saved, static_cast<i64>(blocks))));
  return DgradWalk{ceil_div(blocks, kClusterSize),
                   params.mini_blocks / kClusterSize,
                   kept == blocks ? ceil_div(kept, kClusterSize) : kept / kClusterSize,
                   ceil_div(layer.intermediate_size, kTileColumns),
                   ceil_div(layer.hidden_size, kTileColumns),
                   &layer,
                   first_block};
}

MOK_DEVICE DgradWalk shared_walk(const LayerParams& layer, const DgradParams& params) {
  const bool here = layer.shared_intermediate_size > 0 && params.macro_index == 0;
  const i32 blocks = here ? ceil_div(layer.num_tokens, kRowTile) : 0;
  const i32 units = ceil_div(blocks, kClusterSize);
  return DgradWalk{units,
                   params.mini_blocks / kClusterSize,
                   params.shared_saved_rows > 0 ? units : 0,
                   ceil_div(layer.shared_intermediate_size, kTileColumns),
                   ceil_div(layer.hidden_size, kTileColumns),
                   nullptr,
                   0};
}

}  // namespace mok
