// OP_QUANTISE: rows of floats, rotated by Hadamard blocks, to int8 groups with one scale and one sum each (layout: QuantiseArgs).
// Every float operation is in the order that abi.h states, so NumPy gives the same bits. Also for OP_NORM and OP_GATE, which
// quantise what they have just computed: quantise_columns.
#pragma once
#include "abi.h"
#include "kernels.h"
#include "simd.h"

namespace inferflow {
namespace {

// Whole numbers within −127 … 127 as bytes.
inline void store_bytes(int8_t* p, vi v) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
#else
  for (int n = 0; n < LANES; n++) p[n] = (int8_t)v[n];
#endif
}

// A quantised row's three parts.
struct Quantised {
  int8_t* values;  // [padded]
  float* scales;   // [groups]
  int32_t* sums;   // [groups]
};
inline Quantised quantised(const float* row, int64_t padded, int64_t group) {
  char* base = reinterpret_cast<char*>(const_cast<float*>(row));
  return {reinterpret_cast<int8_t*>(base), reinterpret_cast<float*>(base + padded),
          reinterpret_cast<int32_t*>(base + padded + padded / group * 4)};
}

// One stage inside a vector: (x, y) at `DISTANCE` from each other become (x + y, x − y). The product with ±1 is exact.
template <int DISTANCE>
inline vf butterfly(vf v) {
  vf sign;
  for (int n = 0; n < LANES; n++) sign[n] = n & DISTANCE ? -1.0f : 1.0f;
  return fma(v, sign, swap_lanes<DISTANCE>(v));
}
inline vf butterflies(vf v) {
  v = butterfly<1>(v);
  v = butterfly<2>(v);
  if constexpr (LANES > 4) v = butterfly<4 % LANES>(v);
  if constexpr (LANES > 8) v = butterfly<8 % LANES>(v);
  return v;
}

// x [width] times the orthonormal Hadamard matrix, in place; width is a power of two.
inline void hadamard(float* x, int64_t width) {
  if (width < LANES) {
    for (int64_t h = 1; h < width; h *= 2)
      for (int64_t n = 0; n < width; n++)
        if (!(n & h)) {
          const float a = x[n], b = x[n + h];
          x[n] = a + b;
          x[n + h] = a - b;
        }
    const float norm = (float)(1.0 / std::sqrt((double)width));
    for (int64_t n = 0; n < width; n++) x[n] *= norm;
    return;
  }
  const vf norm = set1((float)(1.0 / std::sqrt((double)width)));
  if (width == 4 * LANES) {  // all of it in registers
    const vf a = butterflies(load(x)), b = butterflies(load(x + LANES));
    const vf c = butterflies(load(x + 2 * LANES)), d = butterflies(load(x + 3 * LANES));
    const vf ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
    store(x, (ab + cd) * norm);
    store(x + LANES, (a_b + c_d) * norm);
    store(x + 2 * LANES, (ab - cd) * norm);
    store(x + 3 * LANES, (a_b - c_d) * norm);
    return;
  }
  for (int64_t n = 0; n < width; n += LANES) store(x + n, butterflies(load(x + n)));
  int64_t h = LANES;
  for (; 2 * h < width; h *= 4)  // two stages a pass
    for (int64_t block = 0; block < width; block += 4 * h)
      for (int64_t n = block; n < block + h; n += LANES) {
        const vf a = load(x + n), b = load(x + n + h), c = load(x + n + 2 * h), d = load(x + n + 3 * h);
        const vf ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
        store(x + n, ab + cd);
        store(x + n + h, a_b + c_d);
        store(x + n + 2 * h, ab - cd);
        store(x + n + 3 * h, a_b - c_d);
      }
  if (h < width)
    for (int64_t n = 0; n < h; n += LANES) {
      const vf a = load(x + n), b = load(x + n + h);
      store(x + n, a + b);
      store(x + n + h, a - b);
    }
  for (int64_t n = 0; n < width; n += LANES) store(x + n, load(x + n) * norm);
}

// One group of `group` floats (a multiple of 16).
inline void quantise_group(const float* x, int64_t group, int8_t* values, float* scale, int32_t* sum) {
  vi most = {};  // the bits of |x| sort as |x| does, with infinity and NaN on top
  for (int64_t n = 0; n < group; n += LANES) {
    const vi bits = as_int(load(x + n)) & set1i(0x7fffffff);
    most = bits > most ? bits : most;
  }
  const int32_t top = over_lanes(most, [](vi a, vi b) { return a > b ? a : b; });
  float m;
  memcpy(&m, &top, 4);
  const float inverse = 127.0f / m;
  const bool finite = top < 0x7f800000;
  *scale = finite ? m / 127.0f : NAN;
  if (!finite || !(inverse < INFINITY)) {  // so small that 127 / m overflows: as m = 0
    if (finite) *scale = 0.0f;
    *sum = 0;
    memset(values, 0, group);
    return;
  }
  vi total = {};
  for (int64_t n = 0; n < group; n += LANES) {
    const vi whole = to_int(round_even(load(x + n) * set1(inverse)));
    store_bytes(values + n, whole);
    total += whole;
  }
  *sum = over_lanes(total, [](vi a, vi b) { return a + b; });
}

// Columns [begin, end) of a row, whole rotation blocks and groups. x: those columns, zeros beyond `cols`; it is used up.
inline void quantise_columns(const QuantiseArgs& q, float* x, float* row, int64_t begin, int64_t end) {
  if (q.rotation)
    for (int64_t n = begin; n < end && n < q.cols; n += q.rotation) hadamard(x + (n - begin), q.rotation);
  const Quantised out = quantised(row, q.padded, q.group);
  for (int64_t g = begin / q.group; g < end / q.group; g++)
    quantise_group(x + (g * q.group - begin), q.group, out.values + g * q.group, out.scales + g, out.sums + g);
}

// Elements [begin, end) of row t, all axes flattened.
inline void gather(const Tensor& in, const float* row, int64_t begin, int64_t end, float* x) {
  int64_t index[MAX_DIMS], rest = begin;
  for (int d = in.ndim - 1; d >= 0; d--) {
    index[d] = rest % in.sizes[d];
    rest /= in.sizes[d];
  }
  const int last = in.ndim - 1;
  for (int64_t n = begin; n < end;) {
    const float* p = row;
    for (int d = 0; d < in.ndim; d++) p += index[d] * in.strides[d];
    int64_t run = in.sizes[last] - index[last];
    run = run < end - n ? run : end - n;
    if (in.strides[last] == 1) memcpy(x, p, run * 4);
    else
      for (int64_t k = 0; k < run; k++) x[k] = p[k * in.strides[last]];
    x += run;
    n += run;
    index[last] += run;
    for (int d = last; d > 0 && index[d] == in.sizes[d]; d--) {
      index[d] = 0;
      index[d - 1]++;
    }
  }
}

// A unit is one token's share of about this many columns: one token's wide row is work for several threads.
constexpr int64_t QUANTISE_COLUMNS = 1024;
inline int64_t quantise_chunk(const QuantiseArgs& q) {
  const int64_t block = q.rotation > q.group ? q.rotation : q.group;
  return block >= QUANTISE_COLUMNS ? block : QUANTISE_COLUMNS / block * block;
}

int64_t quantise_units(const void* args, const Step& step) {
  const QuantiseArgs& q = *static_cast<const QuantiseArgs*>(args);
  const int64_t chunk = quantise_chunk(q);
  return leading(q.in, step) * ((q.padded + chunk - 1) / chunk);
}

void quantise_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const QuantiseArgs& q = *static_cast<const QuantiseArgs*>(args);
  const int64_t chunk = quantise_chunk(q), chunks = (q.padded + chunk - 1) / chunk;
  float* x = reinterpret_cast<float*>(scratch.get(chunk * 4));
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t t = unit / chunks, first = unit % chunks * chunk;
    const int64_t last = first + chunk < q.padded ? first + chunk : q.padded;
    const int64_t have = last < q.cols ? last : q.cols;
    if (have > first) gather(q.in, at(q.in, step, t), first, have, x);
    const int64_t filled = have > first ? have - first : 0;
    memset(x + filled, 0, (last - first - filled) * 4);
    quantise_columns(q, x, at(q.out, step, t), first, last);
  }
}

const Kernel quantise_kernel = {quantise_units, quantise_run};

}  // namespace
}  // namespace inferflow
