// OP_EXPERTS: every token through the experts that its ids name. A unit is a run of tiles of one expert, for all the (token,
// choice) pairs that chose it; ids outside the stack give rows of NaN.
#pragma once
#include "matmul.h"

namespace inferflow {
namespace {

struct ExpertUnits {
  int64_t pairs, groups, size, blocks;
  bool by_pair;  // fewer pairs than experts: a group is a pair, and the first pair of an expert does the work of all of them
};
inline ExpertUnits expert_units(const ExpertsArgs& e, const Step& step) {
  const Matrix& m = *e.matrix;
  ExpertUnits u;
  u.pairs = leading(e.ids, step) * e.topk;
  u.by_pair = u.pairs <= m.stack;
  u.groups = u.by_pair ? u.pairs : m.stack + 1;  // the last one: ids outside the stack
  u.size = unit_tiles(m, 1 + u.pairs / m.stack);
  u.blocks = (tiles_of(m) + u.size - 1) / u.size;
  return u;
}

int64_t experts_units(const void* args, const Step& step) {
  const ExpertUnits u = expert_units(*static_cast<const ExpertsArgs*>(args), step);
  return u.groups * u.blocks;
}

inline int32_t expert_of(const ExpertsArgs& e, const Step& step, int64_t pair) {
  int32_t id;
  memcpy(&id, at(e.ids, step, pair / e.topk) + pair % e.topk * (e.ids.ndim ? e.ids.strides[0] : 1), 4);
  return id < 0 || id >= e.matrix->stack ? (int32_t)e.matrix->stack : id;
}

void experts_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const ExpertsArgs& e = *static_cast<const ExpertsArgs*>(args);
  const Matrix& m = *e.matrix;
  const ExpertUnits u = expert_units(e, step);
  const int64_t panel = multiply_space(m);
  uint8_t* space = scratch.get(panel + 2 * u.pairs * sizeof(void*));
  const float** in = reinterpret_cast<const float**>(space + panel);
  float** out = const_cast<float**>(in + u.pairs);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t g = unit / u.blocks, first = unit % u.blocks * u.size;
    const int64_t last = first + u.size < tiles_of(m) ? first + u.size : tiles_of(m);
    const int64_t expert = u.by_pair ? expert_of(e, step, g) : g;
    int64_t count = 0;
    for (int64_t p = 0; p < u.pairs; p++) {
      if (expert_of(e, step, p) != expert) continue;
      if (u.by_pair && p < g) break;  // an earlier pair does it
      const int64_t t = p / e.topk, k = p % e.topk;
      in[count] = at(e.in, step, t) + (e.per_choice ? k * e.in.strides[0] : 0);
      out[count++] = at(e.out, step, t) + k * e.out.strides[0];
    }
    if (expert < m.stack) {
      if (count) multiply(m, expert, first, last, {count, in, out, nullptr}, space);
      continue;
    }
    for (int64_t n = 0; n < count; n++)
      for (int64_t row = first * TILE; row < last * TILE && row < m.rows; row++) out[n][row] = NAN;
  }
}

const Kernel experts_kernel = {experts_units, experts_run};

}  // namespace
}  // namespace inferflow
