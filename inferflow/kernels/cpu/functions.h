// Functions of one number, a vector of them at a time, within a few units in the last place of inferflow/kernels/reference.py.
// NaN stays NaN. Coefficients are minimax fits on the intervals named; rare functions go through double, one lane after another.
#pragma once
#include "abi.h"
#include "simd.h"

namespace inferflow {
namespace {

constexpr float INF = __builtin_inff();
constexpr float LN2 = 0.693147181f;

inline vf with_sign_of(vf x, vf sign) { return as_float(as_int(abs(x)) | (as_int(sign) & set1i(INT32_MIN))); }

template <int N>
inline vf polynomial(vf x, const float (&c)[N]) {  // greatest power first
  vf p = set1(c[0]);
  for (int n = 1; n < N; n++) p = fma(p, x, set1(c[n]));
  return p;
}

template <class F>
inline vf through_double(vf x, F f) {
  for (int n = 0; n < LANES; n++) x[n] = static_cast<float>(f(static_cast<double>(x[n])));
  return x;
}
inline vf sin(vf x) { return through_double(x, [](double v) { return __builtin_sin(v); }); }
inline vf cos(vf x) { return through_double(x, [](double v) { return __builtin_cos(v); }); }
inline vf pow(vf a, vf b) {
  for (int n = 0; n < LANES; n++) a[n] = static_cast<float>(__builtin_pow(a[n], b[n]));
  return a;
}

inline vf floor(vf x) {
  const vi small = abs(x) < set1(8388608.0f);  // from 2^23 on all floats are whole
  const vf near = to_float(to_int(pick(small, x, vf{})));
  return pick(small, with_sign_of(pick(near > x, near - set1(1), near), x), x);
}
inline vf ceil(vf x) { return -floor(-x); }

inline vf sigmoid(vf x) { return set1(1) / (set1(1) + exp(-x)); }
inline vf silu(vf x) { return x / (set1(1) + exp(-x)); }

// Below 0.55: x + x³·P(x²), else 1 − 2 / (e^2|x| + 1).
inline vf tanh(vf x) {
  const vf t = abs(x), z = x * x;
  const vf near = fma(x * z, polynomial(z, {-0.006282458548f, 0.02107774653f, -0.05385385454f, 0.1333260238f, -0.3333331943f}), x);
  const vf far = set1(1) - set1(2) / (exp(t + t) + set1(1));
  return pick(t < set1(0.55f), near, with_sign_of(far, x));
}

// x·Φ(x). With t = |x| and u = 1 / (1 + 0.3·t), the tail 1 − Φ(t) is e^(−t²/2)·u·P(u); t² in two parts keeps the tail's digits.
inline vf gelu(vf x) {
  const vf t = limited(abs(x), 0, 20), u = set1(1) / fma(set1(0.3f), t, set1(1)), square = t * t, rest = fma(t, t, -square);
  const vf p = polynomial(u, {-0.02061308175f, 0.1123771518f, -0.2280707657f, 0.1915860325f, -0.07925095409f, 0.09605976939f,
                              0.07842491567f, 0.1102274656f, 0.1195728257f, 0.1196866333f});
  const vf e = exp(set1(-0.5f) * square), tail = fma(e, set1(-0.5f) * rest, e) * (u * p);
  return x * pick(x < vf{}, tail, set1(1) - tail);
}

// x·(1 + tanh v)/2 is x·σ(2v), which does not cancel.
inline vf gelu_tanh(vf x) {
  const vf v = set1(0.797884561f) * (x + set1(0.044715f) * x * x * x);
  return x / (set1(1) + exp(set1(-2) * v));
}

// e^x − 1 for x ≤ 0.
inline vf expm1_negative(vf x) {
  const vf q = polynomial(x, {0.0001648796315f, 0.00137070613f, 0.008328709751f, 0.04166613147f, 0.1666666418f, 0.5f});
  return pick(x > set1(-0.5f), fma(x * x, q, x), exp(x) - set1(1));
}

// log(1 + f) for f in √½ − 1 … √2 − 1.
inline vf log_near_one(vf f) {
  const vf p = polynomial(f, {0.0691466555f, -0.1178963929f, 0.1187317967f, -0.1238438711f, 0.1421863735f, -0.1666924804f,
                              0.2000222802f, -0.2499998659f, 0.3333331048f});
  const vf square = f * f;
  return fma(square, fma(f, p, set1(-0.5f)), f);
}

// x = 2^n·m with m in √½ … √2: n·ln 2 + log m, ln 2 in two parts.
inline vf log(vf x) {
  const vi tiny = x < set1(1.17549435e-38f);
  const vi bits = as_int(abs(pick(tiny, x * set1(8388608.0f), x))) - set1i(0x3f3504f3);
  const vf n = to_float((bits >> 23) - (tiny & set1i(23))), m = as_float((bits & set1i(0x7fffff)) + set1i(0x3f3504f3));
  const vf y = fma(n, set1(0.693359375f), fma(n, set1(-2.12194440e-4f), log_near_one(m - set1(1))));
  const vf edge = pick(x == vf{}, set1(-INF), pick(x > vf{}, x, set1(__builtin_nanf(""))));  // 0, ∞ or NaN, below 0
  return pick((x > vf{}) & (x < set1(INF)), y, edge);
}

// log(1 + e^x) = max(x, 0) + log(1 + e^−|x|)
inline vf softplus(vf x) {
  const vf e = exp(-abs(x));
  const vi low = e < set1(0.414f);
  const vf y = log_near_one(pick(low, e, set1(0.5f) * (e - set1(1)))) + pick(low, vf{}, set1(LN2));
  return max(x, vf{}) + y;
}

// Calls `body` with the function that `kind` names; `a` is its parameter.
template <class Body>
inline void with_unary(int64_t kind, float a, Body body) {
  switch (kind) {
    case U_SILU: return body([](vf x) { return silu(x); });
    case U_GELU: return body([](vf x) { return gelu(x); });
    case U_GELU_TANH: return body([](vf x) { return gelu_tanh(x); });
    case U_QUICK_GELU: return body([](vf x) { return x / (set1(1) + exp(set1(-1.702f) * x)); });
    case U_RELU: return body([](vf x) { return max(x, vf{}); });
    case U_RELU2: return body([](vf x) { const vf y = max(x, vf{}); return y * y; });
    case U_SIGMOID: return body([](vf x) { return sigmoid(x); });
    case U_TANH: return body([](vf x) { return tanh(x); });
    case U_SOFTPLUS: return body([](vf x) { return softplus(x); });
    case U_IDENTITY: return body([](vf x) { return x; });
    case U_EXP: return body([](vf x) { return exp(x); });
    case U_LOG: return body([](vf x) { return log(x); });
    case U_SQRT: return body([](vf x) { return sqrt(x); });
    case U_ABS: return body([](vf x) { return abs(x); });
    case U_FLOOR: return body([](vf x) { return floor(x); });
    case U_CEIL: return body([](vf x) { return ceil(x); });
    case U_SIN: return body([](vf x) { return sin(x); });
    case U_COS: return body([](vf x) { return cos(x); });
    case U_CLAMP: return body([a](vf x) { return min(max(x, set1(-a)), set1(a)); });
    case U_SOFTCAP: return body([a](vf x) { return set1(a) * tanh(x / set1(a)); });
  }
}

}  // namespace
}  // namespace inferflow
