#include "isa.h"

namespace inferflow {
extern const Isa isa_avx2;
const Isa isa_avx2 = make_isa("avx2");
}  // namespace inferflow
