// Memory ordering: loads, adds and fences, named after instruction, order and scope.
//
// Every cross-CTA or cross-rank hand-over in the project goes through these functions:
// the writer finishes its stores and adds with release, the reader loads with acquire.
// Reads/writes: single u32 words in global memory. No function here waits; bounded waits are in check.cuh.
#pragma once
#include "config.cuh"

namespace mok {

MOK_DEVICE u32 ld_acquire_gpu(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

MOK_DEVICE u32 ld_acquire_sys(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

MOK_DEVICE u32 ld_relaxed_gpu(const u32* word) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

MOK_DEVICE void red_release_gpu(u32* word, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

MOK_DEVICE void red_release_sys(u32* word, u32 value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

MOK_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Order ordinary accesses against the copy engine's (async proxy). Global: after acquiring a counter, before
// TMA reads what ordinary stores wrote. Shared: between ordinary accesses and TMA or wgmma on the same bytes.
MOK_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

MOK_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Draws the next number of a ticket counter. Relaxed: a ticket orders nothing by itself.
MOK_DEVICE u32 draw_ticket(u32* ticket) {
  u32 number;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(number) : "l"(ticket) : "memory");
  return number;
}

// A kernel that is launched early (mok_ref/gpu/launch.py: Launch) runs up to this line beside the one before it on its
// stream; from here on that one is complete and its writes are visible. It comes before every access to memory.
MOK_DEVICE void wait_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may take its place as soon as there is room for it; it waits as above for this one's end.
MOK_DEVICE void let_next_kernel_in() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// First line of a kernel that is launched early.
MOK_DEVICE void follow_previous_kernel() {
  let_next_kernel_in();
  wait_previous_kernel();
}

// Adds to a counter that others add to: what they wrote before their adds is visible after this one, and what this
// thread wrote before it to whoever acquires the counter later. Returns the value before.
MOK_DEVICE u32 atom_acq_rel_gpu(u32* word, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

MOK_DEVICE void st_release_gpu(u32* word, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

MOK_DEVICE void sleep_ns(u32 duration) { asm volatile("nanosleep.u32 %0;" ::"r"(duration)); }

MOK_DEVICE u64 global_timer_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Cycles of this multiprocessor.
MOK_DEVICE u64 clock_cycles() {
  u64 now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}

// Which multiprocessor this is.
MOK_DEVICE u32 sm_id() {
  u32 sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

}  // namespace mok
