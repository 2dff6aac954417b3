// What the matrix kernels of all instruction sets share: the formats' sizes, the batch of rows that a unit multiplies, the float
// part of a result. An instruction set (matmul_portable.h, matmul_avx2.h …) adds how a tile is decoded and how its integers are
// summed; the sums are exact, so every way of getting them gives the same bits.
#pragma once
#include <type_traits>
#include "abi.h"
#include "kernels.h"
#include "quantise.h"
#include "simd.h"

namespace inferflow {
namespace {

// The rows that one matrix multiplies in a step; experts and linear layers differ only in how they collect them.
struct Batch {
  int64_t count;
  const float* const* in;        // floats, or quantised rows
  float* const* out;             // where the first output of each row goes
  const float* const* residual;  // the same places of what is added; null for none

  Batch part(int64_t first, int64_t rows) const { return {rows, in + first, out + first, residual ? residual + first : nullptr}; }
};

constexpr bool is_float(int format) { return format <= BF16; }
constexpr bool is_pair(int format) { return format >= PAIR6 && format <= PAIR8; }
constexpr bool is_kept(int format) { return format >= KEPT4; }
constexpr bool is_signed(int format) { return format == Q8 || format == KEPT8; }  // int8; the others' magnitudes are below 128
constexpr bool is_packed(int format) { return is_pair(format) || format == KEPT4; }
constexpr int planes(int format) { return format - PAIR6 + 2; }

// What a format without a codebook is decoded with.
struct NoTable {
  explicit NoTable(const uint8_t*) {}
};

// Bytes of one group of one tile.
constexpr int64_t group_bytes(int format, int64_t group) {
  return is_pair(format) ? 256 + 64 * planes(format) : format == KEPT4 ? group * 8 : group * 16;
}

inline int64_t tiles_of(const Matrix& m) { return (m.rows + TILE - 1) / TILE; }
inline int64_t groups_of(const Matrix& m) { return m.padded / m.group; }

// One tile of an integer matrix.
struct Tile {
  const uint8_t* codes;   // [groups, group_bytes]
  const uint8_t* bytes;   // scales [groups, 16] of PAIR and Q8
  const float* scales;    // scales [groups, 16] of KEPT
  const float* mins;      // or null
};
inline Tile tile_of(const Matrix& m, int64_t stacked, int64_t tile) {
  const int64_t groups = groups_of(m), scale = stacked * m.scales_stride + tile * groups * TILE;
  const uint8_t* codes = static_cast<const uint8_t*>(m.codes) + stacked * m.codes_stride + tile * groups * group_bytes(m.format, m.group);
  if (!is_kept(m.format)) return {codes, static_cast<const uint8_t*>(m.scales) + scale, nullptr, nullptr};
  return {codes, nullptr, static_cast<const float*>(m.scales) + scale, m.mins ? m.mins + scale : nullptr};
}

inline vf load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__ARM_NEON)
  uint32_t four;
  memcpy(&four, p, 4);
  return (vf)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
#else
  vi v;
  for (int n = 0; n < LANES; n++) v[n] = p[n];
  return to_float(v);
#endif
}

// One group's step of f, for the LANES rows from `row` on.
template <int FORMAT>
inline vf add_group(vf f, vi sum, const Tile& tile, int64_t group, int row, float a_scale, int32_t a_sum) {
  const int64_t at = group * TILE + row;
  if constexpr (!is_kept(FORMAT)) return fma(to_float(sum), load_bytes(tile.bytes + at) * set1(a_scale), f);
  f = fma(to_float(sum), load(tile.scales + at) * set1(a_scale), f);
  if (tile.mins) f = fma(set1((float)a_sum), -(load(tile.mins + at) * set1(a_scale)), f);
  return f;
}

// f [count][16], a tile's sums for so many rows of the batch, to their outputs.
inline void finish(const Matrix& m, int64_t stacked, int64_t tile, const float* f, int64_t count, float* const* out, const float* const* residual) {
  const int64_t first = tile * TILE;
  for (int64_t n = first; n < first + TILE && n < m.rows; n += LANES, f += LANES) {
    const int64_t have = m.rows - n;
    auto all = [&](auto get, auto put) {
      const vf scale = m.row_scales ? get(m.row_scales + stacked * m.rows_stride + n) : vf{};
      const vf bias = m.bias ? get(m.bias + stacked * m.rows + n) : vf{};
      for (int64_t t = 0; t < count; t++) {
        vf y = load(f + t * TILE);
        if (m.row_scales) y *= scale;
        if (m.bias) y += bias;
        if (residual) y += get(residual[t] + n);
        put(out[t] + n, y);
      }
    };
    if (have >= LANES) all(load, store);
    else all([have](const float* p) { return load_n(p, have); }, [have](float* p, vf v) { store_n(p, v, have); });
  }
}

}  // namespace
}  // namespace inferflow
