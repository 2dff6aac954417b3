// What an instruction set provides: for each operation, how many units its work has and a function that runs a range of them.
// Every isa_*.cpp compiles the same headers under its own flags and namespace and exports one such table.
#pragma once
#include <cstddef>
#include "abi.h"

namespace inferflow {

// Scratch memory of one thread, 64-byte aligned, kept from step to step; `get` may move it, so one call per unit.
struct Scratch {
  uint8_t* data = nullptr;
  size_t size = 0;
  uint8_t* get(size_t bytes);  // pool.cpp
  ~Scratch();
};

struct Kernel {
  // Independent units of this operation in this step (0: nothing to do).
  int64_t (*units)(const void* args, const Step& step);
  // Runs units [begin, end).
  void (*run)(const void* args, const Step& step, int64_t begin, int64_t end, Scratch& scratch);
};

struct Isa {
  const char* name;     // "portable", "avx2", "avx512", "avx512vnni", "neon"
  int lanes;            // floats in a vector
  Kernel ops[OP_COUNT];
};

// The tables that this build holds, best first; supported() asks the processor.
const Isa* const* isas();  // null-terminated
bool supported(const Isa& isa);

// Views.
static inline float* at(const Tensor& t, const Step& step, int64_t row) {
  float* base = static_cast<float*>(t.data ? const_cast<void*>(t.data) : step.buffers[t.buffer]);
  return base + t.offset + row * t.stride;
}
static inline int64_t leading(const Tensor& t, const Step& step) { return t.leading == TOKENS ? step.tokens : t.leading == ROWS ? step.rows : 1; }
static inline bool given(const Tensor& t) { return t.data || t.buffer >= 0; }

}  // namespace inferflow
