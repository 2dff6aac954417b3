// AVX-512 for processors without it, by SIMDe: compile for the baseline (no -m flags) with `-include emulated_avx512.h`, and with
// -DEMULATE_VNNI for VBMI and VNNI. Slow and exact; what SIMDe 0.7 lacks is spelt out below.
#pragma once
#include <cstring>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#define _IMMINTRIN_H_INCLUDED  // the compiler's own headers stay out
#define __AVX2__ 1
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#if defined(EMULATE_VNNI)
#define __AVX512VNNI__ 1
#define __AVX512VBMI__ 1
#endif

typedef uint16_t __mmask16;
typedef uint64_t __mmask64;

template <class To, class From>
inline To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
template <class T, int N>
struct EmulatedLanes { T lane[N]; };
typedef EmulatedLanes<int32_t, 16> EmulatedInts;
typedef EmulatedLanes<float, 16> EmulatedFloats;
typedef EmulatedLanes<uint8_t, 16> EmulatedBytes;

#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)

#undef _mm512_fmadd_ps  // SIMDe rounds twice
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const EmulatedFloats x = emulated_bits<EmulatedFloats>(a), y = emulated_bits<EmulatedFloats>(b);
  EmulatedFloats r = emulated_bits<EmulatedFloats>(c);
  for (int n = 0; n < 16; n++) r.lane[n] = __builtin_fmaf(x.lane[n], y.lane[n], r.lane[n]);
  return emulated_bits<__m512>(r);
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) {
  EmulatedFloats r = {};
  for (int n = 0; n < 16; n++)
    if (mask >> n & 1) memcpy(&r.lane[n], (const char*)p + 4 * n, 4);
  return emulated_bits<__m512>(r);
}
inline void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 v) {
  const EmulatedFloats x = emulated_bits<EmulatedFloats>(v);
  for (int n = 0; n < 16; n++)
    if (mask >> n & 1) memcpy((char*)p + 4 * n, &x.lane[n], 4);
}
inline __m512 _mm512_cvtph_ps(__m256i v) {
  EmulatedFloats r;
  for (int half = 0; half < 2; half++) {
    __m128i h;
    memcpy(&h, (const char*)&v + 16 * half, 16);
    const __m256 x = simde_mm256_cvtph_ps(h);
    memcpy(&r.lane[8 * half], &x, 32);
  }
  return emulated_bits<__m512>(r);
}
inline __m512i _mm512_cvtepu8_epi32(__m128i v) {
  const EmulatedBytes x = emulated_bits<EmulatedBytes>(v);
  EmulatedInts r;
  for (int n = 0; n < 16; n++) r.lane[n] = x.lane[n];
  return emulated_bits<__m512i>(r);
}
inline __m512 _mm512_cvtepi32_ps(__m512i v) {
  const EmulatedInts x = emulated_bits<EmulatedInts>(v);
  EmulatedFloats r;
  for (int n = 0; n < 16; n++) r.lane[n] = (float)x.lane[n];
  return emulated_bits<__m512>(r);
}
inline __m128i _mm512_cvtepi32_epi8(__m512i v) {
  const EmulatedInts x = emulated_bits<EmulatedInts>(v);
  EmulatedBytes r;
  for (int n = 0; n < 16; n++) r.lane[n] = (uint8_t)x.lane[n];
  return emulated_bits<__m128i>(r);
}
