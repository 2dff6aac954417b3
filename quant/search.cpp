// The hot loops of quantisation: scale search and encoding of groups, and Hadamard rotation. `solve.py` and `rotation.py` define
// what each computes, operation by operation; this repeats them with 16 rows side by side, so every machine gives the same
// bits (hence no fused multiply-add: build with -ffp-contract=off). The library knows arrays only, and keeps no state.
//
//   g++ -O3 -std=c++17 -shared -fPIC -pthread -ffp-contract=off -fno-math-errno -Wno-psabi search.cpp -o _search.so
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int GROUP = 64, PAIRS = 32, ROWS = 16, MOST_POINTS = 64;
constexpr uint8_t X_NEGATIVE = 64, Y_NEGATIVE = 128;

typedef float Eight __attribute__((vector_size(32)));
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

// One group: z and, for a full factor, Σ_{j<=k} z_j R_jk, which no choice changes. factor: [64, 64], or [64] when diagonal.
struct Group {
  Lanes z[GROUP], whole[GROUP];
  const float* factor;
  bool full;
};

struct Result {
  Lanes error[GROUP];
  Lanes loss, fitted;
  alignas(32) float scratch[ROWS];
  uint8_t codes[PAIRS][ROWS];
};

INLINE Eight splat(float x) { return Eight{x, x, x, x, x, x, x, x}; }
INLINE Eight select(Mask m, Eight a, Eight b) { return m ? a : b; }
INLINE Eight absolute(Eight a) { return (Eight)((Mask)a & 0x7fffffff); }
INLINE Eight smaller(Eight a, Eight b) { return a < b ? a : b; }
INLINE Eight larger(Eight a, Eight b) { return a < b ? b : a; }

INLINE void load(const Table& table, const float* factor, bool full, int i, float* u, float* v, float* w) {
  const float a = full ? factor[i * GROUP + i] : factor[i], b = full ? factor[i * GROUP + i + 1] : 0;
  const float c = full ? factor[(i + 1) * GROUP + i + 1] : factor[i + 1];
  for (int64_t k = 0; k < table.points; ++k) u[k] = a * table.x[k], v[k] = b * table.x[k], w[k] = c * table.y[k];
}

// The indices of the points nearest to x, y: the sign of x that gives less is found again afterwards.
INLINE void nearest(const Lanes& x, const Lanes& y, bool full, int64_t points, const float* u, const float* v, const float* w,
                    Mask index[HALVES]) {
  Eight best[HALVES], ax[HALVES], ay[HALVES];
  for (int h = 0; h < HALVES; ++h) {
    best[h] = splat(std::numeric_limits<float>::infinity());
    index[h] = Mask{};
    ax[h] = absolute(x.half[h]);
    ay[h] = absolute(y.half[h]);
  }
  for (int64_t k = 0; k < points; ++k) {
    const Eight uk = splat(u[k]), vk = splat(v[k]), wk = splat(w[k]);
    const Mask number = Mask{} + (int32_t)k;
    for (int h = 0; h < HALVES; ++h) {
      Eight value;
      if (full) {
        const Eight up_x = x.half[h] - uk, down_x = x.half[h] + uk;
        const Eight up_y = absolute(y.half[h] - vk) - wk, down_y = absolute(y.half[h] + vk) - wk;
        value = smaller(up_x * up_x + up_y * up_y, down_x * down_x + down_y * down_y);
      } else {  // the sign is that of x, and |x| gives the same bits
        const Eight dx = ax[h] - uk, dy = ay[h] - wk;
        value = dx * dx + dy * dy;
      }
      const Mask better = value < best[h];
      index[h] = better ? number : index[h];
      best[h] = smaller(value, best[h]);
    }
  }
}

// What the earlier pairs of the group left over goes to all later columns.
INLINE void spread(Lanes* left, const float* factor, int i, const Lanes& ex, const Lanes& ey) {
  for (int k = i + 2; k < GROUP; ++k) {
    const Eight rx = splat(factor[i * GROUP + k]), ry = splat(factor[(i + 1) * GROUP + k]);
    for (int h = 0; h < HALVES; ++h) {
      left[k].half[h] = left[k].half[h] + rx * ex.half[h];
      left[k].half[h] = left[k].half[h] + ry * ey.half[h];
    }
  }
}

