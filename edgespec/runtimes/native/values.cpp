#include "values.h"

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

namespace edgespec {

using namespace abi;

Api g_api = nullptr;

Status* current_error() noexcept {
  const auto make = [](const char* what) {
    return slot<Status* (*)(int, const char*)>(g_api, kCreateStatus)(kInvalidArgument, what);
  };
  try {
    throw;
  } catch (const std::bad_alloc&) { return make("edgespec: out of memory"); } catch (const std::exception& problem) {
    return make(problem.what());
  } catch (...) { return make("edgespec: unknown failure"); }
}

void check(Status* status) {
  if (!status) return;
  const std::unique_ptr<Status, void (*)(Status*)> owned(status, slot<void (*)(Status*)>(g_api, kReleaseStatus));
  throw std::runtime_error(std::string("edgespec: ") +
                           slot<const char* (*)(const Status*)>(g_api, kGetErrorMessage)(status));
}

namespace {

View view(const Value* value) {
  View v;
  if (!value) throw std::invalid_argument("edgespec: an input is missing");
  check(slot<Status* (*)(const Value*, void**)>(g_api, kGetTensorMutableData)(value, &v.data));
  ShapeInfo* shape = nullptr;
  check(slot<Status* (*)(const Value*, ShapeInfo**)>(g_api, kGetTensorTypeAndShape)(value, &shape));
  const std::unique_ptr<ShapeInfo, void (*)(ShapeInfo*)> owned(
      shape, slot<void (*)(ShapeInfo*)>(g_api, kReleaseTensorTypeAndShapeInfo));
  check(slot<Status* (*)(const ShapeInfo*, int*)>(g_api, kGetTensorElementType)(shape, &v.type));
  size_t rank = 0;
  check(slot<Status* (*)(const ShapeInfo*, size_t*)>(g_api, kGetDimensionsCount)(shape, &rank));
  v.dims.resize(rank);
  check(slot<Status* (*)(const ShapeInfo*, int64_t*, size_t)>(g_api, kGetDimensions)(shape, v.dims.data(), rank));
  return v;
}

}  // namespace

View input(KernelContext* context, size_t index) {
  const Value* value = nullptr;
  check(slot<Status* (*)(const KernelContext*, size_t, const Value**)>(g_api, kKernelContextGetInput)(context, index,
                                                                                                      &value));
  return view(value);
}

void* output(KernelContext* context, size_t index, const std::vector<int64_t>& dims) {
  Value* value = nullptr;
  check(slot<Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**)>(g_api, kKernelContextGetOutput)(
      context, index, dims.data(), dims.size(), &value));
  return value ? view(value).data : nullptr;
}

std::string text_attribute(const KernelInfo* info, const char* name) {
  const auto get =
      slot<Status* (*)(const KernelInfo*, const char*, char*, size_t*)>(g_api, kKernelInfoGetAttributeString);
  size_t size = 0;
  check(get(info, name, nullptr, &size));
  std::string text(size, '\0');
  check(get(info, name, text.data(), &size));
  text.resize(std::strlen(text.c_str()));
  return text;
}

bool flag_attribute(const KernelInfo* info, const char* name) {
  int64_t value = 0;
  Status* status = slot<Status* (*)(const KernelInfo*, const char*, int64_t*)>(g_api, kKernelInfoGetAttributeInt64)(
      info, name, &value);
  if (status) slot<void (*)(Status*)>(g_api, kReleaseStatus)(status);
  return !status && value != 0;
}

}  // namespace edgespec
