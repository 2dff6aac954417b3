// Included by every isa_*.cpp after it has named itself: the table of all kernels, compiled for that instruction set.
#pragma once
#include "kernels.h"
#include "simd.h"

#include "quantise.h"

#include "attention.h"
#include "elementwise.h"
#include "embed.h"
#include "experts.h"
#include "gate.h"
#include "glu.h"
#include "matmul.h"
#include "norm.h"
#include "rope.h"
#include "router.h"
#include "sample.h"
#include "state.h"

namespace inferflow {
namespace {

constexpr Isa make_isa(const char* name) {
  return {name,
          LANES,
          {embed_kernel, positions_kernel, select_kernel, copy_kernel, quantise_kernel, linear_kernel, experts_kernel, norm_kernel,
           unary_kernel, xielu_kernel, binary_kernel, reduce_kernel, concat_kernel, outer_kernel, rope_table_kernel, rope_kernel,
           store_kv_kernel, sdpa_kernel, conv_kernel, recurrence_kernel, router_kernel, combine_kernel, gate_kernel,
           glu_kernel, peaks_kernel, weigh_kernel, reach_kernel}};
}

}  // namespace
}  // namespace inferflow
