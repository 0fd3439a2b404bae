// Compile-time facts that every other header may rely on: integer names, tile constants, limits.
//
// This is the only file that reads MOK_* macros; everything else uses the constants below. (Exception: trace.cuh,
// whose functions have no body without MOK_TRACE.)
// NumPy twin: mok_ref/config.py (ROW_TILE) and mok_ref/gpu/params.py.
#pragma once

namespace mok {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

// Each expert's rows start at a multiple of kRowTile (contract: row_tile).
constexpr i32 kRowTile = 128;

// One chain step of tc() adds this many products; K is padded with +0 to a multiple of it.
constexpr i32 kChainStep = 16;

// dot128 adds columns in blocks of this many.
constexpr i32 kDotBlock = 128;

// Ranks of one layer. The ranks' token offsets are carried by value in the schedule's info.
#ifndef MOK_MAX_RANKS
#define MOK_MAX_RANKS 128
#endif
constexpr i32 kMaxRanks = MOK_MAX_RANKS;
static_assert(kMaxRanks >= 1 && kMaxRanks <= 1024, "MOK_MAX_RANKS must be in 1..1024");

// CTAs of the forward kernel that share operands through their cluster's shared memory.
#ifndef MOK_CLUSTER_SIZE
#define MOK_CLUSTER_SIZE 1
#endif
constexpr i32 kClusterSize = MOK_CLUSTER_SIZE;
static_assert(kClusterSize == 1 || kClusterSize == 2, "MOK_CLUSTER_SIZE must be 1 or 2");
#if MOK_CLUSTER_SIZE > 1
#define MOK_CLUSTER_DIMS __cluster_dims__(MOK_CLUSTER_SIZE, 1, 1)
#else
#define MOK_CLUSTER_DIMS
#endif

// 1: operands of the routed experts are MXFP8 codes with scales (set by the kernels' own source files).
#ifndef MOK_MXFP8
#define MOK_MXFP8 0
#endif
constexpr bool kMxfp8 = MOK_MXFP8 != 0;

// 1: the kernels record when each of their tasks began and ended (trace.cuh).
#ifndef MOK_TRACE
#define MOK_TRACE 0
#endif

constexpr u32 kFullWarp = 0xffffffffu;
constexpr i32 kWarpSize = 32;

}  // namespace mok

#define MOK_DEVICE __device__ __forceinline__
