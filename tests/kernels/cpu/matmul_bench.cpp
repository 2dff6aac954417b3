// Checks and measures the matrix kernels of one instruction set, the one this file is compiled for:
//   g++ -std=c++17 -O3 -ffp-contract=off -fno-math-errno -I inferflow/kernels/cpu [-mavx2 -mfma -mf16c] matmul_bench.cpp -lpthread
//   matmul_bench check                            every format against plain integers, bit for bit; exit status 1 on a difference
//   matmul_bench speed [format] [rows] [cols]     weights and multiply-adds a second, one thread and two, in cache and from memory
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "abi.h"
#include "kernels.h"
#include "simd.h"
#include "quantise.h"
#include "matmul.h"
#include "experts.h"
#include "embed.h"

using namespace inferflow;

uint8_t* Scratch::get(size_t bytes) {
  if (bytes > size) {
    free(data);
    data = static_cast<uint8_t*>(aligned_alloc(64, size = (bytes + 4095) / 4096 * 4096));
  }
  return data;
}
Scratch::~Scratch() { free(data); }

static const char* NAMES[] = {"f32", "f16", "bf16", "pair6", "pair7", "pair8", "q8", "kept4", "kept7", "kept8"};
static std::mt19937 rng(1);
static float uniform() { return (float)(int32_t)rng() * 0x1p-31f; }

template <class T>
struct Array {
  T* p;
  size_t n;
  explicit Array(size_t n) : p(static_cast<T*>(aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64))), n(n) { memset((void*)p, 0, n * sizeof(T)); }
  Array(const Array&) = delete;
  ~Array() { free(p); }
};

// A matrix of random codes; `extreme`: every magnitude as large as the format allows.
struct Made {
  Matrix m{};
  Array<uint8_t> codes, scales, table;
  Array<float> mins, row_scales, bias;
  static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
  static size_t code_bytes(int f, int64_t rows, int64_t cols, int64_t group) {
    return is_float(f) ? rows * cols * (f == F32 ? 4 : 2) : up(rows, 16) / 16 * (up(cols, group) / group) * group_bytes(f, group);
  }
  static size_t scale_count(int f, int64_t rows, int64_t cols, int64_t group) { return is_float(f) ? 0 : up(rows, 16) * (up(cols, group) / group); }
  Made(int f, int64_t rows, int64_t cols, int64_t group, int64_t stack, bool extreme, bool with_mins)
      : codes(stack * code_bytes(f, rows, cols, group)), scales(stack * scale_count(f, rows, cols, group) * 4), table(128),
        mins(stack * scale_count(f, rows, cols, group)), row_scales(stack * rows), bias(stack * rows) {
    m.format = f; m.group = is_float(f) ? 0 : group; m.rows = rows; m.cols = cols; m.padded = is_float(f) ? cols : up(cols, group); m.stack = stack;
    m.codes = codes.p; m.scales = scales.p; m.bias = bias.p;
    m.codes_stride = codes.n / stack; m.scales_stride = scale_count(f, rows, cols, group); m.rows_stride = rows;
    for (size_t i = 0; i < bias.n; i++) bias.p[i] = uniform();
    if (is_float(f)) {
      for (size_t i = 0; i < codes.n / (f == F32 ? 4 : 2); i++) {
        float x = uniform();
        if (f == F32) memcpy(codes.p + 4 * i, &x, 4);
        else { uint16_t h = f == BF16 ? 0x3f00 | (rng() & 0x80ff) : 0x3800 | (rng() & 0x83ff); memcpy(codes.p + 2 * i, &h, 2); }
      }
      return;
    }
    m.codebook = table.p;
    for (size_t i = 0; i < table.n; i++) table.p[i] = extreme ? 63 : rng() % 64;
    for (size_t i = 0; i < codes.n; i++) codes.p[i] = (uint8_t)rng();
    if (f == KEPT7) for (size_t i = 0; i < codes.n; i++) codes.p[i] = extreme ? 127 : codes.p[i] & 127;
    if (extreme && is_signed(f)) for (size_t i = 0; i < codes.n; i++) codes.p[i] = rng() & 1 ? 0x80 : 0x7f;
    if (extreme) memset(codes.p, is_signed(f) ? 0x80 : f == KEPT7 ? 127 : 255, codes.n / 2);  // half of it of one sign
    if (!is_kept(f)) {
      for (size_t i = 0; i < scales.n / 4; i++) scales.p[i] = (uint8_t)rng();
      for (size_t i = 0; i < row_scales.n; i++) row_scales.p[i] = uniform() * 1e-3f;
      m.row_scales = row_scales.p;
    } else {
      for (size_t i = 0; i < scales.n / 4; i++) { float x = uniform() * 1e-2f; memcpy(scales.p + 4 * i, &x, 4); }
      for (size_t i = 0; i < mins.n; i++) mins.p[i] = uniform() * 1e-2f;
      if (with_mins) m.mins = mins.p;
    }
  }
  // The integer at a place, straight from the text of abi.h.
  int weight(int64_t s, int64_t row, int64_t col) const {
    const int64_t groups = m.padded / m.group, g = col / m.group, c = col % m.group, lane = row % 16 * 4 + c % 4;
    const uint8_t* p = codes.p + s * m.codes_stride + (row / 16 * groups + g) * group_bytes(m.format, m.group);
    if (m.format == KEPT4) return p[c / 8 * 64 + lane] >> (c / 4 % 2 * 4) & 15;
    if (m.format >= Q8) return m.format == KEPT7 ? p[c / 4 * 64 + lane] : (int8_t)p[c / 4 * 64 + lane];
    const int P = m.format - PAIR6 + 2, step = c / 8, y = c / 4 % 2;
    int index = p[step / 2 * 64 + lane] >> (step % 2 * 4) & 15;
    for (int k = 2; k < P; k++) index |= (p[256 + 64 * k + lane] >> step & 1) << (k + 2);
    const int w = table.p[y * (16 << (P - 2)) + index];
    return p[256 + 64 * y + lane] >> step & 1 ? -w : w;
  }
  float scale(int64_t s, int64_t row, int64_t g) const {
    const int64_t i = s * m.scales_stride + (row / 16 * (m.padded / m.group) + g) * 16 + row % 16;
    return is_kept(m.format) ? reinterpret_cast<float*>(scales.p)[i] : (float)scales.p[i];
  }
  float min(int64_t s, int64_t row, int64_t g) const { return mins.p[s * m.scales_stride + (row / 16 * (m.padded / m.group) + g) * 16 + row % 16]; }
};

