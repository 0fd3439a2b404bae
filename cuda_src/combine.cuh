// Weighted sum of expert outputs into tokens, and its counterpart for dx.
//
//   combine_forward:   acc = shared_y[t] or +0;  acc = acc + w[t,k] * y[t,k], k ascending, routes only
//   dispatch_backward: acc = shared_dx[t] or +0; acc = acc + dx[t,k], k ascending, routes only;
//                      acc = acc + router_dx[t] last;  d_topk_weights[t,k] = +0 where there is no route
//   each then rounded to bf16 once. Products and sums are rounded separately.
//
// NumPy twins: mok_ref/combine.py: combine_forward; mok_ref/dispatch.py: dispatch_backward. One thread owns
// kVector adjacent columns of one token, so a warp reads 512 contiguous bytes of each slot's row. Reads: the rank's own combine buffer, filled by all
// ranks before the barrier. Writes: y or dx. Synchronisation: a barrier between ranks before the kernel.
#pragma once
#include "numerics.cuh"
#include "params.cuh"
#include "schedule.cuh"

namespace mok {

// kVector adjacent bf16 values as they lie in memory.
template <i32 kVector>
struct Bf16Vector;

template <>
struct Bf16Vector<8> {
  uint4 words;
  MOK_DEVICE static Bf16Vector load(const u16* address) {
    return Bf16Vector{*reinterpret_cast<const uint4*>(address)};
  }
  MOK_DEVICE static Bf16Vector pack(const float* v) {
    return Bf16Vector{make_uint4(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]),
                                 pack_bf16x2(v[6], v[7]))};
  }
  MOK_DEVICE void store(u16* address) const { *reinterpret_cast<uint4*>(address) = words; }
  MOK_DEVICE void unpack(float* v) const {
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      v[2 * i] = bf16_low(pairs[i]);
      v[2 * i + 1] = bf16_high(pairs[i]);
    }
  }
};

template <>
struct Bf16Vector<1> {
  u16 bits;
  MOK_DEVICE static Bf16Vector load(const u16* address) { return Bf16Vector{*address}; }
  MOK_DEVICE static Bf16Vector pack(const float* v) { return Bf16Vector{float_to_bf16(v[0])}; }
  MOK_DEVICE void store(u16* address) const { *address = bits; }
  MOK_DEVICE void unpack(float* v) const { v[0] = bf16_to_float(bits); }
};

// acc over the slots of one token, kVector columns starting at `rows` (slot 0's row plus the column).
// Loads of kSlots slots are issued before the first is added; the order of the sum stays k ascending.
template <i32 kVector, bool kWeighted>
MOK_DEVICE void add_slots(float* acc, const u16* rows, const i32* ids, const float* weights, i32 top_k,
                          i64 stride) {
  constexpr i32 kSlots = 8;
  for (i32 first = 0; first < top_k; first += kSlots) {
    Bf16Vector<kVector> row[kSlots];
    bool route[kSlots];
#pragma unroll
    for (i32 i = 0; i < kSlots; ++i) {
      route[i] = first + i < top_k && ids[first + i] >= 0;
      if (route[i]) row[i] = Bf16Vector<kVector>::load(rows + (first + i) * stride);
    }
#pragma unroll
    for (i32 i = 0; i < kSlots; ++i) {
      if (!route[i]) continue;
      float value[kVector];
      row[i].unpack(value);
      const float weight = kWeighted ? weights[first + i] : 0.0f;
#pragma unroll
      for (i32 c = 0; c < kVector; ++c)
        acc[c] = kWeighted ? add_weighted(acc[c], weight, value[c]) : __fadd_rn(acc[c], value[c]);
    }
  }
}

template <i32 kVector>
MOK_DEVICE void start_from(float* acc, const u16* address) {
#pragma unroll
  for (i32 c = 0; c < kVector; ++c) acc[c] = 0.0f;
  if (address != nullptr) Bf16Vector<kVector>::load(address).unpack(acc);
}

template <i32 kVector>
MOK_DEVICE void combine_forward(const LayerParams& params, i64 token, i32 column) {
  const i64 H = params.hidden_size, K = params.top_k;
  const u16* rows = peer_buffer<const u16>(params, kCombine, params.rank) + token * K * H + column;
  const i32* ids = peer_buffer<const i32>(params, kTopkIds, params.rank) + token * K;
  const float* weights = peer_buffer<const float>(params, kTopkWeights, params.rank) + token * K;
  float acc[kVector];
  start_from<kVector>(acc, params.shared_intermediate_size ? params.shared_y + token * H + column : nullptr);
  add_slots<kVector, true>(acc, rows, ids, weights, params.top_k, H);
  Bf16Vector<kVector>::pack(acc).store(params.y + token * H + column);
}

template <i32 kVector>
MOK_DEVICE void dispatch_backward(const LayerParams& params, const BackwardParams& back, i64 token,
                                  i32 column) {
  const i64 H = params.hidden_size, K = params.top_k;
  const u16* rows = peer_buffer<const u16>(params, kCombine, params.rank) + token * K * H + column;
  const i32* ids = peer_buffer<const i32>(params, kTopkIds, params.rank) + token * K;
  float acc[kVector];
  start_from<kVector>(acc, params.shared_intermediate_size ? back.shared_dx + token * H + column : nullptr);
  add_slots<kVector, false>(acc, rows, ids, nullptr, params.top_k, H);
  if (back.router_dx != nullptr) {
    float router[kVector];
    Bf16Vector<kVector>::load(back.router_dx + token * H + column).unpack(router);
#pragma unroll
    for (i32 c = 0; c < kVector; ++c) acc[c] = __fadd_rn(acc[c], router[c]);
  }
  Bf16Vector<kVector>::pack(acc).store(back.dx + token * H + column);
}

// d_topk_weights of one slot: what the expert's rank pushed, +0 without a route.
MOK_DEVICE void dispatch_d_weight(const LayerParams& params, const BackwardParams& back, i64 slot_index) {
  const bool route = peer_buffer<const i32>(params, kTopkIds, params.rank)[slot_index] >= 0;
  back.d_topk_weights[slot_index] =
      route ? peer_buffer<const float>(params, kDTopkWeights, params.rank)[slot_index] : 0.0f;
}

}  // namespace mok
