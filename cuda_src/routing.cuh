// Routing: scores, (grouped) top-k, weights; forward and backward (docs/spec.md, R1 to R12).
//
// NumPy twin: mok_ref/routing.py, same names. The products R1 and R12 are products along and over rows of
// portable.cu; everything else is here.
// Executed by: one warp per token; lanes share the experts (e = lane, lane + 32, ...), ordered sums are made by
// all lanes alike from shared memory. Reads/writes: rows of its token only. Synchronisation: within the warp.
#pragma once
#include "check.cuh"
#include "config.cuh"
#include "numerics.cuh"

namespace mok {

struct RoutingParams {
  const float* logits;        // [T, E]
  const float* choice_bias;   // [E] or null
  i32* topk_ids;              // [T, K]
  float* topk_weights;        // [T, K]
  float* scores;              // [T, E], +0 for closed experts and only for them
  float* ratio;               // [T, K]
  float* total;               // [T]
  const float* d_topk_weights;  // backward: [T, K]
  const float* d_scores;        // backward: [T, E] of balance losses, or null
  float* d_logits;              // backward: [T, E]
  u16* d_logits_bf16;           // backward: [T, E], what R12 multiplies
  u64* input_error;             // NaN and +Inf logits are reported here and count as closed
  i32 num_tokens;
  i32 num_experts;
  i32 top_k;
  i32 num_groups;
  i32 keep_groups;
  i32 group_top2;
  i32 is_softmax;
  i32 renormalize;
  float scale;
  i32 reserved;
};

constexpr i32 kClosedKey = static_cast<i32>(0x80000000u);

// Shared memory of one warp.
struct RoutingScratch {
  float* value;     // [E] scores, or gradients of scores
  i32* key;         // [E] choices in integer order
  i32* group_key;   // [E] at least G
};

MOK_DEVICE RoutingScratch routing_scratch(char* shared, i32 warp, i32 num_experts) {
  float* value = reinterpret_cast<float*>(shared) + static_cast<i64>(warp) * 3 * num_experts;
  i32* key = reinterpret_cast<i32*>(value + num_experts);
  return RoutingScratch{value, key, key + num_experts};
}

// A float's bits as an integer in the order of real numbers; -0 counts as +0.
MOK_DEVICE i32 choice_key(float choice) {
  const i32 bits = static_cast<i32>(__float_as_uint(choice));
  if (bits == kClosedKey) return 0;
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// The float that has this key.
MOK_DEVICE float key_value(i32 key) {
  return __uint_as_float(static_cast<u32>(key < 0 ? key ^ 0x7fffffff : key));
}

MOK_DEVICE float warp_max(float value) {
  for (i32 offset = kWarpSize / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  return value;
}

// The greatest key and its index, the lower one on ties; index -1 if all are closed. Closes that entry.
MOK_DEVICE i32 take_best(i32* keys, i32 count, i32 lane) {
  i32 best = kClosedKey, index = count;
  for (i32 i = lane; i < count; i += kWarpSize) {
    if (keys[i] > best) {
      best = keys[i];
      index = i;
    }
  }
  const i32 greatest = __reduce_max_sync(kFullWarp, best);
  if (greatest == kClosedKey) return -1;
  const i32 first = static_cast<i32>(
      __reduce_min_sync(kFullWarp, static_cast<u32>(best == greatest ? index : count)));
  if (lane == 0) keys[first] = kClosedKey;
  __syncwarp();
  return first;
}

// A logit that a choice can be defined on; others are reported and closed.
MOK_DEVICE float checked_logit(const RoutingParams& routing, i32 token, i32 expert) {
  const float logit = routing.logits[static_cast<i64>(token) * routing.num_experts + expert];
  const u32 bits = __float_as_uint(logit);
  const bool refused = (bits & 0x7fffffffu) > 0x7f800000u || bits == 0x7f800000u;
  if (!refused) return logit;
  if (routing.input_error != nullptr)
    report_input(routing.input_error, kBadLogit, static_cast<u32>(token) * routing.num_experts + expert, bits);
  return __uint_as_float(0xff800000u);
}

// R2: softmax over the open experts. m = max; p = exp(logit - m); Z = sum of p, e ascending; score = p / Z.
MOK_DEVICE void softmax_scores(const RoutingParams& routing, i32 token, float* scores, i32 lane) {
  const float closed = __uint_as_float(0xff800000u);
  float top = closed;
  for (i32 e = lane; e < routing.num_experts; e += kWarpSize) {
    scores[e] = checked_logit(routing, token, e);
    top = fmaxf(top, scores[e]);
  }
  top = warp_max(top);
  for (i32 e = lane; e < routing.num_experts; e += kWarpSize)
    scores[e] = scores[e] == closed ? 0.0f : exp_rn(__fsub_rn(scores[e], top));
  __syncwarp();
  float z = 0.0f;
  for (i32 e = 0; e < routing.num_experts; ++e) z = __fadd_rn(z, scores[e]);
  if (top == closed) z = 1.0f;
  __syncwarp();
  for (i32 e = lane; e < routing.num_experts; e += kWarpSize) scores[e] = __fdiv_rn(scores[e], z);
  __syncwarp();
}

// R3: score = sigmoid(logit), +0 for closed experts.
MOK_DEVICE void sigmoid_scores(const RoutingParams& routing, i32 token, float* scores, i32 lane) {
  for (i32 e = lane; e < routing.num_experts; e += kWarpSize) {
    const float logit = checked_logit(routing, token, e);
    scores[e] = logit == __uint_as_float(0xff800000u) ? 0.0f : sigmoid(logit);
  }
  __syncwarp();
}

// Score of group `group` (R5) as a key: its best choice, or the sum of its two best.
MOK_DEVICE i32 group_choice(const RoutingParams& routing, const i32* keys, i32 group) {
  const i32 size = routing.num_experts / routing.num_groups;
  i32 best = kClosedKey, second = kClosedKey;
  for (i32 e = group * size; e < (group + 1) * size; ++e) {
    if (keys[e] > best) {
      second = best;
      best = keys[e];
    } else if (keys[e] > second) {
      second = keys[e];
    }
  }
  if (!routing.group_top2 || second == kClosedKey) return best;
  return choice_key(__fadd_rn(key_value(best), key_value(second)));
}

// R5: closes every expert outside the token's best groups; ties go to the lower group.
MOK_DEVICE void keep_best_groups(const RoutingParams& routing, const RoutingScratch& scratch, i32 lane) {
  if (routing.keep_groups == routing.num_groups) return;
  for (i32 group = lane; group < routing.num_groups; group += kWarpSize)
    scratch.group_key[group] = group_choice(routing, scratch.key, group);
  __syncwarp();
  const i32 size = routing.num_experts / routing.num_groups;
  for (i32 round = 0; round < routing.keep_groups; ++round) take_best(scratch.group_key, routing.num_groups, lane);
  for (i32 e = lane; e < routing.num_experts; e += kWarpSize)  // kept groups' keys are closed now, others' not
    if (scratch.group_key[e / size] != kClosedKey) scratch.key[e] = kClosedKey;
  __syncwarp();
}

// R6 and R7: slots in descending choice, and the sum of their scores, k ascending, routes only.
MOK_DEVICE float choose_topk(const RoutingParams& routing, const RoutingScratch& scratch, i32 token, i32 lane) {
  float total = 0.0f;
  for (i32 slot = 0; slot < routing.top_k; ++slot) {
    const i32 expert = take_best(scratch.key, routing.num_experts, lane);
    if (expert >= 0) total = __fadd_rn(total, scratch.value[expert]);
    if (lane == 0) routing.topk_ids[static_cast<i64>(token) * routing.top_k + slot] = expert;
  }
  __syncwarp();
  return total;
}

// R8 and R9: ratio = score / total if renormalize (0 where total is 0), weight = ratio * scale.
MOK_DEVICE void route_weights(const RoutingParams& routing, const float* scores, i32 token, float total,
                              i32 lane) {
  const float divisor = total == 0.0f ? 1.0f : total;
  for (i32 slot = lane; slot < routing.top_k; slot += kWarpSize) {
    const i64 route = static_cast<i64>(token) * routing.top_k + slot;
    const i32 expert = routing.topk_ids[route];
    const float chosen = expert < 0 ? 0.0f : scores[expert];
    const float ratio = routing.renormalize ? __fdiv_rn(chosen, divisor) : chosen;
    routing.ratio[route] = ratio;
    routing.topk_weights[route] = expert < 0 ? 0.0f : __fmul_rn(ratio, routing.scale);  // +0, not 0 * scale
  }
  if (lane == 0) routing.total[token] = total;
}

// R2 to R9 for one token.
MOK_DEVICE void route_forward(const RoutingParams& routing, const RoutingScratch& scratch, i32 token, i32 lane) {
  if (routing.is_softmax) {
    softmax_scores(routing, token, scratch.value, lane);
  } else {
    sigmoid_scores(routing, token, scratch.value, lane);
  }
  for (i32 e = lane; e < routing.num_experts; e += kWarpSize) {
    const float score = scratch.value[e];
    const float choice = routing.choice_bias == nullptr ? score : __fadd_rn(score, routing.choice_bias[e]);
    scratch.key[e] = score == 0.0f ? kClosedKey : choice_key(choice);  // an open expert's score is above 0
    routing.scores[static_cast<i64>(token) * routing.num_experts + e] = score;
  }
  __syncwarp();
  keep_best_groups(routing, scratch, lane);
  const float total = choose_topk(routing, scratch, token, lane);
  route_weights(routing, scratch.value, token, total, lane);
}

// R10, from weight = ratio * scale: gradients of the chosen scores, put at their experts (`d_score`, +0
// elsewhere).  u = d_weight * scale; renormalize: (u - sum of u * ratio) / total, else u
MOK_DEVICE void route_weights_backward(const RoutingParams& routing, float* d_score, i32 token, i32 lane) {
  for (i32 e = lane; e < routing.num_experts; e += kWarpSize) d_score[e] = 0.0f;
  __syncwarp();
  const i64 first = static_cast<i64>(token) * routing.top_k;
  float dot = 0.0f;
  for (i32 slot = 0; slot < routing.top_k; ++slot) {
    if (routing.topk_ids[first + slot] < 0) continue;
    const float u = __fmul_rn(routing.d_topk_weights[first + slot], routing.scale);
    dot = __fadd_rn(dot, __fmul_rn(u, routing.ratio[first + slot]));
  }
  const float total = routing.total[token];
  for (i32 slot = lane; slot < routing.top_k; slot += kWarpSize) {
    const i32 expert = routing.topk_ids[first + slot];
    if (expert < 0) continue;
    const float u = __fmul_rn(routing.d_topk_weights[first + slot], routing.scale);
    float d_chosen = u;
    if (routing.renormalize) d_chosen = total == 0.0f ? 0.0f : __fdiv_rn(__fsub_rn(u, dot), total);
    d_score[expert] = d_chosen;
  }
  __syncwarp();
}

// R11: gradient of the logits.
//   softmax: dot = sum of d_score * score, e ascending;  d_logit = score * (d_score - dot)
//   sigmoid: d_logit = d_score * (score * (1 - score));  closed: +0
MOK_DEVICE void scores_backward(const RoutingParams& routing, const float* d_score, i32 token, i32 lane) {
  const i64 first = static_cast<i64>(token) * routing.num_experts;
  const float* scores = routing.scores + first;
  float dot = 0.0f;
  if (routing.is_softmax)
    for (i32 e = 0; e < routing.num_experts; ++e) dot = __fadd_rn(dot, __fmul_rn(d_score[e], scores[e]));
  for (i32 e = lane; e < routing.num_experts; e += kWarpSize) {
    const float score = scores[e];
    float d_logit = routing.is_softmax
                        ? __fmul_rn(score, __fsub_rn(d_score[e], dot))
                        : __fmul_rn(d_score[e], __fmul_rn(score, __fsub_rn(1.0f, score)));
    if (score == 0.0f) d_logit = 0.0f;
    routing.d_logits[first + e] = d_logit;
    routing.d_logits_bf16[first + e] = float_to_bf16(d_logit);
  }
}

// R10 and R11 for one token.
MOK_DEVICE void route_backward(const RoutingParams& routing, const RoutingScratch& scratch, i32 token,
                               i32 lane) {
  route_weights_backward(routing, scratch.value, token, lane);
  if (routing.d_scores != nullptr) {
    const float* balance = routing.d_scores + static_cast<i64>(token) * routing.num_experts;
    for (i32 e = lane; e < routing.num_experts; e += kWarpSize)
      scratch.value[e] = __fadd_rn(scratch.value[e], balance[e]);
    __syncwarp();
  }
  scores_backward(routing, scratch.value, token, lane);
}

}  // namespace mok
