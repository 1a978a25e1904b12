// Adapters: low-rank adds to matrices of a program, y += scale * B (A x), for the rows of a pass that name one.
//
// A row of the plan names its adapter in the upper half of its slot: slot + adapter * 2^32, 0 for none.  Every row is
// computed on its own, so its bits do not depend on other rows or on their adapters.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model_file.h"
#include "program.h"

namespace edgespec {

constexpr int kMaxRank = 1 << 12;
constexpr int kMaxAdapters = 1 << 16;

// The add to some tiles of a matrix.
struct LowRank {
  int first = 0, tiles = 0;  // of the matrix
  int rank = 0;
  Kind kind = kF32;  // of both matrices
  float scale = 1;
  const uint8_t *a = nullptr, *b = nullptr;  // packed [rank, k] and [16 tiles, rank], in `memory`
  std::unique_ptr<Memory> memory;

  const uint8_t* up(int tile) const { return b + size_t(tile - first) * tile_bytes(kind, rank); }
  bool has(int tile) const { return tile >= first && tile < first + tiles; }
};

class AdapterStore {
 public:
  // Throws std::invalid_argument: no such graph of native operators.
  explicit AdapterStore(const std::string& graph);

  const std::string& program() const { return text_; }
  int count() const { return static_cast<int>(adapters_.size()); }  // adapters, numbered from 1 on
  int open();                                                       // begins the next adapter -> its number
  // Adds to the adapter that was begun last: A [rank, k] and B [n, rank] for the matrix of this name in the checkpoint.
  // Throws std::invalid_argument: the program has no such matrix that can be added to, or one of another size.
  void add(const std::string& matrix, int rank, int k, int n, const float* a, const float* b, float scale, Kind kind);
  bool has(const std::string& matrix) const { return find_use(matrix).step != nullptr; }
  size_t bytes() const { return bytes_; }
  void seal() { model_ = {}; }  // after the last add: closes the files of the model
  // Finds the adds of an adapter to a weight input; null: there are none.
  const std::vector<LowRank>* find(int adapter, int weight) const {
    const auto& own = adapters_[static_cast<size_t>(adapter) - 1];
    const auto found = own.find(weight);
    return found == own.end() ? nullptr : &found->second;
  }

 private:
  struct Use {  // a step that multiplies by a weight input, and which part of the input a matrix of the checkpoint is
    const Step* step = nullptr;
    int weight = -1, part = 0, parts = 1;
    const float* order = nullptr;  // of the numbers that it multiplies; null: as they are
  };
  Use find_use(const std::string& matrix) const;

  ModelFile model_;
  std::string text_;
  Program program_;
  std::vector<std::map<int, std::vector<LowRank>>> adapters_;
  size_t bytes_ = 0;
};

// The adapters that the next session opened by this thread uses, if its program is theirs.
std::shared_ptr<AdapterStore> take_pending_adapters(const std::string& program);

}  // namespace edgespec
