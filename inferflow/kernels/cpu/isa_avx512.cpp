#include "isa.h"

namespace inferflow {
extern const Isa isa_avx512;
const Isa isa_avx512 = make_isa("avx512");
}  // namespace inferflow
