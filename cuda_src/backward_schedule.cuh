// Which tile a ticket of the dgrad kernel stands for.
//
// Tickets walk first the shared expert's row blocks, then those of the macrobatch, in steps of one minibatch:
//   step s:  gate and up of minibatch s (where they are made again), dhu of minibatch s - 1, dx of minibatch s - 2
// so that every tile depends on smaller tickets only, and those were drawn about a minibatch ago. Inside a
// minibatch tiles go by groups of row blocks, column by column over the group: row blocks of one expert share the
// weight tile.
// Executed by: the producer warp of every CTA. Tickets ascend, so a cursor moves over the steps.
#pragma once
#include "backward_params.cuh"
#include "backward_pipeline.cuh"

namespace mok {

MOK_DEVICE i32 ceil_div(i32 value, i32 unit) { return (value + unit - 1) / unit; }

// Row blocks whose tiles are walked together, column by column: with 16 of them the tiles under way on 132 SMs share
// about as many rows as columns, and rows do not leave the L2 before their last column has been made.
constexpr i32 kBlockGroup = 16;

struct DgradTile {
  i32 kind;      // TaskKind, kTaskEnd past the last one
  i32 block;     // row block of the macrobatch, or of the shared expert's tokens
  i32 column;    // column tile; gate/up: the gate's, then the up's
  bool made_again;  // gate and up of its minibatch are
};

struct DgradWalk {
  i32 blocks;          // row blocks of this walk
  i32 mini_blocks;
  i32 saved_blocks;    // leading row blocks whose gate and up forward kept
  i32 hidden_columns;  // column tiles of I
  i32 input_columns;   // column tiles of H
  i32 step;            // cursor: this step begins at ticket `first`
  u32 first;

  // The last step is the one that makes dx of the last minibatch.
  MOK_DEVICE bool has_step() const { return (step - 2) * mini_blocks < blocks; }

  MOK_DEVICE i32 blocks_of(i32 minibatch) const {
    const i32 left = minibatch < 0 ? 0 : blocks - minibatch * mini_blocks;
    return max(0, min(left, mini_blocks));
  }
  // A minibatch is made again as a whole when one of its blocks was not kept.
  MOK_DEVICE bool made_again(i32 minibatch) const {
    return min((minibatch + 1) * mini_blocks, blocks) > saved_blocks;
  }

  MOK_DEVICE u32 gate_up_tiles() const { return made_again(step) ? 2 * hidden_columns * blocks_of(step) : 0; }
  MOK_DEVICE u32 hidden_tiles() const { return hidden_columns * blocks_of(step - 1); }
  MOK_DEVICE u32 input_tiles() const { return input_columns * blocks_of(step - 2); }

  // Moves to the step that holds `ticket`; false when the ticket lies behind this walk.
  MOK_DEVICE bool seek(u32 ticket) {
    for (; has_step(); ++step) {
      const u32 tiles = gate_up_tiles() + hidden_tiles() + input_tiles();
      if (ticket - first < tiles) return true;
      first += tiles;
    }
    return false;
  }

  // The tile of a ticket inside the current step.
  MOK_DEVICE DgradTile tile(u32 ticket) const {
    u32 index = ticket - first;
    DgradTile result{kTaskGateUp, 0, 0, false};
    i32 minibatch = step;
    if (index >= gate_up_tiles()) {
      index -= gate_up_tiles();
      result.kind = kTaskHidden;
      minibatch = step - 1;
      if (index >= hidden_tiles()) {
        index -= hidden_tiles();
        result.kind = kTaskInput;
        minibatch = step - 2;
      }
    }
    const i32 columns = result.kind == kTaskGateUp ? 2 * hidden_columns
                        : result.kind == kTaskHidden ? hidden_columns : input_columns;
    const i32 group = static_cast<i32>(index) / (kBlockGroup * columns);
    const i32 inside = static_cast<i32>(index) - group * kBlockGroup * columns;
    const i32 blocks_here = min(kBlockGroup, blocks_of(minibatch) - group * kBlockGroup);
    result.column = blocks_here == kBlockGroup ? inside / kBlockGroup : inside / blocks_here;
    result.block = minibatch * mini_blocks + group * kBlockGroup + inside - result.column * blocks_here;
    result.made_again = made_again(minibatch);
    return result;
  }
};

// Row blocks of the macrobatch that this launch treats; 0 when routing needs fewer macrobatches.
MOK_DEVICE i32 macro_row_blocks(const LayerParams& layer, i32 macro_index, i32 macro_blocks) {
  return max(0, min(macro_blocks, layer.info->num_row_blocks - macro_index * macro_blocks));
}

MOK_DEVICE DgradWalk routed_walk(const LayerParams& layer, const DgradParams& params) {
  const i32 first_block = params.macro_index * params.macro_blocks;
  const i32 blocks = macro_row_blocks(layer, params.macro_index, params.macro_blocks);
  const i64 saved = layer.max_saved_rows / kRowTile - first_block;
  return DgradWalk{blocks,
                   params.mini_blocks,
                   static_cast<i32>(max(static_cast<i64>(0), min(saved, static_cast<i64>(blocks)))),
                   ceil_div(layer.intermediate_size, kTileColumns),
                   ceil_div(layer.hidden_size, kTileColumns),
                   0,
                   0};
}

MOK_DEVICE DgradWalk shared_walk(const LayerParams& layer, const DgradParams& params) {
  const bool here = layer.shared_intermediate_size > 0 && params.macro_index == 0;
  const i32 blocks = here ? ceil_div(layer.num_tokens, kRowTile) : 0;
  return DgradWalk{blocks,
                   params.mini_blocks,
                   params.shared_saved_rows > 0 ? blocks : 0,
                   ceil_div(layer.shared_intermediate_size, kTileColumns),
                   ceil_div(layer.hidden_size, kTileColumns),
                   0,
                   0};
}

}  // namespace mok
