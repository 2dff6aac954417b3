#include "isa.h"

namespace inferflow {
extern const Isa isa_portable;
const Isa isa_portable = make_isa("portable");
}  // namespace inferflow
