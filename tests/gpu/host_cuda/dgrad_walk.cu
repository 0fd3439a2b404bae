// The tiles that tickets of the dgrad kernel stand for, in a table: what tests look at.
#include "backward_schedule.cuh"

using namespace mok;

// tiles [end ticket, kClusterSize, 5]: kind, block, partner, column, exists; kind 0 behind the walk. One warp.
extern "C" __global__ void dgrad_walk(const __grid_constant__ LayerParams layer,
                                      const __grid_constant__ DgradParams params, i32 end, i32* tiles) {
  if (threadIdx.x != 0) return;
  DgradWalk walk = routed_walk(layer, params);
  walk.begin(0);
  for (i32 ticket = 0; ticket < end; ++ticket) {
    const bool found = walk.seek(ticket);
    for (i32 rank = 0; rank < kClusterSize; ++rank, tiles += 5) {
      const DgradTile tile = found ? walk.tile(ticket, rank) : DgradTile{};
      const i32 words[5] = {tile.kind, tile.block, tile.partner, tile.column, tile.exists};
      for (i32 i = 0; i < 5; ++i) tiles[i] = words[i];
    }
  }
}
