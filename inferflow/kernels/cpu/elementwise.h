// What is done number by number: functions of one and of two, copies, concatenation, outer products. Lines of the longest common
// inner axis go a vector at a time; a unit is some lines, or a piece of a long one.
#pragma once
#include "functions.h"
#include "view.h"

namespace inferflow {
namespace {

// The lines of N views (the first is the output) and their cut into units.
template <int N>
struct Lines {
  Walk<N> walk;
  int64_t apart[N], length, pieces, piece, each;

  Lines(const Step& step, const Tensor* const (&views)[N]) : walk(step, views, 0) {
    length = walk.take_line(apart);
    const int64_t sixteenth = walk.points * length / 256 * 16;  // a long line is cut so that there are at least so many units
    piece = length <= UNIT ? length : sixteenth < UNIT / 4 ? UNIT / 4 : least(sixteenth, UNIT);
    pieces = length ? ceil_div(length, piece) : 1;
    each = per_unit(length);
  }
  int64_t units() const { return ceil_div(walk.points, each) * pieces; }

  // body(pointers, elements) for each line's part in the units [begin, end).
  template <class Body>
  void run(int64_t begin, int64_t end, Body body) const {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t line = unit / pieces * each, first = unit % pieces * piece, last = least(length, first + piece);
      for (int64_t n = line; n < least(walk.points, line + each); n++) {
        float* p[N];
        walk.find(n, p);
        for (int v = 0; v < N; v++) p[v] += first * apart[v];
        body(p, last - first);
      }
    }
  }
};

// One copy of each function's loop, whoever calls it: small code, and what is in the loop is inlined.
template <class F>
__attribute__((noinline)) void map1(float* out, int64_t so, const float* a, int64_t sa, int64_t n, F f) {
  int64_t i = 0;
  if (so == 1 && sa == 1)
    for (; i + LANES <= n; i += LANES) store(out + i, f(load(a + i)));
  for (; i < n; i += LANES) {
    const int64_t lanes = least(n - i, LANES);
    put(out + i * so, so, f(take(a + i * sa, sa, lanes)), lanes);
  }
}

template <class F>
__attribute__((noinline)) void map2(float* out, int64_t so, const float* a, int64_t sa, const float* b, int64_t sb, int64_t n, F f) {
  int64_t i = 0;
  if (so == 1 && sa == 1 && sb == 1)
    for (; i + LANES <= n; i += LANES) store(out + i, f(load(a + i), load(b + i)));
  for (; i < n; i += LANES) {
    const int64_t lanes = least(n - i, LANES);
    put(out + i * so, so, f(take(a + i * sa, sa, lanes), take(b + i * sb, sb, lanes)), lanes);
  }
}

template <class F>
inline void run_map1(const Step& step, const Tensor& out, const Tensor& in, int64_t begin, int64_t end, F f) {
  const Lines<2> lines(step, {&out, &in});
  lines.run(begin, end, [&](float* const* p, int64_t n) { map1(p[0], lines.apart[0], p[1], lines.apart[1], n, f); });
}
template <class F>
inline void run_map2(const Step& step, const Tensor& out, const Tensor& a, const Tensor& b, int64_t begin, int64_t end, F f) {
  const Lines<3> lines(step, {&out, &a, &b});
  const int64_t* s = lines.apart;
  lines.run(begin, end, [&](float* const* p, int64_t n) { map2(p[0], s[0], p[1], s[1], p[2], s[2], n, f); });
}

// ---------------------------------------------------------------------------------------------------- one number

inline int64_t unary_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const UnaryArgs*>(args);
  return Lines<2>(step, {&op.out, &op.in}).units();
}
inline void unary_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const UnaryArgs*>(args);
  with_unary(op.kind, static_cast<float>(op.a), [&](auto f) { run_map1(step, op.out, op.in, begin, end, f); });
}

inline int64_t copy_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const CopyArgs*>(args);
  return Lines<2>(step, {&op.out, &op.in}).units();
}
inline void copy_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const CopyArgs*>(args);
  run_map1(step, op.out, op.in, begin, end, [](vf x) { return x; });
}

inline int64_t xielu_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const XieluArgs*>(args);
  return Lines<2>(step, {&op.out, &op.in}).units();
}
inline void xielu_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const XieluArgs*>(args);
  const vf beta = set1(static_cast<float>(op.beta)), eps = set1(static_cast<float>(op.eps));
  const vf p = softplus(set1(*at(op.alpha_p, step, 0))), n = beta + softplus(set1(*at(op.alpha_n, step, 0)));
  run_map1(step, op.out, op.in, begin, end, [=](vf x) {
    return pick(x > vf{}, p * x * x + beta * x, (expm1_negative(min(x, eps)) - x) * n + beta * x);
  });
}

// ---------------------------------------------------------------------------------------------------- two numbers

