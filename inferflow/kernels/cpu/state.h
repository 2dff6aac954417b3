// What keeps a state per sequence: OP_CONV, the causal depthwise convolution, and OP_RECURRENCE, linear attention with a decay.
// A unit is one sequence's share of the channels or heads and takes its tokens in order, so chunks of any size give the same bits.
// A sequence's first step (past = 0) starts from zeros, whatever the state array holds.
#pragma once
#include "view.h"

namespace inferflow {
namespace {

// ---------------------------------------------------------------------------------------------------- convolution

constexpr int64_t CONV_CHANNELS = 256;  // of a unit

inline int64_t conv_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const ConvArgs*>(args);
  return step.span_count * ceil_div(last_size(op.in), CONV_CHANNELS);
}

// y = Σ_j w[j]·seen[j] (+ b) for `n` channels; seen[j] is row (oldest + j) % kernel of the ring.
inline void conv_token(const float* ring, const float* w, const float* bias, int64_t kernel, int64_t oldest, float* y, int64_t sy,
                       int64_t n) {
  for (int64_t c = 0; c < n; c += LANES) {
    const int64_t lanes = least(n - c, LANES);
    vf total = load(ring + oldest * CONV_CHANNELS + c) * load(w + c);
    for (int64_t j = 1, row = oldest; j < kernel; j++) {
      row = row + 1 < kernel ? row + 1 : 0;
      total += load(ring + row * CONV_CHANNELS + c) * load(w + j * CONV_CHANNELS + c);
    }
    if (bias) total += take(bias + c, 1, lanes);
    put(y + c * sy, sy, total, lanes);
  }
}

// One sequence, channels [first, first + n). ring and w: [kernel, CONV_CHANNELS] of working memory.
inline void conv_sequence(const ConvArgs& op, const Step& step, const Span& span, int64_t first, int64_t n, float* ring, float* w) {
  const int64_t kernel = op.kernel, channels = last_size(op.in), sx = last_stride(op.in), sy = last_stride(op.out);
  float* state = op.state + span.slot * (kernel - 1) * channels + first;
  for (int64_t j = 0; j < kernel; j++)
    for (int64_t c = 0; c < n; c++) w[j * CONV_CHANNELS + c] = op.weight[(first + c) * kernel + j];
  for (int64_t j = 0; j < kernel - 1; j++)
    for (int64_t c = 0; c < n; c++) ring[j * CONV_CHANNELS + c] = span.past ? state[j * channels + c] : 0.0f;
  int64_t newest = kernel - 1;
  for (int64_t t = span.start; t < span.start + span.count; t++) {
    const float* x = at(op.in, step, t) + first * sx;
    for (int64_t c = 0; c < n; c++) ring[newest * CONV_CHANNELS + c] = x[c * sx];
    const int64_t oldest = newest + 1 < kernel ? newest + 1 : 0;
    conv_token(ring, w, op.bias ? op.bias + first : nullptr, kernel, oldest, at(op.out, step, t) + first * sy, sy, n);
    newest = oldest;
  }
  for (int64_t j = 0; j < kernel - 1; j++)  // `newest` is now the row that the next input would take
    memcpy(state + j * channels, ring + (newest + 1 + j) % kernel * CONV_CHANNELS, n * 4);
}

inline void conv_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const auto& op = *static_cast<const ConvArgs*>(args);
  const int64_t channels = last_size(op.in), pieces = ceil_div(channels, CONV_CHANNELS), room = op.kernel * CONV_CHANNELS;
  float* ring = reinterpret_cast<float*>(scratch.get(2 * room * 4));
  memset(ring, 0, 2 * room * 4);  // lanes beyond the last channel are computed too
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit % pieces * CONV_CHANNELS, n = least(CONV_CHANNELS, channels - first);
    conv_sequence(op, step, step.spans[unit / pieces], first, n, ring, ring + room);
  }
}

// ---------------------------------------------------------------------------------------------------- recurrence

// One head's inputs for one token. `s` is how far a row's elements are apart; decay: 0 for one decay of all keys.
struct Head {
  const float *q, *k, *v, *decay, *beta;
  float* out;
  int64_t sq, sk, sv, sdecay, sout;
};

