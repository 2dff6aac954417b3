// OP_GLU: gated linear units, quantise(act(A·x) · (B·x)), so that what the matrices give does not go through memory. A unit is some
// columns of some tokens: the same rows of both matrices, whole rotation blocks and groups of the result.
#pragma once
#include <algorithm>
#include "gate.h"
#include "matmul.h"

namespace inferflow {
namespace {

struct GluCut {
  int64_t tokens, columns, parts, blocks;  // of the step, of a unit; units along tokens, along columns
  static constexpr int64_t MOST_TOKENS = 256, LEAST_COLUMNS = 64;  // 256 · 2 · 64 floats stay in a second-level cache

  GluCut(const GluArgs& g, const Step& step) {
    const QuantiseArgs& q = *g.quantise;
    const int64_t block = q.rotation > q.group ? q.rotation : q.group, total = leading(g.in, step);
    columns = ceil_div(LEAST_COLUMNS, block) * block;
    parts = ceil_div(total, MOST_TOKENS);
    tokens = parts ? ceil_div(total, parts) : 0;
    blocks = ceil_div(q.padded, columns);
  }
};

int64_t glu_units(const void* args, const Step& step) {
  const GluCut cut(*static_cast<const GluArgs*>(args), step);
  return cut.parts * cut.blocks;
}

template <class F>
inline void glu_unit(const GluArgs& g, const Step& step, const GluCut& cut, int64_t unit, Scratch& scratch, F f) {
  const QuantiseArgs& q = *g.quantise;
  const int64_t first = unit % cut.blocks * cut.columns, last = least(first + cut.columns, q.padded);
  const int64_t start = unit / cut.blocks * cut.tokens, count = least(cut.tokens, leading(g.in, step) - start);
  const int64_t space = std::max(multiply_space(g.matrices[0]), multiply_space(g.matrices[1])), size = count * cut.columns;
  uint8_t* memory = scratch.get(space + 2 * size * sizeof(float) + 2 * count * sizeof(void*));
  float *a = reinterpret_cast<float*>(memory + space), *b = a + size;
  const float** in = reinterpret_cast<const float**>(b + size);
  float** out = const_cast<float**>(in + count);
  for (int64_t t = 0; t < count; t++) in[t] = at(g.in, step, start + t);
  for (int n = 0; n < 2; n++) {
    for (int64_t t = 0; t < count; t++) out[t] = (n ? b : a) + t * cut.columns - first;
    multiply(g.matrices[n], 0, first / TILE, ceil_div(least(last, q.cols), TILE), {count, in, out, nullptr}, memory);
  }
  map2(a, 1, a, 1, b, 1, size, f);
  for (int64_t t = 0; t < count; t++) {
    float* y = a + t * cut.columns;
    for (int64_t n = q.cols - first; n < last - first; n++) y[n] = 0;
    quantise_columns(q, y, at(q.out, step, start + t), first, last);
  }
}

void glu_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const GluArgs& g = *static_cast<const GluArgs*>(args);
  const GluCut cut(g, step);
  with_gate(g.kind, [&](auto f) {
    for (int64_t unit = begin; unit < end; unit++) glu_unit(g, step, cut, unit, scratch, f);
  });
}

constexpr Kernel glu_kernel = {glu_units, glu_run};

}  // namespace
}  // namespace inferflow
