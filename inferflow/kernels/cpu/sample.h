// What choosing tokens needs of whole rows of logits: columns' peaks, sums of exponentials, and the few logits above a bound. A unit is
// a row. inferflow/kernels/logits.py defines the bits: every operation here is one of its, in its order, and none is fused with another.
#pragma once
#include "abi.h"
#include "simd.h"
#include "view.h"

namespace inferflow {
namespace {

constexpr float NO_LOGIT = -__builtin_inff();

inline const float* row_at(const Rows& rows, int64_t n) { return rows.logits + rows.at[n] * rows.stride; }

// e^((x − best) / T) as 2^t, scale = log2(e) / T: below 2^−125 it is 0. 2^t = 2^n · p(r), r in ±½; 2^23 · 1.5 rounds t to n.
INLINE inline vf weight(vf x, vf best, vf scale) {
  const vf t = (x - best) * scale;
  const vf low = pick(t > set1(-125.0f), t, set1(-125.0f)), big = low + set1(12582912.0f), r = low - (big - set1(12582912.0f));
  vf p = set1(0.0013264727f);
  p = p * r + set1(0.009671513f);
  p = p * r + set1(0.055507336f);
  p = p * r + set1(0.24022242f);
  p = p * r + set1(0.693147f);
  p = p * r + set1(1.0f);
  vu bits, power;
  memcpy(&bits, &p, sizeof bits);
  memcpy(&power, &big, sizeof power);
  bits += power << 23;
  memcpy(&p, &bits, sizeof p);
  return pick(t >= set1(-125.0f), p, vf{});
}

// out[n] = body(out[n], logit) for N stretches in turn, `count` whole vectors of columns.
template <int N, class Body>
INLINE inline void stretches(float* out, const float* p, int64_t apart, int64_t count, Body body) {
  for (int64_t n = 0; n + LANES <= count; n += LANES) {
    vf v = load(out + n);
    unrolled<N>([&](auto s) INLINE { v = body(v, load(p + s * apart + n)); });
    store(out + n, v);
  }
}

// The same for all stretches and columns. The last stretch ends early: −∞ fills its last vector.
template <class Body>
INLINE inline void over_stretches(float* out, const float* row, const Rows& rows, Body body) {
  constexpr int64_t CHUNK = 1024, TOGETHER = 4;  // a run of a page; and few passes over what is made of it
  const int64_t whole = rows.vocab / rows.columns;
  for (int64_t start = 0; start < rows.columns; start += CHUNK) {
    const int64_t count = least(CHUNK, rows.columns - start);
    const float* p = row + start;
    int64_t s = 0;
    for (; s + TOGETHER <= whole; s += TOGETHER) stretches<TOGETHER>(out + start, p + s * rows.columns, rows.columns, count, body);
    for (; s < whole; s++) stretches<1>(out + start, p + s * rows.columns, 0, count, body);
    const int64_t left = least(count, rows.vocab - whole * rows.columns - start), vectors = left / LANES * LANES;
    if (left <= 0) continue;
    stretches<1>(out + start, p + s * rows.columns, 0, vectors, body);
    float last[LANES];
    for (int64_t n = 0; n < LANES; n++) last[n] = vectors + n < left ? p[s * rows.columns + vectors + n] : NO_LOGIT;
    if (vectors < left) stretches<1>(out + start + vectors, last, 0, LANES, body);
  }
}

inline int64_t peaks_units(const void* args, const Step&) { return static_cast<const PeaksArgs*>(args)->rows.count; }
inline void peaks_run(const void* args, const Step&, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const PeaksArgs*>(args);
  for (int64_t n = begin; n < end; n++) {
    const float* row = row_at(op.rows, n);
    float* peaks = op.peaks + n * op.rows.columns;
    for (int64_t column = 0; column < op.rows.columns; column++) peaks[column] = NO_LOGIT;
    vi nan = {};
    over_stretches(peaks, row, op.rows, [&](vf top, vf x) INLINE {
      nan |= x != x;
      return pick(x > top, x, top);
    });
    vf greatest = set1(NO_LOGIT);
    for (int64_t column = 0; column < op.rows.columns; column += LANES) greatest = max(greatest, load(peaks + column));
    const float best = largest(greatest);
    int64_t token = op.rows.vocab;
    for (int64_t column = 0; column < op.rows.columns; column++)
      if (peaks[column] == best)
        for (int64_t id = column; id < token; id += op.rows.columns)
          if (row[id] == best) token = id;
    const bool bad = over_lanes(nan, [](vi a, vi b) { return a | b; });
    op.best[n] = bad ? __builtin_nanf("") : row[token];
    op.tokens[n] = token;
  }
}

inline int64_t weigh_units(const void* args, const Step&) { return static_cast<const WeighArgs*>(args)->rows.count; }
inline void weigh_run(const void* args, const Step&, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const WeighArgs*>(args);
  for (int64_t n = begin; n < end; n++) {
    const float* row = row_at(op.rows, n);
    float* sums = op.sums + n * op.rows.columns;
    const vf best = set1(op.best[n]), scale = set1(op.scale[n]);
    for (int64_t column = 0; column < op.rows.columns; column++) sums[column] = 0;
    over_stretches(sums, row, op.rows, [&](vf sum, vf x) INLINE { return sum + weight(x, best, scale); });
  }
}

// Orders as an integer does: by logit, descending, then by id. Floats of one sign compare as their bits do.
inline uint64_t key(float logit, int64_t id) {
  uint32_t bits;
  memcpy(&bits, &logit, sizeof bits);
  return static_cast<uint64_t>(bits >> 31 ? bits : 0x7fffffffu - bits) << 32 | static_cast<uint64_t>(id);
}

inline int64_t reach_units(const void* args, const Step&) { return static_cast<const ReachArgs*>(args)->rows.count; }
inline void reach_run(const void* args, const Step&, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const ReachArgs*>(args);
  for (int64_t n = begin; n < end; n++) {
    const float *row = row_at(op.rows, n), *peaks = op.peaks + n * op.rows.columns, floor = op.floor[n];
    uint64_t* keys = op.keys + n * op.room;
    int64_t found = 0;
    for (int64_t start = 0; start < op.rows.columns; start += LANES) {
      if (!over_lanes(load(peaks + start) >= set1(floor), [](vi a, vi b) { return a | b; })) continue;
      for (int64_t column = start; column < start + LANES; column++)
        for (int64_t id = column; id < op.rows.vocab && peaks[column] >= floor; id += op.rows.columns)
          if (row[id] >= floor && found++ < op.room) keys[found - 1] = key(row[id], id);
    }
    op.counts[n] = found;
  }
}

constexpr Kernel peaks_kernel = {peaks_units, peaks_run};
constexpr Kernel weigh_kernel = {weigh_units, weigh_run};
constexpr Kernel reach_kernel = {reach_units, reach_run};

}  // namespace
}  // namespace inferflow
