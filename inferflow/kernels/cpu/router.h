// OP_ROUTER: which experts a token goes to, and their weights; OP_COMBINE: the experts' outputs added up.
// Scores are compared as whole numbers that sort as they do, NaN least of all: any scores give ids within range.
#pragma once
#include "elementwise.h"
#include "norm.h"

namespace inferflow {
namespace {

constexpr int32_t TAKEN = INT32_MIN;  // below every score

// −∞ < … < −0 = +0 < … < ∞ keep their order; NaN is below all of them.
inline void orders_of(const float* x, int64_t n, int32_t* orders) {
  for (int64_t i = 0; i < n; i += LANES) {
    const int64_t lanes = least(n - i, LANES);
    const vf v = take(x + i, 1, lanes) + vf{};  // −0 becomes +0
    const vi bits = as_int(v), order = v != v ? set1i(TAKEN + 1) : bits < vi{} ? bits ^ set1i(INT32_MAX) : bits;
    put(reinterpret_cast<float*>(orders + i), 1, as_float(order), lanes);
  }
}

// The index of the greatest; of several, the first.
inline int64_t greatest(const int32_t* orders, int64_t n) {
  int32_t top = TAKEN;
  for (int64_t i = 0; i < n; i++) top = orders[i] > top ? orders[i] : top;
  int64_t best = 0;
  while (orders[best] != top) best++;
  return best;
}

// One token's working memory, [experts] each: the logits, and what is made of them.
struct RouterRoom {
  float *logits, *scores, *choice, *groups, *weights;
  int32_t *ids, *orders;
  RouterRoom(Scratch& scratch, int64_t experts) {
    logits = reinterpret_cast<float*>(scratch.get(experts * 28));
    scores = logits + experts;
    choice = scores + experts;
    groups = choice + experts;
    weights = groups + experts;
    ids = reinterpret_cast<int32_t*>(weights + experts);
    orders = ids + experts;
  }
};

inline float group_score(const float* x, int64_t n, bool top2) {
  if (!top2 || n == 1) return max_row(x, n);
  float first = -INF, second = -INF;
  for (int64_t i = 0; i < n; i++) {
    if (x[i] != x[i]) return x[i];
    if (x[i] > first) {
      second = first;
      first = x[i];
    } else if (x[i] > second) {
      second = x[i];
    }
  }
  return first + second;
}

// Experts outside the best groups get −∞.
inline void keep_best_groups(const RouterArgs& op, RouterRoom& room) {
  const int64_t each = op.experts / op.groups;
  for (int64_t g = 0; g < op.groups; g++) room.groups[g] = group_score(room.choice + g * each, each, op.group_top2);
  orders_of(room.groups, op.groups, room.orders);
  for (int64_t n = 0; n < op.top_groups; n++) room.orders[greatest(room.orders, op.groups)] = TAKEN;
  for (int64_t e = 0; e < op.experts; e++)
    if (room.orders[e / each] != TAKEN) room.choice[e] = -INF;
}

// bias: null or [experts], `apart` from each other.
inline void route(const RouterArgs& op, RouterRoom& room, const float* bias, int64_t apart) {
  const int64_t n = op.experts, k = op.top_k;
  float *scores = room.scores, *weights = room.weights;
  if (op.score == S_SOFTMAX) softmax_row(room.logits, scores, n);
  else if (op.score == S_SIGMOID) map1(scores, 1, room.logits, 1, n, [](vf x) { return sigmoid(x); });
  else memcpy(scores, room.logits, n * 4);
  for (int64_t e = 0; e < n; e++) room.choice[e] = bias ? scores[e] + bias[e * apart] : scores[e];
  if (op.groups) keep_best_groups(op, room);
  orders_of(room.choice, n, room.orders);
  for (int64_t j = 0; j < k; j++) {
    const int64_t best = greatest(room.orders, n);
    room.orders[best] = TAKEN;
    room.ids[j] = static_cast<int32_t>(best);
    weights[j] = scores[best];
  }
  if (op.score == S_SOFTMAX_TOPK) softmax_row(weights, weights, k);
  if (op.normalise) {
    const float total = sum_row(weights, k, plus), floor = static_cast<float>(op.norm_min);
    for (int64_t j = 0; j < k; j++) weights[j] /= total <= floor ? floor : total;
  }
  for (int64_t j = 0; j < k; j++) weights[j] *= static_cast<float>(op.scale);
}

// Each choice in turn, weighted by a softmax over those near it; then it is masked.
inline void route_sparsemixer(const RouterArgs& op, RouterRoom& room) {
  const int64_t n = op.experts;
  const float limit = 2 * static_cast<float>(op.jitter);
  memcpy(room.scores, room.logits, n * 4);
  for (int64_t j = 0; j < op.top_k; j++) {
    orders_of(room.scores, n, room.orders);
    const int64_t best = greatest(room.orders, n);
    const float peak = room.scores[best];
    for (int64_t e = 0; e < n; e++) {
      const float logit = room.logits[e], size = __builtin_fabsf(logit), scale = size <= peak || peak != peak ? peak : size;
      room.choice[e] = (peak - logit) / scale > limit ? -INF : room.scores[e];
    }
    softmax_row(room.choice, room.choice, n);
    room.ids[j] = static_cast<int32_t>(best);
    room.weights[j] = room.choice[best];
    room.scores[best] = -INF;
  }
}

inline int64_t router_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const RouterArgs*>(args);
  return ceil_div(Walk<1>(step, {&op.ids}, 1).points, per_unit(op.experts * op.top_k));
}
inline void router_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const auto& op = *static_cast<const RouterArgs*>(args);
  const bool biased = given(op.bias);
  const Tensor& bias = biased ? op.bias : op.logits;
  const Walk<4> rows(step, {&op.ids, &op.weights, &op.logits, &bias}, 1);
  const int64_t each = per_unit(op.experts * op.top_k), n = op.experts;
  RouterRoom room(scratch, n);
  for (int64_t r = begin * each; r < least(rows.points, end * each); r++) {
    float* p[4];
    rows.find(r, p);
    for (int64_t e = 0; e < n; e++) room.logits[e] = p[2][e * last_stride(op.logits)];
    if (op.score == S_SPARSEMIXER) route_sparsemixer(op, room);
    else route(op, room, biased ? p[3] : nullptr, last_stride(bias));
    for (int64_t j = 0; j < op.top_k; j++) {
      memcpy(p[0] + j * last_stride(op.ids), room.ids + j, 4);
      p[1][j * last_stride(op.weights)] = room.weights[j];
    }
  }
}

