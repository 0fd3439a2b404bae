// dx and d_topk_weights of this rank's tokens beside the weight gradients.
//
//   dx[t] = sum over slots of pushed dx rows     d_topk_weights[t, k] = what the expert's rank pushed   (combine.cuh)
//
// NumPy twin: mok_ref/dispatch.py: dispatch_backward.
// Executed by: warps of the wgrad kernels that have nothing else to do. The sums are bound by memory, the weight
// gradients by products: together they take hardly longer than the latter alone.
// Synchronisation: a barrier between ranks before the kernel; one rank alone, whose kernel begins early, waits for
// the end of dgrad. Reads: this rank's combine buffer.
#pragma once
#include "combine.cuh"
#include "sync.cuh"

namespace mok {

template <>
struct Bf16Vector<4> {
  uint2 words;
  MOK_DEVICE static Bf16Vector load(const u16* address) {
    return Bf16Vector{*reinterpret_cast<const uint2*>(address)};
  }
  MOK_DEVICE static Bf16Vector pack(const float* v) {
    return Bf16Vector{make_uint2(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]))};
  }
  MOK_DEVICE void store(u16* address) const { *reinterpret_cast<uint2*>(address) = words; }
  MOK_DEVICE void unpack(float* v) const {
    v[0] = bf16_low(words.x);
    v[1] = bf16_high(words.x);
    v[2] = bf16_low(words.y);
    v[3] = bf16_high(words.y);
  }
};

// `worker` of `workers` warps, a token at a time, kColumns columns per lane (H is a multiple of 8 here).
template <i32 kColumns>
MOK_DEVICE void dispatch_backward_warp(const LayerParams& layer, const BackwardParams& back, i32 worker, i32 workers) {
  const i32 lane = threadIdx.x % kWarpSize;
  for (i64 token = worker; token < layer.num_tokens; token += workers) {
#pragma unroll 1
    for (i32 column = lane * kColumns; column < layer.hidden_size; column += kWarpSize * kColumns) {
      dispatch_backward<kColumns>(layer, back, token, column);
    }
    for (i32 slot = lane; slot < layer.top_k; slot += kWarpSize) {
      dispatch_d_weight(layer, back, token * layer.top_k + slot);
    }
  }
}

// What a wgrad kernel does beside its products. Fewer columns take fewer registers and have fewer rows on their way.
template <i32 kColumns>
struct DxBeside {
  const LayerParams& layer;
  const BackwardParams& back;
  bool wanted;

  MOK_DEVICE void operator()(i32 worker, i32 workers) const {
    wait_previous_kernel();  // also where nothing is wanted: this kernel's end is taken for the end of that one
    if (wanted) dispatch_backward_warp<kColumns>(layer, back, worker, workers);
  }
};

struct NothingBeside {
  MOK_DEVICE void operator()(i32, i32) const {}
};

}  // namespace mok
