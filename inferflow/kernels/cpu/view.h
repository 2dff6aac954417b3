// Walking over tensors: several views with the same outer axes, visited point by point, and how much work makes a unit.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace inferflow {
namespace {

constexpr int64_t UNIT = 4096;  // elements: about a microsecond's work, and less than a first-level cache

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t per_unit(int64_t elements) { return elements >= UNIT ? 1 : UNIT / (elements > 0 ? elements : 1); }

// Up to LANES elements, `stride` apart; the lanes beyond n are zero.
inline vf take(const float* p, int64_t stride, int64_t n) {
  if (stride == 1) return n == LANES ? load(p) : load_n(p, n);
  if (stride == 0 && n == LANES) return set1(*p);
  vf v = {};
  for (int64_t i = 0; i < n; i++) v[i] = p[i * stride];
  return v;
}
inline void put(float* p, int64_t stride, vf v, int64_t n) {
  if (stride == 1) return n == LANES ? store(p, v) : store_n(p, v, n);
  for (int64_t i = 0; i < n; i++) p[i * stride] = v[i];
}

inline int64_t last_size(const Tensor& t) { return t.sizes[t.ndim - 1]; }
inline int64_t last_stride(const Tensor& t) { return t.strides[t.ndim - 1]; }

// A row as contiguous floats: where it lies, or copied into `room`.
inline const float* gathered(const float* p, int64_t stride, int64_t n, float* room) {
  if (stride == 1) return p;
  for (int64_t i = 0; i < n; i++) room[i] = p[i * stride];
  return room;
}
inline void scattered(const float* row, float* p, int64_t stride, int64_t n) {
  if (row != p)
    for (int64_t i = 0; i < n; i++) p[i * stride] = row[i];
}

// Rows cut into units: some rows at a time, or pieces of about `columns` of a wide one.
struct RowCut {
  int64_t total, width, columns, pieces, rows;

  RowCut(int64_t total, int64_t width, int64_t columns) : total(total), width(width), columns(columns) {
    pieces = ceil_div(width, columns);
    rows = pieces > 1 ? 1 : per_unit(width);
  }
  int64_t units() const { return ceil_div(total, rows) * pieces; }

  // body(row, first column, last column) for what the units [begin, end) hold.
  template <class Body>
  void run(int64_t begin, int64_t end, Body body) const {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t first_row = unit / pieces * rows, first = unit % pieces * columns;
      for (int64_t row = first_row; row < least(total, first_row + rows); row++) body(row, first, least(width, first + columns));
    }
  }
};

// The outer axes of N views, the leading one among them. Axes that lie behind one another in every view become one, so that
// contiguous tensors have a single axis; points are counted in row-major order. The first view says the sizes; in the others an
// axis of size 1, or one that is not there, is broadcast.
template <int N>
struct Walk {
  int axes = 0;
  int64_t points = 1;
  int64_t sizes[MAX_DIMS + 1];
  int64_t strides[MAX_DIMS + 1][N];
  float* base[N];

  // All but the last `inner` axes of views[0].
  Walk(const Step& step, const Tensor* const (&views)[N], int inner) {
    int64_t s[N];
    for (int v = 0; v < N; v++) base[v] = at(*views[v], step, 0);
    for (int v = 0; v < N; v++) s[v] = views[v]->leading == NONE ? 0 : views[v]->stride;
    add(leading(*views[0], step), s);
    for (int axis = 0; axis < views[0]->ndim - inner; axis++) {
      const int64_t size = views[0]->sizes[axis];
      for (int v = 0; v < N; v++) {
        const Tensor& t = *views[v];
        s[v] = axis < t.ndim && t.sizes[axis] == size ? t.strides[axis] : 0;
      }
      add(size, s);
    }
  }

  void add(int64_t size, const int64_t (&s)[N]) {
    points *= size;
    if (size == 1) return;
    bool joins = axes > 0;
    for (int v = 0; joins && v < N; v++) joins = strides[axes - 1][v] == size * s[v];
    if (!joins) sizes[axes++] = 1;
    sizes[axes - 1] *= size;
    for (int v = 0; v < N; v++) strides[axes - 1][v] = s[v];
  }

  // Takes the last axis out of the walk: its length, and how far apart its elements are in each view.
  int64_t take_line(int64_t (&apart)[N]) {
    for (int v = 0; v < N; v++) apart[v] = axes ? strides[axes - 1][v] : 1;
    const int64_t length = axes ? sizes[--axes] : points;
    points = length ? points / length : 0;
    return length;
  }

  void find(int64_t point, float* (&p)[N]) const {
    for (int v = 0; v < N; v++) p[v] = base[v];
    for (int axis = axes - 1; axis >= 0; axis--) {
      const int64_t index = axis ? point % sizes[axis] : point;
      for (int v = 0; v < N; v++) p[v] += index * strides[axis][v];
      point = axis ? point / sizes[axis] : 0;
    }
  }
};

}  // namespace
}  // namespace inferflow
