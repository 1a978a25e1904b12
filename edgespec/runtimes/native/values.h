// A node's attributes, inputs and outputs, as ONNX Runtime's C interface gives them.
#pragma once
#include <string>
#include <vector>

#include "abi.h"
#include "node.h"

namespace edgespec {

extern abi::Api g_api;  // set when the operators are registered

// The exception being handled, as ONNX Runtime's status; allocates no memory.
abi::Status* current_error() noexcept;
// Throws std::runtime_error with the message of a status.
void check(abi::Status* status);

View input(abi::KernelContext* context, size_t index);
void* output(abi::KernelContext* context, size_t index, const std::vector<int64_t>& dims);
std::string text_attribute(const abi::KernelInfo* info, const char* name);
bool flag_attribute(const abi::KernelInfo* info, const char* name);  // it need not be there

}  // namespace edgespec
