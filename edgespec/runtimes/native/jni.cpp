// The C interface for Java and Kotlin: dev.edgespec.runtimes.NativeNode (android_demo).
//
// JNI's functions are a table whose places the specification fixes, so no header of a JDK or NDK is needed to build
// (https://docs.oracle.com/en/java/javase/17/docs/specs/jni/functions.html).
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "edgespec.h"
#include "texts.h"

#ifdef _WIN32
#define EDGESPEC_JNI extern "C" __declspec(dllexport)
#else
#define EDGESPEC_JNI extern "C" __attribute__((visibility("default")))
#endif

namespace {

using Env = void* const**;
using Object = void*;
enum Place {
  kGetArrayLength = 171,
  kGetObjectArrayElement = 173,
  kNewByteArray = 176,
  kGetByteArrayRegion = 200,
  kGetLongArrayRegion = 204,
  kSetByteArrayRegion = 208,
  kSetLongArrayRegion = 212,
  kGetDirectBufferAddress = 230,
  kDeleteLocalRef = 23,
};
constexpr int kOutputs = 4;

template <class Result, class... Arguments>
Result call(Env env, Place place, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Env, Arguments...)>((*env)[place])(env, arguments...);
}

// Reads arrays out of direct buffers [count], null for one that is absent, and their shapes [2 * count].
template <size_t count>
std::array<edgespec_array, count> arrays(Env env, Object buffers, Object shapes) {
  std::array<int64_t, 2 * count> sizes{};
  call<void>(env, kGetLongArrayRegion, shapes, int32_t{0}, static_cast<int32_t>(sizes.size()), sizes.data());
  std::array<edgespec_array, count> found{};
  for (size_t i = 0; i < count; ++i) {
    const Object buffer = call<Object>(env, kGetObjectArrayElement, buffers, static_cast<int32_t>(i));
    if (!buffer) continue;
    found[i] = {call<void*>(env, kGetDirectBufferAddress, buffer), sizes[2 * i], sizes[2 * i + 1]};
    call<void>(env, kDeleteLocalRef, buffer);
  }
  return found;
}

Object bytes_of(Env env, const char* text) {
  const auto size = static_cast<int32_t>(std::strlen(text));
  const Object found = call<Object>(env, kNewByteArray, size);
  if (found) call<void>(env, kSetByteArrayRegion, found, int32_t{0}, size, text);
  return found;
}

edgespec_model* model_of(int64_t handle) { return reinterpret_cast<edgespec_model*>(static_cast<intptr_t>(handle)); }

}  // namespace

// -> a handle, 0: `error` says why.  path: UTF-8.
EDGESPEC_JNI int64_t Java_dev_edgespec_runtimes_NativeNode_open(Env env, Object, Object path, int32_t threads) {
  std::string name(static_cast<size_t>(call<int32_t>(env, kGetArrayLength, path)), '\0');
  call<void>(env, kGetByteArrayRegion, path, int32_t{0}, static_cast<int32_t>(name.size()), &name[0]);
  edgespec_model* model = nullptr;
  return edgespec_open(name.c_str(), threads, &model) ? 0 : static_cast<int64_t>(reinterpret_cast<intptr_t>(model));
}

EDGESPEC_JNI void Java_dev_edgespec_runtimes_NativeNode_close(Env, Object, int64_t handle) {
  edgespec_close(model_of(handle));
}

EDGESPEC_JNI int32_t Java_dev_edgespec_runtimes_NativeNode_inputWidth(Env, Object, int64_t handle) {
  edgespec_facts facts{};
  facts.size = sizeof facts;
  return edgespec_describe(model_of(handle), &facts) ? -1 : facts.input_width;
}

// inputs: direct buffers [EDGESPEC_NODE_INPUTS], shapes: rows and columns of each; outputs [4], room: the same of them,
// which says afterwards what was written -> a status.
EDGESPEC_JNI int32_t Java_dev_edgespec_runtimes_NativeNode_run(Env env, Object, int64_t handle, Object inputs,
                                                               Object shapes, Object outputs, Object room) {
  const auto given = arrays<EDGESPEC_NODE_INPUTS>(env, inputs, shapes);
  auto told = arrays<kOutputs>(env, outputs, room);
  const int status = edgespec_run(model_of(handle), given.data(), EDGESPEC_NODE_INPUTS, told.data(), kOutputs);
  std::array<int64_t, 2 * kOutputs> sizes{};
  for (int i = 0; i < kOutputs; ++i) sizes[2 * i] = told[i].rows, sizes[2 * i + 1] = told[i].columns;
  call<void>(env, kSetLongArrayRegion, room, int32_t{0}, static_cast<int32_t>(sizes.size()),
             static_cast<const int64_t*>(sizes.data()));
  return status;
}

// Most threads of the passes to come, the caller's included; no bit changes.
EDGESPEC_JNI void Java_dev_edgespec_runtimes_NativeNode_limit(Env, Object, int64_t handle, int32_t threads) {
  model_of(handle)->threads.limit(threads);
}

// Why the last call of this thread failed, UTF-8.
EDGESPEC_JNI Object Java_dev_edgespec_runtimes_NativeNode_error(Env env, Object) {
  return bytes_of(env, edgespec_error());
}

// The instruction set of the kernels.
EDGESPEC_JNI Object Java_dev_edgespec_runtimes_NativeNode_isa(Env env, Object) { return bytes_of(env, edgespec_isa()); }

EDGESPEC_JNI int32_t Java_dev_edgespec_runtimes_NativeNode_version(Env, Object) {
  return static_cast<int32_t>(edgespec_c_version());
}
