// OP_LINEAR: matrices of any format times the rows of a step, cut into runs of tiles. And `multiply`, the same for a part of one
// matrix and any collection of rows, which OP_EXPERTS uses too.
#pragma once
#include "matmul_common.h"
#include "matmul_float.h"
#if defined(__AVX2__) || defined(__AVX512F__)
#include "matmul_x86.h"
#elif defined(__ARM_NEON)
#include "matmul_neon.h"
#else
#include "matmul_portable.h"
#endif

namespace inferflow {
namespace {

// A tile's decoded weights: in `space`, or where they already are.
template <int FORMAT>
inline const uint8_t* panel_of(const Decoder<FORMAT>& decoder, const Matrix& m, const Tile& tile, uint8_t* space) {
  if constexpr (is_packed(FORMAT)) {
    const int64_t groups = groups_of(m), bytes = group_bytes(FORMAT, m.group);
    for (int64_t g = 0; g < groups; g++) {
      const uint8_t* codes = tile.codes + g * bytes;
      for (int64_t n = 0; n < bytes; n += 64) __builtin_prefetch(codes + groups * bytes + n, 0, 2);  // the next tile
      decode_group<FORMAT>(decoder, codes, m.group, space + g * m.group * TILE);
    }
    return space;
  } else return tile.codes;
}

// Blocks of T rows from t on, as many as there are; where it stopped.
template <int FORMAT, int T>
inline int64_t dot_blocks(const Matrix& m, int64_t stacked, int64_t index, const Tile& tile, const uint8_t* panel, const Batch& b, int64_t t) {
  for (; t + T <= b.count; t += T) {
    Quantised a[T];
    float f[T * TILE];
    for (int n = 0; n < T; n++) {
      a[n] = quantised(b.in[t + n], m.padded, m.group);
      __builtin_prefetch(b.out[t + n] + index * TILE, 1);  // far apart, in a page each
      if (b.residual) __builtin_prefetch(b.residual[t + n] + index * TILE);
    }
    dot<FORMAT, T>(tile, panel, groups_of(m), m.group, a, f);
    finish(m, stacked, index, f, T, b.out + t, b.residual ? b.residual + t : nullptr);
  }
  return t;
}

// All rows from t on, in ever smaller blocks.
template <int FORMAT, size_t N>
inline void dot_rest(const Matrix& m, int64_t stacked, int64_t index, const Tile& tile, const uint8_t* panel, const Batch& b, int64_t t) {
  t = dot_blocks<FORMAT, BLOCKS[N]>(m, stacked, index, tile, panel, b, t);
  if constexpr (BLOCKS[N] > 1) dot_rest<FORMAT, N + 1>(m, stacked, index, tile, panel, b, t);
}

// Tiles [begin, end) of one matrix times the whole batch.
template <int FORMAT>
void multiply_tiles(const Matrix& m, int64_t stacked, int64_t begin, int64_t end, const Batch& b, uint8_t* space) {
  const Decoder<FORMAT> decoder(m.codebook);
  for (int64_t index = begin; index < end; index++) {
    const Tile tile = tile_of(m, stacked, index);
    const uint8_t* panel = panel_of<FORMAT>(decoder, m, tile, space);
    dot_rest<FORMAT, 0>(m, stacked, index, tile, panel, b, 0);
  }
}

// T rows, straight from the codes.
template <int FORMAT, int T>
void multiply_direct(const Matrix& m, int64_t stacked, int64_t begin, int64_t end, const Batch& b, uint8_t* space) {
  const Decoder<FORMAT> decoder(m.codebook);
  const int64_t count = m.padded;  // a local: bytes may alias anything, and the loop would read it again each time
  Quantised a[T];
  for (int t = 0; t < T; t++) a[t] = quantised(b.in[t], m.padded, m.group);
  int8_t* __restrict negated = reinterpret_cast<int8_t*>(space);
  if constexpr (NEGATED && is_pair(FORMAT))
    for (int64_t n = 0; n < count; n++) negated[n] = (int8_t)-a[0].values[n];
  for (int64_t index = begin; index < end; index++) {
    float f[T * TILE];
    dot_codes<FORMAT, T>(decoder, tile_of(m, stacked, index), groups_of(m), m.group, a, negated, f);
    finish(m, stacked, index, f, T, b.out, b.residual);
  }
}

template <int FORMAT, int T = direct_rows(FORMAT)>
void multiply_few(const Matrix& m, int64_t stacked, int64_t begin, int64_t end, const Batch& b, uint8_t* space) {
  if (b.count == T) multiply_direct<FORMAT, T>(m, stacked, begin, end, b, space);
  else if constexpr (T > 1) multiply_few<FORMAT, T - 1>(m, stacked, begin, end, b, space);
}

constexpr int64_t DIRECT_PASSES = 4;  // over a tile's codes, which the panel of so many rows does not beat

template <int FORMAT>
void multiply_integers(const Matrix& m, int64_t stacked, int64_t begin, int64_t end, const Batch& b, uint8_t* space) {
  if constexpr (constexpr int most = direct_rows(FORMAT); most > 0) {
    if (b.count <= most) return multiply_few<FORMAT>(m, stacked, begin, end, b, space);
    if (most > 1 && b.count <= DIRECT_PASSES * most) {  // even shares
      int64_t done = 0;
      for (int64_t passes = (b.count + most - 1) / most; passes; passes--) {
        const int64_t share = (b.count - done + passes - 1) / passes;
        multiply_few<FORMAT>(m, stacked, begin, end, b.part(done, share), space);
        done += share;
      }
      return;
    }
  }
  multiply_tiles<FORMAT>(m, stacked, begin, end, b, space);
}

// Bytes of scratch that multiply needs, a multiple of 64: a panel, or widened rows.
inline int64_t multiply_space(const Matrix& m) {
  if (is_float(m.format)) return m.format == F32 ? 0 : m.cols * PANEL_ROWS * 4;
  return is_packed(m.format) ? m.padded * TILE : 0;
}

// Tiles [begin, end) (16 rows each, in float formats too) of matrix `stacked` of the stack.
void multiply(const Matrix& m, int64_t stacked, int64_t begin, int64_t end, const Batch& b, uint8_t* space) {
  const int64_t last = end * TILE < m.rows ? end * TILE : m.rows;
  switch (m.format) {
    case F32: return multiply_float<F32>(m, stacked, begin * TILE, last, b, reinterpret_cast<float*>(space));
    case F16: return multiply_float<F16>(m, stacked, begin * TILE, last, b, reinterpret_cast<float*>(space));
    case BF16: return multiply_float<BF16>(m, stacked, begin * TILE, last, b, reinterpret_cast<float*>(space));
    case PAIR6: return multiply_integers<PAIR6>(m, stacked, begin, end, b, space);
    case PAIR7: return multiply_integers<PAIR7>(m, stacked, begin, end, b, space);
    case PAIR8: return multiply_integers<PAIR8>(m, stacked, begin, end, b, space);
    case Q8: return multiply_integers<Q8>(m, stacked, begin, end, b, space);
    case KEPT4: return multiply_integers<KEPT4>(m, stacked, begin, end, b, space);
    case KEPT7: return multiply_integers<KEPT7>(m, stacked, begin, end, b, space);
    case KEPT8: return multiply_integers<KEPT8>(m, stacked, begin, end, b, space);
  }
}

// Tiles of a unit: enough work to be worth handing out (a few microseconds), little enough to be shared evenly.
inline int64_t unit_tiles(const Matrix& m, int64_t tokens) {
  constexpr int64_t WORK = 160000;  // weights, each decoded once and then multiplied by all tokens
  const int64_t tile = TILE * m.cols * (tokens + 2) / 3;
  return tile >= WORK ? 1 : WORK / (tile ? tile : 1);
}
inline int64_t matrix_units(const Matrix& m, int64_t tokens) {
  const int64_t size = unit_tiles(m, tokens);
  return (tiles_of(m) + size - 1) / size;
}

int64_t linear_units(const void* args, const Step& step) {
  const LinearArgs& l = *static_cast<const LinearArgs*>(args);
  const int64_t tokens = leading(l.in, step);
  int64_t units = 0;
  for (int64_t n = 0; tokens && n < l.count; n++) units += matrix_units(l.matrices[n], tokens);
  return units;
}

// The addresses of all rows. A unit may be as short as writing them takes, hence the plain addition.
template <class Pointer>
inline void each_row(Pointer* rows, const Tensor& t, const Step& step, int64_t count) {
  float* row = at(t, step, 0);
  const int64_t stride = t.stride;
  for (int64_t n = 0; n < count; n++, row += stride) rows[n] = row;
}

void linear_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const LinearArgs& l = *static_cast<const LinearArgs*>(args);
  const int64_t tokens = leading(l.in, step);
  int64_t most = 0;
  for (int64_t n = 0; n < l.count; n++) most = multiply_space(l.matrices[n]) > most ? multiply_space(l.matrices[n]) : most;
  uint8_t* space = scratch.get(most + 3 * tokens * sizeof(void*));
  const float** in = reinterpret_cast<const float**>(space + most);
  float** out = const_cast<float**>(in + tokens);
  const float** residual = in + 2 * tokens;
  int64_t first = 0;
  for (int64_t n = 0; n < l.count; n++) {
    const Matrix& m = l.matrices[n];
    const int64_t units = matrix_units(m, tokens), size = unit_tiles(m, tokens), tiles = tiles_of(m);
    const int64_t from = begin > first ? begin - first : 0, to = end - first < units ? end - first : units;
    first += units;
    if (from >= to) continue;
    const bool adds = l.residuals && given(l.residuals[n]);
    each_row(in, l.in, step, tokens);
    each_row(out, l.outs[n], step, tokens);
    if (adds) each_row(residual, l.residuals[n], step, tokens);
    multiply(m, 0, from * size, to * size < tiles ? to * size : tiles, {tokens, in, out, adds ? residual : nullptr}, space);
  }
}

const Kernel linear_kernel = {linear_units, linear_run};

}  // namespace
}  // namespace inferflow
