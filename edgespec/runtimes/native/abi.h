// ONNX Runtime's C interface for custom operators, declared by hand: no header of ONNX Runtime is needed to build.
//
// OrtApi is an append-only table of function pointers: a slot number never changes between releases, so the table can
// be accessed as an array.  OrtCustomOp is a struct of callbacks; its layout up to version 18 is declared here.  Tests
// pin both by running the operators on the installed ONNX Runtime.  If ONNX Runtime's header is available,
// abi_check.cpp compares the two.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgespec::abi {

struct Status;
struct KernelContext;
struct KernelInfo;
struct Value;
struct ShapeInfo;
struct SessionOptions;
struct Domain;

using Api = void* const*;

struct ApiBase {
  Api (*get_api)(uint32_t version);
  const char* (*version)();
};

constexpr uint32_t kApiVersion = 18;  // ParallelFor and the V2 callbacks

enum Slot : int {
  kCreateStatus = 0,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelInfoGetAttributeString = 87,
  kKernelContextGetInputCount = 88,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelContextParallelFor = 274,
};

enum ElementType : int { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt64 = 7, kBool = 9 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
constexpr int kInvalidArgument = 2;

struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, Api, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  int (*input_characteristic)(const CustomOp*, size_t);
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory_type)(const CustomOp*, size_t);
  int (*variadic_input_min)(const CustomOp*);
  int (*variadic_input_homogeneous)(const CustomOp*);
  int (*variadic_output_min)(const CustomOp*);
  int (*variadic_output_homogeneous)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, Api, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
  size_t (*may_inplace)(int**, int**);
  void (*release_may_inplace)(int*, int*);
  size_t (*alias_map)(int**, int**);
  void (*release_alias_map)(int*, int*);
};
static_assert(sizeof(void*) != 8 || sizeof(CustomOp) == 208, "OrtCustomOp as of version 18");

template <class Function>
inline Function slot(Api api, Slot number) {
  return reinterpret_cast<Function>(api[number]);
}

}  // namespace edgespec::abi
