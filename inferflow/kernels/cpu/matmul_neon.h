// Tiles on NEON, with the dot product instructions where the target has them. A panel is int8 [groups, group / 4 steps, 64], the
// weights themselves: every format's fit int8, and two products (128 · 127 · 2 = 32512) fit the 16 bits that plain NEON adds them in.
#pragma once
#include "matmul_common.h"

namespace inferflow {
namespace {

constexpr int PANEL_OFFSET = 0;
constexpr int BLOCKS[] = {4, 2, 1};  // rows of a batch that one dot() takes
constexpr int direct_rows(int format) { return is_packed(format); }
constexpr bool NEGATED = false;
constexpr int PARTS = 4;  // vectors in a step: 4 columns of 4 rows each

// The sums of 4 rows.
struct Sums {
#if defined(__ARM_FEATURE_DOTPROD)
  int32x4_t all = vdupq_n_s32(0);
  // Four columns, and four more.
  void add(int8x16_t w, int8x16_t a, int8x16_t v, int8x16_t b) { all = vdotq_s32(vdotq_s32(all, w, a), v, b); }
  int32x4_t rows() const { return all; }
#else
  int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);  // two rows each, two columns a lane
  void add(int8x16_t w, int8x16_t a, int8x16_t v, int8x16_t b) {
    low = vpadalq_s16(low, vmlal_s8(vmull_s8(vget_low_s8(w), vget_low_s8(a)), vget_low_s8(v), vget_low_s8(b)));
    high = vpadalq_s16(high, vmlal_high_s8(vmull_high_s8(w, a), v, b));
  }
  int32x4_t rows() const { return vpaddq_s32(low, high); }
#endif
};

inline int8x16_t four(const int8_t* a) {  // 4 activations, for every row
  int32_t x;
  memcpy(&x, a, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(x));
}

// A codebook's coordinate in registers: 16 · 2^(P−2) magnitudes.
template <int P>
struct Codebook {
  uint8x16x4_t t;
  explicit Codebook(const uint8_t* p) {
    for (int n = 0; n < 4; n++) t.val[n] = n < 1 << (P - 2) ? vld1q_u8(p + 16 * n) : vdupq_n_u8(0);
  }
  uint8x16_t look(uint8x16_t index) const {
    if constexpr (P == 2) return vqtbl1q_u8(t.val[0], index);
    else if constexpr (P == 3) return vqtbl2q_u8(uint8x16x2_t{{t.val[0], t.val[1]}}, index);
    else return vqtbl4q_u8(t, index);
  }
};

// −x where the plane has the bit.
inline int8x16_t with_sign(uint8x16_t x, uint8x16_t plane, uint8x16_t bit) {
  const uint8x16_t mask = vtstq_u8(plane, bit);
  return vreinterpretq_s8_u8(vsubq_u8(veorq_u8(x, mask), mask));
}

// The weights of 4 rows of a group of codes: f(step, x, y).
template <int P>
struct Pairs {
  Codebook<P> x, y;
  explicit Pairs(const uint8_t* codebook) : x(codebook), y(codebook + (16 << (P - 2))) {}

  template <class F>
  inline __attribute__((always_inline)) void walk(const uint8_t* codes, F f) const {
    uint8x16_t plane[4];
    for (int p = 0; p < P; p++) plane[p] = vld1q_u8(codes + 256 + 64 * p);
    for (int step = 0; step < 8; step++) {
      const uint8x16_t both = vld1q_u8(codes + step / 2 * 64), bit = vdupq_n_u8(1 << step);
      uint8x16_t index = step & 1 ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
      if (P > 2) index = vorrq_u8(index, vandq_u8(vtstq_u8(plane[2], bit), vdupq_n_u8(16)));
      if (P > 3) index = vorrq_u8(index, vandq_u8(vtstq_u8(plane[3], bit), vdupq_n_u8(32)));
      f(step, with_sign(x.look(index), plane[0], bit), with_sign(y.look(index), plane[1], bit));
    }
  }
};

// Eight columns of KEPT4.
inline int8x16_t low_nibbles(const uint8_t* p) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15))); }
inline int8x16_t high_nibbles(const uint8_t* p) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4)); }

template <int FORMAT>
using Decoder = std::conditional_t<is_pair(FORMAT), Pairs<planes(FORMAT)>, NoTable>;

// One group to its panel.
template <int FORMAT>
inline void decode_group(const Decoder<FORMAT>& pairs, const uint8_t* codes, int64_t group, uint8_t* panel) {
  int8_t* out = reinterpret_cast<int8_t*>(panel);
  if constexpr (FORMAT == KEPT4) {
    for (int64_t n = 0; n < group * 8; n += 16) {
      vst1q_s8(out + n / 64 * 128 + n % 64, low_nibbles(codes + n));
      vst1q_s8(out + n / 64 * 128 + 64 + n % 64, high_nibbles(codes + n));
    }
  } else {
    for (int part = 0; part < PARTS; part++)
      pairs.walk(codes + part * 16, [&](int step, int8x16_t x, int8x16_t y) {
        vst1q_s8(out + step * 128 + part * 16, x);
        vst1q_s8(out + step * 128 + 64 + part * 16, y);
      });
  }
}

inline vi lanes(const Sums& sums) { return (vi)sums.rows(); }

// f [T][16] = one tile times T quantised rows.
template <int FORMAT, int T>
inline void dot(const Tile& tile, const uint8_t* panel, int64_t groups, int64_t group, const Quantised* a, float* f) {
  const int8_t* w = reinterpret_cast<const int8_t*>(panel);
  memset(f, 0, T * TILE * 4);
  for (int64_t g = 0; g < groups; g++, w += group * TILE) {
    Sums sums[T][PARTS];
    for (int64_t c = 0; c < group; c += 8)
      for (int t = 0; t < T; t++) {
        const int8x16_t x = four(a[t].values + g * group + c), y = four(a[t].values + g * group + c + 4);
        for (int r = 0; r < PARTS; r++) sums[t][r].add(vld1q_s8(w + c * 16 + r * 16), x, vld1q_s8(w + c * 16 + 64 + r * 16), y);
      }
    for (int t = 0; t < T; t++)
      for (int r = 0; r < PARTS; r++) {
        float* y = f + t * TILE + r * LANES;
        store(y, add_group<FORMAT>(load(y), lanes(sums[t][r]), tile, g, r * LANES, a[t].scales[g], a[t].sums[g]));
      }
  }
}

// The same for one row, straight from the codes.
template <int FORMAT, int T>
inline void dot_codes(const Decoder<FORMAT>& pairs, const Tile& tile, int64_t groups, int64_t group, const Quantised* a, const int8_t*, float* f) {
  const int64_t bytes = group_bytes(FORMAT, group);
  memset(f, 0, TILE * 4);
  for (int64_t g = 0; g < groups; g++)
    for (int r = 0; r < PARTS; r++) {
      const uint8_t* codes = tile.codes + g * bytes + r * 16;
      const int8_t* values = a->values + g * group;
      Sums sums;
      if constexpr (FORMAT == KEPT4)
        for (int64_t c = 0; c < group; c += 8)
          sums.add(low_nibbles(codes + c * 8), four(values + c), high_nibbles(codes + c * 8), four(values + c + 4));
      else
        pairs.walk(codes, [&](int step, int8x16_t x, int8x16_t y) { sums.add(x, four(values + 8 * step), y, four(values + 8 * step + 4)); });
      store(f + r * LANES, add_group<FORMAT>(load(f + r * LANES), lanes(sums), tile, g, r * LANES, a->scales[g], a->sums[g]));
    }
}

}  // namespace
}  // namespace inferflow
