// What keeps a state per sequence: OP_CONV, the causal depthwise convolution, and OP_RECURRENCE, linear attention with a decay.
// A unit holds some channels or heads and takes each sequence's tokens in order, so chunks of any size give the same bits.
// A sequence's first step (past = 0) starts from zeros, whatever the state array holds.
#pragma once
#include "elementwise.h"

namespace inferflow {
namespace {

// ---------------------------------------------------------------------------------------------------- convolution

constexpr int64_t CONV_CHANNELS = 128, MAX_KERNEL = 64;

// y = Σ_j w[j]·seen[j] (+ bias) for n channels; seen[j] has elements `apart[j]` from each other, w is [kernel, CONV_CHANNELS].
inline void conv_token(const float* const* seen, const int64_t* apart, const float* w, const float* bias, int64_t kernel, float* y,
                       int64_t sy, int64_t n) {
  for (int64_t c = 0; c < n; c += LANES) {
    const int64_t lanes = least(n - c, LANES);
    vf total = take(seen[0] + c * apart[0], apart[0], lanes) * load(w + c);
    for (int64_t j = 1; j < kernel; j++) total += take(seen[j] + c * apart[j], apart[j], lanes) * load(w + j * CONV_CHANNELS + c);
    if (bias) total += take(bias + c, 1, lanes);
    put(y + c * sy, sy, total, lanes);
  }
}

// Channels [first, first + n) of one sequence: a token sees rows t … t + kernel − 1 of the state with the inputs behind it.
// The output may not lie on the input.
inline void conv_sequence(const ConvArgs& op, const Step& step, const Span& span, int64_t first, int64_t n, const float* w) {
  const int64_t before = op.kernel - 1, channels = last_size(op.in), sx = last_stride(op.in), sy = last_stride(op.out);
  float* state = op.state + span.slot * before * channels + first;
  const auto same = [](vf x) { return x; };
  const float zero = 0;
  for (int64_t j = 0; j < before && !span.past; j++) map1(state + j * channels, 1, &zero, 0, n, same);
  const float* seen[MAX_KERNEL];
  int64_t apart[MAX_KERNEL];
  const auto look_from = [&](int64_t row) {
    for (int64_t j = 0; j < op.kernel; j++, row++) {
      seen[j] = row < before ? state + row * channels : at(op.in, step, span.start + row - before) + first * sx;
      apart[j] = row < before ? 1 : sx;
    }
  };
  for (int64_t t = 0; t < span.count; t++) {
    look_from(t);
    const float* bias = op.bias ? op.bias + first : nullptr;
    conv_token(seen, apart, w, bias, op.kernel, at(op.out, step, span.start + t) + first * sy, sy, n);
  }
  look_from(span.count - 1);  // all but the oldest of what the last token saw
  for (int64_t j = 0; j < before; j++) map1(state + j * channels, 1, seen[j + 1], apart[j + 1], n, same);
}

inline int64_t conv_units(const void* args, const Step& step) {
  return step.span_count ? ceil_div(last_size(static_cast<const ConvArgs*>(args)->in), CONV_CHANNELS) : 0;
}
inline void conv_run(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch) {
  const auto& op = *static_cast<const ConvArgs*>(args);
  float* w = reinterpret_cast<float*>(scratch.get(op.kernel * CONV_CHANNELS * 4));
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit * CONV_CHANNELS, n = least(CONV_CHANNELS, last_size(op.in) - first);
    for (int64_t j = 0; j < op.kernel; j++)
      for (int64_t c = 0; c < CONV_CHANNELS; c++)
        w[j * CONV_CHANNELS + c] = c < n ? op.weight[(first + c) * op.kernel + j] : 0.0f;
    for (int64_t s = 0; s < step.span_count; s++) conv_sequence(op, step, step.spans[s], first, n, w);
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

// The inputs of one token: its first head's, and how far apart the heads' are (q and k serve `share` heads each).
struct Heads {
  Head first;
  int64_t share, q, k, v, decay, beta, out;

  Heads(const RecurrenceArgs& op, const Step& step, int64_t t) : share(op.heads / op.groups) {
    const bool delta = given(op.beta);
    first = {at(op.q, step, t), at(op.k, step, t), at(op.v, step, t), at(op.decay, step, t), delta ? at(op.beta, step, t) : nullptr,
             at(op.out, step, t), op.q.strides[1], op.k.strides[1], op.v.strides[1],
             op.decay_per_key ? op.decay.strides[1] : 0, op.out.strides[1]};
    q = op.q.strides[0], k = op.k.strides[0], v = op.v.strides[0], decay = op.decay.strides[0], out = op.out.strides[0];
    beta = delta ? op.beta.strides[0] : 0;
  }
  Head head(int64_t h) const {
    Head made = first;
    const int64_t group = h / share;
    made.q += group * q, made.k += group * k, made.v += h * v, made.decay += h * decay, made.out += h * out;
    if (made.beta) made.beta += h * beta;
    return made;
  }
};

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
    for (int64_t t = span.start; t < span.start + span.count; t++) {
      const Heads heads(op, step, t);
      for (int64_t h = first; h < last; h++) advance(heads.head(h), state + h * size, op.dk, op.dv);
    }
  }
}

constexpr Kernel conv_kernel = {conv_units, conv_run};
constexpr Kernel recurrence_kernel = {recurrence_units, recurrence_run};

}  // namespace
}  // namespace inferflow
