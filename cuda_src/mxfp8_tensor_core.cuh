// mxfp8_tensor_core.cuh: products whose first operand is expanded in registers.
//
//   d[m,n] = tc(a, b, d)   one group of 16 along K, K ascending                                  (spec eq. 3.1)
//
// NumPy twin     mok_ref/tensor_core.py: tc. As tensor_core.cuh, but a's 64 rows are a fragment: thread t of the
//                warpgroup (warp w, lane l) holds rows 16 w + l / 4 (a[0], a[2]) and + 8 (a[1], a[3]),
//                places 2 (l % 4), + 1 of the group (a[0], a[1]) and + 8 (a[2], a[3])
// Before         `wgmma_fence` after the fragment was written
// After          `wgmma_commit`, `wgmma_wait` before the fragment's registers are written again
//
// The sum of a group is exact, so any order inside it gives the same bits, if both operands have it.
#pragma once
#include "tensor_core.cuh"

namespace mok {

// All 128 rows of b (64 accumulators), or the first 64 (the first 32 of them).
MOK_DEVICE void wgmma_m64n128k16(float (&d)[64], const u32 (&a)[4], u64 b, i32 scale_d) {
  asm volatile(
      "{.reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));
}

MOK_DEVICE void wgmma_m64n64k16(float (&d)[64], const u32 (&a)[4], u64 b, i32 scale_d) {
  asm volatile(
      "{.reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));
}

template <i32 kRows>
MOK_DEVICE void wgmma_from_registers(float (&d)[64], const u32 (&a)[4], u64 b, i32 scale_d) {
  static_assert(kRows == 64 || kRows == 128, "tiles have 64 or 128 rows");
  if constexpr (kRows == 64) {
    wgmma_m64n64k16(d, a, b, scale_d);
  } else {
    wgmma_m64n128k16(d, a, b, scale_d);
  }
}

}  // namespace mok
