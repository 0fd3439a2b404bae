// Bounded waits and the error record: no spin in this project is without a limit.
//
// A wait polls its counter, the rank's abort flag and the clock. On expiry the first waiter claims the
// abort flag, writes what it waited for into pinned host memory (code last, after a system fence), and
// every other wait of the rank ends too. Kernels check `aborted` after each wait and return.
// Python twin: mok_ref/gpu/errors.py turns the record into MokTimeoutError.
#pragma once
#include "params.cuh"
#include "sync.cuh"

namespace mok {

MOK_DEVICE WaitContext wait_context(const LayerParams& params) {
  return WaitContext{params.timeout_ns, params.abort_flag, params.error_record, params.rank};
}

MOK_DEVICE bool aborted(const u32* abort_flag) { return ld_relaxed_gpu(abort_flag) != 0; }

// Writes the record once; later callers find the flag claimed and write nothing.
// Inlined everywhere: a call would cost every kernel that waits a stack frame.
MOK_DEVICE void report_timeout(const WaitContext& wait, u32 phase, i32 peer, u32 counter, u32 expected,
                               u32 seen, u32 epoch, u64 waited_ns) {
  if (atomicCAS(wait.abort_flag, 0u, 1u) != 0u) return;
  volatile ErrorRecord* record = wait.record;
  record->rank = wait.rank;
  record->peer = peer;
  record->phase = phase;
  record->counter = counter;
  record->expected = expected;
  record->seen = seen;
  record->epoch = epoch;
  record->wait_us = static_cast<u32>(waited_ns / 1000);
  fence_acq_rel_sys();
  record->code = kTimeout;
  fence_acq_rel_sys();
}

// True: *word has reached `expected` (modulo 2^32, so epochs may wrap). False: time-out or abort.
// kPauseNs: about how long to sleep between two looks; 0 where every moment counts.
template <bool kSystem, u32 kPauseNs = 0>
MOK_DEVICE bool wait_at_least(const u32* word, u32 expected, const WaitContext& wait, u32 phase, i32 peer,
                              u32 counter, u32 epoch) {
  u32 seen = kSystem ? ld_acquire_sys(word) : ld_acquire_gpu(word);
  if (static_cast<i32>(seen - expected) >= 0) return true;
  const u64 start = global_timer_ns();
  while (true) {
#pragma unroll 1
    for (i32 poll = 0; poll < 32; ++poll) {
      if constexpr (kPauseNs > 0) sleep_ns(kPauseNs);
      seen = kSystem ? ld_acquire_sys(word) : ld_acquire_gpu(word);
      if (static_cast<i32>(seen - expected) >= 0) return true;
    }
    if (aborted(wait.abort_flag)) return false;
    const u64 waited = global_timer_ns() - start;
    if (waited > wait.timeout_ns) {
      report_timeout(wait, phase, peer, counter, expected, seen, epoch, waited);
      return false;
    }
  }
}

// Inside one GPU: counters of the megakernels.
template <u32 kPauseNs = 0>
MOK_DEVICE bool wait_gpu(const u32* word, u32 expected, const WaitContext& wait, u32 phase, u32 counter) {
  return wait_at_least<false, kPauseNs>(word, expected, wait, phase, -1, counter, 0);
}

// Between ranks: barrier flags.
MOK_DEVICE bool wait_sys(const u32* word, u32 expected, const WaitContext& wait, u32 phase, i32 peer,
                         u32 epoch) {
  return wait_at_least<true>(word, expected, wait, phase, peer, static_cast<u32>(peer), epoch);
}

// Keeps the bad input that comes first in (kind, token, slot) order, whoever finds it first in time.
// index: token * K + slot, of a logit token * E + expert
MOK_DEVICE void report_input(u64* input_error, u32 kind, u32 index, u32 value_bits) {
  const u64 place = static_cast<u64>(kind) << 28 | (index & 0x0fffffffu);
  atomicMin(input_error, place << 32 | value_bits);
}

}  // namespace mok
