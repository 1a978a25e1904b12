// A graph file of native operators, read without ONNX Runtime: the program of its only node, and the node's weights
// where the weight file is mapped.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "mapping.h"
#include "pass.h"

namespace edgespec {

// Where a weight is.
struct Place {
  std::string file;  // empty: in the graph file
  uint64_t offset = 0, bytes = 0;
};

struct ModelFile {
  std::string program;
  std::vector<std::string> names;            // of the node's inputs after the fixed ones
  std::vector<Tensor> weights;               // the same
  std::vector<Place> places;                 // of the same
  std::vector<std::unique_ptr<Mapping>> in;  // where they are mapped
  std::vector<Memory> small;                 // those that the graph file holds
};

// Throws std::invalid_argument: no such graph, one of more than one node, or missing weights.
ModelFile read_model(const std::string& path);

}  // namespace edgespec
