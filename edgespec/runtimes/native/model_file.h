// A graph file of native operators, read without ONNX Runtime: the program of its only node, and the node's weights
// where the weight file is mapped.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "pass.h"

namespace edgespec {

// A file in memory, read only.
class Mapping {
 public:
  // Throws std::invalid_argument: it cannot be opened or mapped.
  explicit Mapping(const std::string& path);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

struct ModelFile {
  std::string program;
  std::vector<Tensor> weights;               // of the node's inputs after the fixed ones
  std::vector<std::unique_ptr<Mapping>> in;  // where they are mapped
  std::vector<Memory> small;                 // those that the graph file holds
};

// Throws std::invalid_argument: no such graph, one of more than one node, or missing weights.
ModelFile read_model(const std::string& path);

}  // namespace edgespec
