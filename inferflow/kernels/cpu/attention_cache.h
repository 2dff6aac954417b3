// The key-value cache: its element types, and OP_STORE_KV, which writes a step's keys and values into it.
//
// Numbers are rounded to the nearest, ties to even; f16 overflows to infinity. KV_I8, for each position and head: m = max |x|,
// scale = m / 127, element = round_half_even(x · (127 / m)), all in float. An m so small that 127 / m is infinite (0 too) gives
// zeros and scale 0; an m that is not finite gives zeros and scale NaN.
//
// A unit of OP_STORE_KV is what one span writes into one block, so no two threads write to one cache line.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace inferflow {
namespace {
namespace attention {

typedef uint16_t v16 __attribute__((vector_size(LANES * 2)));
typedef int8_t v8 __attribute__((vector_size(LANES)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));

// To float16 in integers, for processors that cannot convert.
inline vi to_f16(vf x) {
  const vi bits = as_int(x), u = bits & set1i(0x7fffffff);
  const vi normal = (u + set1i(0xfff) + (u >> 13 & set1i(1)) - set1i(0x38000000)) >> 13;
  const vi small = as_int(as_float(u) + set1(0.5f)) - set1i(0x3f000000);  // 0.5 has float16's smallest step as its last bit
  vi h = u < set1i(0x38800000) ? small : normal;
  h = u >= set1i(0x47800000) ? set1i(0x7c00) : h;
  h = u > set1i(0x7f800000) ? set1i(0x7e00) : h;
  return h | (bits >> 16 & set1i(0x8000));
}

inline vi to_bf16(vf x) {
  const vi bits = as_int(x);
  const vi rounded = (bits + set1i(0x7fff) + (bits >> 16 & set1i(1))) >> 16;
  return x != x ? (bits >> 16 | set1i(0x40)) : rounded;
}

// An element type: a vector of it as floats, and a vector of floats as it.
struct F32 {
  typedef float Element;
  static vf load(const float* p) { return inferflow::load(p); }
  static void store(float* p, vf x) { inferflow::store(p, x); }
};

struct F16 {
  typedef uint16_t Element;
  static vf load(const uint16_t* p) { return load_f16(p); }
  static void store(uint16_t* p, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__ARM_NEON)
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    const v16 h = __builtin_convertvector(to_f16(x), v16);
    memcpy(p, &h, sizeof h);
#endif
  }
};

struct BF16 {
  typedef uint16_t Element;
  static vf load(const uint16_t* p) { return load_bf16(p); }
  static void store(uint16_t* p, vf x) {
    const v16 h = __builtin_convertvector(to_bf16(x), v16);
    memcpy(p, &h, sizeof h);
  }
};

// Whole numbers; their scales are applied to scores and weights.
struct I8 {
  typedef int8_t Element;
  static vf load(const int8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    v8 x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, vf);
#endif
  }
  static void store(int8_t* p, vf x) {
    const v8 b = __builtin_convertvector(to_int(round_even(x)), v8);
    memcpy(p, &b, sizeof b);
  }
};

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// The first n < LANES elements, the rest zero.
template <class Type> vf load_tail(const typename Type::Element* p, int64_t n) {
  typename Type::Element x[LANES] = {};
  memcpy(x, p, n * sizeof x[0]);
  return Type::load(x);
}

template <class Type> void narrow(const float* x, int64_t n, typename Type::Element* out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) Type::store(out + i, load(x + i));
  if (i == n) return;
  typename Type::Element tail[LANES];
  Type::store(tail, load_n(x + i, n - i));
  memcpy(out + i, tail, (n - i) * sizeof tail[0]);
}

inline void gather(float* to, const float* from, int64_t n, int64_t stride) {
  if (stride == 1) memcpy(to, from, n * sizeof(float));
  else for (int64_t i = 0; i < n; i++) to[i] = from[i * stride];
}

// x becomes what is to be rounded to int8. The scale.
inline float to_int8_range(float* x, int64_t n) {
  float m = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; i++) {
    const float a = __builtin_fabsf(x[i]);
    finite &= a <= __FLT_MAX__;
    m = a > m ? a : m;
  }
  const float inverse = 127.0f / m;
  if (!finite || !(inverse <= __FLT_MAX__)) {
    memset(x, 0, n * sizeof(float));
    return finite ? 0.0f : __builtin_nanf("");
  }
  for (int64_t i = 0; i < n; i++) x[i] *= inverse;
  return m / 127.0f;
}

