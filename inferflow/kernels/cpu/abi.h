// The contract between Python and C++: plain structs that inferflow/kernels/native.py mirrors field by field, and the meaning of
// every number in them. Python plans (which operations, which buffers), C++ runs; nothing here is ever parsed or resized.
//
// A program is a list of operations. Every operation cuts its work into independent units; any thread may run any unit, and a
// unit's results do not depend on which other units, tokens or sequences are in the step. That is all there is to batch invariance.
#pragma once
#include <cstdint>

namespace inferflow {

constexpr int MAX_DIMS = 6;     // axes of a tensor beside the leading one
constexpr int TILE = 16;        // weight rows that are stored together
constexpr int MAX_PARTS = 64;   // inputs of a concatenation

// What a leading axis counts.
enum Leading : int32_t { TOKENS = 0, ROWS = 1, NONE = 2 };  // NONE: a constant, the same for all tokens (stride 0)

// A view of a buffer, 4-byte elements: element (t, i0, i1, …) is at base + offset + t·stride + Σ i_n·strides[n].
// base is Step::buffers[buffer], or `data` when that is not null. The elements are float, but for expert ids (int32) and
// quantised rows (see Quantise).
struct Tensor {
  const void* data;
  int32_t buffer;
  int32_t leading;
  int32_t ndim;  // axes beside the leading one
  int32_t pad;
  int64_t offset, stride;
  int64_t sizes[MAX_DIMS], strides[MAX_DIMS];
};

// One sequence's share of the step: tokens [start, start + count) at positions past, past + 1, …
struct Span {
  int64_t start, count, past;
  int64_t blocks;  // index of its first entry in Step::block_table
  int64_t slot;    // its row in every state array
};

struct Step {
  int64_t tokens, rows;
  const int64_t *ids, *positions;  // [tokens]
  const int64_t* row_index;        // [rows]: the tokens whose logits are wanted
  const int32_t* span_of;          // [tokens]: index into spans
  const Span* spans;
  int64_t span_count;
  const int32_t* block_table;  // of all sequences, one after the other
  void** buffers;              // by number
};

// ---------------------------------------------------------------------------------------------------- weight matrices
//
// Float formats are row-major [stack, rows, cols], as in the file.
// Integer formats are stored in tiles of 16 rows and groups of `group` columns (padded with zeros to whole tiles and groups).
// Lane l of 64 is row l/4, column l%4 of a step of 4 columns:
//   PAIR6/7/8  [tiles, groups, 256 + 64·P] bytes, group 64, P = 2, 3, 4 bit planes. A code names two weights: step s of 8 columns
//              (s = 0 … 7) holds, in lane l, the weights of columns 8s + l%4 (x) and 8s + 4 + l%4 (y) of row l/4. The low four
//              bits of its table index are a nibble of byte (s/2)·64 + l (low nibble for even s); plane p is the 64 bytes at
//              256 + 64p, bit s of byte l: p = 0 the sign of x (1: negative), 1 the sign of y, 2 and 3 bits 4 and 5 of the index.
//              The table (`codebook`, [2][16·2^(P-2)] uint8, at most 63) holds |x|, then |y|.
//   Q8         [tiles, groups, 1024] int8, group 64: step c of 4 columns is the 64 bytes at 64c.
//   KEPT4      [tiles, groups, group·8]: values 0 … 15; step c is in byte (c/2)·64 + l (low nibble for even c).
//   KEPT7      [tiles, groups, group·16]: values 0 … 127, laid out as Q8.   KEPT8: the same with int8 values.
// weight = integer · scale (− min). PAIR and Q8: scale = scales[tile, group, row%16] (uint8) · row_scales[row], no min.
// KEPT: scales and mins are float [tiles, groups, 16]; mins may be null.
//
// An integer matrix multiplies quantised rows (see Quantise). The result of one output element is defined as
//   f = 0;  for each group g in order:  f = fma(float(Σ w·a), scale_g · a_scale_g, f), where scale_g is float(uint8) or the float;
//   with mins also, right after it:     f = fma(float(a_sum_g), −(min_g · a_scale_g), f);
//   y = f · row_scale (PAIR, Q8), then + bias, then + residual, each a float operation of its own
// whatever the number of tokens, so all kernels give the same bits. Float formats: one vector accumulator per output (lanes along
// cols, fma in order), then one fixed tree over the lanes, the tail by masked lanes; then + bias, + residual.
enum Format : int32_t { F32 = 0, F16 = 1, BF16 = 2, PAIR6 = 3, PAIR7 = 4, PAIR8 = 5, Q8 = 6, KEPT4 = 7, KEPT7 = 8, KEPT8 = 9 };

struct Matrix {
  int32_t format, group;        // group: 0 for float formats
  int64_t rows, cols, padded;   // padded: cols rounded up to whole groups
  int64_t stack;                // matrices behind one another (experts), or 1
  int64_t rotation;             // width of the Hadamard blocks that its columns are rotated by, 0 for none
  const void *codes, *scales;
  const float *mins, *row_scales, *bias;  // bias [stack, rows]; null for none
  const uint8_t* codebook;
  int64_t codes_stride, scales_stride, rows_stride;  // between stacked matrices: bytes, elements (scales, mins), elements (row scales)
};

// ---------------------------------------------------------------------------------------------------- operations

enum OpCode : int32_t {
  OP_EMBED = 0, OP_POSITIONS, OP_SELECT, OP_COPY, OP_QUANTISE, OP_LINEAR, OP_EXPERTS, OP_NORM, OP_UNARY, OP_XIELU, OP_BINARY,
  OP_REDUCE, OP_CONCAT, OP_OUTER, OP_ROPE_TABLE, OP_ROPE, OP_STORE_KV, OP_SDPA, OP_CONV, OP_RECURRENCE, OP_ROUTER, OP_COMBINE,
  OP_GATE, OP_GLU, OP_PEAKS, OP_WEIGH, OP_REACH, OP_COUNT
};

struct Op {
  int32_t code, pad;
  const void* args;  // the struct below that bears its name
};

// out[t] = row ids[t] + offset of the table. source 0: Step::ids, 1: Step::positions, 2: `in`, rounded to the nearest.
// An id outside the table gives a row of NaN.
struct EmbedArgs { Tensor in, out; const Matrix* table; int64_t source, offset; };

struct PositionsArgs { Tensor out; };            // out[t] = float(position)
struct SelectArgs { Tensor in, out; };           // out[r] = in[row_index[r]]
struct CopyArgs { Tensor in, out; };             // broadcasts axes of size 1

// A quantised row, at out.offset + t·out.stride (4-byte units, 64-byte aligned): int8 [padded], then float scale [groups], then
// int32 sum [groups]. x is padded with zeros, then rotated (each block of `rotation` columns times the orthonormal Hadamard matrix in
// natural order: stages of width 1, 2, 4 … in float, then one multiplication by float(1/√rotation)); then for each group
// m = max |x|, scale = m / 127, a = int8(round_half_even(x · (127 / m))), all in float; m = 0 gives zeros.
// A group that is not finite gets scale NaN (and harms no other token).
struct QuantiseArgs { Tensor in, out; int64_t cols, padded, group, rotation; };

// Several matrices with one input. in: floats (float formats) or quantised rows. One entry of outs (and residuals: data and buffer
// both unset, buffer = -1, for none) per matrix.
struct LinearArgs { Tensor in; int64_t count; const Matrix* matrices; const Tensor* outs; const Tensor* residuals; };

// in [t] or [t, topk] (then in.ndim says so by `per_choice`), ids int32 [t, topk] -> out [t, topk, rows]. Tokens go grouped by expert.
struct ExpertsArgs { Tensor in, ids, out; const Matrix* matrix; int64_t topk, per_choice; };

// Over the last axis. weight/bias [last] or [heads, last] (per_head); add_one is already in the weight.
// kind 0 rms, 1 layer, 2 l2. quantise != null: the normed row goes there, quantised, and `out` is not written (only [t, d] inputs).
struct NormArgs { Tensor in, out; const float *weight, *bias; const QuantiseArgs* quantise; int64_t kind, per_head; double eps; };

// kinds of one number, in the order of UNARY below; a, b: parameters (clamp: limit; softcap: cap).
enum Unary : int32_t {
  U_SILU = 0, U_GELU, U_GELU_TANH, U_QUICK_GELU, U_RELU, U_RELU2, U_SIGMOID, U_TANH, U_SOFTPLUS, U_IDENTITY, U_EXP, U_LOG, U_SQRT,
  U_ABS, U_FLOOR, U_CEIL, U_SIN, U_COS, U_CLAMP, U_SOFTCAP
};
struct UnaryArgs { Tensor in, out; int64_t kind; double a; };
struct XieluArgs { Tensor in, alpha_p, alpha_n, out; double beta, eps; };  // alphas: tensors of one element
enum BinaryKind : int32_t { B_ADD = 0, B_SUB, B_MUL, B_DIV, B_POW, B_MIN, B_MAX };
// a and b have the axes of out (stride 0 where they are broadcast). A constant operand is a Tensor with `data`.
struct BinaryArgs { Tensor a, b, out; int64_t kind; };
// out = unary(a) · b, contiguous rows; quantise as in Norm. For tokens × [d].
struct GateArgs { Tensor a, b, out; const QuantiseArgs* quantise; int64_t kind; };
// unary(A·in) · (B·in) for the two matrices, quantised: the bits of Linear and Gate.
struct GluArgs { Tensor in; const Matrix* matrices; const QuantiseArgs* quantise; int64_t kind; };
enum ReduceKind : int32_t { R_SUM = 0, R_MEAN, R_MAX, R_SOFTMAX };
struct ReduceArgs { Tensor in, out; int64_t kind; };
struct ConcatArgs { Tensor out; int64_t count; const Tensor* parts; };
struct OuterArgs { Tensor a, b, out; };  // b may be NONE-leading

// out [t, 2·half]: cos, then sin, of float(position)·inverse (angle in float, functions in double), times factor.
// inverse [variants, half], factors [variants]; variant_of [spans] says which is each sequence's.
struct RopeTableArgs { Tensor out; const float *inverse, *factors; const int32_t* variant_of; int64_t half; };
// The first 2·half channels of the last axis. pairing 0: halves, 1: neighbours.
struct RopeArgs { Tensor in, table, out; int64_t half, pairing; };

// ---------------------------------------------------------------------------------------------------- attention

enum CacheType : int32_t { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2, KV_I8 = 3 };
// A cache of one node: keys [blocks, heads, dim, block] (positions innermost), values [blocks, heads, block, vdim].
// KV_I8: key_scales and value_scales float [blocks, heads, block]: max |x| / 127 over the head's channels of that position.
struct Cache {
  void *keys, *values;
  float *key_scales, *value_scales;
  int64_t type, block, heads, dim, vdim;  // block: a multiple of 16
};
struct StoreKvArgs { Tensor k, v; const Cache* cache; };
// q [t, heads, dim] -> out [t, heads, vdim]. A key at position p is seen by a query at t when p <= t, p > t − window and
// p >= t / chunk · chunk. Score = q·k·scale, softcap, + alibi_scale · bias; bias = slope · (p − t), or with bfloat16 set,
// bf16(bf16(slope) · bf16(p)). sinks [heads] or null. 0 stands for no window, chunk, softcap; slopes null for no alibi.
// Blocks are walked in order, each with a running maximum: one query's result depends on its own keys only.
struct SdpaArgs {
  Tensor q, out;
  const Cache* cache;
  const float *sinks, *slopes;
  int64_t window, chunk, bfloat16;
  double scale, softcap, alibi_scale;
};

// ---------------------------------------------------------------------------------------------------- state, experts

// state [slots, kernel − 1, channels]: the inputs before this step's, oldest first; read when past > 0, written always.
struct ConvArgs { Tensor in, out; const float *weight, *bias; float* state; int64_t kernel; };
// state [slots, heads, dk, dv]; beta.buffer = -1 and data null for none.
struct RecurrenceArgs { Tensor q, k, v, decay, beta, out; float* state; int64_t heads, groups, dk, dv, decay_per_key; };

enum Score : int32_t { S_SOFTMAX = 0, S_SIGMOID, S_SOFTMAX_TOPK, S_SPARSEMIXER, S_IDENTITY };
struct RouterArgs {
  Tensor logits, bias, ids, weights;  // bias.buffer = -1 and data null for none; ids int32
  int64_t experts, top_k, score, normalise, groups, top_groups, group_top2;
  double norm_min, scale, jitter;
};
struct CombineArgs { Tensor y, weights, out; };  // weights unset: a plain sum

// ---------------------------------------------------------------------------------------------------- rows of logits

// `count` rows, at[n] · stride floats from `logits` on; no part of a program. A row is folded: token f·columns + c stands in column c, and
// columns is a multiple of 16. inferflow/kernels/logits.py says what the results are; arrays of results are dense.
struct Rows { const float* logits; const int64_t* at; int64_t count, vocab, stride, columns; };
struct PeaksArgs { Rows rows; float *peaks, *best; int64_t* tokens; };             // best: NaN where the row holds one
struct WeighArgs { Rows rows; const float *best, *scale; float* sums; };           // scale: log2(e) / temperature
struct ReachArgs { Rows rows; const float *peaks, *floor; int64_t room; uint64_t* keys; int64_t* counts; };  // counts may exceed room

}  // namespace inferflow
