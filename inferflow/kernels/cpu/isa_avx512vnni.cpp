#include "isa.h"

namespace inferflow {
extern const Isa isa_avx512vnni;
const Isa isa_avx512vnni = make_isa("avx512vnni");
}  // namespace inferflow
