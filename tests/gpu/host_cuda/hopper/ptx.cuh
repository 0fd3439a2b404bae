// Stands in for cuda_src/ptx.cuh when Hopper kernels run on the CPU: same functions, one CTA or cluster at a time.
//
// Copies by TMA are not carried out where they are issued: they wait in lists from which scheduler.h takes them at
// random times. Mistakes that would go unnoticed or hang on a device end the launch with a message: arriving too often
// at a barrier, misaligned accesses, copies through empty maps.
#pragma once
#include <deque>
#include <map>
#include <random>
#include <string>

#include "config.cuh"
#include "sync.cuh"

namespace mok {

// ---- state of the running CTA or cluster ----

// Addresses in shared memory carry their CTA's number in the cluster above the bytes that a CTA may have.
constexpr u32 kHostCtaBits = 18;
constexpr u32 kHostOffset = (1 << kHostCtaBits) - 1;

inline u32 host_thread() { return static_cast<u32>(host_cuda::current); }
inline i32 lane_id() { return host_thread() % kWarpSize; }
inline u32 cluster_ctarank() { return host_thread() / blockDim.x; }
inline bool elect_one() { return threadIdx.x % kWarpSize == 0; }
inline u32 host_remote(u32 address, u32 cta) { return (address & kHostOffset) | cta << kHostCtaBits; }

struct HostBarrier {
  i32 count = 0, pending = 0;
  i64 bytes = 0;  // announced and not delivered
  u32 phase = 0;
};

// On the host: [0] address, [1] element bytes | rank << 8 | swizzle span << 16, [2..6] elements, [7..10] strides in
// bytes of dimensions 1 .., [11..15] box. Python twin: tests/gpu/host_cuda/hopper.py: encode_tiled.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

struct HostCopy {
  TensorMap map;
  i32 corner[5];
  u32 shared;
  u32 barrier;  // loads only
};

// Eight bytes on their way into another CTA's shared memory.
struct HostLetter {
  u32 address, barrier;
  u64 value;
};

inline u32 host_shared_bytes = 1 << kHostCtaBits;  // dynamic shared memory of the launch

struct HostCta {
  unsigned char* shared = nullptr;
  std::map<u32, HostBarrier> barriers;
  std::vector<HostLetter> letters;
  std::vector<HostCopy> loads;
  std::map<u32, std::vector<HostCopy>> open_stores;                // by thread
  std::map<u32, std::deque<std::vector<HostCopy>>> store_groups;   // committed
  std::vector<u32> awaited;                                        // by thread: barrier it waits for, or 0
  u64 progress = 0;                                                // changes when anything happens
  std::string mistake;                                             // why the launch ends early
  std::mt19937 random;
};

inline HostCta host_cta;

// In a thread: does not return. In a copy or product: the launch ends after it.
inline void host_mistake(const char* what, u32 where) {
  const bool in_thread = host_cuda::current != host_cuda::kNobody;
  host_cta.mistake = std::string(what) + " at shared address " + std::to_string(where);
  if (!in_thread) return;
  host_cta.mistake += " by thread " + std::to_string(host_thread());
  host_cuda::wait(host_cuda::State::kDone);
}

inline void host_pause() { host_cuda::wait(host_cuda::State::kReady); }

template <class T>
T& host_shared(u32 address) {
  if (address % sizeof(T) != 0) host_mistake("misaligned access", address);
  if ((address & kHostOffset) + sizeof(T) > host_shared_bytes) host_mistake("access beyond the shared memory", address);
  return *reinterpret_cast<T*>(host_cta.shared + address);
}

inline u32 shared_address(const void* pointer) {
  auto* bytes = static_cast<unsigned char*>(const_cast<void*>(pointer));
  if (host_cta.shared == nullptr) host_cta.shared = bytes - (cluster_ctarank() << kHostCtaBits);
  return static_cast<u32>(bytes - host_cta.shared);
}

// ---- mbarrier ----

inline HostBarrier& host_barrier(u32 address) {
  if (host_cta.barriers.count(address) == 0) host_mistake("no barrier", address);
  return host_cta.barriers[address];
}

inline void host_complete(HostBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  ++host_cta.progress;
}

inline void mbarrier_init(u32 address, u32 arrivals) {
  const i32 count = static_cast<i32>(arrivals);
  host_cta.barriers[address] = HostBarrier{count, count, 0, 0};
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_count(u32 address, u32 arrivals) {
  HostBarrier& barrier = host_barrier(address);
  if (barrier.pending < static_cast<i32>(arrivals)) host_mistake("one arrival too many", address);
  barrier.pending -= arrivals;
  host_complete(barrier);
}

inline void mbarrier_arrive(u32 address) { mbarrier_arrive_count(address, 1); }

inline void mbarrier_expect_tx(u32 address, u32 bytes) { host_barrier(address).bytes += bytes; }

inline void mbarrier_arrive_expect_tx(u32 address, u32 bytes) {
  mbarrier_expect_tx(address, bytes);
  mbarrier_arrive(address);
}

inline bool host_complete_phase(u32 address, u32 parity) { return (host_barrier(address).phase & 1) != parity; }

// Others may run after a "no": it may be asked in a loop.
inline bool mbarrier_test_wait(u32 address, u32 parity) {
  const bool complete = host_complete_phase(address, parity);
  if (!complete) host_pause();
  return complete;
}

inline bool mbarrier_try_wait(u32 address, u32 parity) {
  if (!host_complete_phase(address, parity)) host_pause();
  return host_complete_phase(address, parity);
}

inline void mbarrier_arrive_if(u32 address, bool condition) {
  if (condition) mbarrier_arrive(address);
}

inline void mbarrier_wait(u32 address, u32 parity) {
  host_cta.awaited[host_thread()] = address;
  while (!host_complete_phase(address, parity)) host_pause();
  host_cta.awaited[host_thread()] = 0;
}

// ---- TMA ----

// 16-byte units of a span are permuted by the 128-byte row, rows and units being those of the shared address.
inline u32 host_swizzled(u32 address, u64 span) {
  return span == 0 ? address : address ^ ((address >> 7 & (span / 16 - 1)) << 4);
}

// Visits a box element by element: visit(bytes from its start, address in global memory or null, element bytes).
template <class Visit>
void host_visit_box(const HostCopy& copy, Visit visit) {
  const u64* map = copy.map.opaque;
  const i32 element = map[1] & 255, rank = map[1] >> 8 & 255;
  i64 at[5] = {};
  u64 elements = 1;
  for (i32 r = 0; r < rank; ++r) elements *= map[11 + r];
  for (u64 i = 0; i < elements; ++i) {
    u64 rest = i;
    bool inside = true;
    i64 offset = 0;
    for (i32 r = 0; r < rank; ++r) {
      at[r] = copy.corner[r] + static_cast<i64>(rest % map[11 + r]);
      rest /= map[11 + r];
      inside = inside && at[r] >= 0 && at[r] < static_cast<i64>(map[2 + r]);
      offset += at[r] * (r == 0 ? element : static_cast<i64>(map[6 + r]));
    }
    auto* global = reinterpret_cast<unsigned char*>(map[0]);
    visit(static_cast<u32>(i * element), inside ? global + offset : nullptr, element);
  }
}

inline void host_load(const HostCopy& copy) {
  if (copy.map.opaque[0] == 0) return host_mistake("load through an empty map", copy.shared);
  u32 bytes = 0;
  host_visit_box(copy, [&](u32 at, unsigned char* global, i32 element) {
    unsigned char* target = host_cta.shared + host_swizzled(copy.shared + at, copy.map.opaque[1] >> 16);
    if (global == nullptr) {
      std::memset(target, 0, element);
    } else {
      std::memcpy(target, global, element);
    }
    bytes += element;
  });
  HostBarrier& barrier = host_barrier(copy.barrier);
  barrier.bytes -= bytes;
  host_complete(barrier);
  ++host_cta.progress;
}

inline void host_store(const HostCopy& copy) {
  host_visit_box(copy, [&](u32 at, unsigned char* global, i32 element) {
    const u32 source = host_swizzled(copy.shared + at, copy.map.opaque[1] >> 16);
    if (global != nullptr) std::memcpy(global, host_cta.shared + source, element);
  });
  ++host_cta.progress;
}

inline void host_issue_load(u32 target, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
  if (target % 128 != 0) host_mistake("misaligned target of a copy", target);
  if ((target & kHostOffset) >= host_shared_bytes) host_mistake("copy beyond the shared memory", target);
  host_cta.loads.push_back(HostCopy{*map, {c0, c1, c2, c3, 0}, target, barrier});
}

inline void tma_load_2d(u32 target, const TensorMap* map, i32 c0, i32 c1, u32 barrier) {
  host_issue_load(target, map, barrier, c0, c1, 0, 0);
}

inline void tma_load_3d(u32 target, const TensorMap* map, i32 c0, i32 c1, i32 c2, u32 barrier) {
  host_issue_load(target, map, barrier, c0, c1, c2, 0);
}

inline void tma_load_4d(u32 target, const TensorMap* map, i32 c0, i32 c1, i32 c2, i32 c3, u32 barrier) {
  host_issue_load(target, map, barrier, c0, c1, c2, c3);
}

inline void tma_store_3d(const TensorMap* map, u32 source, i32 c0, i32 c1, i32 c2) {
  host_cta.open_stores[host_thread()].push_back(HostCopy{*map, {c0, c1, c2, 0, 0}, source, 0});
}

inline void bulk_commit_group() {
  host_cta.store_groups[host_thread()].push_back(std::move(host_cta.open_stores[host_thread()]));
  host_cta.open_stores[host_thread()].clear();
}

template <int kPending>
void bulk_wait_group() {
  const auto& groups = host_cta.store_groups[host_thread()];
  while (groups.size() > kPending) host_pause();
}

template <int kPending>
void bulk_wait_group_read() {
  bulk_wait_group<kPending>();
}

// ---- named barriers ----

struct HostNamedBarrier {
  i32 arrived = 0;
  u64 turn = 0;
};

inline std::map<i32, HostNamedBarrier> host_named_barriers;

inline void host_arrive(i32 barrier_number, i32 threads) {
  HostNamedBarrier& barrier = host_named_barriers[barrier_number];
  if (++barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.turn;
  ++host_cta.progress;
}

inline void host_meet(i32 barrier_number, i32 threads) {
  const u64 turn = host_named_barriers[barrier_number].turn;
  host_arrive(barrier_number, threads);
  while (host_named_barriers[barrier_number].turn == turn) host_pause();
}

inline i32 host_barrier_number(i32 id) { return id + 16 * static_cast<i32>(cluster_ctarank()); }
inline void named_barrier_arrive(i32 id, i32 threads) { host_arrive(host_barrier_number(id), threads); }
inline void named_barrier_sync(i32 id, i32 threads) { host_meet(host_barrier_number(id), threads); }

// ---- clusters ----

inline void cluster_sync() { host_meet(-1, static_cast<i32>(host_cuda::fibers.size())); }

inline void mbarrier_arrive_cluster(u32 address, u32 cta) {
  if (host_cuda::fibers[cta * blockDim.x].state == host_cuda::State::kDone) host_mistake("its CTA has left", address);
  mbarrier_arrive(host_remote(address, cta));
}

template <class... Corner>
void host_multicast(u32 target, const TensorMap* map, u32 barrier, u16 mask, Corner... corner) {
  for (u32 cta = 0; mask >> cta != 0; ++cta)
    if (mask >> cta & 1) host_issue_load(host_remote(target, cta), map, host_remote(barrier, cta), corner...);
}

inline void tma_load_2d_cluster(u32 target, const TensorMap* map, i32 c0, i32 c1, u32 barrier, u16 mask) {
  host_multicast(target, map, barrier, mask, c0, c1, 0, 0);
}

inline void tma_load_4d_cluster(u32 target, const TensorMap* map, i32 c0, i32 c1, i32 c2, i32 c3, u32 barrier,
                                u16 mask) {
  host_multicast(target, map, barrier, mask, c0, c1, c2, c3);
}

inline void st_async_cluster_u64(u32 address, u32 barrier, u32 cta, u64 value) {
  host_cta.letters.push_back(HostLetter{host_remote(address, cta), host_remote(barrier, cta), value});
}

inline void host_deliver(const HostLetter& letter) {
  host_shared<u64>(letter.address) = letter.value;
  HostBarrier& barrier = host_barrier(letter.barrier);
  barrier.bytes -= 8;
  host_complete(barrier);
  ++host_cta.progress;
}

// ---- shared memory ----

struct HostMatrixRow {
  u32 address, values[4];
};

inline void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  host_cuda::deposit(HostMatrixRow{address, {r0, r1, r2, r3}});
  const u32 lane = threadIdx.x % kWarpSize;
  for (u32 q = 0; q < 4; ++q) {
    const u32 value = host_cuda::collected<HostMatrixRow>(lane % 8 * 4 + q).values[lane / 8];
    host_shared<u32>(address + 4 * q) = value;
  }
  __syncwarp();
}

inline void stmatrix_x4_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  host_cuda::deposit(HostMatrixRow{address, {r0, r1, r2, r3}});
  const u32 lane = threadIdx.x % kWarpSize, row = lane % 8;
  for (u32 column = 0; column < 8; ++column) {
    const u32 pair = host_cuda::collected<HostMatrixRow>(column * 4 + row / 2).values[lane / 8];
    host_shared<u16>(address + 2 * column) = static_cast<u16>(pair >> 16 * (row % 2));
  }
  __syncwarp();
}

inline void ldmatrix_x4(u32 address, u32& r0, u32& r1, u32& r2, u32& r3) {
  host_cuda::deposit(HostMatrixRow{address, {}});
  const u32 lane = threadIdx.x % kWarpSize;
  u32* const targets[4] = {&r0, &r1, &r2, &r3};
  for (u32 tile = 0; tile < 4; ++tile) {
    const u32 row = host_cuda::collected<HostMatrixRow>(tile * 8 + lane / 4).address;
    *targets[tile] = host_shared<u32>(row + 4 * (lane % 4));
  }
  __syncwarp();
}

struct alignas(16) HostQuad {
  u32 x, y, z, w;
};

inline void st_shared_v4(u32 address, u32 x, u32 y, u32 z, u32 w) {
  host_shared<HostQuad>(address) = HostQuad{x, y, z, w};
}

inline uint4 ld_shared_v4(u32 address) {
  const HostQuad v = host_shared<HostQuad>(address);
  return uint4{v.x, v.y, v.z, v.w};
}

inline void st_shared_v2_f32(u32 address, float x, float y) {
  host_shared<u64>(address) = static_cast<u64>(__float_as_uint(y)) << 32 | __float_as_uint(x);
}

inline u32 ld_shared_u8(u32 address) { return host_shared<u8>(address); }
inline u32 ld_shared_u16(u32 address) { return host_shared<u16>(address); }
inline u64 ld_shared_u64(u32 address) { return host_shared<u64>(address); }

// ---- global memory ----

inline uint4 ld_global_nc_v4(const void* pointer) {
  if (reinterpret_cast<u64>(pointer) % 16 != 0) host_mistake("misaligned global load", 0);
  return *static_cast<const uint4*>(pointer);
}

inline i32 ld_global_s32(const i32* pointer) { return *pointer; }
inline u64 ld_global_u64(const u64* pointer) { return *pointer; }
inline float ld_global_f32(const float* pointer) { return *pointer; }

inline void st_global_v4(void* pointer, u32 x, u32 y, u32 z, u32 w) {
  if (reinterpret_cast<u64>(pointer) % 16 != 0) host_mistake("misaligned global store", 0);
  *static_cast<uint4*>(pointer) = uint4{x, y, z, w};
}

inline void st_global_v4(void* pointer, const uint4& value) { st_global_v4(pointer, value.x, value.y, value.z, value.w); }

// ---- what a CPU does not need ----

inline void keep_in_register(u32&) {}
template <i32 kHalf>
u32 both_halves(u32 word) {
  return (word >> 16 * kHalf & 0xffffu) * 0x00010001u;
}
template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

}  // namespace mok
