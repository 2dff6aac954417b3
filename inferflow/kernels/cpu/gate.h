// OP_GATE: an activation times another row, on its way into the next matrix quantised at once. A unit is some rows, or a piece of
// one that holds whole rotation blocks and groups.
#pragma once
#include "elementwise.h"
#include "quantise.h"

namespace inferflow {
namespace {

inline Cut gate_cut(const GateArgs& op, const Step& step) {
  const QuantiseArgs* q = op.quantise;
  return {leading(op.a, step), q ? q->padded : last_size(op.a), q ? quantise_chunk(*q) : UNIT / 4};
}

template <class F>
inline void gate_piece(const GateArgs& op, const Step& step, int64_t t, int64_t first, int64_t last, float* room, F f) {
  const QuantiseArgs* q = op.quantise;
  const int64_t filled = least(last, last_size(op.a)) - first;
  float* y = q ? room : at(op.out, step, t) + first;
  map2(y, 1, at(op.a, step, t) + first, 1, at(op.b, step, t) + first, 1, filled, [f](vf a, vf b) { return f(a) * b; });
  if (!q) return;
  memset(y + filled, 0, (last - first - filled) * 4);
  quantise_columns(*q, y, at(q->out, step, t), first, last);
}

inline int64_t gate_units(const void* args, const Step& step) {
  return gate_cut(*static_cast<const GateArgs*>(args), step).units();
}
inline void gate_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const auto& op = *static_cast<const GateArgs*>(args);
  const Cut cut = gate_cut(op, step);
  float* room = reinterpret_cast<float*>(scratch.get(cut.columns * 4));
  with_unary(op.kind, 0, [&](auto f) {
    cut.run(begin, end, [&](int64_t t, int64_t first, int64_t last) { gate_piece(op, step, t, first, last, room, f); });
  });
}

constexpr Kernel gate_kernel = {gate_units, gate_run};

}  // namespace
}  // namespace inferflow