// `n` columns of the state [dk, dv], W vectors of them (n < LANES only for W = 1):
// S ← decay·S; with beta v ← β·(v − kᵀ·S); S ← S + k·vᵀ; out = qᵀ·S.
template <int W>
inline void advance_columns(const Head& head, float* state, int64_t dk, int64_t dv, int64_t first, int64_t n) {
  const int64_t lanes = W > 1 ? LANES : n;
  vf value[W], out[W] = {}, seen[W] = {};
  for (int w = 0; w < W; w++) value[w] = take(head.v + (first + w * LANES) * head.sv, head.sv, lanes);
  if (head.beta) {
    for (int64_t i = 0; i < dk; i++)
      for (int w = 0; w < W; w++) {
        float* s = state + i * dv + first + w * LANES;
        const vf kept = take(s, 1, lanes) * set1(head.decay[i * head.sdecay]);
        seen[w] = fma(set1(head.k[i * head.sk]), kept, seen[w]);
        put(s, 1, kept, lanes);
      }
    for (int w = 0; w < W; w++) value[w] = (value[w] - seen[w]) * set1(*head.beta);
  }
  for (int64_t i = 0; i < dk; i++)
    for (int w = 0; w < W; w++) {
      float* s = state + i * dv + first + w * LANES;
      const vf old = take(s, 1, lanes), kept = head.beta ? old : old * set1(head.decay[i * head.sdecay]);
      const vf now = fma(set1(head.k[i * head.sk]), value[w], kept);
      out[w] = fma(set1(head.q[i * head.sq]), now, out[w]);
      put(s, 1, now, lanes);
    }
  for (int w = 0; w < W; w++) put(head.out + (first + w * LANES) * head.sout, head.sout, out[w], lanes);
}

// The first n lanes, the rest zero whatever they held.
inline vf first_lanes(vf v, int64_t n) {
  float x[LANES];
  store(x, v);
  return n == LANES ? v : load_n(x, n);
}

// A head with one value: the vectors lie along the keys.
inline void advance_single(const Head& head, float* state, int64_t dk) {
  vf seen = {}, out = {};
  float value = *head.v;
  if (head.beta) {
    for (int64_t i = 0; i < dk; i += LANES) {
      const int64_t lanes = least(dk - i, LANES);
      const vf kept = take(state + i, 1, lanes) * take(head.decay + i * head.sdecay, head.sdecay, lanes);
      seen = fma(take(head.k + i * head.sk, head.sk, lanes), kept, seen);
      put(state + i, 1, kept, lanes);
    }
    value = (value - sum(seen)) * *head.beta;
  }
  for (int64_t i = 0; i < dk; i += LANES) {
    const int64_t lanes = least(dk - i, LANES);
    const vf old = take(state + i, 1, lanes);
    const vf kept = head.beta ? old : old * take(head.decay + i * head.sdecay, head.sdecay, lanes);
    const vf now = first_lanes(fma(take(head.k + i * head.sk, head.sk, lanes), set1(value), kept), lanes);
    out = fma(take(head.q + i * head.sq, head.sq, lanes), now, out);
    put(state + i, 1, now, lanes);
  }
  *head.out = sum(out);
}

inline void advance(const Head& head, float* state, int64_t dk, int64_t dv) {
  if (dv == 1) return advance_single(head, state, dk);
  int64_t first = 0;
  for (; first + 4 * LANES <= dv; first += 4 * LANES) advance_columns<4>(head, state, dk, dv, first, 4 * LANES);
  for (; first < dv; first += LANES) advance_columns<1>(head, state, dk, dv, first, least(dv - first, LANES));
}

inline Head head_of(const RecurrenceArgs& op, const Step& step, int64_t t, int64_t h) {
  const int64_t g = h / (op.heads / op.groups);
  const auto row = [&](const Tensor& x, int64_t n) { return at(x, step, t) + n * x.strides[0]; };
  return {row(op.q, g),
          row(op.k, g),
          row(op.v, h),
          row(op.decay, h),
          given(op.beta) ? row(op.beta, h) : nullptr,
          row(op.out, h),
          op.q.strides[1],
          op.k.strides[1],
          op.v.strides[1],
          op.decay_per_key ? op.decay.strides[1] : 0,
          op.out.strides[1]};
}

inline int64_t recurrence_units(const void* args, const Step& step) {
  const auto& op = *static_cast<const RecurrenceArgs*>(args);
  return step.span_count * ceil_div(op.heads, per_unit(op.dk * op.dv));
}
inline void recurrence_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch&) {
  const auto& op = *static_cast<const RecurrenceArgs*>(args);
  const int64_t each = per_unit(op.dk * op.dv), pieces = ceil_div(op.heads, each), size = op.dk * op.dv;
  for (int64_t unit = begin; unit < end; unit++) {
    const Span& span = step.spans[unit / pieces];
    const int64_t first = unit % pieces * each, last = least(op.heads, first + each);
    float* state = op.state + span.slot * op.heads * size;
    if (!span.past) memset(state + first * size, 0, (last - first) * size * 4);
    for (int64_t t = span.start; t < span.start + span.count; t++)
      for (int64_t h = first; h < last; h++) advance(head_of(op, step, t, h), state + h * size, op.dk, op.dv);
  }
}

constexpr Kernel conv_kernel = {conv_units, conv_run};
constexpr Kernel recurrence_kernel = {recurrence_units, recurrence_run};

}  // namespace
}  // namespace inferflow
