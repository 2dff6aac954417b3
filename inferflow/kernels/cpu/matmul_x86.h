// Tiles on x86: AVX2, AVX-512, AVX-512 with VBMI and VNNI, in one set of words (`Bytes`: 32 or 64 of them).
//
// A panel is a decoded tile, [groups, group / 4 steps, 64] bytes. vpmaddubsw multiplies unsigned by signed bytes and adds pairs in 16
// bits, saturating; two products fit when the unsigned side is at most 128 (128 · 127 · 2 = 32512). So PAIR weights (at most ±63)
// are stored with 64 added, which the group's sum takes off again; KEPT4 and KEPT7 are unsigned as they are; Q8 and KEPT8 multiply
// |w| by ±a. vpdpbusd has no such limit: there int8 weights get 128 added.
//
// One row of activations skips the panel. |x| and |y| come from tables in registers, and the signs go to the activations: ±a
// chosen by the sign planes, whose bit of the step at hand is brought to bit 7 by doubling. 4 · 63 · 127 = 32004 fits 16 bits, so
// x and y are added before they are widened. With VBMI a table in registers holds the signed weights, so decoding costs less than
// the products of a few rows, and these skip the panel too.
#pragma once
#include "matmul_common.h"

namespace inferflow {
namespace {

constexpr int PANEL_OFFSET = 64;
#if defined(__AVX512VNNI__)  // and VBMI
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif

#if defined(__AVX512F__)
typedef __m512i Bytes;
inline Bytes load_b(const void* p) { return _mm512_loadu_si512(p); }
inline void store_b(void* p, Bytes v) { _mm512_storeu_si512(p, v); }
inline Bytes all8(int x) { return _mm512_set1_epi8((char)x); }
inline Bytes all16(int x) { return _mm512_set1_epi16((short)x); }
inline Bytes all32(int x) { return _mm512_set1_epi32(x); }
inline Bytes add8(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
inline Bytes add16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
inline Bytes add32(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
inline Bytes and_b(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes shift4(Bytes a) { return _mm512_srli_epi16(a, 4); }
inline Bytes pairs16(Bytes u, Bytes s) { return _mm512_maddubs_epi16(u, s); }
inline Bytes pairs32(Bytes a) { return _mm512_madd_epi16(a, all16(1)); }
inline Bytes abs8(Bytes a) { return _mm512_abs_epi8(a); }
inline Bytes select(Bytes a, Bytes b, Bytes bit7) { return _mm512_mask_blend_epi8(_mm512_movepi8_mask(bit7), a, b); }
inline Bytes negate_where(Bytes a, Bytes bit7) { return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(bit7), _mm512_setzero_si512(), a); }
inline Bytes times_sign(Bytes a, Bytes w) { return negate_where(a, w); }  // anything where w is 0
inline Bytes table16(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline Bytes look16(Bytes table, Bytes index) { return _mm512_shuffle_epi8(table, index); }
inline void keep(Bytes&) {}
constexpr int BLOCKS[] = {12, 8, 4, 2, 1};  // rows of a batch that one dot() takes: as many as the registers hold
#else
typedef __m256i Bytes;
inline Bytes load_b(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_b(void* p, Bytes v) { _mm256_storeu_si256((__m256i*)p, v); }
inline Bytes all8(int x) { return _mm256_set1_epi8((char)x); }
inline Bytes all16(int x) { return _mm256_set1_epi16((short)x); }
inline Bytes all32(int x) { return _mm256_set1_epi32(x); }
inline Bytes add8(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Bytes add16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
inline Bytes add32(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
inline Bytes and_b(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
inline Bytes shift4(Bytes a) { return _mm256_srli_epi16(a, 4); }
inline Bytes pairs16(Bytes u, Bytes s) { return _mm256_maddubs_epi16(u, s); }
inline Bytes pairs32(Bytes a) { return _mm256_madd_epi16(a, all16(1)); }
inline Bytes abs8(Bytes a) { return _mm256_abs_epi8(a); }
// Written out because GCC turns the intrinsic, where two of them share a mask, into a comparison and two blends.
inline Bytes select(Bytes a, Bytes b, Bytes bit7) {
  Bytes r;
  asm("vpblendvb %3, %2, %1, %0" : "=x"(r) : "x"(a), "x"(b), "x"(bit7));
  return r;
}
inline Bytes negate_where(Bytes a, Bytes bit7) { return _mm256_sign_epi8(a, _mm256_or_si256(bit7, all8(1))); }
inline Bytes times_sign(Bytes a, Bytes w) { return _mm256_sign_epi8(a, w); }  // 0 where w is
inline Bytes table16(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
inline Bytes look16(Bytes table, Bytes index) { return _mm256_shuffle_epi8(table, index); }
inline void keep(Bytes& sum) { asm("" : "+x"(sum)); }  // summed up here: GCC would rather keep eight products, in memory
constexpr int BLOCKS[] = {3, 2, 1};
#endif

constexpr int WIDTH = sizeof(Bytes);   // bytes: 4 columns of LANES rows
constexpr int PARTS = 64 / WIDTH;      // vectors in a step
static_assert(WIDTH == LANES * 4, "a lane of a sum is a row");

inline Bytes four(const int8_t* a) {  // 4 activations, for every row
  int32_t x;
  memcpy(&x, a, 4);
  return all32(x);
}
inline vi lanes(Bytes sums) { return (vi)sums; }

// acc + Σ of 4 products a lane.
inline Bytes multiply_add(Bytes acc, Bytes u, Bytes s) { return add32(acc, pairs32(pairs16(u, s))); }
#if defined(EMULATE_VNNI)  // in the tests, where no processor has it
inline void add_four(Bytes& acc, Bytes u, const int8_t* a) { acc = _mm512_dpbusd_epi32(acc, u, four(a)); }
#elif defined(__AVX512VNNI__)
// The same of 4 activations for every row. Written out because GCC broadcasts them into registers, of which it then has too few.
inline void add_four(Bytes& acc, Bytes u, const int8_t* a) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(u), "m"(*(const int32_t(*)[1])a));
}
#endif

#if defined(__AVX512VNNI__)

// A pair's codes, decoded by vpermb: the sign is the last bit of the index, the tables hold 64 ± |x|.
template <int P>
struct Pairs {
  static constexpr int SIGN = P + 2;  // the bit of an index
  Bytes x[2], y[2];  // indices 0 … 63, 64 … 127; below P = 4 bit 6 is of no account
  explicit Pairs(const uint8_t* codebook) {
    fill(x, codebook);
    fill(y, codebook + (16 << (P - 2)));
  }
  static inline void fill(Bytes (&table)[2], const uint8_t* p) {
    const Bytes size = P == 2   ? table16(p)
                       : P == 3 ? _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p))
                                : load_b(p);
    const __mmask64 negative = P == 2 ? 0xFFFF0000FFFF0000 : P == 3 ? 0xFFFFFFFF00000000 : 0;
    const Bytes zero = all8(PANEL_OFFSET), plus = add8(zero, size);
    table[0] = _mm512_mask_sub_epi8(plus, negative, zero, size);
    table[1] = _mm512_sub_epi8(zero, size);
  }
  static inline Bytes look(const Bytes (&table)[2], Bytes index) {
    if constexpr (P < 4) return _mm512_permutexvar_epi8(index, table[0]);
    else return _mm512_permutex2var_epi8(table[0], index, table[1]);
  }
  // Bits below `bit` from index, bit `bit` from the plane's bit `step`; those above are of no account.
  template <int BIT>
  static inline __attribute__((always_inline)) Bytes join(Bytes index, Bytes plane, int step) {
    const Bytes moved = step > BIT ? _mm512_srli_epi16(plane, step - BIT) : _mm512_slli_epi16(plane, BIT - step);
    return _mm512_ternarylogic_epi32(index, moved, all8((1 << BIT) - 1), 0xE4);
  }
  // f(step, x + 64, y + 64) for steps 0 … 7.
  template <class F>
  inline __attribute__((always_inline)) void walk(const uint8_t* codes, F f) const {
    const Bytes sign_x = load_b(codes + 256), sign_y = load_b(codes + 320);
    const Bytes high = P > 2 ? load_b(codes + 384) : sign_x, top = P > 3 ? load_b(codes + 448) : sign_x;
#pragma GCC unroll 8
    for (int step = 0; step < 8; step++) {
      const Bytes both = load_b(codes + 64 * (step / 2));
      Bytes index = step % 2 ? shift4(both) : both;
      if constexpr (P > 2) index = join<4>(index, high, step);
      if constexpr (P > 3) index = join<5>(index, top, step);
      f(step, look(x, join<SIGN>(index, sign_x, step)), look(y, join<SIGN>(index, sign_y, step)));
    }
  }
};
#else

// A codebook's coordinate in registers: 16 · 2^(P−2) magnitudes.
template <int P>
struct Codebook {
  Bytes tables[1 << (P - 2)];
  explicit Codebook(const uint8_t* p) {
    for (int n = 0; n < 1 << (P - 2); n++) tables[n] = table16(p + 16 * n);
  }
  // The entries of index + 16 · (bit 7 of high) + 32 · (bit 7 of top).
  inline __attribute__((always_inline)) Bytes look(Bytes index, Bytes high, Bytes top) const {
    const Bytes a = look16(tables[0], index);
    if constexpr (P == 2) return a;
    else {
      const Bytes b = select(a, look16(tables[1], index), high);
      if constexpr (P == 3) return b;
      else return select(b, select(look16(tables[2], index), look16(tables[3], index), high), top);
    }
  }
};

// The planes of one vector of codes. step() calls f(step, |x|, |y|, planes of the signs) for steps 7 … 0.
template <int P>
struct Pairs {
  Codebook<P> x, y;
  explicit Pairs(const uint8_t* codebook) : x(codebook), y(codebook + (16 << (P - 2))) {}

  template <class F>
  inline __attribute__((always_inline)) void walk(const uint8_t* codes, F f) const {
    const Bytes low = all8(15);
    Bytes sign_x = load_b(codes + 256), sign_y = load_b(codes + 320);
    Bytes high = P > 2 ? load_b(codes + 384) : sign_x, top = P > 3 ? load_b(codes + 448) : sign_x;
#pragma GCC unroll 4
    for (int two = 3; two >= 0; two--) {
      const Bytes both = load_b(codes + 64 * two);
#pragma GCC unroll 2
      for (int odd = 1; odd >= 0; odd--) {
        const Bytes index = and_b(odd ? shift4(both) : both, low);
        f(2 * two + odd, x.look(index, high, top), y.look(index, high, top), sign_x, sign_y);
        sign_x = add8(sign_x, sign_x);
        sign_y = add8(sign_y, sign_y);
        if (P > 2) high = add8(high, high);
        if (P > 3) top = add8(top, top);
      }
    }
  }
};
#endif

template <int FORMAT>
using Decoder = std::conditional_t<is_pair(FORMAT), Pairs<planes(FORMAT)>, NoTable>;

// One group to its panel.
template <int FORMAT>
inline void decode_group(const Decoder<FORMAT>& pairs, const uint8_t* codes, int64_t group, uint8_t* panel) {
  if constexpr (FORMAT == KEPT4) {
    for (int64_t n = 0; n < group * 8; n += WIDTH) {
      const Bytes both = load_b(codes + n);
      uint8_t* at = panel + n / 64 * 128 + n % 64;
      store_b(at, and_b(both, all8(15)));
      store_b(at + 64, and_b(shift4(both), all8(15)));
    }
  } else {
    for (int part = 0; part < PARTS; part++) {
      uint8_t* at = panel + part * WIDTH;
      if constexpr (VNNI)
        pairs.walk(codes, [at](int step, Bytes x, Bytes y) {
          store_b(at + step * 128, x);
          store_b(at + step * 128 + 64, y);
        });
      else
        pairs.walk(codes + part * WIDTH, [at](int step, Bytes x, Bytes y, Bytes sign_x, Bytes sign_y) {
          store_b(at + step * 128, add8(negate_where(x, sign_x), all8(PANEL_OFFSET)));
          store_b(at + step * 128 + 64, add8(negate_where(y, sign_y), all8(PANEL_OFFSET)));
        });
    }
  }
}

// What the panel's bytes are too large by.
constexpr int offset_of(int format) { return is_pair(format) ? PANEL_OFFSET : VNNI && is_signed(format) ? 128 : 0; }

// acc[t][part] += the products of one group.
template <int FORMAT, int T>
INLINE inline void dot_group(Bytes (&acc)[T][PARTS], const uint8_t* panel, const int8_t* const (&a)[T], int64_t steps) {
  constexpr bool SMALL = FORMAT == KEPT4 && !VNNI;  // 8 steps · 2 · 15 · 127 = 30480 fit 16 bits
  for (int64_t first = 0; first < steps; first += SMALL ? 8 : steps) {
    const int64_t last = SMALL && first + 8 < steps ? first + 8 : steps;
    Bytes half[T][PARTS] = {};
#pragma GCC unroll 2
    for (int64_t s = first; s < last; s++) {
      Bytes w[PARTS], u[PARTS];
      unrolled<PARTS>([&](auto r) INLINE {
        w[r] = load_b(panel + s * 64 + r * WIDTH);
        u[r] = !is_signed(FORMAT) ? w[r] : VNNI ? add8(w[r], all8(-128)) : abs8(w[r]);
      });
      unrolled<T>([&](auto t) INLINE {
#if defined(__AVX512VNNI__)
        add_four(acc[t][0], u[0], a[t] + 4 * s);
#else
        const Bytes x = four(a[t] + 4 * s);
        unrolled<PARTS>([&](auto r) INLINE {
          if constexpr (SMALL) half[t][r] = add16(half[t][r], pairs16(u[r], x));
          else acc[t][r] = multiply_add(acc[t][r], u[r], is_signed(FORMAT) ? times_sign(x, w[r]) : x);
        });
#endif
      });
    }
    if constexpr (SMALL)
      unrolled<T>([&](auto t) INLINE {
        unrolled<PARTS>([&](auto r) INLINE { acc[t][r] = add32(acc[t][r], pairs32(half[t][r])); });
      });
  }
}

// f [T][16] = one tile times T quantised rows.
template <int FORMAT, int T>
__attribute__((noinline)) void dot(const Tile& tile, const uint8_t* panel, int64_t groups, int64_t any_group, const Quantised* a, float* f) {
  const int64_t group = is_kept(FORMAT) ? any_group : 64;
  vf y[T][PARTS] = {};
  for (int64_t g = 0; g < groups; g++, panel += group * TILE) {
    Bytes acc[T][PARTS];
    const int8_t* values[T];
    unrolled<T>([&](auto t) INLINE {
      values[t] = a[t].values + g * group;
      unrolled<PARTS>([&](auto r) INLINE { acc[t][r] = all32(offset_of(FORMAT) ? -offset_of(FORMAT) * a[t].sums[g] : 0); });
    });
    dot_group<FORMAT, T>(acc, panel, values, group / 4);
    unrolled<T>([&](auto t) INLINE {
      unrolled<PARTS>([&](auto r) INLINE {
        y[t][r] = add_group<FORMAT>(y[t][r], lanes(acc[t][r]), tile, g, r * LANES, a[t].scales[g], a[t].sums[g]);
      });
    });
  }
  unrolled<T>([&](auto t) INLINE {
    unrolled<PARTS>([&](auto r) INLINE { store(f + t * TILE + r * LANES, y[t][r]); });
  });
}

// Straight from the codes, direct_rows(format) rows at most.
inline void prefetch_ahead(const uint8_t* codes, int64_t bytes) {
  constexpr int64_t AHEAD = 8192;  // tiles lie one behind the other
  for (int64_t n = 0; n < bytes; n += 64) _mm_prefetch((const char*)codes + n + AHEAD, _MM_HINT_T0);
}

inline Bytes dot_kept4(const uint8_t* codes, int64_t group, const int8_t* a) {
  Bytes acc = {};
  for (int64_t first = 0; first < group; first += 32) {
    Bytes half = {};
    for (int64_t c = first; c < group && c < first + 32; c += 8) {
      const Bytes both = load_b(codes + c * 8);
      half = add16(half, pairs16(and_b(both, all8(15)), four(a + c)));
      half = add16(half, pairs16(and_b(shift4(both), all8(15)), four(a + c + 4)));
    }
    acc = add32(acc, pairs32(half));
  }
  return acc;
}

#if defined(__AVX512VNNI__)
constexpr int direct_rows(int format) { return is_pair(format) ? 12 : format == KEPT4; }
constexpr bool NEGATED = false;

template <int FORMAT, int T>
inline void dot_codes(const Decoder<FORMAT>& pairs, const Tile& tile, int64_t groups, int64_t group, const Quantised* a, const int8_t*, float* f) {
  const int64_t bytes = group_bytes(FORMAT, group);
  vf y[T] = {};
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* codes = tile.codes + g * bytes;
    prefetch_ahead(codes, bytes);
    Bytes acc[T];
    if constexpr (is_pair(FORMAT)) {
      constexpr bool TWO = T < 3;  // sums of a row: else one product waits for the last
      const int8_t* values[T];
      Bytes more[T];
      unrolled<T>([&](auto t) INLINE {
        values[t] = a[t].values + g * 64;
        acc[t] = all32(-PANEL_OFFSET * a[t].sums[g]);
        more[t] = all32(0);
      });
      pairs.walk(codes, [&](int step, Bytes x, Bytes y) INLINE {
        unrolled<T>([&](auto t) INLINE { add_four(acc[t], x, values[t] + 8 * step); });
        unrolled<T>([&](auto t) INLINE { add_four(TWO ? more[t] : acc[t], y, values[t] + 8 * step + 4); });
      });
      if constexpr (TWO) unrolled<T>([&](auto t) INLINE { acc[t] = add32(acc[t], more[t]); });
    } else acc[0] = dot_kept4(codes, group, a->values + g * group);
    unrolled<T>([&](auto t) INLINE { y[t] = add_group<FORMAT>(y[t], lanes(acc[t]), tile, g, 0, a[t].scales[g], a[t].sums[g]); });
  }
  unrolled<T>([&](auto t) INLINE { store(f + t * TILE, y[t]); });
}
#else
constexpr int direct_rows(int format) { return is_packed(format); }
constexpr bool NEGATED = true;  // −a is wanted too

template <int P>
inline __attribute__((always_inline)) Bytes dot_pairs(const Pairs<P>& pairs, const uint8_t* codes, const int8_t* a, const int8_t* negated) {
  Bytes acc = {};
  pairs.walk(codes, [&](int step, Bytes x, Bytes y, Bytes sign_x, Bytes sign_y) {
    const Bytes ax = select(four(a + 8 * step), four(negated + 8 * step), sign_x);
    const Bytes ay = select(four(a + 8 * step + 4), four(negated + 8 * step + 4), sign_y);
    acc = add32(acc, pairs32(add16(pairs16(x, ax), pairs16(y, ay))));
    keep(acc);
  });
  return acc;
}

template <int FORMAT, int T>
inline void dot_codes(const Decoder<FORMAT>& pairs, const Tile& tile, int64_t groups, int64_t group, const Quantised* a, const int8_t* negated, float* f) {
  const int64_t bytes = group_bytes(FORMAT, group);
  vf y[PARTS] = {};
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* codes = tile.codes + g * bytes;
    prefetch_ahead(codes, bytes);
#pragma GCC unroll 2
    for (int r = 0; r < PARTS; r++) {
      asm volatile("" ::: "memory");  // load the activations again rather than spill them
      Bytes sums;
      if constexpr (is_pair(FORMAT)) sums = dot_pairs(pairs, codes + r * WIDTH, a->values + g * 64, negated + g * 64);
      else sums = dot_kept4(codes + r * WIDTH, group, a->values + g * group);
      y[r] = add_group<FORMAT>(y[r], lanes(sums), tile, g, r * LANES, a->scales[g], a->sums[g]);
    }
  }
  for (int r = 0; r < PARTS; r++) store(f + r * LANES, y[r]);
}
#endif

}  // namespace
}  // namespace inferflow
