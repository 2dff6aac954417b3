// The hot loops of quantisation: scale search and encoding of groups, products, Hadamard rotation. `solve.py` and `rotation.py` define
// what each computes, operation by operation; this repeats them with 16 rows side by side, so every machine gives the same
// bits (hence no fused multiply-add: build with -ffp-contract=off). The library knows arrays only, and keeps no state.
//
//   g++ -O3 -std=c++17 -shared -fPIC -pthread -ffp-contract=off -fno-math-errno search.cpp -o _search.so
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a call that is not inlined
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int GROUP = 64, PAIRS = 32, ROWS = 16, MOST_POINTS = 64;
constexpr uint8_t X_NEGATIVE = 64, Y_NEGATIVE = 128;

typedef float Eight __attribute__((vector_size(32)));
typedef float Anywhere __attribute__((vector_size(32), aligned(4)));
typedef int32_t Mask __attribute__((vector_size(32)));
constexpr int HALVES = 2;

// One number of each of the 16 rows.
struct Lanes {
  Eight half[HALVES];
};

struct Table {
  int64_t points;
  float x[MOST_POINTS], y[MOST_POINTS];
};

// One group: z and Σ_{j<=k} z_j R_jk, which no choice changes. factor: Rᵀ [64, 64], so that a column of R is contiguous, or the
// diagonal [64] (then FULL is false in what follows).
struct Group {
  Lanes z[GROUP], whole[GROUP];
  const float* factor;
};

struct Result {
  Lanes error[GROUP];
  Lanes loss, fitted;
  uint8_t codes[PAIRS][ROWS];
};

// Row by row.
INLINE float* numbers(Lanes& lanes) { return (float*)&lanes; }

INLINE Eight splat(float x) { return Eight{x, x, x, x, x, x, x, x}; }
INLINE Eight select(Mask m, Eight a, Eight b) { return m ? a : b; }
INLINE Eight absolute(Eight a) { return (Eight)((Mask)a & 0x7fffffff); }
INLINE Eight smaller(Eight a, Eight b) { return a < b ? a : b; }
INLINE Eight larger(Eight a, Eight b) { return a < b ? b : a; }

// The factor's share in one pair: (x, y) counts (x a, x b + y c).
struct Pair {
  float a, b, c;
};

template <bool FULL>
INLINE Pair pair_of(const float* factor, int i) {
  if (!FULL) return {factor[i], 0, factor[i + 1]};
  return {factor[i * GROUP + i], factor[(i + 1) * GROUP + i], factor[(i + 1) * GROUP + i + 1]};
}

INLINE Lanes first(const Pair& pair, const Lanes& x) {
  Lanes out;
  for (int h = 0; h < HALVES; ++h) out.half[h] = x.half[h] * splat(pair.a);
  return out;
}

INLINE Lanes second(const Pair& pair, const Lanes& x, const Lanes& y) {
  Lanes out;
  for (int h = 0; h < HALVES; ++h) out.half[h] = x.half[h] * splat(pair.b) + y.half[h] * splat(pair.c);
  return out;
}

// Σ_{j<i} values_j R_jk for k = i and i + 1.
template <bool FULL>
INLINE void of_earlier(const Lanes* values, const float* factor, int i, Lanes& x, Lanes& y) {
  for (int h = 0; h < HALVES; ++h) x.half[h] = y.half[h] = Eight{};
  if (!FULL) return;
  const float *rx = factor + i * GROUP, *ry = rx + GROUP;
  for (int j = 0; j < i; ++j)
    for (int h = 0; h < HALVES; ++h) {
      x.half[h] = x.half[h] + splat(rx[j]) * values[j].half[h];
      y.half[h] = y.half[h] + splat(ry[j]) * values[j].half[h];
    }
}

// Squared distances of (x, y) to a point with positive and with negative qx, each with the better sign of qy.
INLINE void distances(Eight x, Eight y, Eight u, Eight v, Eight w, Eight& up, Eight& down) {
  const Eight up_x = x - u, down_x = x + u;
  const Eight up_y = absolute(y - v) - w, down_y = absolute(y + v) - w;
  up = up_x * up_x + up_y * up_y;
  down = down_x * down_x + down_y * down_y;
}

