// Rotary positions: OP_ROPE_TABLE makes each token's cosines and sines, OP_ROPE turns pairs of channels by them.
#pragma once
#include "view.h"

namespace inferflow {
namespace {

inline int64_t rope_table_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const RopeTableArgs*>(args);
  return ceil_div(step.tokens, per_unit(32 * op.half));  // sine and cosine take as long as 32 products
}
inline void rope_table_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const RopeTableArgs*>(args);
  const int64_t each = per_unit(32 * op.half);
  for (int64_t t = begin * each; t < least(step.tokens, end * each); t++) {
    const int32_t variant = op.variant_of[step.span_of[t]];
    const float position = static_cast<float>(step.positions[t]), factor = op.factors[variant];
    float* row = at(op.out, step, t);
    for (int64_t n = 0; n < op.half; n++) {
      const double angle = position * op.inverse[variant * op.half + n];
      row[n] = factor * static_cast<float>(__builtin_cos(angle));
      row[op.half + n] = factor * static_cast<float>(__builtin_sin(angle));
    }
  }
}

// Channels n and n + half. y may be x.
inline void turn_halves(const float* x, int64_t sx, float* y, int64_t sy, const float* table, int64_t half) {
  int64_t n = 0;
  if (sx == 1 && sy == 1)
    for (; n + LANES <= half; n += LANES) {
      const vf c = load(table + n), s = load(table + half + n), a = load(x + n), b = load(x + half + n);
      store(y + n, a * c - b * s);
      store(y + half + n, b * c + a * s);
    }
  for (; n < half; n++) {
    const float c = table[n], s = table[half + n], a = x[n * sx], b = x[(half + n) * sx];
    y[n * sy] = a * c - b * s;
    y[(half + n) * sy] = b * c + a * s;
  }
}

// Channels 2n and 2n + 1. y may be x.
inline void turn_neighbours(const float* x, int64_t sx, float* y, int64_t sy, const float* table, int64_t half) {
  for (int64_t n = 0; n < half; n++) {
    const float c = table[n], s = table[half + n], a = x[2 * n * sx], b = x[(2 * n + 1) * sx];
    y[2 * n * sy] = a * c - b * s;
    y[(2 * n + 1) * sy] = b * c + a * s;
  }
}

inline int64_t rope_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const RopeArgs*>(args);
  return ceil_div(Walk<1>(step, {&op.in}, 1).points, per_unit(last_size(op.in)));
}
inline void rope_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const RopeArgs*>(args);
  const Walk<2> rows(step, {&op.in, &op.out}, 1);
  const int64_t width = last_size(op.in), sx = last_stride(op.in), sy = last_stride(op.out), each = per_unit(width);
  const int64_t heads = rows.points / leading(op.in, step);
  for (int64_t r = begin * each; r < least(rows.points, end * each); r++) {
    float* p[2];
    rows.find(r, p);
    const float* table = at(op.table, step, r / heads);
    (op.pairing ? turn_neighbours : turn_halves)(p[0], sx, p[1], sy, table, op.half);
    if (p[0] != p[1])
      for (int64_t n = 2 * op.half; n < width; n++) p[1][n * sy] = p[0][n * sx];
  }
}

constexpr Kernel rope_table_kernel = {rope_table_units, rope_table_run};
constexpr Kernel rope_kernel = {rope_units, rope_run};

}  // namespace
}  // namespace inferflow