// ---------------------------------------------------------------------------------------------------- combine

inline RowCut combine_cut(const CombineArgs& op, const Step& step) {
  return {Walk<1>(step, {&op.out}, 1).points, last_size(op.out), UNIT / 4};
}
inline int64_t combine_units(const void* args, const Step& step) {
  return combine_cut(*static_cast<const CombineArgs*>(args), step).units();
}
inline void combine_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const CombineArgs*>(args);
  const bool weighted = given(op.weights);
  const Walk<3> rows(step, {&op.out, &op.y, weighted ? &op.weights : &op.y}, 1);
  const int axis = op.y.ndim - 2;
  const int64_t k = op.y.sizes[axis], next = op.y.strides[axis], sy = last_stride(op.y), so = last_stride(op.out);
  const int64_t sw = weighted ? last_stride(op.weights) : 0;
  combine_cut(op, step).run(begin, end, [&](int64_t row, int64_t first, int64_t last) {
    float* p[3];
    rows.find(row, p);
    for (int64_t n = first; n < last; n += LANES) {
      const int64_t lanes = least(last - n, LANES);
      vf total = {};
      for (int64_t j = 0; j < k; j++) {
        const vf y = take(p[1] + j * next + n * sy, sy, lanes), part = weighted ? y * set1(p[2][j * sw]) : y;
        total = j ? total + part : part;
      }
      put(p[0] + n * so, so, total, lanes);
    }
  });
}

constexpr Kernel router_kernel = {router_units, router_run};
constexpr Kernel combine_kernel = {combine_units, combine_run};

}  // namespace
}  // namespace inferflow