// The indices of the points nearest to (x, y), whatever their signs.
template <bool FULL>
INLINE void nearest(const Lanes& x, const Lanes& y, const Pair& pair, const Table& table, Mask index[HALVES]) {
  float u[MOST_POINTS], v[MOST_POINTS], w[MOST_POINTS];
  for (int64_t k = 0; k < table.points; ++k) u[k] = pair.a * table.x[k];
  for (int64_t k = 0; FULL && k < table.points; ++k) v[k] = pair.b * table.x[k];
  for (int64_t k = 0; k < table.points; ++k) w[k] = pair.c * table.y[k];
  Eight best[HALVES], ax[HALVES], ay[HALVES];
  for (int h = 0; h < HALVES; ++h) {
    best[h] = splat(std::numeric_limits<float>::infinity());
    index[h] = Mask{};
    ax[h] = absolute(x.half[h]);
    ay[h] = absolute(y.half[h]);
  }
  Mask number{};
  for (int64_t k = 0; k < table.points; ++k, number += 1) {
    const Eight uk = splat(u[k]), vk = splat(FULL ? v[k] : 0), wk = splat(w[k]);
    for (int h = 0; h < HALVES; ++h) {
      Eight value, down;
      if (FULL) {
        distances(x.half[h], y.half[h], uk, vk, wk, value, down);
        value = smaller(value, down);
      } else {  // the signs are those of x and y, and these are the same bits
        const Eight dx = ax[h] - uk, dy = ay[h] - wk;
        value = dx * dx + dy * dy;
      }
      index[h] = value < best[h] ? number : index[h];
      best[h] = smaller(value, best[h]);
    }
  }
}

// The signed points of these indices: their codes, and their coordinates.
INLINE void choose(const Lanes& x, const Lanes& y, const Pair& pair, const Table& table, const Mask index[HALVES], uint8_t* codes,
                   Lanes& qx, Lanes& qy) {
  for (int h = 0; h < HALVES; ++h) {
    for (int l = 0; l < 8; ++l) qx.half[h][l] = table.x[index[h][l]], qy.half[h][l] = table.y[index[h][l]];
    const Eight u = splat(pair.a) * qx.half[h], v = splat(pair.b) * qx.half[h], w = splat(pair.c) * qy.half[h];
    Eight up, down;
    distances(x.half[h], y.half[h], u, v, w, up, down);
    const Mask x_negative = down < up;
    const Mask y_negative = select(x_negative, y.half[h] + v, y.half[h] - v) < Eight{};
    const Mask code = index[h] + (x_negative & X_NEGATIVE) + (y_negative & Y_NEGATIVE);
    for (int l = 0; l < 8; ++l) codes[h * 8 + l] = (uint8_t)code[l];
    qx.half[h] = select(x_negative, -qx.half[h], qx.half[h]);
    qy.half[h] = select(y_negative, -qy.half[h], qy.half[h]);
  }
}

