// links.cu: the transfers of the forward megakernel without its products, to measure the links alone.
// Compiled for: sm_90a
//
//   pull   x_ring[ring_row(p)] = x[peer_rank[p]][peer_row[p] / top_k]           by the code of dispatch.cuh
//   push   combine[peer_row[p]] on rank peer_rank[p] = a row of staged bits     by the code of experts.cuh
//
// Python twin    mok_ref/bench/links.py: LinkBench
// Launch         as the megakernel: kForwardThreads threads, kForwardSharedBytes of dynamic shared memory, so
//                one CTA on an SM; warps 1 to pull_warps pull (the megakernel's number is 1), warps 2 and 3 push
// Before         schedule tables complete, counters zero, every row block whole, the ring holds all rows
// Never waits for another rank: nothing is computed and no ring slot is used twice.
#include "dispatch.cuh"
#include "experts.cuh"

namespace mok {

// Staged bits: no two 16-byte units of a staging buffer are equal, none is zero or all ones.
MOK_DEVICE void fill_staging(u32 shared) {
  for (u32 at = 16 * threadIdx.x; at < kStagingBytes; at += 16 * blockDim.x) {
    const u32 word = (at + 1) * 0x9e3779b1u;
    st_shared_v4(shared + kStagingOffset + at, word ^ 0x3f80u, word * 3u, word * 5u, word * 7u);
  }
}

// Down tile `number` in the order of the walk, column-major inside a minibatch.
MOK_DEVICE Tile down_tile(const LayerParams& params, const MinibatchWalk& minis, i32 number) {
  const i32 columns = ceil_div(params.hidden_size, kTileN);
  i32 q = 0, unit = number;
  while (unit >= minis.blocks_in(minis.at(q)) * columns) unit -= minis.blocks_in(minis.at(q++)) * columns;
  const i32 blocks = minis.blocks_in(minis.at(q));
  Tile tile{kDown};
  tile.row_block = minis.at(q) * minis.mini_blocks + unit % blocks;
  tile.column = unit / blocks;
  tile.valid_rows = kTileM;
  return tile;
}

// One epilogue warp: its rows of every down tile that it draws.
MOK_DEVICE void push_tiles(const LayerParams& params, u32 shared, i32 warp) {
  const i32 lane = threadIdx.x % kWarpSize, first_row = kEpilogueRows * warp;
  const MinibatchWalk minis(params);
  const StagingBuffer staging[2] = {{shared, 0}, {shared, 1}};
  const i32 tiles = minis.num_row_blocks * ceil_div(params.hidden_size, kTileN);
  for (i32 number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile = down_tile(params, minis, number);
    u16* target[2];
#pragma unroll
    for (i32 group = 0; group < 2; ++group) target[group] = push_target(tile, params, 64 * group + first_row + lane);
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
#pragma unroll
      for (i32 group = 0; group < 2; ++group) {
        push_rows(staging[group], target[group], tile.column * kTileN, params.hidden_size, half, first_row, lane);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kForwardThreads, 1)
    links_transfer(const __grid_constant__ LayerParams params, i32 pull_warps, i32 pushes) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const u32 shared = shared_address(bytes);
  const i32 warp = threadIdx.x / kWarpSize;
  if (pushes) fill_staging(shared);
  __syncthreads();
  if (warp >= 1 && warp <= pull_warps) dispatch_forward(params);
  if (pushes && (warp == 2 || warp == 3)) push_tiles(params, shared, warp - 2);
}

}  // namespace mok
