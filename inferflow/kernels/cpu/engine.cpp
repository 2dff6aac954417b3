// What Python calls: pools, one step of a program, the processor's instruction sets, and a probe of the memory's speed.
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "pool.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

using namespace inferflow;

namespace {

double now() {
  using clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

const Isa* find(int isa) {
  for (int n = 0; isas()[n]; n++)
    if (n == isa) return supported(*isas()[n]) ? isas()[n] : nullptr;
  return nullptr;
}

// Reads [begin, end), whole cache lines, and gives something that depends on all of it.
int64_t read_all(const char* begin, const char* end) {
#if defined(__x86_64__)
  __m128i x[4] = {};
  for (const char* p = begin; p + 64 <= end; p += 64)
    for (int n = 0; n < 4; n++) x[n] = _mm_xor_si128(x[n], _mm_load_si128(reinterpret_cast<const __m128i*>(p + 16 * n)));
  return _mm_cvtsi128_si64(_mm_xor_si128(_mm_xor_si128(x[0], x[1]), _mm_xor_si128(x[2], x[3])));
#else
  int64_t x[8] = {};
  for (const char* p = begin; p + 64 <= end; p += 64) {
    int64_t line[8];
    memcpy(line, p, 64);
    for (int n = 0; n < 8; n++) x[n] ^= line[n];
  }
  return x[0] ^ x[1] ^ x[2] ^ x[3] ^ x[4] ^ x[5] ^ x[6] ^ x[7];
#endif
}

}  // namespace

extern "C" {

// The name of instruction set `isa` of this build, best first; null past the last.
const char* inferflow_isa_name(int isa) {
  for (int n = 0; isas()[n]; n++)
    if (n == isa) return isas()[n]->name;
  return nullptr;
}
int inferflow_isa_supported(int isa) { return find(isa) != nullptr; }

void* inferflow_pool_new(int threads) { return new Pool(threads); }
void inferflow_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }

// One step: all operations in order. `seconds`, unless null, gets [count] durations. 0, or −1 for an instruction set that is not here.
int inferflow_run(void* pool, int isa, const Op* ops, int64_t count, const Step* step, double* seconds) {
  const Isa* table = find(isa);
  if (!table) return -1;
  for (int64_t n = 0; n < count; n++) {
    const double start = seconds ? now() : 0;
    static_cast<Pool*>(pool)->run(table->ops[ops[n].code], ops[n].args, *step);
    if (seconds) seconds[n] += now() - start;
  }
  return 0;
}

// Sizes of the structs, so that Python can prove that its mirrors agree: in the order of abi.h.
int64_t inferflow_size(int which) {
  const int64_t sizes[] = {
      sizeof(Tensor), sizeof(Span), sizeof(Step), sizeof(Matrix), sizeof(Op), sizeof(EmbedArgs), sizeof(PositionsArgs),
      sizeof(SelectArgs), sizeof(CopyArgs), sizeof(QuantiseArgs), sizeof(LinearArgs), sizeof(ExpertsArgs), sizeof(NormArgs),
      sizeof(UnaryArgs), sizeof(XieluArgs), sizeof(BinaryArgs), sizeof(GateArgs), sizeof(ReduceArgs), sizeof(ConcatArgs),
      sizeof(OuterArgs), sizeof(RopeTableArgs), sizeof(RopeArgs), sizeof(Cache), sizeof(StoreKvArgs), sizeof(SdpaArgs),
      sizeof(ConvArgs), sizeof(RecurrenceArgs), sizeof(RouterArgs), sizeof(CombineArgs), sizeof(Rows), sizeof(PeaksArgs),
      sizeof(WeighArgs), sizeof(ReachArgs)};
  return which >= 0 && which < static_cast<int>(sizeof sizes / sizeof *sizes) ? sizes[which] : -1;
}

// Bytes per second at which `threads` threads read `bytes` bytes (64-byte aligned), the best of `repeats` times.
double inferflow_read_bandwidth(const char* data, int64_t bytes, int threads, int repeats) {
  double best = 0;
  std::vector<int64_t> sink(threads);
  for (int r = 0; r < repeats; r++) {
    const double start = now();
    std::vector<std::thread> team;
    const int64_t part = bytes / threads / 64 * 64;
    for (int n = 1; n < threads; n++)
      team.emplace_back([&, n] { sink[n] ^= read_all(data + n * part, data + (n + 1) * part); });
    sink[0] ^= read_all(data, data + part);
    for (auto& thread : team) thread.join();
    const double speed = static_cast<double>(part * threads) / (now() - start);
    best = speed > best ? speed : best;
  }
  volatile int64_t keep = sink[0];
  (void)keep;
  return best;
}

}  // extern "C"