template <bool FULL>
INLINE void encode_group(const Group& group, const Lanes& scale, const Table& table, Result& out) {
  Lanes inverse, cross{}, power{};
  for (int h = 0; h < HALVES; ++h) {
    inverse.half[h] = scale.half[h] > Eight{} ? splat(1) / scale.half[h] : Eight{};
    out.loss.half[h] = Eight{};
  }
  for (int i = 0; i < GROUP; i += 2) {
    const Pair pair = pair_of<FULL>(group.factor, i);
    const Lanes &zx = group.z[i], &zy = group.z[i + 1], own_x = first(pair, zx), own_y = second(pair, zx, zy);
    Lanes left_x, left_y, x, y, qx, qy;
    of_earlier<FULL>(out.error, group.factor, i, left_x, left_y);
    for (int h = 0; h < HALVES; ++h) {
      x.half[h] = (own_x.half[h] + left_x.half[h]) * inverse.half[h];
      y.half[h] = (own_y.half[h] + left_y.half[h]) * inverse.half[h];
    }
    Mask index[HALVES];
    nearest<FULL>(x, y, pair, table, index);
    choose(x, y, pair, table, index, out.codes[i / 2], qx, qy);
    Lanes &ex = out.error[i], &ey = out.error[i + 1];
    for (int h = 0; h < HALVES; ++h) {
      ex.half[h] = zx.half[h] - scale.half[h] * qx.half[h];
      ey.half[h] = zy.half[h] - scale.half[h] * qy.half[h];
    }
    const Lanes made_x = first(pair, ex), made_y = second(pair, ex, ey);
    for (int h = 0; h < HALVES; ++h) {
      const Eight rest_x = made_x.half[h] + left_x.half[h], rest_y = made_y.half[h] + left_y.half[h];
      const Eight all_x = group.whole[i].half[h], all_y = group.whole[i + 1].half[h];
      const Eight got_x = all_x - rest_x, got_y = all_y - rest_y;
      out.loss.half[h] = out.loss.half[h] + (rest_x * rest_x + rest_y * rest_y);
      cross.half[h] = cross.half[h] + (all_x * got_x + all_y * got_y);
      power.half[h] = power.half[h] + (got_x * got_x + got_y * got_y);
    }
  }
  for (int h = 0; h < HALVES; ++h) {
    const Eight ratio = power.half[h] > Eight{} ? cross.half[h] / power.half[h] : splat(1);
    out.fitted.half[h] = scale.half[h] * larger(ratio, Eight{});
  }
}

template <bool FULL>
INLINE void begin(Group& group, const float* w, int64_t stride, const float* factor) {
  group.factor = factor;
  for (int j = 0; j < GROUP; ++j)
    for (int r = 0; r < ROWS; ++r) numbers(group.z[j])[r] = w[r * stride + j];
  for (int i = 0; i < GROUP; i += 2) {
    const Pair pair = pair_of<FULL>(factor, i);
    const Lanes own_x = first(pair, group.z[i]), own_y = second(pair, group.z[i], group.z[i + 1]);
    Lanes left_x, left_y;
    of_earlier<FULL>(group.z, factor, i, left_x, left_y);
    for (int h = 0; h < HALVES; ++h) {
      group.whole[i].half[h] = left_x.half[h] + own_x.half[h];
      group.whole[i + 1].half[h] = left_y.half[h] + own_y.half[h];
    }
  }
}

struct Tries {
  const float* parts;
  int64_t candidates, refits;
  float deviation, narrow, wide, most;
};

// The smallest and the largest scale to try.
template <bool FULL>
INLINE void range(const Group& group, const Tries& tries, Lanes& low, Lanes& high) {
  float total = 0;
  Lanes power{}, largest{};
  for (int j = 0; j < GROUP; ++j) {
    const float weight = group.factor[FULL ? j * GROUP + j : j];
    if (!(weight > 0)) continue;
    total += weight * weight;
    for (int h = 0; h < HALVES; ++h) {
      const Eight z = group.z[j].half[h], weighted = splat(weight) * z;
      power.half[h] = power.half[h] + weighted * weighted;
      largest.half[h] = larger(largest.half[h], absolute(z));
    }
  }
  for (int h = 0; h < HALVES; ++h) {
    Eight usual = power.half[h];
    if (total > 0)
      for (int l = 0; l < 8; ++l) usual[l] = std::sqrt(usual[l] / total) / tries.deviation;
    low.half[h] = usual * splat(tries.narrow);
    high.half[h] = larger(usual * splat(tries.wide), largest.half[h] / splat(tries.most));
  }
}

INLINE Lanes snap(Lanes scale, const float* grid) {
  if (!grid) return scale;
  for (int r = 0; r < ROWS; ++r) {
    float& s = numbers(scale)[r];
    s = grid[r] > 0 ? std::min(std::nearbyint(s / grid[r]), 255.0f) * grid[r] : 0;
  }
  return scale;
}

