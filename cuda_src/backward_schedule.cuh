// Which tile a ticket of the dgrad kernel stands for.
//
// Tickets walk first the shared expert's row blocks, then those of the macrobatch, in steps of one minibatch:
//   step s:  gate and up of minibatch s (where they are made again), dhu of minibatch s - 1, dx of minibatch s - 2
// so that every tile depends on smaller tickets only, and those were drawn about a minibatch ago. Inside a
// minibatch tiles go by groups of row blocks, column by column over the group: row blocks of one expert share the
// weight tile. Groups end where experts do, and minibatches as far as experts have about their size: weights that two
// of them share are fetched from memory twice.
// Executed by: the producer warp of every CTA. Tickets ascend, so a cursor moves over the groups.
// In clusters a ticket stands for two row blocks of a group that follow each other, one for each CTA, and one column;
// the last of an odd number of row blocks has tickets of its own, each for two columns.
#pragma once
#include "backward_params.cuh"
#include "backward_pipeline.cuh"

namespace mok {

MOK_DEVICE i32 ceil_div(i32 value, i32 unit) { return (value + unit - 1) / unit; }

// Row blocks whose tiles are walked together, column by column: with about 16 of them the tiles under way on 132 SMs
// share about as many rows as columns, and rows do not leave the L2 before their last column has been made.
constexpr i32 kBlockGroup = 16;

struct DgradTile {
  i32 kind;         // TaskKind, kTaskEnd past the last one
  i32 block;        // of the macrobatch, or of the shared expert's tokens
  i32 partner;      // row block of the other CTA with the same column; -1: none
  i32 column;       // column tile; gate/up: the gate's, then the up's
  bool exists;      // false: nothing is left for this CTA of the cluster
  bool made_again;  // gate and up of its minibatch are
};

// Row blocks of the macrobatch that this launch treats; 0 when routing needs fewer macrobatches.
MOK_DEVICE i32 macro_row_blocks(const LayerParams& layer, i32 macro_index, i32 macro_blocks) {
  return max(0, min(macro_blocks, layer.info->num_row_blocks - macro_index * macro_blocks));
}

// Row blocks first .. end - 1.
struct BlockRange {
  i32 first = 0, end = 0;

  MOK_DEVICE i32 blocks() const { return end - first; }
};

// The border of experts that is nearest to row block `wanted` and no more than `slack` away, else `wanted`.
MOK_DEVICE i32 nearest_border(const LayerParams& layer, i32 first_block, i32 wanted, i32 slack) {
  const i32 expert = ld_global_s32(layer.row_block_expert + first_block + wanted);
  const i32* const offset = layer.expert_offset + expert;
  const i32 begin = max(0, ld_global_s32(offset) / kRowTile - first_block);
  const i32 end = ld_global_s32(offset + 1) / kRowTile - first_block;
  const i32 before = wanted - begin, behind = end - wanted;
  if (min(before, behind) > slack) return wanted;
  return before <= behind ? begin : end;
}

// Tickets ascend, so a cursor moves over the groups: of gate and up made again, of dhu, of dx, step by step.
struct DgradWalk {
  i32 blocks;          // of this walk
  i32 mini_blocks;     // of a minibatch, about; even
  i32 saved_blocks;    // leading ones whose gate and up forward kept
  i32 hidden_columns;  // column tiles of I
  i32 input_columns;   // column tiles of H
  const LayerParams* layer;  // of the routed experts; null: one expert has all rows
  i32 first_block;     // of the macrobatch
  u32 first = 0;       // the group begins at this ticket
  i32 kind = kTaskInput;
  i32 expert = 0;      // whose rows the group has
  BlockRange group{};
  BlockRange again{}, hidden{}, input{};  // minibatches of the step: made again, dhu, dx

  MOK_DEVICE BlockRange minibatch_from(i32 begin) const {
    i32 end = begin + mini_blocks;
    if (end < blocks && layer != nullptr) end = nearest_border(*layer, first_block, end, mini_blocks / 2);
    return BlockRange{begin, min(end, blocks)};
  }
  MOK_DEVICE i32 end_of(i32 e) const { return ld_global_s32(layer->expert_offset + e + 1) / kRowTile - first_block; }

