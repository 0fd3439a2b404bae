// The ordered chain: gradients of weights that every rank holds (shared expert, router).
//
//   dW = tc over all tokens (rows_out^T, rows_in^T), g ascending: rank r continues the float32 accumulators that
//   rank r - 1 wrote, its own tokens starting a new group of 16
//
// NumPy twin: mok_ref/chain.py: ordered_chain.
// Executed by: the warps of backward_wgrad.cuh. One launch continues one group of tiles; launches of all ranks
// are separated by barriers, in launch p rank r treats tile group p - r, so that ranks work on different tiles at
// the same time and no kernel waits for a peer. A rank without tokens passes the accumulators on.
// Reads: the previous rank's chain buffer (peer memory, complete since the barrier). Writes: this rank's.
#pragma once
#include "backward_wgrad.cuh"

namespace mok {

// Tickets of one chain launch over its group of tiles.
struct ChainTickets {
  const WgradContext& c;

  template <typename Draw>
  MOK_DEVICE TileTask locate(Draw&& draw) const {
    const u32 ticket = draw();
    if (ticket >= static_cast<u32>(c.params.end_tile - c.params.first_tile)) return TileTask{};
    const WgradTile tile = wgrad_tile<kTileRows>(c.params, c.params.first_tile + static_cast<i32>(ticket));
    const i32 begin = c.params.accumulate ? kBeginStart : kBeginZero;
    const i32 flags = flags_of(tile.product, begin, kEndFloat32, 0, 0);
    return weight_task<kTileRows>(c.params, tile, 0, 0, c.params.num_rows, flags);
  }
};

}  // namespace mok
