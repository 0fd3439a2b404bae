// tensor_core.cuh: the matrix product of the contract on Hopper's tensor cores.
//
//   d[m,n] = tc(a, b, d)   one group of 16 along K per instruction, K ascending, one accumulator   (spec eq. 3.1)
//
// NumPy twin     mok_ref/tensor_core.py: tc
// Executed by    one warpgroup (128 threads) per call, all of them together
// Reads          two operand tiles in shared memory, 128-byte swizzled as TMA wrote them
// Writes         the accumulator fragment in registers: thread t of the warpgroup (warp w = t / 32, lane l)
//                holds rows 16 w + l / 4 and + 8, columns 8 i + 2 (l % 4) and + 1:
//                d[4 i], d[4 i + 1] of the first row, d[4 i + 2], d[4 i + 3] of the second
// Before         `wgmma_fence` once the accumulators were touched by other instructions
// After          `wgmma_commit`, then `wgmma_wait<n>` before registers or operand tiles are reused
//
// wgmma adds in float32 exactly as the model in docs/spec.md says (measured on an H200), whatever the tile
// shape: scale_d = 0 starts a chain at +0, scale_d = 1 continues it.
//
// Operand tiles (bf16, k-block of 64):
//   Major::kK    rows of 64 K-elements (128 bytes), TMA box (64, rows) of the row-major [rows, K] matrix:
//                8 KB per 64 rows; next k16 step: +32 bytes; next 64 rows: +8 KB.
//   Major::kMN   TMA box (64, 64, n) of the 3-D view (64, K, cols / 64) of the row-major [K, cols] matrix:
//                n blocks of 8 KB, each 64 K-rows of 64 columns; next k16 step: +2 KB; next 64 columns: +8 KB.
#pragma once

#include "ptx.cuh"

namespace mok {

enum class Major { kK, kMN };

// Shared-memory matrix descriptor (PTX ISA, "Matrix-Descriptor Format"): address, leading and stride byte
// offsets in units of 16 bytes, 128-byte swizzle in bits 62..63. `tile` is 1024-byte aligned.
// Its low word: to it, as to the whole, an offset in bytes / 16 may be added.
template <Major kMajor>
MOK_DEVICE u32 descriptor_low(u32 tile) {
  constexpr u32 kLeading = kMajor == Major::kK ? 1 : 512;
  return ((tile & 0x3FFFFu) >> 4) | (kLeading << 16);
}

// `value`, the same in all lanes of a warp, all of which call it, in a register of the warp instead of one per lane, as
// tensor cores take descriptors. What is added to it there is added once per warp.
MOK_DEVICE u32 warp_uniform(u32 value) { return __reduce_max_sync(kFullWarp, value); }

MOK_DEVICE u64 descriptor_of(u32 low) {
  constexpr u64 kStride = 64;
  constexpr u64 kSwizzle128 = 1;
  return low | (kStride << 32) | (kSwizzle128 << 62);
}

template <Major kMajor>
MOK_DEVICE u64 matrix_descriptor(u32 tile) {
  return descriptor_of(descriptor_low<kMajor>(tile));
}

// Descriptor increments.
template <Major kMajor>
constexpr u64 kDescriptorStepK16 = kMajor == Major::kK ? 2 : 128;
constexpr u64 kDescriptorStep64Rows = 512;

MOK_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

MOK_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
MOK_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <Major kMajorA, Major kMajorB>
MOK_DEVICE void wgmma_m64n256k16(float (&d)[128], u64 a, u64 b, i32 scale_d) {
  asm volatile(
      "{.reg .pred p;\n setp.ne.b32 p, %130, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, %131, %132;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(scale_d), "n"(kMajorA == Major::kMN), "n"(kMajorB == Major::kMN));
}

template <Major kMajorA, Major kMajorB>
MOK_DEVICE void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b, i32 scale_d) {
  asm volatile(
      "{.reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, %67, %68;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(scale_d), "n"(kMajorA == Major::kMN), "n"(kMajorB == Major::kMN));
}

// One k-block of 64 by the descriptors of its operands: four k16 steps in ascending order. The first uses `scale_d`,
// the others continue.
template <Major kMajorA, Major kMajorB>
MOK_DEVICE void tc_k64(float (&d)[128], u64 a, u64 b, i32 scale_d) {
  constexpr u64 kStepA = kDescriptorStepK16<kMajorA>, kStepB = kDescriptorStepK16<kMajorB>;
  wgmma_m64n256k16<kMajorA, kMajorB>(d, a, b, scale_d);
#pragma unroll
  for (int k16 = 1; k16 < 4; ++k16) {
    wgmma_m64n256k16<kMajorA, kMajorB>(d, a + k16 * kStepA, b + k16 * kStepB, 1);
  }
}

template <Major kMajorA, Major kMajorB>
MOK_DEVICE void tc_k64(float (&d)[128], u32 tile_a, u32 tile_b, i32 scale_d) {
  tc_k64<kMajorA, kMajorB>(d, matrix_descriptor<kMajorA>(tile_a), matrix_descriptor<kMajorB>(tile_b), scale_d);
}

template <Major kMajorA, Major kMajorB>
MOK_DEVICE void tc_k64(float (&d)[64], u32 tile_a, u32 tile_b, i32 scale_d) {
  const u64 a = matrix_descriptor<kMajorA>(tile_a), b = matrix_descriptor<kMajorB>(tile_b);
  constexpr u64 kStepA = kDescriptorStepK16<kMajorA>, kStepB = kDescriptorStepK16<kMajorB>;
  wgmma_m64n128k16<kMajorA, kMajorB>(d, a, b, scale_d);
#pragma unroll
  for (int k16 = 1; k16 < 4; ++k16) {
    wgmma_m64n128k16<kMajorA, kMajorB>(d, a + k16 * kStepA, b + k16 * kStepB, 1);
  }
}

}  // namespace mok