  // End of the rows at `begin` that are walked as one: those of an expert, or of several that have one row block each.
  MOK_DEVICE i32 end_of_experts(i32 begin, i32 limit) {
    if (layer == nullptr || begin >= limit) return limit;
    if (begin == minibatch().first) expert = ld_global_s32(layer->row_block_expert + first_block + begin);
    i32 end = end_of(expert);
    while (end <= begin) end = end_of(++expert);
    if (end - begin > 1) return min(end, limit);
    while (end < limit && end - begin < kBlockGroup) {
      const i32 next = end_of(expert + 1);
      if (next - end > 1) break;
      end = next;
      ++expert;
    }
    return end;
  }
  // An equal part of what is left of them, in pairs.
  MOK_DEVICE BlockRange group_from(i32 begin, i32 limit) {
    const i32 end = end_of_experts(begin, limit), left = end - begin;
    const i32 groups = max(1, (left + kBlockGroup / 2) / kBlockGroup);
    const i32 part = ceil_div(ceil_div(left, groups), kClusterSize) * kClusterSize;
    return BlockRange{begin, min(begin + part, end)};
  }
  // A minibatch is made again as a whole when one of its blocks was not kept.
  MOK_DEVICE bool made_again(const BlockRange& minibatch) const { return minibatch.end > saved_blocks; }

  MOK_DEVICE const BlockRange& minibatch() const {
    return kind == kTaskGateUp ? again : kind == kTaskHidden ? hidden : input;
  }
  MOK_DEVICE i32 columns() const {
    return kind == kTaskInput ? input_columns : kind == kTaskHidden ? hidden_columns : 2 * hidden_columns;
  }
  MOK_DEVICE u32 tickets_of_group() const {
    const i32 n = group.blocks(), pairs = n / kClusterSize;
    return pairs * columns() + (n > kClusterSize * pairs ? ceil_div(columns(), kClusterSize) : 0);
  }

  // Before the first ticket.
  MOK_DEVICE void begin(u32 first_ticket) {
    first = first_ticket;
    kind = kTaskInput;
  }

  // Moves to the group that holds `ticket`; false when the ticket lies behind this walk.
  MOK_DEVICE bool seek(u32 ticket) {
    while (true) {
      const u32 tickets = tickets_of_group();
      if (ticket - first < tickets) return true;
      first += tickets;
      group.first = group.end;
      if (group.end == minibatch().end) {
        if (kind == kTaskInput) {
          input = hidden;
          hidden = again;
          again = minibatch_from(again.end);
          if (again.blocks() + hidden.blocks() + input.blocks() == 0) return false;
          kind = made_again(again) ? kTaskGateUp : kTaskHidden;
        } else {
          ++kind;
        }
        group.end = minibatch().first;
      }
      group = group_from(group.end, minibatch().end);
    }
  }

  // The tile that a ticket of the current group stands for in CTA `rank` of the cluster. Of an odd number of row blocks
  // the last one's tickets stand behind those of the others for the same two columns.
  MOK_DEVICE DgradTile tile(u32 ticket, i32 rank) const {
    const i32 index = static_cast<i32>(ticket - first), pairs = group.blocks() / kClusterSize;
    const bool odd = group.blocks() > kClusterSize * pairs;
    const i32 turn = odd ? index / (kClusterSize * pairs + 1) : 0, column = kClusterSize * turn;
    const i32 inside = index - turn * (kClusterSize * pairs + 1);
    const i32 columns_here = odd ? min(kClusterSize, columns() - column) : columns();
    if (inside < columns_here * pairs) {
      const i32 block = group.first + inside % pairs * kClusterSize;
      return DgradTile{kind, block + rank, block + kClusterSize - 1 - rank, column + inside / pairs, true,
                       made_again(minibatch())};
    }
    return DgradTile{kind, group.end - 1, -1, min(column + rank, columns() - 1), column + rank < columns(),
                     made_again(minibatch())};
  }
};

MOK_DEVICE DgradWalk routed_walk(const LayerParams& layer, const DgradParams& params) {
  const i32 first_block = params.macro_index * params.macro_blocks;
  const i32 blocks = macro_row_blocks(layer, params.macro_index, params.macro_blocks);
  const i64 saved = layer.max_saved_rows / kRowTile - first_block;
  return DgradWalk{blocks,
                   params.mini_blocks,
                   static_cast<i32>(max(static_cast<i64>(0), min(saved, static_cast<i64>(blocks)))),
                   ceil_div(layer.intermediate_size, kTileColumns),
                   ceil_div(layer.hidden_size, kTileColumns),
                   &layer,
                   first_block};
}

MOK_DEVICE DgradWalk shared_walk(const LayerParams& layer, const DgradParams& params) {
  const bool here = layer.shared_intermediate_size > 0 && params.macro_index == 0;
  const i32 blocks = here ? ceil_div(layer.num_tokens, kRowTile) : 0;
  return DgradWalk{blocks,
                   params.mini_blocks,
                   params.shared_saved_rows > 0 ? blocks : 0,
                   ceil_div(layer.shared_intermediate_size, kTileColumns),
                   ceil_div(layer.hidden_size, kTileColumns),
                   nullptr,
                   0};
}

}  // namespace mok