// Calls body(span, piece) for the units begin … end − 1 of a step whose spans have pieces(span) units each.
template <class Pieces, class Body> void each_unit(const Step& step, int64_t begin, int64_t end, Pieces pieces, Body body) {
  int64_t first = 0;
  for (int64_t s = 0; s < step.span_count && first < end; s++) {
    const int64_t after = first + pieces(step.spans[s]);
    for (int64_t unit = begin > first ? begin : first; unit < after && unit < end; unit++) body(step.spans[s], unit - first);
    first = after;
  }
}
template <class Pieces> int64_t count_units(const Step& step, Pieces pieces) {
  int64_t total = 0;
  for (int64_t s = 0; s < step.span_count; s++) total += pieces(step.spans[s]);
  return total;
}

// ---------------------------------------------------------------------------------------------------- OP_STORE_KV

inline int64_t blocks_written(const Span& span, int64_t block) {
  return span.count ? (span.past + span.count - 1) / block - span.past / block + 1 : 0;
}

// One head's row of one token, as the cache has it. Returns its scale (KV_I8).
template <class Type> float cache_row(const Tensor& t, const Step& step, int64_t token, int64_t head, int64_t n, float* row,
                                      typename Type::Element* out) {
  gather(row, at(t, step, token) + head * t.strides[0], n, t.strides[1]);
  const float scale = same<Type, I8> ? to_int8_range(row, n) : 1.0f;
  narrow<Type>(row, n, out);
  return scale;
}

// Tokens at positions first … last − 1 of the span, all in one block.
template <class Type>
void store_block(const StoreKvArgs& args, const Step& step, const Span& span, int64_t first, int64_t last, Scratch& scratch) {
  typedef typename Type::Element Element;
  const Cache& cache = *args.cache;
  const int64_t widest = cache.dim > cache.vdim ? cache.dim : cache.vdim;
  float* row = (float*)scratch.get(2 * widest * sizeof(float));
  Element* narrowed = (Element*)(row + widest);
  const int64_t block = step.block_table[span.blocks + first / cache.block];
  for (int64_t head = 0; head < cache.heads; head++) {
    const int64_t place = block * cache.heads + head;
    Element* keys = (Element*)cache.keys + place * cache.dim * cache.block;
    Element* values = (Element*)cache.values + place * cache.block * cache.vdim;
    for (int64_t position = first; position < last; position++) {
      const int64_t token = span.start + position - span.past, n = position % cache.block;
      const float key_scale = cache_row<Type>(args.k, step, token, head, cache.dim, row, narrowed);
      for (int64_t d = 0; d < cache.dim; d++) keys[d * cache.block + n] = narrowed[d];
      const float value_scale = cache_row<Type>(args.v, step, token, head, cache.vdim, row, values + n * cache.vdim);
      if (!same<Type, I8>) continue;
      cache.key_scales[place * cache.block + n] = key_scale;
      cache.value_scales[place * cache.block + n] = value_scale;
    }
  }
}

template <class Type> void store_units(const StoreKvArgs& args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const int64_t block = args.cache->block;
  const auto pieces = [&](const Span& span) { return blocks_written(span, block); };
  each_unit(step, begin, end, pieces, [&](const Span& span, int64_t piece) {
    const int64_t start = (span.past / block + piece) * block, stop = start + block, all = span.past + span.count;
    store_block<Type>(args, step, span, start > span.past ? start : span.past, stop < all ? stop : all, scratch);
  });
}

static int64_t store_kv_units(const void* args, const Step& step) {
  const int64_t block = ((const StoreKvArgs*)args)->cache->block;
  return count_units(step, [&](const Span& span) { return blocks_written(span, block); });
}

static void store_kv_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const StoreKvArgs& a = *(const StoreKvArgs*)args;
  switch (a.cache->type) {
    case KV_F32: return store_units<F32>(a, step, begin, end, scratch);
    case KV_F16: return store_units<F16>(a, step, begin, end, scratch);
    case KV_BF16: return store_units<BF16>(a, step, begin, end, scratch);
    default: return store_units<I8>(a, step, begin, end, scratch);
  }
}

static const Kernel store_kv_kernel = {store_kv_units, store_kv_run};

}  // namespace attention
}  // namespace
}  // namespace inferflow