static Tensor tensor(int buffer, int64_t stride) {
  Tensor t{};
  t.buffer = buffer; t.leading = TOKENS; t.ndim = 1; t.stride = stride; t.sizes[0] = stride; t.strides[0] = 1;
  return t;
}
static void run(const Kernel& k, const void* args, const Step& step, int chunk = 1 << 30) {
  static Scratch scratch;
  const int64_t units = k.units(args, step);
  for (int64_t u = 0; u < units; u += chunk) k.run(args, step, u, u + chunk < units ? u + chunk : units, scratch);
}

static int64_t quantised_stride(int64_t padded, int64_t group) { return Made::up(padded + padded / group * 8, 64) / 4; }

// Rows of floats and the same quantised by the kernel, in buffers 0 and 1; buffer 2: outputs, 3: residuals.
struct Data {
  int64_t tokens, cols, padded, group, stride;
  Array<float> x, q, y, residual;
  void* buffers[5];
  Step step{};
  Data(int64_t tokens, const Matrix& m, int64_t out, bool extreme, int64_t rotation = 0)
      : tokens(tokens), cols(m.cols), padded(m.padded), group(m.group), stride(m.group ? quantised_stride(padded, group) : 0),
        x(tokens * cols), q(tokens * stride), y(tokens * out), residual(tokens * out), buffers{x.p, q.p, y.p, residual.p, nullptr} {
    for (size_t i = 0; i < x.n; i++) x.p[i] = extreme ? (i / cols % 2 ? -1.0f : 1.0f) : uniform();
    for (size_t i = 0; i < residual.n; i++) residual.p[i] = uniform();
    step.tokens = tokens; step.buffers = buffers;
    if (!group) return;
    QuantiseArgs a{tensor(0, cols), tensor(1, stride), cols, padded, group, rotation};
    run(quantise_kernel, &a, step);
  }
};

