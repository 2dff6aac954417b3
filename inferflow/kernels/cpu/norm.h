// Along the last axis: norms, sums, means, maxima, softmax. One row's sums have one fixed order: four vectors side by side, then one
// after another, then the tree over the lanes; nothing but the row's length decides it.
#pragma once
#include "functions.h"
#include "quantise.h"
#include "view.h"

namespace inferflow {
namespace {

// Σ f(x_i), lanes beyond the row left out.
template <class F>
inline float sum_row(const float* x, int64_t n, F f) {
  vf a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    a = f(a, load(x + i));
    b = f(b, load(x + i + LANES));
    c = f(c, load(x + i + 2 * LANES));
    d = f(d, load(x + i + 3 * LANES));
  }
  for (; i + LANES <= n; i += LANES) a = f(a, load(x + i));
  if (i < n) b = f(b, load_n(x + i, n - i));
  return sum((a + b) + (c + d));
}
inline vf plus(vf total, vf x) { return total + x; }
inline vf plus_square(vf total, vf x) { return fma(x, x, total); }

inline float max_row(const float* x, int64_t n) {
  vf top = set1(-INF);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) top = max(top, load(x + i));
  float tail[LANES];
  for (int k = 0; k < LANES; k++) tail[k] = i + k < n ? x[i + k] : -INF;
  return largest(max(top, load(tail)));
}

// y may be x.
inline void softmax_row(const float* x, float* y, int64_t n) {
  const vf top = set1(max_row(x, n));
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, exp(load(x + i) - top));
  if (i < n) store_n(y + i, exp(load_n(x + i, n - i) - top), n - i);
  const vf total = set1(sum_row(y, n, plus));
  for (i = 0; i + LANES <= n; i += LANES) store(y + i, load(y + i) / total);
  if (i < n) store_n(y + i, load_n(y + i, n - i) / total, n - i);
}

// ---------------------------------------------------------------------------------------------------- norms

// y_i = last(x_i·factor, i, lanes). y may be x.
template <class Last>
inline void scale_row(const float* x, float* y, int64_t n, float factor, Last last) {
  const vf by = set1(factor);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(y + i, last(load(x + i) * by, i, LANES));
  if (i < n) store_n(y + i, last(load_n(x + i, n - i) * by, i, n - i), n - i);
}

// One over the length or the root of the mean square of a row.
inline float norm_factor(const NormArgs& op, const float* x, int64_t n) {
  const float square = sum_row(x, n, plus_square), count = static_cast<float>(n);
  float eps = static_cast<float>(op.eps);
  if (op.kind != 2) return 1.0f / __builtin_sqrtf(square / count + eps);
  if (eps > 0 && eps < 1e-37f) eps = 1e-37f;  // its inverse is a number
  const float length = __builtin_sqrtf(square);
  return 1.0f / (length <= eps ? eps : length);
}

// y may be x. `head` is the row of the weights.
inline void norm_row(const NormArgs& op, const float* x, float* y, int64_t n, int64_t head) {
  if (op.kind == 1) {
    const vf mean = set1(sum_row(x, n, plus) / static_cast<float>(n));
    scale_row(x, y, n, 1.0f, [=](vf v, int64_t, int64_t) { return v - mean; });
    x = y;
  }
  const float factor = norm_factor(op, x, n);
  const float *w = op.weight ? op.weight + head * n : nullptr, *b = op.bias ? op.bias + head * n : nullptr;
  if (w && b) return scale_row(x, y, n, factor, [=](vf v, int64_t i, int64_t k) { return v * take(w + i, 1, k) + take(b + i, 1, k); });
  if (w) return scale_row(x, y, n, factor, [=](vf v, int64_t i, int64_t k) { return v * take(w + i, 1, k); });
  if (b) return scale_row(x, y, n, factor, [=](vf v, int64_t i, int64_t k) { return v + take(b + i, 1, k); });
  scale_row(x, y, n, factor, [](vf v, int64_t, int64_t) { return v; });
}

inline int64_t norm_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const NormArgs*>(args);
  return ceil_div(Walk<1>(step, {&op.in}, 1).points, per_unit(last_size(op.in)));
}

inline void norm_quantised(const NormArgs& op, const Step& step, int64_t first, int64_t last, Scratch& scratch) {
  const QuantiseArgs& q = *op.quantise;
  float* row = reinterpret_cast<float*>(scratch.get(q.padded * 4));
  for (int64_t t = first; t < last; t++) {
    norm_row(op, gathered(at(op.in, step, t), last_stride(op.in), q.cols, row), row, q.cols, 0);
    memset(row + q.cols, 0, (q.padded - q.cols) * 4);
    quantise_columns(q, row, at(q.out, step, t), 0, q.padded);
  }
}

inline void norm_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const auto& op = *static_cast<const NormArgs*>(args);
  const int64_t n = last_size(op.in), each = per_unit(n), sx = last_stride(op.in);
  const int64_t heads = op.per_head ? op.in.sizes[op.in.ndim - 2] : 1;
  if (op.quantise) return norm_quantised(op, step, begin * each, least(leading(op.in, step), end * each), scratch);
  const Walk<2> rows(step, {&op.in, &op.out}, 1);
  const int64_t sy = last_stride(op.out);
  float* room = sx == 1 && sy == 1 ? nullptr : reinterpret_cast<float*>(scratch.get(n * 4));
  for (int64_t r = begin * each; r < least(rows.points, end * each); r++) {
    float* p[2];
    rows.find(r, p);
    float* y = sy == 1 ? p[1] : room;
    norm_row(op, gathered(p[0], sx, n, y), y, n, r % heads);
    scattered(y, p[1], sy, n);
  }
}

// ---------------------------------------------------------------------------------------------------- reductions

inline int64_t reduce_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const ReduceArgs*>(args);
  return ceil_div(Walk<1>(step, {&op.in}, 1).points, per_unit(last_size(op.in)));
}
inline void reduce_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const auto& op = *static_cast<const ReduceArgs*>(args);
  const int64_t n = last_size(op.in), each = per_unit(n), sx = last_stride(op.in), sy = last_stride(op.out);
  const Walk<2> rows(step, {&op.in, &op.out}, 1);
  float* room = reinterpret_cast<float*>(scratch.get(n * 4));
  for (int64_t r = begin * each; r < least(rows.points, end * each); r++) {
    float* p[2];
    rows.find(r, p);
    const float* x = gathered(p[0], sx, n, room);
    switch (op.kind) {
      case R_SUM: *p[1] = sum_row(x, n, plus); break;
      case R_MEAN: *p[1] = sum_row(x, n, plus) / static_cast<float>(n); break;
      case R_MAX: *p[1] = max_row(x, n); break;
      case R_SOFTMAX: {
        float* y = sy == 1 ? p[1] : room;
        softmax_row(x, y, n);
        scattered(y, p[1], sy, n);
      }
    }
  }
}

constexpr Kernel norm_kernel = {norm_units, norm_run};
constexpr Kernel reduce_kernel = {reduce_units, reduce_run};

}  // namespace
}  // namespace inferflow
