// OP_SDPA: attention over the paged cache, with a running softmax.
//
// A unit is a tile of a span's tokens and query heads of one key head: at most TILE_ROWS rows (one row: one token, one head).
// The tile walks the context in stretches of whole blocks that begin at multiples of STRETCH; in each, a row takes part only if it
// sees a key there, and its scores, maximum, weights and sums are functions of its own keys. So a row's bits are the same in any
// tile. Keys that a row does not see are masked by selection in the scores and left out of the sum of values, never multiplied by
// zero: they may hold anything.
//
// Both products, queries by keys and weights by values, are one matrix product whose terms are added in order, whatever the shape
// of the register tile. Scratch memory is that of one tile and one stretch; nothing grows with the context.
#pragma once
#include "attention_cache.h"
#include "functions.h"

namespace inferflow {
namespace {
namespace attention {

constexpr int64_t TILE_ROWS = 48;  // whole register tiles of 6 rows for most sizes of head groups
constexpr int64_t STRETCH = 128;   // positions that share one maximum
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int ACCUMULATORS = 24;   // of 32 registers
#else
constexpr int ACCUMULATORS = 12;   // of 16
#endif

// ---------------------------------------------------------------------------------------------------- products

// A matrix product: c [rows, n] = a [rows, depth] · b [depth, n], or that is added to c. Rows of c are whole vectors (what is
// written past n is never read).
template <class Type> struct Product {
  const float* a;
  const typename Type::Element* b;
  float* c;
  bool add;
  const typename Type::Element* next;  // what b will be in the next block: fetched ahead
  int64_t depth, a_stride, b_stride, c_stride;
};

// R rows by V vectors. tail: elements of b in the last vector, when that is not whole (then V is 1). Of the two operands the one of
// fewer vectors stays in registers for a step, so that accumulators and operands fit.
template <class Type, int R, int V, bool TAIL> inline void register_tile(const Product<Type>& p, int64_t column, int64_t tail) {
  const int64_t depth = p.depth, a_stride = p.a_stride, b_stride = p.b_stride, c_stride = p.c_stride;
  const float* a = p.a;
  const typename Type::Element* b = p.b + column;
  const int64_t ahead = p.next - p.b;
  float* c = p.c + column;
  vf sum[R][V], x[R], y[V];
  const auto each = [&](auto f) INLINE { unrolled<R>([&](auto r) INLINE { unrolled<V>([&](auto v) INLINE { f(r, v); }); }); };
  each([&](auto r, auto v) INLINE { sum[r][v] = p.add ? load(c + r * c_stride + v * LANES) : vf{}; });
  for (int64_t k = 0; k < depth; k++, a++, b += b_stride) {
    for (size_t n = 0; n < V * LANES * sizeof(b[0]); n += 64) __builtin_prefetch((const char*)(b + ahead) + n, 0, 2);
    const auto get_x = [&](auto r) INLINE { x[r] = set1(a[r * a_stride]); };
    const auto get_y = [&](auto v) INLINE { y[v] = TAIL ? load_tail<Type>(b, tail) : Type::load(b + v * LANES); };
    const auto add = [&](int r, int v) INLINE { sum[r][v] = fma(x[r], y[v], sum[r][v]); };
    if constexpr (V <= R) {
      unrolled<V>(get_y);
      unrolled<R>([&](auto r) INLINE {
        get_x(r);
        unrolled<V>([&](auto v) INLINE { add(r, v); });
      });
    } else {
      unrolled<R>(get_x);
      unrolled<V>([&](auto v) INLINE {
        get_y(v);
        unrolled<R>([&](auto r) INLINE { add(r, v); });
      });
    }
  }
  each([&](auto r, auto v) INLINE { store(c + r * c_stride + v * LANES, sum[r][v]); });
}

template <class Type, int R, int V> void product_rows(const Product<Type>& p, int64_t column, int64_t n) {
  for (; column + V * LANES <= n; column += V * LANES) register_tile<Type, R, V, false>(p, column, 0);
  if constexpr (V > 1) product_rows<Type, R, V / 2>(p, column, n);
  else if (column < n) register_tile<Type, R, 1, true>(p, column, n - column);
}

// Vectors of a register tile of R rows.
constexpr int columns(int rows) {
  int v = 8;
  while (v * rows > ACCUMULATORS) v /= 2;
  return v;
}
template <class Type, int R> void product_share(const Product<Type>& p, int64_t share, int64_t n) {
  if (share == R) product_rows<Type, R, columns(R)>(p, 0, n);
  else if constexpr (R > 1) product_share<Type, R - 1>(p, share, n);
}

// Rows go in even shares (of at most six: their addresses are one register and a few multiples), columns as wide as fits.
template <class Type> void product(Product<Type> p, int64_t rows, int64_t n) {
  constexpr int MOST = 6;
  for (int64_t passes = (rows + MOST - 1) / MOST; passes; passes--) {
    const int64_t share = (rows + passes - 1) / passes;
    product_share<Type, MOST>(p, share, n);
    rows -= share;
    p.a += share * p.a_stride;
    p.c += share * p.c_stride;
    p.next = p.b;  // already on its way
  }
}

// ---------------------------------------------------------------------------------------------------- scores

// Positions [first, after).
struct Range { int64_t first, after; };
inline bool operator==(Range a, Range b) { return a.first == b.first && a.after == b.after; }

inline Range visible(const SdpaArgs& args, int64_t position) {
  int64_t first = args.window && position >= args.window ? position - args.window + 1 : 0;
  const int64_t chunk = args.chunk ? position / args.chunk * args.chunk : 0;
  return {first > chunk ? first : chunk, position + 1};
}
// The part of it in the `width` positions from `start` on, counted from there.
inline Range within(Range r, int64_t start, int64_t width) {
  return {r.first > start ? r.first - start : 0, r.after - start < width ? r.after - start : width};
}

inline vf numbers_from(int64_t first) {
  vi n;
  for (int i = 0; i < LANES; i++) n[i] = i;
  return to_float(n + set1i((int32_t)first));
}
inline vf rounded_to_bf16(vf x) { return as_float(to_bf16(x) << 16); }

// e^x for x ≤ 0, exactly 0 below −87 (a weight that no sum would notice) and for −∞; NaN stays. n = round(x / ln 2) is read from
// the low bits of a float so great that its last bit counts ones.
inline vf exp_negative(vf x) {
  const vf ones = set1(12582912.0f), shifted = fma(x, set1(1.44269504f), ones), n = shifted - ones;
  const vf r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  const vu power = ((vu)as_int(shifted) << 23) + (vu)as_int(set1(1.0f));  // wraps, below −87
  return pick(x < set1(-87.0f), vf{}, p * as_float((vi)power));
}

inline float highest(vf v) { return over_lanes(v, [](vf a, vf b) { return pick(b > a, b, a); }); }

// What turns a product of a query and a key into a score, for one head and one query position.
struct Scoring {
  vf scale, cap, slope, alibi_scale;
  int64_t position;
  bool capped, biased, rounded;
  Scoring(const SdpaArgs& args, int64_t head, int64_t position)
      : scale(set1((float)args.scale)), cap(set1((float)args.softcap)), slope(set1(args.slopes ? args.slopes[head] : 0)),
        alibi_scale(set1((float)args.alibi_scale)), position(position), capped(args.softcap != 0), biased(args.slopes),
        rounded(args.bfloat16) {}
  vf operator()(vf x, int64_t first) const {
    x = x * scale;
    if (capped) x = cap * tanh(x / cap);
    if (!biased) return x;
    const vf bias = rounded ? rounded_to_bf16(rounded_to_bf16(slope) * rounded_to_bf16(numbers_from(first)))
                            : slope * numbers_from(first - position);
    return x + bias * alibi_scale;
  }
};

// Products of one row and one stretch become scores, −∞ outside `seen`. Their maximum (a NaN among them is left to the weights).
inline float scores(const Scoring& score, float* row, Range seen, int64_t start, const float* key_scales) {
  vf top = set1(-INF);
  for (int64_t n = seen.first / LANES * LANES; n < seen.after; n += LANES) {
    vf x = load(row + n);
    if (key_scales) x = x * load(key_scales + n);
    x = score(x, start + n);
    if (n < seen.first || n + LANES > seen.after) {
      const vf number = numbers_from(n);
      x = pick((number >= set1((float)seen.first)) & (number < set1((float)seen.after)), x, set1(-INF));
    }
    store(row + n, x);
    top = pick(x > top, x, top);
  }
  return highest(top);
}

// Scores become weights e^(score − top); their sum goes onto `total` (one sum for each lane).
inline void weights(float* row, Range seen, float top, float keep, float* total, const float* value_scales) {
  vf sum = load(total) * set1(keep);
  for (int64_t n = seen.first / LANES * LANES; n < seen.after; n += LANES) {
    const vf e = exp_negative(load(row + n) - set1(top));
    sum = sum + e;
    store(row + n, value_scales ? e * load(value_scales + n) : e);
  }
  store(total, sum);
}

// ---------------------------------------------------------------------------------------------------- tiles

// One unit: `tokens` tokens from `token` (of the step) at `position` on, query heads head … head + heads − 1, all of key head `kv`.
// Row r is token r / heads, head r % heads.
struct Tile {
  int64_t token, position, tokens, head, heads, kv;
  const int32_t* blocks;
  int64_t stretch;  // positions: whole blocks
  float *q, *weights, *out, *top, *next, *keep, *total, *key_scales, *value_scales;
  int64_t out_stride;
};

inline int64_t whole_vectors(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

inline void place(Tile& tile, const Cache& cache, Scratch& scratch) {
  const int64_t rows = whole_vectors(tile.tokens * tile.heads), dim = whole_vectors(cache.dim);
  tile.out_stride = whole_vectors(cache.vdim);
  tile.stretch = cache.block < STRETCH ? STRETCH / cache.block * cache.block : cache.block;
  const int64_t floats = rows * (dim + tile.stretch + tile.out_stride + 3 + LANES) + 2 * tile.stretch;
  float* p = (float*)scratch.get(floats * sizeof(float));
  float** parts[] = {&tile.q, &tile.weights, &tile.out, &tile.top, &tile.next, &tile.keep, &tile.total};
  const int64_t widths[] = {dim, tile.stretch, tile.out_stride, 1, 1, 1, LANES};
  for (int n = 0; n < 7; n++) { *parts[n] = p; p += rows * widths[n]; }
  tile.key_scales = p;
  tile.value_scales = p + tile.stretch;
}

inline void start(const Tile& tile, const SdpaArgs& args, const Step& step) {
  const int64_t rows = tile.tokens * tile.heads, dim = args.cache->dim;
  for (int64_t r = 0; r < whole_vectors(rows); r++) tile.top[r] = tile.next[r] = 0;
  memset(tile.out, 0, rows * tile.out_stride * sizeof(float));
  for (int64_t r = 0; r < rows; r++) {
    const int64_t head = tile.head + r % tile.heads;
    gather(tile.q + r * dim, at(args.q, step, tile.token + r / tile.heads) + head * args.q.strides[0], dim, args.q.strides[1]);
    tile.top[r] = args.sinks ? args.sinks[head] : -INF;
    store(tile.total + r * LANES, vf{});
    if (args.sinks) tile.total[r * LANES] = 1;
  }
}

// Rows of tokens [from, to): their scores over the stretch that starts at position `first`, new maxima, weights and sums. What the
// rows have so far is scaled to the new maxima. scaled: keys and values have scales.
inline void soften(const Tile& tile, const SdpaArgs& args, int64_t first, int64_t from, int64_t to, bool scaled) {
  const int64_t begin = from * tile.heads, end = to * tile.heads;
  const float *key_scales = scaled ? tile.key_scales : nullptr, *value_scales = scaled ? tile.value_scales : nullptr;
  for (int64_t t = from, r = begin; t < to; t++) {
    const Range seen = within(visible(args, tile.position + t), first, tile.stretch);
    for (int64_t head = tile.head; head < tile.head + tile.heads; head++, r++) {
      const float top = scores(Scoring(args, head, tile.position + t), tile.weights + r * tile.stretch, seen, first, key_scales);
      tile.next[r] = top > tile.top[r] ? top : tile.top[r];
      if (tile.next[r] == -INF) tile.next[r] = -__FLT_MAX__;  // no weight yet: −∞ − top has to be −∞
    }
  }
  for (int64_t r = begin / LANES * LANES; r < end; r += LANES)
    store(tile.keep + r, exp_negative(load(tile.top + r) - load(tile.next + r)));
  for (int64_t t = from, r = begin; t < to; t++) {
    const Range seen = within(visible(args, tile.position + t), first, tile.stretch);
    for (int64_t after = r + tile.heads; r < after; r++) {
      tile.top[r] = tile.next[r];
      weights(tile.weights + r * tile.stretch, seen, tile.top[r], tile.keep[r], tile.total + r * LANES, value_scales);
      if (tile.keep[r] == 1) continue;
      float* out = tile.out + r * tile.out_stride;
      for (int64_t n = 0; n < tile.out_stride; n += LANES) store(out + n, load(out + n) * set1(tile.keep[r]));
    }
  }
}

// Where one key head's part of a block lies. The scales are null but for KV_I8.
template <class Type> struct Block {
  typedef typename Type::Element Element;
  const Element *keys, *values;
  const float *key_scales = nullptr, *value_scales = nullptr;
  Block(const Cache& cache, int64_t number, int64_t head) {
    const int64_t place = number * cache.heads + head;
    keys = (const Element*)cache.keys + place * cache.dim * cache.block;
    values = (const Element*)cache.values + place * cache.block * cache.vdim;
    if (!same<Type, I8>) return;
    key_scales = cache.key_scales + place * cache.block;
    value_scales = cache.value_scales + place * cache.block;
  }
};

// f(block, the next one, its first position, tokens [begin, end) of [from, to) that see some of it), for the blocks of the stretch
// that starts at position `first`.
template <class Type, class F>
void each_block(const Tile& tile, const SdpaArgs& args, int64_t first, int64_t from, int64_t to, F f) {
  const Cache& cache = *args.cache;
  const int64_t last = tile.position + tile.tokens;
  int64_t begin = from, end = from;
  for (int64_t start = first; start < first + tile.stretch && start < last; start += cache.block) {
    while (begin < to && tile.position + begin < start) begin++;
    if (end < begin) end = begin;
    while (end < to && visible(args, tile.position + end).first < start + cache.block) end++;
    if (begin == end) continue;
    const int64_t index = start / cache.block, after = start + cache.block < last ? index + 1 : index;
    f(Block<Type>(cache, tile.blocks[index], tile.kv), Block<Type>(cache, tile.blocks[after], tile.kv), start, begin, end);
  }
}

// out += weights · values, each token with the values that it sees; tokens that see the same of a block go together.
template <class Type>
void add_values(const Tile& tile, const SdpaArgs& args, int64_t first, const Block<Type>& here, const Block<Type>& next, int64_t start,
                int64_t begin, int64_t end) {
  const int64_t block = args.cache->block, vdim = args.cache->vdim;
  for (int64_t t = begin, after; t < end; t = after) {
    const Range seen = within(visible(args, tile.position + t), start, block);
    for (after = t + 1; after < end && within(visible(args, tile.position + after), start, block) == seen;) after++;
    const int64_t row = t * tile.heads, skipped = seen.first * vdim;
    product(Product<Type>{tile.weights + row * tile.stretch + start - first + seen.first, here.values + skipped,
                          tile.out + row * tile.out_stride, true, next.values + skipped, seen.after - seen.first, tile.stretch, vdim,
                          tile.out_stride},
            (after - t) * tile.heads, vdim);
  }
}

// Tokens [from, to), which see keys in the stretch that starts at position `first`.
template <class Type> void attend_stretch(const Tile& tile, const SdpaArgs& args, int64_t first, int64_t from, int64_t to) {
  const Cache& cache = *args.cache;
  each_block<Type>(tile, args, first, from, to,
                   [&](const Block<Type>& here, const Block<Type>& next, int64_t start, int64_t begin, int64_t end) {
    const int64_t row = begin * tile.heads, seen = within(visible(args, tile.position + end - 1), start, cache.block).after;
    product(Product<Type>{tile.q + row * cache.dim, here.keys, tile.weights + row * tile.stretch + start - first, false, next.keys,
                          cache.dim, cache.dim, cache.block, tile.stretch},
            (end - begin) * tile.heads, whole_vectors(seen));
    if (!here.key_scales) return;
    memcpy(tile.key_scales + start - first, here.key_scales, cache.block * sizeof(float));
    memcpy(tile.value_scales + start - first, here.value_scales, cache.block * sizeof(float));
  });
  soften(tile, args, first, from, to, same<Type, I8>);
  each_block<Type>(tile, args, first, from, to,
                   [&](const Block<Type>& here, const Block<Type>& next, int64_t start, int64_t begin, int64_t end) {
    add_values(tile, args, first, here, next, start, begin, end);
  });
}

inline void finish(const Tile& tile, const SdpaArgs& args, const Step& step) {
  const int64_t vdim = args.cache->vdim, stride = args.out.strides[1];
  for (int64_t r = 0; r < tile.tokens * tile.heads; r++) {
    float* row = tile.out + r * tile.out_stride;
    const vf total = set1(sum(load(tile.total + r * LANES)));
    for (int64_t n = 0; n < vdim; n += LANES) store(row + n, load(row + n) / total);
    float* out = at(args.out, step, tile.token + r / tile.heads) + (tile.head + r % tile.heads) * args.out.strides[0];
    if (stride == 1) memcpy(out, row, vdim * sizeof(float));
    else for (int64_t n = 0; n < vdim; n++) out[n * stride] = row[n];
  }
}

template <class Type> void attend_tile(Tile& tile, const SdpaArgs& args, const Step& step, Scratch& scratch) {
  place(tile, *args.cache, scratch);
  start(tile, args, step);
  int64_t from = 0, to = 0;  // the tokens that see the stretch: both only grow
  for (int64_t first = visible(args, tile.position).first / tile.stretch * tile.stretch; first < tile.position + tile.tokens; first += tile.stretch) {
    while (tile.position + from < first) from++;
    while (to < tile.tokens && visible(args, tile.position + to).first < first + tile.stretch) to++;
    if (from < to) attend_stretch<Type>(tile, args, first, from, to);
  }
  finish(tile, args, step);
}

// ---------------------------------------------------------------------------------------------------- units

// How the work is cut: heads of a unit, units for each key head, tokens of a unit.
struct Cut {
  int64_t heads, parts, tokens, group, key_heads;
  explicit Cut(const SdpaArgs& args) : key_heads(args.cache->heads) {
    group = args.q.sizes[0] / key_heads;
    parts = (group + TILE_ROWS - 1) / TILE_ROWS;
    heads = (group + parts - 1) / parts;
    parts = (group + heads - 1) / heads;
    tokens = TILE_ROWS / heads;
  }
  int64_t tiles(const Span& span) const { return (span.count + tokens - 1) / tokens; }
  int64_t units(const Span& span) const { return key_heads * parts * tiles(span); }
};

template <class Type> void sdpa_units_of(const SdpaArgs& args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const Cut cut(args);
  each_unit(step, begin, end, [&](const Span& span) { return cut.units(span); }, [&](const Span& span, int64_t piece) {
    const int64_t tiles = cut.tiles(span), first = piece % tiles * cut.tokens, part = piece / tiles % cut.parts;
    Tile tile;
    tile.kv = piece / tiles / cut.parts;
    tile.token = span.start + first;
    tile.position = span.past + first;
    tile.tokens = span.count - first < cut.tokens ? span.count - first : cut.tokens;
    tile.head = tile.kv * cut.group + part * cut.heads;
    tile.heads = part + 1 < cut.parts ? cut.heads : cut.group - part * cut.heads;
    tile.blocks = step.block_table + span.blocks;
    attend_tile<Type>(tile, args, step, scratch);
  });
}

static int64_t sdpa_units(const void* args, const Step& step) {
  const Cut cut(*(const SdpaArgs*)args);
  return count_units(step, [&](const Span& span) { return cut.units(span); });
}

static void sdpa_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const SdpaArgs& a = *(const SdpaArgs*)args;
  switch (a.cache->type) {
    case KV_F32: return sdpa_units_of<F32>(a, step, begin, end, scratch);
    case KV_F16: return sdpa_units_of<F16>(a, step, begin, end, scratch);
    case KV_BF16: return sdpa_units_of<BF16>(a, step, begin, end, scratch);
    default: return sdpa_units_of<I8>(a, step, begin, end, scratch);
  }
}

static const Kernel sdpa_kernel = {sdpa_units, sdpa_run};

}  // namespace attention
using attention::sdpa_kernel;
using attention::store_kv_kernel;
}  // namespace
}  // namespace inferflow