static float expected(const Made& w, int64_t s, int64_t row, const float* in, bool add_residual, float residual) {
  const Matrix& m = w.m;
  float f = 0;
  if (is_float(m.format)) {
    float lanes[LANES] = {};
    for (int64_t c = 0; c < m.cols; c++) {
      const int64_t i = s * m.rows * m.cols + row * m.cols + c;
      float x;
      uint16_t h;
      memcpy(&h, w.codes.p + 2 * i, 2);
      if (m.format == F32) memcpy(&x, w.codes.p + 4 * i, 4);
      else if (m.format == BF16) { uint32_t b = (uint32_t)h << 16; memcpy(&x, &b, 4); }
      else x = (h & 0x8000 ? -1.0f : 1.0f) * std::ldexp((float)(1024 + (h & 1023)), (h >> 10 & 31) - 25);
      lanes[c % LANES] = fma1(x, in[c], lanes[c % LANES]);
    }
    f = sum(load(lanes));
  } else {
    const Quantised a = quantised(in, m.padded, m.group);
    for (int64_t g = 0; g < m.padded / m.group; g++) {
      int64_t sum = 0;
      for (int64_t c = g * m.group; c < (g + 1) * m.group; c++) sum += w.weight(s, row, c) * a.values[c];
      f = fma1((float)sum, w.scale(s, row, g) * a.scales[g], f);
      if (m.mins) f = fma1((float)a.sums[g], -(w.min(s, row, g) * a.scales[g]), f);
    }
    if (m.row_scales) f *= m.row_scales[s * m.rows_stride + row];
  }
  if (m.bias) f += m.bias[s * m.rows + row];
  return add_residual ? f + residual : f;
}

static int failures = 0;
static void same(float got, float want, const char* what, const char* format, int64_t a, int64_t b) {
  if (memcmp(&got, &want, 4) == 0 || (got != got && want != want)) return;
  if (failures++ < 20) printf("%s %s [%ld, %ld]: %.9g, not %.9g\n", what, format, (long)a, (long)b, got, want);
}

static void check_linear(int f, int64_t rows, int64_t cols, int64_t group, int64_t tokens, bool extreme, bool with_mins) {
  Made w(f, rows, cols, group, 1, extreme, with_mins), v(f, 5, cols, group, 1, extreme, with_mins);
  Data d(tokens, w.m, rows + 5, extreme);
  const Matrix two[] = {w.m, v.m};
  Tensor outs[] = {tensor(2, rows + 5), tensor(2, rows + 5)}, adds[] = {tensor(3, rows + 5), tensor(-1, 0)};
  outs[1].offset = rows;
  LinearArgs a{is_float(f) ? tensor(0, cols) : tensor(1, d.stride), 2, two, outs, adds};
  run(linear_kernel, &a, d.step, 1);
  for (int64_t t = 0; t < tokens; t++) {
    const float* in = is_float(f) ? d.x.p + t * cols : d.q.p + t * d.stride;
    for (int64_t r = 0; r < rows; r++) same(d.y.p[t * (rows + 5) + r], expected(w, 0, r, in, true, d.residual.p[t * (rows + 5) + r]), "linear", NAMES[f], t, r);
    for (int64_t r = 0; r < 5; r++) same(d.y.p[t * (rows + 5) + rows + r], expected(v, 0, r, in, false, 0), "linear, 2nd", NAMES[f], t, r);
  }
}

static void check_experts(int f, int64_t rows, int64_t cols, int64_t group, int64_t tokens, int64_t stack, bool per_choice) {
  constexpr int64_t K = 3;
  Made w(f, rows, cols, group, stack, false, true);
  Data d(per_choice ? tokens * K : tokens, w.m, rows * K, false);
  Array<int32_t> ids(tokens * K);
  for (size_t i = 0; i < ids.n; i++) ids.p[i] = rng() % stack;
  ids.p[0] = (int32_t)stack;
  d.buffers[4] = ids.p;
  d.step.tokens = tokens;
  const int64_t width = is_float(f) ? cols : d.stride;
  Tensor in = tensor(is_float(f) ? 0 : 1, width), out = tensor(2, rows * K), choice = tensor(4, K);
  if (per_choice) in.stride = width * K, in.strides[0] = width;
  out.strides[0] = rows;
  ExpertsArgs a{in, choice, out, &w.m, K, per_choice};
  run(experts_kernel, &a, d.step, 1);
  for (int64_t p = 0; p < tokens * K; p++) {
    const float* row = (is_float(f) ? d.x.p : d.q.p) + (per_choice ? p : p / K) * width;
    for (int64_t r = 0; r < rows; r++)
      same(d.y.p[p * rows + r], ids.p[p] >= stack ? NAN : expected(w, ids.p[p], r, row, false, 0), "experts", NAMES[f], p, r);
  }
}

