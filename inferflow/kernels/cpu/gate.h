// OP_GATE: an activation times another tensor. Rows on their way into a matrix are quantised at once: there a unit is some rows, or
// a piece of one that holds whole rotation blocks and groups.
#pragma once
#include "elementwise.h"
#include "quantise.h"

namespace inferflow {
namespace {

// Of quantised rows; few tokens are cut finer, so that there is work for all threads.
inline RowCut gate_cut(const GateArgs& op, const Step& step) {
  const int64_t total = leading(op.a, step), chunk = quantise_chunk(*op.quantise);
  return {total, op.quantise->padded, total < 16 ? chunk : 4 * chunk};
}

inline int64_t gate_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const GateArgs*>(args);
  return op.quantise ? gate_cut(op, step).units() : Lines<3>(step, {&op.out, &op.a, &op.b}).units();
}

// body(f) with f(a, b) = act(a) · b.
template <class Body>
inline void with_gate(int64_t kind, Body body) {
  with_unary(kind, 0, [&](auto act) { body([act](vf a, vf b) { return act(a) * b; }); });
}

inline void gate_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const auto& op = *static_cast<const GateArgs*>(args);
  with_gate(op.kind, [&](auto f) {
    if (!op.quantise) return run_map2(step, op.out, op.a, op.b, begin, end, f);
    const QuantiseArgs& q = *op.quantise;
    const RowCut cut = gate_cut(op, step);
    const int64_t sa = last_stride(op.a), sb = last_stride(op.b);
    float* y = reinterpret_cast<float*>(scratch.get(cut.columns * 4));
    cut.run(begin, end, [&](int64_t t, int64_t first, int64_t last) {
      const int64_t filled = least(last, q.cols) - first;
      map2(y, 1, at(op.a, step, t) + first * sa, sa, at(op.b, step, t) + first * sb, sb, filled, f);
      memset(y + filled, 0, (last - first - filled) * 4);
      quantise_columns(q, y, at(q.out, step, t), first, last);
    });
  });
}

constexpr Kernel gate_kernel = {gate_units, gate_run};

}  // namespace
}  // namespace inferflow