INLINE void encode_group(const Group& group, const Lanes& scale, const Table& table, Result& out) {
  Lanes left[GROUP], inverse, cross, power;
  std::memset(left, 0, sizeof left);
  const Eight zero = splat(0), one = splat(1);
  for (int h = 0; h < HALVES; ++h) {
    inverse.half[h] = scale.half[h] > zero ? one / scale.half[h] : zero;
    cross.half[h] = power.half[h] = out.loss.half[h] = zero;
  }
  for (int i = 0; i < GROUP; i += 2) {
    float u[MOST_POINTS], v[MOST_POINTS], w[MOST_POINTS];
    load(table, group.factor, group.full, i, u, v, w);
    const float *f = group.factor, *g = f + i * GROUP;
    const Eight a = splat(group.full ? g[i] : f[i]), b = splat(group.full ? g[i + 1] : 0);
    const Eight c = splat(group.full ? g[GROUP + i + 1] : f[i + 1]);
    const Lanes &zx = group.z[i], &zy = group.z[i + 1];
    Lanes x, y, ex, ey;
    for (int h = 0; h < HALVES; ++h) {
      x.half[h] = (zx.half[h] * a + left[i].half[h]) * inverse.half[h];
      y.half[h] = ((zx.half[h] * b + zy.half[h] * c) + left[i + 1].half[h]) * inverse.half[h];
    }
    Mask index[HALVES];
    nearest(x, y, group.full, table.points, u, v, w, index);
    for (int h = 0; h < HALVES; ++h) {
      Eight uk, vk, wk, qx, qy;
      for (int l = 0; l < 8; ++l) {
        const int k = index[h][l];
        uk[l] = u[k], vk[l] = v[k], wk[l] = w[k], qx[l] = table.x[k], qy[l] = table.y[k];
      }
      const Eight up_x = x.half[h] - uk, up_y = absolute(y.half[h] - vk) - wk;
      const Eight down_x = x.half[h] + uk, down_y = absolute(y.half[h] + vk) - wk;
      const Mask x_negative = down_x * down_x + down_y * down_y < up_x * up_x + up_y * up_y;
      const Mask y_negative = select(x_negative, y.half[h] + vk, y.half[h] - vk) < zero;
      const Mask code = index[h] + (x_negative & X_NEGATIVE) + (y_negative & Y_NEGATIVE);
      for (int l = 0; l < 8; ++l) out.codes[i / 2][h * 8 + l] = (uint8_t)code[l];
      ex.half[h] = zx.half[h] - scale.half[h] * select(x_negative, -qx, qx);
      ey.half[h] = zy.half[h] - scale.half[h] * select(y_negative, -qy, qy);
      const Eight rest_x = ex.half[h] * a + left[i].half[h];
      const Eight rest_y = (ex.half[h] * b + ey.half[h] * c) + left[i + 1].half[h];
      const Eight all_x = group.whole[i].half[h], all_y = group.whole[i + 1].half[h];
      const Eight made_x = all_x - rest_x, made_y = all_y - rest_y;
      out.loss.half[h] = out.loss.half[h] + (rest_x * rest_x + rest_y * rest_y);
      cross.half[h] = cross.half[h] + (all_x * made_x + all_y * made_y);
      power.half[h] = power.half[h] + (made_x * made_x + made_y * made_y);
    }
    out.error[i] = ex, out.error[i + 1] = ey;
    if (group.full) spread(left, f, i, ex, ey);
  }
  for (int h = 0; h < HALVES; ++h) {
    const Eight ratio = power.half[h] > zero ? cross.half[h] / power.half[h] : one;
    out.fitted.half[h] = scale.half[h] * larger(ratio, zero);
  }
}