// Rotates by the definition, in double.
static void check_embed_and_quantise(int f, int64_t cols, int64_t group, int64_t rotation) {
  Made w(f, 37, cols, group, 1, false, true);
  w.m.rotation = is_float(f) ? 0 : rotation;
  Data d(4, w.m, cols, false, w.m.rotation);
  const int64_t ids[] = {36, 0, 17, 37};
  d.step.ids = ids;
  EmbedArgs e{tensor(-1, 0), tensor(2, cols), &w.m, 0, 0};
  run(embed_kernel, &e, d.step, 1);
  auto turned = [&](std::vector<double> v) {
    if (!w.m.rotation) return v;
    std::vector<double> y(v.size());
    for (size_t i = 0; i < v.size(); i++)
      for (int64_t j = 0; j < rotation; j++) y[i] += v[i / rotation * rotation + j] * (__builtin_parity((i % rotation) & j) ? -1 : 1) / std::sqrt((double)rotation);
    return y;
  };
  for (int t = 0; t < 3; t++) {
    std::vector<double> v(cols);
    for (int64_t c = 0; c < cols; c++) {
      if (is_float(f)) { Made& m = w; float x; uint16_t h; const int64_t i = ids[t] * cols + c; memcpy(&h, m.codes.p + 2 * i, 2);
        if (f == F32) memcpy(&x, m.codes.p + 4 * i, 4); else if (f == BF16) { uint32_t b = (uint32_t)h << 16; memcpy(&x, &b, 4); }
        else x = (h & 0x8000 ? -1.0f : 1.0f) * std::ldexp((float)(1024 + (h & 1023)), (h >> 10 & 31) - 25);
        v[c] = x; continue; }
      v[c] = (double)w.weight(0, ids[t], c) * w.scale(0, ids[t], c / group) * (w.m.row_scales ? w.m.row_scales[ids[t]] : 1.0) - (w.m.mins ? w.min(0, ids[t], c / group) : 0.0);
    }
    v = turned(v);
    for (int64_t c = 0; c < cols; c++)
      if (!(std::fabs(v[c] - d.y.p[t * cols + c]) <= 1e-5 * (1 + std::fabs(v[c])))) same(d.y.p[t * cols + c], (float)v[c], "embed", NAMES[f], t, c);
  }
  for (int64_t c = 0; c < cols; c++) same(d.y.p[3 * cols + c], NAN, "embed, no such row", NAMES[f], 3, c);
  if (is_float(f)) return;
  for (int t = 0; t < 4; t++) {
    std::vector<double> v(d.x.p + t * cols, d.x.p + (t + 1) * cols);
    v = turned(v);
    v.resize(w.m.padded);
    const Quantised q = quantised(d.q.p + t * d.stride, w.m.padded, group);
    for (int64_t g = 0; g < w.m.padded / group; g++) {
      double most = 0, sum = 0;
      for (int64_t c = g * group; c < (g + 1) * group; c++) most = std::fmax(most, std::fabs(v[c]));
      for (int64_t c = g * group; c < (g + 1) * group; c++) sum += q.values[c];
      if (std::fabs(q.scales[g] - most / 127) > 1e-6 * most || sum != q.sums[g]) same(q.scales[g], (float)(most / 127), "quantise: scale or sum", NAMES[f], t, g);
      for (int64_t c = g * group; c < (g + 1) * group; c++)
        if (std::fabs(q.values[c] * most / 127 - v[c]) > most / 127 * 0.5001) same(q.values[c], (float)(v[c] * 127 / most), "quantise", NAMES[f], t, c);
    }
  }
}

static void check_nan() {
  Made w(PAIR7, 16, 128, 64, 1, false, false);
  Data d(2, w.m, 16, false);
  d.x.p[3] = NAN; d.x.p[70] = INFINITY;
  QuantiseArgs a{tensor(0, 128), tensor(1, d.stride), 128, 128, 64, 64};
  run(quantise_kernel, &a, d.step);
  const Quantised bad = quantised(d.q.p, 128, 64), good = quantised(d.q.p + d.stride, 128, 64);
  for (int g = 0; g < 2; g++) { same(bad.scales[g], NAN, "nan", "", 0, g); if (!(good.scales[g] > 0)) failures++; }
}

