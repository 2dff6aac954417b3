// How fast attention is, one thread: decode from caches that no processor cache holds (as between the layers of a model), and
// prefill from ones that it does, with the share of the multiply-add peak that this processor shows in the same run.
//
//   g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -mavx2 -mfma -mf16c -I inferflow/kernels/cpu
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

// Multiply-adds per second of twelve independent chains.
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

// Reads 96 MiB, which no processor cache keeps. Bytes a second.
double read_memory() {
  static std::vector<float> memory(24 << 20, 1.0f);
  const double start = now();
  vf x[4] = {};
  for (size_t n = 0; n < memory.size(); n += 4 * LANES)
    for (int v = 0; v < 4; v++) x[v] = x[v] + load(memory.data() + n + v * LANES);
  for (vf& v : x) asm volatile("" : "+m"(v));
  return (double)memory.size() * sizeof(float) / (now() - start);
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
      store_kv_kernel.run(&args, step, 0, store_kv_kernel.units(&args, step), scratch);
    }
  }
  void attend(int64_t count, int64_t past) {
    span.count = count, span.past = past, step.tokens = count;
    for (Cache& cache : caches) {
      const SdpaArgs args = {tensor(q, shape.heads, shape.dim), tensor(out, shape.heads, shape.dim), &cache, nullptr, nullptr, 0, 0, 0,
                             0.125, 0, 1};
      sdpa_kernel.run(&args, step, 0, sdpa_kernel.units(&args, step), scratch);
    }
  }
};

// The least of some runs: other work on the machine only ever adds.
template <class Before, class Body> double fastest(int runs, Before before, Body body) {
  double least = 1e9;
  for (int n = 0; n < runs; n++) {
    before();
    const double start = now();
    body();
    const double time = now() - start;
    least = time < least ? time : least;
  }
  return least;
}

void measure(Shape s, int64_t type, int64_t block, double peak_rate) {
  const char* names[] = {"f32", "f16", "bf16", "int8"};
  const double width = type == KV_F32 ? 4 : type == KV_I8 ? 1 : 2, layers = (double)s.layers;
  const auto evict = [] { read_memory(); };
  const auto nothing = [] {};
  Model decode(s, s.layers, type, block, 256), one(s, 1, type, block, 512);
  const double stored = fastest(9, evict, [&] { decode.store(1, 255); }) / layers;
  const double cold = fastest(9, evict, [&] { decode.attend(1, 255); }) / layers;
  const double warm = fastest(101, nothing, [&] { one.attend(1, 255); });
  const double prefill = fastest(9, nothing, [&] { one.attend(512, 0); });
  const double writing = fastest(9, nothing, [&] { one.store(512, 0); });
  const double bytes = 2 * 256.0 * s.kv * s.dim * width, terms = 2.0 * s.heads * s.dim * 512 * 513 / 2;
  printf("%-15s %-4s %5d | %7.1f %6.1f %7.1f %9.1f | %8.2f %5.0f%% %7.2f\n", s.name, names[type], (int)block, cold * 1e6,
         bytes / cold * 1e-9, warm * 1e6, stored * 1e6, prefill * 1e3, 100 * terms / prefill / peak_rate, writing * 1e3);
}

}  // namespace
}  // namespace inferflow

int main(int count, char** words) {
  using namespace inferflow;
  const double rate = peak();
  double bandwidth = 0;
  for (int n = 0; n < 9; n++) {
    const double once = read_memory();
    bandwidth = once > bandwidth ? once : bandwidth;
  }
  printf("Multiply-adds: %.1f G/s, reading memory: %.1f GB/s. One layer, one thread.\n", rate * 1e-9, bandwidth * 1e-9);
  printf("                     block | decode at 256, us: cold, GB/s, warm, store | prefill of 512, ms: share of peak, store\n");
  const Shape shapes[] = {{"9/3 heads, 64", 9, 3, 64, 30}, {"14/2 heads, 64", 14, 2, 64, 24}, {"12/2 heads, 128", 12, 2, 128, 28}};
  for (const Shape& shape : shapes)
    for (int64_t type = 0; type < 4; type++)
      for (int64_t block = 16; block <= 64; block *= 2)
        if (count < 2 || block == atoi(words[1])) measure(shape, type, block, rate);
}
