// clock.cu: cycles and time of every multiprocessor at one moment; two moments give its clock.
//
//   stamps[sm] = (cycles, nanoseconds)
//
// Python twin    mok_ref/bench/energy.py: ClockProbe
// Launch         more blocks than multiprocessors, so that each runs one; the last one's stamp stays
#include "sync.cuh"

using namespace mok;

// stamps: (num_stamps, 2)
extern "C" __global__ void stamp_clocks(u64* stamps, i32 num_stamps) {
  const u32 sm = sm_id();
  if (threadIdx.x != 0 || sm >= static_cast<u32>(num_stamps)) return;
  stamps[2 * sm] = clock_cycles();
  stamps[2 * sm + 1] = global_timer_ns();
}
