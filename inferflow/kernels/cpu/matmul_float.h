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

// A row as floats.
template <int FORMAT>
inline void widen(const uint8_t* p, int64_t cols, float* out) {
  int64_t c = 0;
  for (; c + LANES <= cols; c += LANES) store(out + c, load_weights<FORMAT>(p + c * float_bytes<FORMAT>()));
  if (c < cols) store_n(out + c, load_weights_n<FORMAT>(p + c * float_bytes<FORMAT>(), cols - c), cols - c);
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

// Rows row, row + 1 … of the matrix, which begin at w.
template <int FORMAT, int R, int T>
inline void float_rows(const Matrix& m, int64_t stacked, const uint8_t* w, int64_t row, const Batch& b, int64_t t0) {
  float y[R * T];
  float_block<FORMAT, R, T>(w, m.cols * float_bytes<FORMAT>(), m.cols, b.in + t0, y);
  const float* bias = m.bias ? m.bias + stacked * m.rows : nullptr;
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) {
      float v = y[r * T + t];
      if (bias) v += bias[row + r];
      if (b.residual) v += b.residual[t0 + t][row + r];
      b.out[t0 + t][row + r] = v;
    }
}

constexpr int64_t PANEL_ROWS = 16;  // go through the tokens together, which are read once for all of them
#if defined(__AVX512F__)
constexpr int FLOAT_TOKENS = 6;  // with 4 rows: as many sums as the registers hold
#else
constexpr int FLOAT_TOKENS = 3;
#endif

// `rows` rows (a multiple of 8) times as many blocks of T tokens as there are from t on; where it stopped.
template <int FORMAT, int T>
inline int64_t float_tokens(const Matrix& m, int64_t stacked, const uint8_t* w, int64_t row, int64_t rows, const Batch& b, int64_t t) {
  constexpr int R = T == 1 ? 8 : 4;
  for (; t + T <= b.count; t += T)
    for (int64_t r = 0; r < rows; r += R)
      float_rows<FORMAT, R, T>(m, stacked, w + r * m.cols * float_bytes<FORMAT>(), row + r, b, t);
  return t;
}

// Rows [begin, end), which begin at w, times the whole batch.
template <int FORMAT>
void multiply_rows(const Matrix& m, int64_t stacked, const uint8_t* w, int64_t begin, int64_t end, const Batch& b) {
  const int64_t stride = m.cols * float_bytes<FORMAT>();
  int64_t row = begin;
  while (row + 8 <= end) {
    const int64_t rows = row + PANEL_ROWS <= end ? PANEL_ROWS : 8;
    int64_t t = float_tokens<FORMAT, FLOAT_TOKENS>(m, stacked, w, row, rows, b, 0);
    t = float_tokens<FORMAT, 2>(m, stacked, w, row, rows, b, t);
    float_tokens<FORMAT, 1>(m, stacked, w, row, rows, b, t);
    row += rows;
    w += rows * stride;
  }
  for (; row < end; row++, w += stride)
    for (int64_t t = 0; t < b.count; t++) float_rows<FORMAT, 1, 1>(m, stacked, w, row, b, t);
}

// Rows [begin, end) of a matrix of the stack. For many tokens 16-bit rows are widened first, in `space` [PANEL_ROWS, cols].
template <int FORMAT>
void multiply_float(const Matrix& m, int64_t stacked, int64_t begin, int64_t end, const Batch& b, float* space) {
  const int64_t stride = m.cols * float_bytes<FORMAT>();
  const uint8_t* w = static_cast<const uint8_t*>(m.codes) + stacked * m.codes_stride + begin * stride;
  if (FORMAT == F32 || b.count <= 8) return multiply_rows<FORMAT>(m, stacked, w, begin, end, b);
  for (int64_t row = begin; row < end; row += PANEL_ROWS) {
    const int64_t last = row + PANEL_ROWS < end ? row + PANEL_ROWS : end;
    for (int64_t r = row; r < last; r++, w += stride) widen<FORMAT>(w, m.cols, space + (r - row) * m.cols);
    multiply_rows<F32>(m, stacked, reinterpret_cast<const uint8_t*>(space), row, last, b);
  }
}

}  // namespace
}  // namespace inferflow