INLINE void begin(Group& group, const float* w, int64_t stride, const float* factor, bool full) {
  group.factor = factor;
  group.full = full;
  for (int j = 0; j < GROUP; ++j)
    for (int r = 0; r < ROWS; ++r) group.z[j].half[r / 8][r % 8] = w[r * stride + j];
  std::memset(group.whole, 0, sizeof group.whole);
  for (int i = 0; i < GROUP; i += 2) {
    const float *f = factor, *g = f + i * GROUP;
    const Eight a = splat(full ? g[i] : f[i]), b = splat(full ? g[i + 1] : 0);
    const Eight c = splat(full ? g[GROUP + i + 1] : f[i + 1]);
    const Lanes &zx = group.z[i], &zy = group.z[i + 1];
    for (int h = 0; h < HALVES; ++h) {
      group.whole[i].half[h] = group.whole[i].half[h] + zx.half[h] * a;
      group.whole[i + 1].half[h] = group.whole[i + 1].half[h] + (zx.half[h] * b + zy.half[h] * c);
    }
    if (full) spread(group.whole, f, i, zx, zy);
  }
}

struct Tries {
  const float* parts;
  int64_t candidates, refits;
  float deviation, narrow, wide, most;
};

// The smallest and the largest scale to try.
INLINE void range(const Group& group, const Tries& tries, Lanes& low, Lanes& high) {
  float total = 0;
  Lanes power{}, largest{};
  for (int j = 0; j < GROUP; ++j) {
    const float weight = group.factor[group.full ? j * GROUP + j : j];
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
    float& s = scale.half[r / 8][r % 8];
    s = grid[r] > 0 ? std::min(std::nearbyint(s / grid[r]), 255.0f) * grid[r] : 0;
  }
  return scale;
}

INLINE Lanes search(const Group& group, const Tries& tries, const float* grid, const Table& table, Result& result) {
  Lanes low, high, best, chosen{};
  range(group, tries, low, high);
  Lanes fitted = low;
  for (int h = 0; h < HALVES; ++h) best.half[h] = splat(std::numeric_limits<float>::infinity());
  for (int64_t attempt = 0; attempt < tries.candidates + tries.refits; ++attempt) {
    Lanes scale = fitted;
    if (attempt < tries.candidates) {
      const Eight part = splat(tries.parts[attempt]);
      for (int h = 0; h < HALVES; ++h) scale.half[h] = low.half[h] + (high.half[h] - low.half[h]) * (part * part);
    }
    scale = snap(scale, grid);
    encode_group(group, scale, table, result);
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
CLONES void search_tile(const float* w, int64_t columns, const float* factor, bool full, const Table& table, const Tries& tries,
                        const float* grid, float* scales) {
  Group group;
  Result result;
  const int64_t groups = columns / GROUP;
  for (int64_t g = 0; g < groups; ++g) {
    begin(group, w + g * GROUP, columns, factor + (full ? 0 : g * GROUP), full);
    const Lanes chosen = search(group, tries, grid, table, result);
    for (int r = 0; r < ROWS; ++r) scales[r * groups + g] = chosen.half[r / 8][r % 8];
  }
}

CLONES void encode_tile(const float* w, int64_t columns, const float* factor, bool full, const Table& table,
                        const float* scales, uint8_t* codes, float* error) {
  Group group;
  Result result;
  const int64_t groups = columns / GROUP;
  for (int64_t g = 0; g < groups; ++g) {
    begin(group, w + g * GROUP, columns, factor + (full ? 0 : g * GROUP), full);
    Lanes scale;
    for (int r = 0; r < ROWS; ++r) scale.half[r / 8][r % 8] = scales[r * groups + g];
    encode_group(group, scale, table, result);
    for (int r = 0; r < ROWS; ++r) {
      for (int p = 0; p < PAIRS; ++p) codes[r * columns / 2 + g * PAIRS + p] = result.codes[p][r];
      for (int j = 0; j < GROUP; ++j) error[r * columns + g * GROUP + j] = result.error[j].half[r / 8][r % 8];
    }
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

// rows: a multiple of 16; columns: of 64. full: factor is [64, 64] and columns 64, otherwise factor is [columns].
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

extern "C" void hadamard(float* x, int64_t blocks, int64_t width, int64_t threads) {
  const float norm = (float)(1 / std::sqrt((double)width));
  const int64_t batch = std::max<int64_t>(1, 65536 / width);
  spread_units((blocks + batch - 1) / batch, threads, [&](int64_t unit) {
    for (int64_t b = unit * batch; b < std::min(blocks, (unit + 1) * batch); ++b) hadamard_block(x + b * width, width, norm);
  });
}
