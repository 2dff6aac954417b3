// Which instruction sets this build holds, and which of them this processor has. Compiled for the baseline.
#include "kernels.h"

#include <cstring>

namespace inferflow {

extern const Isa isa_portable;
#if defined(WITHOUT_AVX512)  // a quicker build, for the sanitizers
extern const Isa isa_avx2;
#elif defined(__x86_64__)
extern const Isa isa_avx2, isa_avx512, isa_avx512vnni;
#elif defined(__aarch64__)
extern const Isa isa_neon;
#endif

const Isa* const* isas() {
#if defined(WITHOUT_AVX512)
  static const Isa* const table[] = {&isa_avx2, &isa_portable, nullptr};
#elif defined(__x86_64__)
  static const Isa* const table[] = {&isa_avx512vnni, &isa_avx512, &isa_avx2, &isa_portable, nullptr};
#elif defined(__aarch64__)
  static const Isa* const table[] = {&isa_neon, &isa_portable, nullptr};
#else
  static const Isa* const table[] = {&isa_portable, nullptr};
#endif
  return table;
}

bool supported(const Isa& isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(isa.name, "avx2")) return avx2;
  if (!strcmp(isa.name, "avx512")) return avx512;
  if (!strcmp(isa.name, "avx512vnni"))
    return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
#endif
  (void)isa;
  return true;
}

}  // namespace inferflow
