// Compiled if ONNX Runtime's own header is given (-DEDGESPEC_ONNXRUNTIME_INCLUDE=...): abi.h's declarations by hand
// must match the header.
#include <onnxruntime_c_api.h>

#include <cstddef>

#include "abi.h"

namespace edgespec::abi {

#define EDGESPEC_SLOT(number, member) \
  static_assert(offsetof(OrtApi, member) == static_cast<size_t>(number) * sizeof(void*), #member " has another slot")
EDGESPEC_SLOT(kCreateStatus, CreateStatus);
EDGESPEC_SLOT(kGetErrorMessage, GetErrorMessage);
EDGESPEC_SLOT(kCreateCustomOpDomain, CreateCustomOpDomain);
EDGESPEC_SLOT(kCustomOpDomainAdd, CustomOpDomain_Add);
EDGESPEC_SLOT(kAddCustomOpDomain, AddCustomOpDomain);
EDGESPEC_SLOT(kGetTensorMutableData, GetTensorMutableData);
EDGESPEC_SLOT(kGetTensorElementType, GetTensorElementType);
EDGESPEC_SLOT(kGetDimensionsCount, GetDimensionsCount);
EDGESPEC_SLOT(kGetDimensions, GetDimensions);
EDGESPEC_SLOT(kGetTensorTypeAndShape, GetTensorTypeAndShape);
EDGESPEC_SLOT(kKernelInfoGetAttributeInt64, KernelInfoGetAttribute_int64);
EDGESPEC_SLOT(kKernelInfoGetAttributeString, KernelInfoGetAttribute_string);
EDGESPEC_SLOT(kKernelContextGetInputCount, KernelContext_GetInputCount);
EDGESPEC_SLOT(kKernelContextGetInput, KernelContext_GetInput);
EDGESPEC_SLOT(kKernelContextGetOutput, KernelContext_GetOutput);
EDGESPEC_SLOT(kReleaseStatus, ReleaseStatus);
EDGESPEC_SLOT(kReleaseTensorTypeAndShapeInfo, ReleaseTensorTypeAndShapeInfo);
EDGESPEC_SLOT(kKernelContextParallelFor, KernelContext_ParallelFor);

#define EDGESPEC_FIELD(mine, member) \
  static_assert(offsetof(OrtCustomOp, member) == offsetof(CustomOp, mine), #member " lies elsewhere")
EDGESPEC_FIELD(version, version);
EDGESPEC_FIELD(create_kernel, CreateKernel);
EDGESPEC_FIELD(name, GetName);
EDGESPEC_FIELD(provider, GetExecutionProviderType);
EDGESPEC_FIELD(input_type, GetInputType);
EDGESPEC_FIELD(input_count, GetInputTypeCount);
EDGESPEC_FIELD(output_type, GetOutputType);
EDGESPEC_FIELD(output_count, GetOutputTypeCount);
EDGESPEC_FIELD(compute, KernelCompute);
EDGESPEC_FIELD(destroy, KernelDestroy);
EDGESPEC_FIELD(input_characteristic, GetInputCharacteristic);
EDGESPEC_FIELD(output_characteristic, GetOutputCharacteristic);
EDGESPEC_FIELD(input_memory_type, GetInputMemoryType);
EDGESPEC_FIELD(variadic_input_min, GetVariadicInputMinArity);
EDGESPEC_FIELD(variadic_input_homogeneous, GetVariadicInputHomogeneity);
EDGESPEC_FIELD(variadic_output_min, GetVariadicOutputMinArity);
EDGESPEC_FIELD(variadic_output_homogeneous, GetVariadicOutputHomogeneity);
EDGESPEC_FIELD(create_kernel_v2, CreateKernelV2);
EDGESPEC_FIELD(compute_v2, KernelComputeV2);
EDGESPEC_FIELD(infer_shape, InferOutputShapeFn);
EDGESPEC_FIELD(start_version, GetStartVersion);
EDGESPEC_FIELD(end_version, GetEndVersion);
EDGESPEC_FIELD(may_inplace, GetMayInplace);
EDGESPEC_FIELD(release_may_inplace, ReleaseMayInplace);
EDGESPEC_FIELD(alias_map, GetAliasMap);
EDGESPEC_FIELD(release_alias_map, ReleaseAliasMap);

}  // namespace edgespec::abi
