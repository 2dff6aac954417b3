// Matrices of F32, F16 and BF16 rows. One vector accumulator an output: lanes along the columns, fma in order, the tail by masked
// lanes, then sum()'s tree. Blocks of rows and tokens share loads and never change that order.
#pragma once
#include "matmul_common.h"

namespace inferflow {
namespace {

template <int FORMAT>
constexpr int64_t float_bytes() { return FORMAT == F32 ? 4 : 2; }

template <int FORMAT>
inline vf load_weights(const uint8_t* p) {
  if constexpr (FORMAT == F32) return load(reinterpret_cast<const float*>(p));
  else if constexpr (FORMAT == F16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  else return load_bf16(reinterpret_cast<const uint16_t*>(p));
}
template <int FORMAT>
inline vf load_weights_n(const uint8_t* p, int64_t n) {
  uint8_t lanes[LANES * 4] = {};
  memcpy(lanes, p, n * float_bytes<FORMAT>());
  return load_weights<FORMAT>(lanes);
}

// y [R][T] = R rows of the matrix, `stride` bytes apart, times T rows of floats.
template <int FORMAT, int R, int T>
inline void float_block(const uint8_t* w, int64_t stride, int64_t cols, const float* const* in, float* y) {
  constexpr int64_t SIZE = float_bytes<FORMAT>();
  const int64_t whole = cols / LANES * LANES;
  vf acc[R][T] = {};
  for (int64_t c = 0; c < whole; c += LANES) {
    vf a[T];
    for (int t = 0; t < T; t++) a[t] = load(in[t] + c);
    for (int r = 0; r < R; r++) {
      const vf x = load_weights<FORMAT>(w + r * stride + c * SIZE);
      for (int t = 0; t < T; t++) acc[r][t] = fma(x, a[t], acc[r][t]);
    }
  }
  if (whole < cols)
    for (int t = 0; t < T; t++) {
      const vf a = load_n(in[t] + whole, cols - whole);
      for (int r = 0; r < R; r++)
        acc[r][t] = fma(load_weights_n<FORMAT>(w + r * stride + whole * SIZE, cols - whole), a, acc[r][t]);
    }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) y[r * T + t] = sum(acc[r][t]);
}

template <int FORMAT, int R, int T>
inline void float_rows(const Matrix& m, int64_t stacked, int64_t row, const Batch& b, int64_t t0) {
  float y[R * T];
  const int64_t stride = m.cols * float_bytes<FORMAT>();
  float_block<FORMAT, R, T>(static_cast<const uint8_t*>(m.codes) + stacked * m.codes_stride + row * stride, stride, m.cols, b.in + t0, y);
  const float* bias = m.bias ? m.bias + stacked * m.rows : nullptr;
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) {
      float v = y[r * T + t];
      if (bias) v += bias[row + r];
      if (b.residual) v += b.residual[t0 + t][row + r];
      b.out[t0 + t][row + r] = v;
    }
}

// Rows [begin, end) of one matrix times the whole batch.
template <int FORMAT>
void multiply_float(const Matrix& m, int64_t stacked, int64_t begin, int64_t end, const Batch& b) {
  int64_t row = begin;
  if (b.count == 1)
    for (; row + 8 <= end; row += 8) float_rows<FORMAT, 8, 1>(m, stacked, row, b, 0);
  for (; row + 4 <= end; row += 4) {
    int64_t t = 0;
    for (; t + 3 <= b.count; t += 3) float_rows<FORMAT, 4, 3>(m, stacked, row, b, t);
    for (; t < b.count; t++) float_rows<FORMAT, 4, 1>(m, stacked, row, b, t);
  }
  for (; row < end; row++)
    for (int64_t t = 0; t < b.count; t++) float_rows<FORMAT, 1, 1>(m, stacked, row, b, t);
}

}  // namespace
}  // namespace inferflow