template <bool FULL>
INLINE Lanes search(const Group& group, const Tries& tries, const float* grid, const Table& table, Result& result) {
  Lanes low, high, best, chosen{};
  range<FULL>(group, tries, low, high);
  Lanes fitted = low;
  for (int h = 0; h < HALVES; ++h) best.half[h] = splat(std::numeric_limits<float>::infinity());
  for (int64_t attempt = 0; attempt < tries.candidates + tries.refits; ++attempt) {
    Lanes scale = fitted;
    if (attempt < tries.candidates) {
      const Eight part = splat(tries.parts[attempt]);
      for (int h = 0; h < HALVES; ++h) scale.half[h] = low.half[h] + (high.half[h] - low.half[h]) * (part * part);
    }
    scale = snap(scale, grid);
    encode_group<FULL>(group, scale, table, result);
    for (int h = 0; h < HALVES; ++h) {
      const Mask better = result.loss.half[h] < best.half[h];
      best.half[h] = select(better, result.loss.half[h], best.half[h]);
      chosen.half[h] = select(better, scale.half[h], chosen.half[h]);
      fitted.half[h] = select(better, result.fitted.half[h], fitted.half[h]);
    }
  }
  return chosen;
}

// 16 rows of a matrix of `columns`; one scale a group and row.
template <bool FULL>
INLINE void search_rows(const float* w, int64_t columns, const float* factor, const Table& table, const Tries& tries,
                        const float* grid, float* scales) {
  Group group;
  Result result;
  const int64_t groups = columns / GROUP;
  for (int64_t g = 0; g < groups; ++g) {
    begin<FULL>(group, w + g * GROUP, columns, factor + (FULL ? 0 : g * GROUP));
    Lanes chosen = search<FULL>(group, tries, grid, table, result);
    for (int r = 0; r < ROWS; ++r) scales[r * groups + g] = numbers(chosen)[r];
  }
}

template <bool FULL>
INLINE void encode_rows(const float* w, int64_t columns, const float* factor, const Table& table, const float* scales,
                        uint8_t* codes, float* error) {
  Group group;
  Result result;
  const int64_t groups = columns / GROUP;
  for (int64_t g = 0; g < groups; ++g) {
    begin<FULL>(group, w + g * GROUP, columns, factor + (FULL ? 0 : g * GROUP));
    Lanes scale;
    for (int r = 0; r < ROWS; ++r) numbers(scale)[r] = scales[r * groups + g];
    encode_group<FULL>(group, scale, table, result);
    for (int r = 0; r < ROWS; ++r) {
      for (int p = 0; p < PAIRS; ++p) codes[r * columns / 2 + g * PAIRS + p] = result.codes[p][r];
      for (int j = 0; j < GROUP; ++j) error[r * columns + g * GROUP + j] = numbers(result.error[j])[r];
    }
  }
}

CLONES void search_tile(const float* w, int64_t columns, const float* factor, bool full, const Table& table, const Tries& tries,
                        const float* grid, float* scales) {
  full ? search_rows<true>(w, columns, factor, table, tries, grid, scales)
       : search_rows<false>(w, columns, factor, table, tries, grid, scales);
}

CLONES void encode_tile(const float* w, int64_t columns, const float* factor, bool full, const Table& table,
                        const float* scales, uint8_t* codes, float* error) {
  full ? encode_rows<true>(w, columns, factor, table, scales, codes, error)
       : encode_rows<false>(w, columns, factor, table, scales, codes, error);
}

