// Tiles in plain C++: the definition that the other instruction sets are tested against.
// A panel is a decoded tile: int8 [groups, group / 4 steps, 64], a weight less PANEL_OFFSET in each byte.
#pragma once
#include "matmul_common.h"

namespace inferflow {
namespace {

constexpr int PANEL_OFFSET = 0;      // what is added to the weights of PAIR formats in a panel
constexpr int BLOCKS[] = {4, 2, 1};  // rows of a batch that one dot() takes
constexpr int direct_rows(int) { return 0; }  // always by way of the panel
constexpr bool NEGATED = false;

struct Table {
  const uint8_t* entries;
  explicit Table(const uint8_t* codebook) : entries(codebook) {}
};
template <int FORMAT>
using Decoder = std::conditional_t<is_pair(FORMAT), Table, NoTable>;

// 64 codes a step, two weights each.
template <int FORMAT>
inline void decode_group(const Decoder<FORMAT>& decoder, const uint8_t* codes, int64_t group, uint8_t* panel) {
  if constexpr (FORMAT == KEPT4) {
    for (int64_t step = 0; step < group / 4; step++)
      for (int lane = 0; lane < 64; lane++) panel[step * 64 + lane] = codes[step / 2 * 64 + lane] >> (step & 1) * 4 & 15;
  } else {
    constexpr int P = planes(FORMAT), ENTRIES = 16 << (P - 2);
    for (int step = 0; step < 8; step++)
      for (int lane = 0; lane < 64; lane++) {
        int bit[4], index = codes[step / 2 * 64 + lane] >> (step & 1) * 4 & 15;
        for (int p = 0; p < P; p++) bit[p] = codes[256 + 64 * p + lane] >> step & 1;
        for (int p = 2; p < P; p++) index |= bit[p] << (p + 2);
        const int x = decoder.entries[index], y = decoder.entries[ENTRIES + index];
        panel[step * 128 + lane] = (uint8_t)(bit[0] ? -x : x);
        panel[step * 128 + 64 + lane] = (uint8_t)(bit[1] ? -y : y);
      }
  }
}

// f [T][16] = one tile times T quantised rows. panel: as decode_group leaves it, or the codes of a format that is not packed.
template <int FORMAT, int T>
inline void dot(const Tile& tile, const uint8_t* panel, int64_t groups, int64_t group, const Quantised* a, float* f) {
  const int8_t* w = reinterpret_cast<const int8_t*>(panel);
  memset(f, 0, T * TILE * 4);
  for (int64_t g = 0; g < groups; g++, w += group * TILE)
    for (int t = 0; t < T; t++) {
      int32_t sums[64] = {};
      for (int64_t step = 0; step < group / 4; step++) {
        int8_t spread[64];
        for (int n = 0; n < 64; n += 4) memcpy(spread + n, a[t].values + g * group + step * 4, 4);
        for (int n = 0; n < 64; n++) sums[n] += (int16_t)(w[step * 64 + n] * spread[n]);
      }
      int32_t whole[TILE];
      for (int r = 0; r < TILE; r++) whole[r] = sums[4 * r] + sums[4 * r + 1] + sums[4 * r + 2] + sums[4 * r + 3];
      for (int r = 0; r < TILE; r += LANES) {
        vi sum;
        memcpy(&sum, whole + r, sizeof sum);
        store(f + t * TILE + r, add_group<FORMAT>(load(f + t * TILE + r), sum, tile, g, r, a[t].scales[g], a[t].sums[g]));
      }
    }
}

}  // namespace
}  // namespace inferflow
