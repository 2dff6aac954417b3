// Vectors of floats as wide as the instruction set has them: the one vocabulary that all kernels of an isa_*.cpp are written in.
// Everything has internal linkage, so that no function compiled for a newer processor can replace one of the baseline at link time.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace inferflow {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define INLINE __attribute__((always_inline))

// f(0) … f(N − 1), the numbers as types. Arrays that are indexed by them alone stay in registers, which no unrolling of a loop by the
// compiler promises.
template <int N, class F>
INLINE inline void unrolled(F f) {
  [&]<int... I>(std::integer_sequence<int, I...>) INLINE { (f(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));  // also what comparisons give: 0 or −1 in each lane

inline vf set1(float x) { return x - vf{}; }
inline vi set1i(int32_t x) { return x - vi{}; }
inline vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
inline vf as_float(vi v) { vf r; memcpy(&r, &v, sizeof r); return r; }
inline vi as_int(vf v) { vi r; memcpy(&r, &v, sizeof r); return r; }
inline vf pick(vi mask, vf a, vf b) { return mask ? a : b; }  // a where the mask is set

// The first n < LANES elements, the rest zero.
inline vf load_n(const float* p, int64_t n) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  vf v = {};
  memcpy(&v, p, n * 4);
  return v;
#endif
}
inline void store_n(float* p, vf v, int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  memcpy(p, &v, n * 4);
#endif
}

// a·b + c, rounded once where the processor can.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline float fma1(float a, float b, float c) {
#if defined(__AVX2__) || defined(__AVX512F__) || defined(__ARM_NEON)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// NaN in either operand: NaN in the result, on every instruction set.
inline vf max(vf a, vf b) { return pick(a > b, a, pick(b != b, b, pick(a != a, a, b))); }
inline vf min(vf a, vf b) { return pick(a < b, a, pick(b != b, b, pick(a != a, a, b))); }
inline vf abs(vf a) { return as_float(as_int(a) & set1i(0x7fffffff)); }
inline vf sqrt(vf a) {
#if defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
  return (vf)_mm256_sqrt_ps((__m256)a);
#else
  for (int n = 0; n < LANES; n++) a[n] = __builtin_sqrtf(a[n]);
  return a;
#endif
}
// To the nearest whole number, ties to even; |a| < 2^22.
inline vf round_even(vf a) { const vf big = set1(12582912.0f); return (a + big) - big; }
inline vi to_int(vf a) { return __builtin_convertvector(a, vi); }
inline vf to_float(vi a) { return __builtin_convertvector(a, vf); }

// Lanes i and i ^ DISTANCE change places.
template <int DISTANCE, class V>
inline V swap_lanes(V v) {
#if defined(__clang__)
  V r;
  for (int n = 0; n < LANES; n++) r[n] = v[n ^ DISTANCE];
  return r;
#else
  vi index;
  for (int n = 0; n < LANES; n++) index[n] = n ^ DISTANCE;
  return __builtin_shuffle(v, index);
#endif
}
// f over the lanes, by one fixed tree: halves onto halves.
template <class V, class F>
inline auto over_lanes(V v, F f) {
  if constexpr (LANES > 8) v = f(v, swap_lanes<8 % LANES>(v));
  if constexpr (LANES > 4) v = f(v, swap_lanes<4 % LANES>(v));
  v = f(v, swap_lanes<2>(v));
  return f(v, swap_lanes<1>(v))[0];
}
inline float sum(vf v) { return over_lanes(v, [](vf a, vf b) { return a + b; }); }
inline float largest(vf v) { return over_lanes(v, [](vf a, vf b) { return max(a, b); }); }

// low … high, NaN stays.
inline vf limited(vf x, float low, float high) {
#if defined(__AVX512F__)  // of a NaN and a number, these give the second operand
  return (vf)_mm512_max_ps((__m512)set1(low), _mm512_min_ps((__m512)set1(high), (__m512)x));
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)set1(low), _mm256_min_ps((__m256)set1(high), (__m256)x));
#else
  return pick(x < set1(low), set1(low), pick(x > set1(high), set1(high), x));
#endif
}

// e^x to within 2 units in the last place for all x: 2^n · p(r), r in ±ln2/2; 0 below −104, infinity above 88.8, and p of NaN is NaN.
// Always inlined: loops over it are hot, and its constants then stay in registers.
__attribute__((always_inline)) inline vf exp(vf x) {
  const vf t = limited(x, -104.0f, 89.0f);
  const vf n = round_even(t * set1(1.44269504f));
  vf r = fma(n, set1(-0.693359375f), t);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  const vi whole = to_int(n), half = whole >> 1;  // in two steps: subnormal results too
  return p * as_float((half + set1i(127)) << 23) * as_float((whole - half + set1i(127)) << 23);
}

// 16-bit floats, widened exactly.
inline vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__ARM_NEON)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  vf v;
  for (int n = 0; n < LANES; n++) {
    const uint32_t h = p[n], sign = (h & 0x8000u) << 16, e = h >> 10 & 31, m = h & 1023;
    float f;
    uint32_t bits = sign | (e == 31 ? 0x7f800000u | m << 13 : (e + 112) << 23 | m << 13);
    memcpy(&f, &bits, 4);
    if (e == 0) { f = (float)m * 5.9604644775390625e-8f; if (sign) f = -f; }
    v[n] = f;
  }
  return v;
#endif
}
inline vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  uint16_t h[LANES];
  memcpy(h, p, sizeof h);
  vi v;
  for (int n = 0; n < LANES; n++) v[n] = (int32_t)((uint32_t)h[n] << 16);
  return as_float(v);
#endif
}

}  // namespace
}  // namespace inferflow
