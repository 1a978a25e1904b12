// Inputs and outputs of a Decoder node, for both of its callers: ONNX Runtime (ops.cpp) and the C interface
// (c_api.cpp).
//
// inputs: plan int64 [6, T] (token, position, slot + 2^32 x adapter, visible, parent, place), rows int64 [R], gates
// bool [G],
//   moves int64 [M, 3], kv uint8 [S, bytes] (updated in place), control int64 [8] (top + 2048 x columns of the LM heads
//   that are computed, the first ones, 0 = all; keys, values, codes, read codes + 2 x blocks of each slot's table,
//   window, sinks, ring), tables float [..] (learned tables of the keys' format, then of the codes' format; cache.h),
//   hidden_in float [T, D] (read only if the gates load it), then, for a program with cross-attention, memory uint8 [M,
//   bytes] (keys and values of cross-attention, filled by separate passes) and sources int64 [2, T] (the memory of each
//   row, and how many rows of it are seen or, as it is filled, which one this is), for one that inserts rows, inserted
//   float [I, D'], for one whose rows have three positions, axes int64 [3, T], then the weights.
// outputs: logits float [L, columns] (no rows if top > 0), ids int64 [L, top], values float [L, top], where L is R
//   times the rows that the active LM heads compute for each; hidden float [T, W] (no rows unless the gates ask for it;
//   W: columns of the stores that they leave on).
#pragma once
#include <memory>
#include <vector>

#include "abi.h"
#include "pass.h"

namespace edgespec {

constexpr size_t kFixedInputs = 8;  // before those of memories, of inserted rows and the weights

struct View {
  void* data = nullptr;
  int type = 0;
  std::vector<int64_t> dims;
  int64_t count() const {
    int64_t n = 1;
    for (int64_t d : dims) n *= d;
    return n;
  }
  size_t bytes() const { return size_t(count()) * (type == abi::kFloat ? 4 : type == abi::kInt64 ? 8 : 1); }
};

// Inputs of a program's node before its weights.
size_t node_inputs(const Program& program);

struct NodePass {
  PassInputs in;  // without weights
  std::unique_ptr<bool[]> gates;
};

// Reads what node_inputs() says; the views' memory must stay.  Throws std::invalid_argument: something does not fit.
NodePass read_node(const Program& program, const std::vector<View>& given);

struct NodeShapes {
  std::vector<int64_t> logits, best, hidden;  // best: of the ids and the values
};

NodeShapes node_shapes(const Program& program, const PassInputs& in);

}  // namespace edgespec
