// A node's attributes, inputs and outputs, as ONNX Runtime's C interface gives them.
#pragma once
#include <string>
#include <vector>

#include "abi.h"

namespace edgespec {

extern abi::Api g_api;  // set when the operators are registered

// What is being handled, as ONNX Runtime's status; needs no memory of its own.
abi::Status* current_error() noexcept;
// Throws std::runtime_error: what a status says.
void check(abi::Status* status);

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

View input(abi::KernelContext* context, size_t index);
void* output(abi::KernelContext* context, size_t index, const std::vector<int64_t>& dims);
std::string text_attribute(const abi::KernelInfo* info, const char* name);
bool flag_attribute(const abi::KernelInfo* info, const char* name);  // it need not be there

}  // namespace edgespec