static int check() {
  for (int f = F32; f <= KEPT8; f++)
    for (int64_t group : {64, 32, 16}) {
      if (!is_kept(f) && group != 64) continue;
      for (int extreme = 0; extreme < 2; extreme++)
        for (int64_t tokens : {1, 2, 3, 4, 5, 7, 8, 13, 33})
          for (int64_t rows : {1, 16, 31, 90})
            for (int64_t cols : {64, 96, 331})
              if (rows == 31 || cols == 331) check_linear(f, rows, cols, group, tokens, extreme, extreme || rows == 31);
      for (int64_t tokens : {1, 2, 9, 40})
        for (int per = 0; per < 2; per++) check_experts(f, 35, 130, group, tokens, 7, per);
      check_embed_and_quantise(f, 256, group, 64);
      check_embed_and_quantise(f, 1024, group, 512);
      check_embed_and_quantise(f, 4096, group, 4096);
      check_embed_and_quantise(f, 200, group, 8);
    }
  check_nan();
  // Offsets beyond 2^31: by arithmetic, nothing is touched.
  Matrix big{};
  big.format = PAIR8; big.group = 64; big.rows = 1 << 20; big.cols = big.padded = 1 << 14; big.stack = 4; big.codes_stride = (int64_t)1 << 33; big.scales_stride = (int64_t)1 << 28;
  const int64_t tile = (1 << 16) - 1;
  if (tile_of(big, 3, tile).codes != (const uint8_t*)nullptr + 3 * ((int64_t)1 << 33) + tile * 256 * 512) failures++;
  if (tile_of(big, 3, tile).bytes != (const uint8_t*)nullptr + 3 * ((int64_t)1 << 28) + tile * 256 * 16) failures++;
  printf(failures ? "%d differences\n" : "all equal\n", failures);
  return failures != 0;
}

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds for the kernel over all `copies` matrices, each thread its half of the units.
static double timed(int threads, const std::vector<LinearArgs>& all, const Step& step, int passes) {
  static Scratch scratch[2];
  double best = 1e9;
  const double start = now();
  for (int rep = 0; rep < 5 || now() - start < 0.3; rep++) {
    const double t = now();
    auto work = [&](int q) {
      for (int pass = 0; pass < passes; pass++) for (const LinearArgs& a : all) {
        const int64_t units = linear_kernel.units(&a, step);
        linear_kernel.run(&a, step, units * q / threads, units * (q + 1) / threads, scratch[q]);
      }
    };
    if (threads == 1) work(0);
    else { std::thread other(work, 1); work(0); other.join(); }
    best = std::fmin(best, (now() - t) / passes);
  }
  return best;
}

static void speed(int f, int64_t rows, int64_t cols) {
  const int64_t group = f == KEPT8 || f == KEPT4 || f == KEPT7 ? 32 : 64;
  for (int64_t tokens : {1, 2, 4, 8, 16, 32, 128, 512}) {
    std::vector<Made*> w;
    std::vector<LinearArgs> small, large;
    const double megabytes = Made::code_bytes(f, rows, cols, group) / 1e6;
    const int copies = tokens > 4 ? 1 : (int)(200 / megabytes) + 2;
    for (int c = 0; c < copies; c++) w.push_back(new Made(f, rows, cols, group, 1, false, is_kept(f)));
    Data d(tokens, w[0]->m, rows, false);
    Tensor out = tensor(2, rows);
    for (Made* x : w) large.push_back({is_float(f) ? tensor(0, cols) : tensor(1, d.stride), 1, &x->m, &out, nullptr});
    small.push_back(large[0]);
    const double weights = (double)rows * cols, bytes = Made::code_bytes(f, rows, cols, group) + Made::scale_count(f, rows, cols, group) * (is_kept(f) ? 8 : 1);
    const int passes = 1 + (int)(1e8 / (weights * tokens));  // milliseconds, to which a thread's start is nothing
    const double one = timed(1, small, d.step, passes), two = timed(2, small, d.step, passes);
    printf("%-5s %ldx%ld tokens %3ld: %7.1f G mul-add/s one thread, %7.1f two", NAMES[f], (long)rows, (long)cols, (long)tokens, weights * tokens / one * 1e-9, weights * tokens / two * 1e-9);
    if (copies > 1) {
      const double dram1 = timed(1, large, d.step, 1) / copies, dram2 = timed(2, large, d.step, 1) / copies;
      printf("; from memory %6.1f (%4.1f GB/s), two %6.1f (%4.1f GB/s)", weights * tokens / dram1 * 1e-9, bytes / dram1 * 1e-9, weights * tokens / dram2 * 1e-9, bytes / dram2 * 1e-9);
    }
    printf("\n");
    for (Made* x : w) delete x;
  }
}

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "check") return check();
  if (mode != "speed") return fprintf(stderr, "usage: %s check | speed [format] [rows] [cols]\n", argv[0]), 2;
  const int64_t rows = argc > 3 ? atol(argv[3]) : 2048, cols = argc > 4 ? atol(argv[4]) : 2048;
  for (int f = F32; f <= KEPT8; f++)
    if (argc < 3 || std::string(argv[2]) == NAMES[f] || std::string(argv[2]) == "all") speed(f, rows, cols);
}
