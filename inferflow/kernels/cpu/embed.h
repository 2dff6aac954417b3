// OP_EMBED: rows of a table in any format, as floats. Integer formats: float(integer) · scale, times the row's scale or less the
// min, then rotated back (the orthonormal Hadamard matrix is its own inverse).
#pragma once
#include "matmul.h"

namespace inferflow {
namespace {

template <int FORMAT>
void embed_float(const Matrix& m, int64_t row, float* out) {
  widen<FORMAT>(static_cast<const uint8_t*>(m.codes) + row * m.cols * float_bytes<FORMAT>(), m.cols, out);
}

// x: [padded] floats of scratch; panel: [group · 16] bytes.
template <int FORMAT>
void embed_tile(const Matrix& m, int64_t row, float* out, float* x, uint8_t* panel) {
  const Tile tile = tile_of(m, 0, row / TILE);
  const int lane = row % TILE;
  const int64_t bytes = group_bytes(FORMAT, m.group);
  const Decoder<FORMAT> decoder(m.codebook);
  const float row_scale = m.row_scales ? m.row_scales[row] : 1.0f;
  for (int64_t g = 0; g < groups_of(m); g++) {
    const uint8_t* w = tile.codes + g * bytes;
    if constexpr (is_packed(FORMAT)) {
      decode_group<FORMAT>(decoder, w, m.group, panel);
      w = panel;
    }
    const float scale = is_kept(FORMAT) ? tile.scales[g * TILE + lane] : (float)tile.bytes[g * TILE + lane];
    for (int64_t c = 0; c < m.group; c++) {
      const int whole = (int8_t)w[c / 4 * 64 + lane * 4 + c % 4] - (is_pair(FORMAT) ? PANEL_OFFSET : 0);
      x[g * m.group + c] = (float)whole * scale * row_scale - (is_kept(FORMAT) && tile.mins ? tile.mins[g * TILE + lane] : 0.0f);
    }
  }
  if (m.rotation)
    for (int64_t c = 0; c < m.cols; c += m.rotation) hadamard(x + c, m.rotation);
  memcpy(out, x, m.cols * 4);
}

void embed_row(const Matrix& m, int64_t row, float* out, float* x, uint8_t* panel) {
  switch (m.format) {
    case F32: return embed_float<F32>(m, row, out);
    case F16: return embed_float<F16>(m, row, out);
    case BF16: return embed_float<BF16>(m, row, out);
    case PAIR6: return embed_tile<PAIR6>(m, row, out, x, panel);
    case PAIR7: return embed_tile<PAIR7>(m, row, out, x, panel);
    case PAIR8: return embed_tile<PAIR8>(m, row, out, x, panel);
    case Q8: return embed_tile<Q8>(m, row, out, x, panel);
    case KEPT4: return embed_tile<KEPT4>(m, row, out, x, panel);
    case KEPT7: return embed_tile<KEPT7>(m, row, out, x, panel);
    case KEPT8: return embed_tile<KEPT8>(m, row, out, x, panel);
  }
}

int64_t embed_units(const void* args, const Step& step) { return leading(static_cast<const EmbedArgs*>(args)->out, step); }

void embed_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const EmbedArgs& e = *static_cast<const EmbedArgs*>(args);
  const Matrix& m = *e.table;
  const int64_t floats = (m.padded + 15) / 16 * 64;
  uint8_t* space = scratch.get(floats + m.group * TILE);
  for (int64_t t = begin; t < end; t++) {
    float* out = at(e.out, step, t);
    double id = e.source == 2 ? std::nearbyint((double)*at(e.in, step, t)) : 0.0;
    if (e.source < 2) id = (double)(e.source == 0 ? step.ids[t] : step.positions[t]);
    id += (double)e.offset;
    if (id >= 0 && id < (double)m.rows) embed_row(m, (int64_t)id, out, reinterpret_cast<float*>(space), space + floats);
    else
      for (int64_t c = 0; c < m.cols; c++) out[c] = NAN;
  }
}

const Kernel embed_kernel = {embed_units, embed_run};

}  // namespace
}  // namespace inferflow