// 16 rows of out = a · b, with b [depth, 64]. Slices of b stay in the cache while all rows pass.
CLONES void product_tile(const float* a, int64_t stride, int64_t depth, const float* b, float* out) {
  constexpr int64_t DEEP = 512;
  std::fill(out, out + ROWS * GROUP, 0.0f);
  for (int64_t start = 0; start < depth; start += DEEP)
    for (int row = 0; row < ROWS; row += 2)
      for (int column = 0; column < GROUP; column += 32) {
        const float *first = a + row * stride, *second = first + stride;
        Anywhere *x = (Anywhere*)(out + row * GROUP + column), *y = (Anywhere*)(out + (row + 1) * GROUP + column);
        Eight x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3], y0 = y[0], y1 = y[1], y2 = y[2], y3 = y[3];
        for (int64_t k = start; k < std::min(depth, start + DEEP); ++k) {
          const Anywhere* line = (const Anywhere*)(b + k * GROUP + column);
          const Eight b0 = line[0], b1 = line[1], b2 = line[2], b3 = line[3];
          x0 += first[k] * b0, x1 += first[k] * b1, x2 += first[k] * b2, x3 += first[k] * b3;
          y0 += second[k] * b0, y1 += second[k] * b1, y2 += second[k] * b2, y3 += second[k] * b3;
        }
        x[0] = x0, x[1] = x1, x[2] = x2, x[3] = x3, y[0] = y0, y[1] = y1, y[2] = y2, y[3] = y3;
      }
}

CLONES void hadamard_block(float* x, int64_t width, float norm) {
  for (int64_t half = 1; half < width; half *= 2)
    for (int64_t start = 0; start < width; start += 2 * half)
      for (int64_t i = start; i < start + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  for (int64_t i = 0; i < width; ++i) x[i] *= norm;
}

// Calls work(unit) for all units, spread over the threads.
template <class Work>
void spread_units(int64_t units, int64_t threads, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t unit; (unit = next.fetch_add(1)) < units;) work(unit);
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < std::min(threads, units); ++t) others.emplace_back(run);
  run();
  for (auto& thread : others) thread.join();
}

Table widen(const uint8_t* table, int64_t points) {
  Table wide{};
  wide.points = points;
  for (int64_t k = 0; k < points; ++k) wide.x[k] = table[k], wide.y[k] = table[points + k];
  return wide;
}

}  // namespace

// rows: a multiple of 16; columns: of 64. full: factor is Rᵀ [64, 64] and columns 64, otherwise factor is [columns].
extern "C" void find_scales(const float* w, const float* factor, const uint8_t* table, const float* grid, const float* parts,
                            float* scales, int64_t rows, int64_t columns, int64_t full, int64_t points, int64_t candidates,
                            int64_t refits, int64_t threads, float deviation, float narrow, float wide) {
  const Table points_of = widen(table, points);
  const float most = *std::max_element(table, table + 2 * points);
  const Tries tries{parts, candidates, refits, deviation, narrow, wide, most};
  spread_units(rows / ROWS, threads, [&](int64_t tile) {
    const int64_t row = tile * ROWS;
    search_tile(w + row * columns, columns, factor, full != 0, points_of, tries, grid ? grid + row : nullptr,
                scales + row * (columns / GROUP));
  });
}

extern "C" void encode(const float* w, const float* factor, const uint8_t* table, const float* scales, uint8_t* codes,
                       float* error, int64_t rows, int64_t columns, int64_t full, int64_t points, int64_t threads) {
  const Table points_of = widen(table, points);
  spread_units(rows / ROWS, threads, [&](int64_t tile) {
    const int64_t row = tile * ROWS;
    encode_tile(w + row * columns, columns, factor, full != 0, points_of, scales + row * (columns / GROUP),
                codes + row * (columns / 2), error + row * columns);
  });
}

// out [rows, 64] = a · b: a [rows, depth] with `stride` numbers between rows.
extern "C" void product(const float* a, const float* b, float* out, int64_t rows, int64_t depth, int64_t stride, int64_t threads) {
  spread_units(rows / ROWS, threads, [&](int64_t tile) {
    product_tile(a + tile * ROWS * stride, stride, depth, b, out + tile * ROWS * GROUP);
  });
}

extern "C" void hadamard(float* x, int64_t blocks, int64_t width, int64_t threads) {
  const float norm = (float)(1 / std::sqrt((double)width));
  const int64_t batch = std::max<int64_t>(1, 65536 / width);
  spread_units((blocks + batch - 1) / batch, threads, [&](int64_t unit) {
    for (int64_t b = unit * batch; b < std::min(blocks, (unit + 1) * batch); ++b) hadamard_block(x + b * width, width, norm);
  });
}