inline int64_t binary_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const BinaryArgs*>(args);
  return Lines<3>(step, {&op.out, &op.a, &op.b}).units();
}
inline void binary_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const BinaryArgs*>(args);
  const auto body = [&](auto f) { run_map2(step, op.out, op.a, op.b, begin, end, f); };
  switch (op.kind) {
    case B_ADD: return body([](vf a, vf b) { return a + b; });
    case B_SUB: return body([](vf a, vf b) { return a - b; });
    case B_MUL: return body([](vf a, vf b) { return a * b; });
    case B_DIV: return body([](vf a, vf b) { return a / b; });
    case B_POW: return body([](vf a, vf b) { return pow(a, b); });
    case B_MIN: return body([](vf a, vf b) { return min(a, b); });
    case B_MAX: return body([](vf a, vf b) { return max(a, b); });
  }
}

// a and b as views with out's axes: the last of a and the last of b each get an axis of their own.
struct OuterViews {
  Tensor a, b;
  explicit OuterViews(const OuterArgs& op) : a(op.a), b(op.b) {
    const int axes = op.out.ndim;
    a.sizes[axes - 1] = 1;
    a.strides[axes - 1] = 0;
    a.ndim = b.ndim = axes;
    for (int n = 0; n < axes - 1; n++) {
      const bool shared = op.b.ndim + 1 == axes && n < axes - 2;
      b.sizes[n] = shared ? op.b.sizes[n] : 1;
      b.strides[n] = shared ? op.b.strides[n] : 0;
    }
    b.sizes[axes - 1] = last_size(op.b);
    b.strides[axes - 1] = last_stride(op.b);
  }
};
inline int64_t outer_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const OuterArgs*>(args);
  const OuterViews views(op);
  return Lines<3>(step, {&op.out, &views.a, &views.b}).units();
}
inline void outer_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const OuterArgs*>(args);
  const OuterViews views(op);
  run_map2(step, op.out, views.a, views.b, begin, end, [](vf a, vf b) { return a * b; });
}

// ---------------------------------------------------------------------------------------------------- rows put together

inline int64_t rows_per_unit(const Tensor& out) {
  int64_t elements = 1;
  for (int n = 0; n < out.ndim; n++) elements *= out.sizes[n];
  return per_unit(elements);
}

// The place of part `n` in the output.
inline Tensor concat_place(const ConcatArgs& op, int64_t n) {
  Tensor place = op.out;
  for (int64_t part = 0; part < n; part++) place.offset += last_size(op.parts[part]) * last_stride(op.out);
  place.sizes[place.ndim - 1] = last_size(op.parts[n]);
  return place;
}
// The units of the parts, one part after the other.
inline int64_t concat_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const ConcatArgs*>(args);
  int64_t units = 0;
  for (int64_t n = 0; n < op.count; n++) {
    const Tensor place = concat_place(op, n);
    units += Lines<2>(step, {&place, &op.parts[n]}).units();
  }
  return units;
}
inline void concat_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const ConcatArgs*>(args);
  int64_t start = 0;
  for (int64_t n = 0; n < op.count && start < end; n++) {
    const Tensor place = concat_place(op, n);
    const int64_t units = Lines<2>(step, {&place, &op.parts[n]}).units();
    const int64_t from = begin > start ? begin - start : 0, to = least(end - start, units);
    if (from < to) run_map1(step, place, op.parts[n], from, to, [](vf x) { return x; });
    start += units;
  }
}

inline int64_t select_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const SelectArgs*>(args);
  return ceil_div(step.rows, rows_per_unit(op.out));
}
inline void select_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const SelectArgs*>(args);
  const int64_t each = rows_per_unit(op.out);
  Tensor from = op.in, to = op.out;  // one row
  from.leading = to.leading = NONE;
  for (int64_t row = begin * each; row < least(step.rows, end * each); row++) {
    from.offset = op.in.offset + step.row_index[row] * op.in.stride;
    to.offset = op.out.offset + row * op.out.stride;
    const Lines<2> lines(step, {&to, &from});
    run_map1(step, to, from, 0, lines.units(), [](vf x) { return x; });
  }
}

inline int64_t positions_units(const void*, const Step& step) { return ceil_div(step.tokens, UNIT); }
inline void positions_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const PositionsArgs*>(args);
  for (int64_t t = begin * UNIT; t < least(step.tokens, end * UNIT); t++)
    *at(op.out, step, t) = static_cast<float>(step.positions[t]);
}

constexpr Kernel unary_kernel = {unary_units, unary_run};
constexpr Kernel copy_kernel = {copy_units, copy_run};
constexpr Kernel xielu_kernel = {xielu_units, xielu_run};
constexpr Kernel binary_kernel = {binary_units, binary_run};
constexpr Kernel outer_kernel = {outer_units, outer_run};
constexpr Kernel concat_kernel = {concat_units, concat_run};
constexpr Kernel select_kernel = {select_units, select_run};
constexpr Kernel positions_kernel = {positions_units, positions_run};

}  // namespace
}  // namespace inferflow
