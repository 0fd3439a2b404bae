// Weighted sum of expert outputs into tokens, and its counterpart for dx.
//
//   combine_forward:   acc = shared_y[t] or +0;  acc = acc + w[t,k] * y[t,k], k ascending, routes only
//   dispatch_backward: acc = shared_dx[t] or +0; acc = acc + dx[t,k], k ascending, routes only;
//                      acc = acc + router_dx[t] last;  d_topk_weights[t,k] = +0 where there is no route
//   each then rounded to bf16 once. Products and sums are rounded separately.
//
// NumPy twins: mok_ref/combine.py: combine_forward; mok_ref/dispatch.py: dispatch_backward. One thread owns
// kVector adjacent columns of one token, so a warp reads 512 contiguous bytes of each slot's row. Reads: the rank's
// own combine buffer, filled by all ranks before the barrier. Writes: y or dx.
// Synchronisation: a barrier between ranks before the kernel.
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

constexpr i32 kSlotsInFlight = 8;

// acc over `count` slots of one token, kVector columns starting at `rows` (the first slot's row plus the column).
// All rows are on their way before the first is added, and before it is known which slots have a route: what lies in
// the others is loaded and not used. The order of the sum is k ascending.
template <i32 kVector, bool kWeighted>
MOK_DEVICE void add_slots(float* acc, const u16* rows, const i32* ids, const float* weights, i32 count, i64 stride) {
  Bf16Vector<kVector> row[kSlotsInFlight];
  i32 id[kSlotsInFlight];
  float weight[kSlotsInFlight];
#pragma unroll
  for (i32 i = 0; i < kSlotsInFlight; ++i) {
    id[i] = -1;
    if (i >= count) continue;
    row[i] = Bf16Vector<kVector>::load(rows);
    id[i] = __ldg(ids + i);
    weight[i] = kWeighted ? __ldg(weights + i) : 0.0f;
    rows += stride;
  }
#pragma unroll
  for (i32 i = 0; i < kSlotsInFlight; ++i) {
    if (id[i] < 0) continue;
    float value[kVector];
    row[i].unpack(value);
#pragma unroll
    for (i32 c = 0; c < kVector; ++c)
      acc[c] = kWeighted ? add_weighted(acc[c], weight[i], value[c]) : __fadd_rn(acc[c], value[c]);
  }
}

// acc over all slots of a token.
template <i32 kVector, bool kWeighted>
MOK_DEVICE void add_token(float* acc, const LayerParams& params, i64 token, i32 column) {
  const i64 H = params.hidden_size, first_slot = token * params.top_k;
  const u16* rows = params.combine + first_slot * H + column;
  const i32* ids = params.topk_ids + first_slot;
  const float* weights = params.topk_weights + first_slot;
  i32 slot = 0;
  for (; slot + kSlotsInFlight <= params.top_k; slot += kSlotsInFlight)
    add_slots<kVector, kWeighted>(acc, rows + slot * H, ids + slot, weights + slot, kSlotsInFlight, H);
  if (slot < params.top_k)
    add_slots<kVector, kWeighted>(acc, rows + slot * H, ids + slot, weights + slot, params.top_k - slot, H);
}

template <i32 kVector>
MOK_DEVICE void start_from(float* acc, const u16* address) {
#pragma unroll
  for (i32 c = 0; c < kVector; ++c) acc[c] = 0.0f;
  if (address != nullptr) Bf16Vector<kVector>::load(address).unpack(acc);
}

template <i32 kVector>
MOK_DEVICE void combine_forward(const LayerParams& params, i64 token, i32 column) {
  const i64 H = params.hidden_size;
  float acc[kVector];
  start_from<kVector>(acc, params.shared_intermediate_size ? params.shared_y + token * H + column : nullptr);
  add_token<kVector, true>(acc, params, token, column);
  Bf16Vector<kVector>::pack(acc).store(params.y + token * H + column);
}

template <i32 kVector>
MOK_DEVICE void dispatch_backward(const LayerParams& params, const BackwardParams& back, i64 token,
                                  i32 column) {
  const i64 H = params.hidden_size;
  float acc[kVector];
  start_from<kVector>(acc, params.shared_intermediate_size ? back.shared_dx + token * H + column : nullptr);
  add_token<kVector, false>(acc, params, token, column);
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
  const bool route = params.topk_ids[slot_index] >= 0;
  back.d_topk_weights[slot_index] =
      route ? peer_buffer<const float>(params, kDTopkWeights, params.rank)[slot_index] : 0.0f;
}

}  // namespace mok
