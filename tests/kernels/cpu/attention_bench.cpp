// How fast attention is, one thread: decode from caches that no processor cache holds (as between the layers of a model), and
// prefill from ones that it does, with the share of the multiply-add peak that this processor shows in the same run.
//
//   g++ -std=c++17 -O3 -ffp-contract=off -fno-math-errno -mavx2 -mfma -mf16c -I inferflow/kernels/cpu \
//       tests/kernels/cpu/attention_bench.cpp -o bench && ./bench
#include <ctime>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "attention.h"

namespace inferflow {
uint8_t* Scratch::get(size_t bytes) {
  if (bytes > size) {
    free(data);
    size = (bytes + 63) / 64 * 64;
    data = (uint8_t*)aligned_alloc(64, size);
  }
  return data;
}
Scratch::~Scratch() { free(data); }

namespace {

// Of this thread, so that what else runs on the machine counts little.
double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Multiply-adds per second of sixteen independent chains.
double peak() {
  vf x[12];
  for (vf& v : x) v = set1(1.0f);
  const vf a = set1(0.999f), b = set1(0.001f);
  double best = 0;
  for (int run = 0; run < 20; run++) {
    const double start = now();
    for (int n = 0; n < 1 << 18; n++) {
#pragma GCC unroll 12
      for (int v = 0; v < 12; v++) x[v] = fma(x[v], a, b);
    }
    for (vf& v : x) asm volatile("" : "+m"(v));
    const double rate = 12.0 * LANES * (1 << 18) / (now() - start);
    best = rate > best ? rate : best;
  }
  return best;
}

struct Shape { const char* name; int64_t heads, kv, dim, layers; };

Tensor tensor(std::vector<float>& x, int64_t heads, int64_t dim) {
  Tensor t = {x.data(), -1, TOKENS, 2, 0, 0, heads * dim, {heads, dim}, {dim, 1}};
  return t;
}

// Caches of `layers` layers, filled for one sequence of `context` tokens.
struct Model {
  Shape shape;
  std::vector<std::vector<uint8_t>> memory;
  std::vector<Cache> caches;
  std::vector<int32_t> table;
  std::vector<float> q, k, v, out;
  Span span;
  Step step;
  Scratch scratch;

  Model(Shape s, int64_t layers, int64_t type, int64_t block, int64_t context) : shape(s), step() {
    const int64_t blocks = (context + block - 1) / block, width = type == KV_F32 ? 4 : type == KV_I8 ? 1 : 2;
    for (int64_t n = 0; n < blocks; n++) table.push_back((int32_t)((n * 7 + 3) % blocks));
    if (blocks % 7 == 0) for (int64_t n = 0; n < blocks; n++) table[n] = (int32_t)n;
    for (auto* x : {&q, &out}) x->assign(context * s.heads * s.dim, 0.5f);
    for (auto* x : {&k, &v}) x->assign(context * s.kv * s.dim, 0.5f);
    for (auto* x : {&q, &k, &v}) for (float& f : *x) f = (float)rand() / (float)RAND_MAX - 0.5f;
    for (int64_t l = 0; l < layers; l++) {
      void* part[4];
      for (int64_t n = 0; n < 4; n++) {
        memory.emplace_back(blocks * s.kv * block * (n < 2 ? s.dim * width : 4) + 64);
        part[n] = (void*)(((uintptr_t)memory.back().data() + 63) / 64 * 64);
      }
      caches.push_back({part[0], part[1], (float*)part[2], (float*)part[3], type, block, s.kv, s.dim, s.dim});
    }
    span = {0, context, 0, 0, 0};
    step.spans = &span;
    step.span_count = 1;
    step.block_table = table.data();
    store(context, 0);
  }
  void store(int64_t count, int64_t past) {
    span.count = count, span.past = past, step.tokens = count;
    for (Cache& cache : caches) {
      const StoreKvArgs args = {tensor(k, shape.kv, shape.dim), tensor(v, shape.kv, shape.dim), &cache};
      store_kv_run(&args, step, 0, store_kv_units(&args, step), scratch);
    }
  }
  void attend(int64_t count, int64_t past) {
    span.count = count, span.past = past, step.tokens = count;
    for (Cache& cache : caches) {
      const SdpaArgs args = {tensor(q, shape.heads, shape.dim), tensor(out, shape.heads, shape.dim), &cache, nullptr, nullptr, 0, 0, 0,
                             0.125, 0, 1};
      sdpa_run(&args, step, 0, sdpa_units(&args, step), scratch);
    }
  }
};

template <class Body> double median(int runs, Body body) {
  std::vector<double> times;
  for (int n = 0; n < runs; n++) {
    const double start = now();
    body();
    times.push_back(now() - start);
    for (size_t i = times.size() - 1; i && times[i] < times[i - 1]; i--) { const double t = times[i]; times[i] = times[i - 1]; times[i - 1] = t; }
  }
  return times[runs / 2];
}

void measure(Shape s, int64_t type, int64_t block, double fma_rate) {
  const char* names[] = {"f32", "f16", "bf16", "int8"};
  const double width = type == KV_F32 ? 4 : type == KV_I8 ? 1 : 2;
  std::vector<uint8_t> other(64 << 20, 1);  // what pushes the caches out
  Model decode(s, s.layers, type, block, 256);
  double stored = 0;
  const double cold = median(15, [&] { for (size_t n = 0; n < other.size(); n += 64) other[n]++; stored -= now(); decode.store(1, 255); stored += now(); decode.attend(1, 255); });
  const double sweep = median(15, [&] { for (size_t n = 0; n < other.size(); n += 64) other[n]++; });
  Model one(s, 1, type, block, 512);
  const double warm = median(51, [&] { one.attend(1, 255); });
  const double prefill = median(7, [&] { one.attend(512, 0); }), writing = median(7, [&] { one.store(512, 0); });
  const double bytes = 2 * 256.0 * s.kv * s.dim * width, terms = 2.0 * s.heads * s.dim * 512 * 513 / 2;
  printf("%-14s %-4s block %2d: decode@256 layer %6.1f us cold (%4.1f GB/s; store %4.1f us) %6.1f us warm; prefill 512 layer %6.2f ms, %2.0f%% of peak; store %5.2f ms\n",
         s.name, names[type], (int)block, (cold - sweep) * 1e6 / s.layers, bytes * s.layers / (cold - sweep) * 1e-9, stored * 1e6 / 15 / s.layers,
         warm * 1e6, prefill * 1e3, 100 * terms / prefill / fma_rate, writing * 1e3);
}

}  // namespace
}  // namespace inferflow

int main(int count, char** words) {
  using namespace inferflow;
  const double rate = peak();
  printf("multiply-adds: %.1f G/s\n", rate * 1e-9);
  const Shape shapes[] = {{"9/3 heads, 64", 9, 3, 64, 30}, {"14/2 heads, 64", 14, 2, 64, 24}, {"12/2 heads, 128", 12, 2, 128, 28}};
  for (const Shape& shape : shapes)
    for (int64_t type = 0; type < 4; type++)
      for (int64_t block = 16; block <= 64; block *= 2)
        if (count < 2 || block == atoi(words[1])) measure(shape, type, block, rate);
}
