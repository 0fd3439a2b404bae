"""What racecheck makes of a hand-over through an mbarrier; a script, no test.

    compute-sanitizer --tool racecheck python tests/gpu/racecheck_probe.py MODE

One warp stores, `__syncwarp`, its lane 0 arrives; another warp waits for the phase by its parity
and reads: the order is complete. MODE is a sum: 4 a store by each lane, 2 `stmatrix` over the same
bytes, 1 an earlier store to them. racecheck calls 4 a race and does not see `stmatrix` at all
(docs/results/final_checks_h200_2026-11-29_second.txt), so its reports on the MXFP8 kernels, which
hand stages over in this way, have to be read one by one.
"""

from __future__ import annotations

import sys

SOURCE = r"""
typedef unsigned u32;
extern "C" __global__ void probe(int mode, u32* out) {
  __shared__ __align__(1024) unsigned char bytes[512];
  __shared__ __align__(8) unsigned long long barrier;
  const u32 lane = threadIdx.x % 32;
  const u32 full = static_cast<u32>(__cvta_generic_to_shared(&barrier));
  const u32 unit = static_cast<u32>(__cvta_generic_to_shared(bytes)) + lane * 16;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full));
  __syncthreads();
  if (threadIdx.x < 32) {
    if (mode & 1) {
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(unit), "r"(lane) : "memory");
    }
    __syncwarp();
    if (mode & 2) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%1,%1,%1};" ::"r"(unit),
                   "r"(lane + 7) : "memory");
    }
    if (mode & 4) {
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(unit ^ 16), "r"(lane + 7)
                   : "memory");
    }
    __syncwarp();
    if (lane == 0) {
      asm volatile("{.reg .b64 t;\n mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(full)
                   : "memory");
    }
  } else {
    u32 done = 0, value;
    while (!done) {
      asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
                   " selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(full) : "memory");
    }
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(unit) : "memory");
    out[lane] = value;
  }
}
"""


def main() -> None:
    import cupy

    mode = int(sys.argv[1])
    kernel = cupy.RawModule(code=SOURCE, options=("-arch=sm_90a",)).get_function("probe")
    found = cupy.zeros(32, cupy.uint32)
    kernel((1,), (64,), (mode, found))
    print("mode", mode, found[:4])


if __name__ == "__main__":
    main()
