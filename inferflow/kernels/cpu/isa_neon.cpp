#include "isa.h"

namespace inferflow {
extern const Isa isa_neon;
const Isa isa_neon = make_isa("neon");
}  // namespace inferflow
