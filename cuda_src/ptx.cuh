// ptx.cuh: every PTX instruction the kernels use, one thin function each, named after the instruction.
//
// No arithmetic of the layer and no waiting policy lives here (numerics.cuh, sync.cuh). Shared-memory
// operands are 32-bit addresses made by `shared_address`; tensor maps are the opaque 128 bytes that
// cuTensorMapEncodeTiled writes (mok_ref/gpu/hopper.py: encode_*).
//
// Source of every semantics note: PTX ISA 8.x, sections named in the comments.
#pragma once
#include "config.cuh"
#include "sync.cuh"

namespace mok {

// One tensor map, passed to a kernel inside a `const __grid_constant__` struct.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// ---------------------------------------------------------------- ids, clocks, addresses

MOK_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x % 32, read anew: no register holds it through what comes before.
MOK_DEVICE i32 lane_id() {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// No instruction: from here on `value` is what a register holds, not something that could be computed again.
MOK_DEVICE void keep_in_register(u32& value) { asm volatile("" : "+r"(value)); }

// True in one lane of a warp, all of whose lanes call it. The compiler then knows that one thread alone goes on: around
// copies and other instructions with uniform operands it needs no loop over the lanes, as it does for `lane == 0`.
MOK_DEVICE bool elect_one() {
  u32 chosen;
  asm volatile("{.reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen != 0;
}

MOK_DEVICE u32 cluster_ctarank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The low half of a word twice, or its high half; multiplications take it without an instruction of its own.
template <i32 kHalf>
MOK_DEVICE u32 both_halves(u32 word) {
  u32 result;
  if constexpr (kHalf == 0) {
    asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {low, low};}" : "=r"(result) : "r"(word));
  } else {
    asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {high, high};}" : "=r"(result) : "r"(word));
  }
  return result;
}

// ---------------------------------------------------------------- mbarrier (shared memory of this CTA)

MOK_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes freshly initialised barriers visible to the async proxy and to the cluster.
MOK_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

MOK_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Where `condition` holds, without a branch.
MOK_DEVICE void mbarrier_arrive_if(u32 barrier, bool condition) {
  asm volatile(
      "{.reg .pred p;\n setp.ne.u32 p, %1, 0;\n @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(barrier),
      "r"(static_cast<u32>(condition))
      : "memory");
}

// Arrives on the same barrier of CTA `cta` of the cluster. Deliberately without .release.cluster, which
// compiles to a full memory barrier; use it only to hand back buffers that were read, never written.
MOK_DEVICE void mbarrier_arrive_cluster(u32 barrier, u32 cta) {
  asm volatile(
      "{.reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(cta)
      : "memory");
}

// Arrives and announces `bytes` that the copy engine will deliver to this barrier.
MOK_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// `arrivals` at once.
MOK_DEVICE void mbarrier_arrive_count(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Announces `bytes` without arriving.
MOK_DEVICE void mbarrier_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

MOK_DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Whether the phase of `parity` is complete, without suspending the thread.
MOK_DEVICE bool mbarrier_test_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for the phase of `parity` to complete. What is waited for is always work of this CTA (or its
// cluster), whose own waits on other CTAs are limited in time (sync.cuh), so this one ends as well;
// the trap is a backstop against a defect, far beyond any limit a caller may set.
constexpr u64 kMbarrierLimitNs = 600ull * 1000 * 1000 * 1000;
MOK_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  if (mbarrier_try_wait(barrier, parity)) return;
  const u64 start = global_timer_ns();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (global_timer_ns() - start > kMbarrierLimitNs) __trap();
  }
}

// ---------------------------------------------------------------- TMA loads (global -> shared)

// Box at coordinates (c0, c1), innermost first; completes on `barrier` by bytes.
MOK_DEVICE void tma_load_2d(u32 dst, const TensorMap* map, i32 c0, i32 c1, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}

MOK_DEVICE void tma_load_3d(u32 dst, const TensorMap* map, i32 c0, i32 c1, i32 c2, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

MOK_DEVICE void tma_load_4d(u32 dst, const TensorMap* map, i32 c0, i32 c1, i32 c2, i32 c3, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same, delivered to the same offset of every CTA of the cluster named in `cta_mask`, each of
// which gets the bytes counted on its own barrier. Shared-memory multicast inside one cluster.
MOK_DEVICE void tma_load_4d_cluster(u32 dst, const TensorMap* map, i32 c0, i32 c1, i32 c2, i32 c3, u32 barrier,
                                    u16 cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(cta_mask)
      : "memory");
}

MOK_DEVICE void tma_load_2d_cluster(u32 dst, const TensorMap* map, i32 c0, i32 c1, u32 barrier, u16 cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(cta_mask)
      : "memory");
}

// ---------------------------------------------------------------- TMA stores (shared -> global)

// Three-dimensional map; parts of the box outside the tensor are not written.
MOK_DEVICE void tma_store_3d(const TensorMap* map, u32 src, i32 c0, i32 c1, i32 c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(src), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

MOK_DEVICE void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most kPending groups of this thread are still writing.
template <int kPending>
MOK_DEVICE void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// At most kPending groups of this thread still read their shared-memory source.
template <int kPending>
MOK_DEVICE void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---------------------------------------------------------------- registers, named barriers, clusters

template <int kRegisters>
MOK_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
MOK_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barrier `id` of the CTA, `threads` of them arriving or waiting per turn.
MOK_DEVICE void named_barrier_sync(i32 id, i32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

MOK_DEVICE void named_barrier_arrive(i32 id, i32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// All threads of all CTAs of the cluster.
MOK_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\n barrier.cluster.wait;" ::: "memory");
}

// ---------------------------------------------------------------- shared-memory fragments

// Four 8x8 tiles of 16-bit elements; lane l gives the address of row l % 8 of tile l / 8.
MOK_DEVICE void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same tiles transposed: row and column of each change places on the way.
MOK_DEVICE void stmatrix_x4_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

MOK_DEVICE void ldmatrix_x4(u32 address, u32& r0, u32& r1, u32& r2, u32& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

MOK_DEVICE void st_shared_v2_f32(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

MOK_DEVICE void st_shared_v4(u32 address, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

MOK_DEVICE uint4 ld_shared_v4(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

MOK_DEVICE u32 ld_shared_u8(u32 address) {
  u32 value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

MOK_DEVICE u32 ld_shared_u16(u32 address) {
  u16 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

MOK_DEVICE u64 ld_shared_u64(u32 address) {
  u64 value;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}

// Stores 8 bytes to the same address in CTA `cta` of the cluster and counts them on that CTA's `barrier`.
MOK_DEVICE void st_async_cluster_u64(u32 address, u32 barrier, u32 cta, u64 value) {
  asm volatile(
      "{.reg .b32 remote, remote_barrier;\n mapa.shared::cluster.u32 remote, %0, %2;\n"
      " mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [remote], %3, [remote_barrier];}" ::"r"(
          address),
      "r"(barrier), "r"(cta), "l"(value)
      : "memory");
}

// ---------------------------------------------------------------- global memory, 16 bytes at a time

// Read-only for the whole kernel (inputs, tables written by earlier kernels).
MOK_DEVICE uint4 ld_global_nc_v4(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

// Volatile, so that it is issued here and waited for where its value is used.
MOK_DEVICE i32 ld_global_s32(const i32* pointer) {
  i32 value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}

MOK_DEVICE u64 ld_global_u64(const u64* pointer) {
  u64 value;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer));
  return value;
}

MOK_DEVICE float ld_global_f32(const float* pointer) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(pointer));
  return value;
}

MOK_DEVICE void st_global_v4(void* pointer, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}

MOK_DEVICE void st_global_v4(void* pointer, const uint4& value) {
  st_global_v4(pointer, value.x, value.y, value.z, value.w);
}

}  // namespace mok
