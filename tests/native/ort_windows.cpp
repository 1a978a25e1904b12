// One run of a graph in ONNX Runtime for Windows, with our operators out of their library.
//
//   ort_windows onnxruntime.dll edgespec.dll model.onnx FOLDER
//
// FOLDER/given: a line for each input, "NAME TYPE BYTES DIMENSIONS..." (types as in abi.h), and FOLDER/NAME its
// numbers.  Writes FOLDER/NAME for each output, and also the inputs after the run: caches are updated in place.
#include <windows.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "abi.h"

using namespace edgespec;

namespace {

// places in OrtApi that the library itself does not need
enum Place : int {
  kCreateEnv = 3,
  kCreateSession = 7,
  kRun = 9,
  kCreateSessionOptions = 10,
  kRegisterCustomOpsLibrary = 29,
  kSessionGetOutputCount = 31,
  kSessionGetOutputName = 37,
  kCreateTensorWithDataAsOrtValue = 49,
  kGetTensorShapeElementCount = 64,
  kCreateCpuMemoryInfo = 69,
  kGetAllocatorWithDefaultOptions = 78,
};

abi::Api api;

template <class... Arguments>
void call(int place, Arguments... arguments) {
  const auto function = abi::slot<abi::Status* (*)(Arguments...)>(api, static_cast<abi::Slot>(place));
  if (abi::Status* status = function(arguments...)) {
    std::cerr << abi::slot<const char* (*)(abi::Status*)>(api, abi::kGetErrorMessage)(status) << "\n";
    std::exit(1);
  }
}

struct Input {
  std::string name;
  std::vector<char> data;
  abi::Value* value = nullptr;
};

Input read_input(const std::string& folder, const std::string& line, void* memory) {
  std::istringstream words(line);
  Input input;
  int type = 0;
  size_t bytes = 0;
  words >> input.name >> type >> bytes;
  const std::vector<int64_t> shape{std::istream_iterator<int64_t>(words), {}};
  std::ifstream file(folder + "/" + input.name, std::ios::binary);
  input.data.resize(bytes + 1);  // an address even of nothing
  file.read(input.data.data(), static_cast<std::streamsize>(bytes));
  call(kCreateTensorWithDataAsOrtValue, static_cast<const void*>(memory), static_cast<void*>(input.data.data()), bytes,
       shape.data(), shape.size(), type, &input.value);
  input.data.resize(bytes);
  return input;
}

void write(const std::string& path, const void* data, size_t bytes) {
  std::ofstream(path, std::ios::binary).write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
}

}  // namespace

int main(int, char** words) {
  const HMODULE runtime = LoadLibraryExA(words[1], nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
  if (!runtime) return std::cerr << "onnxruntime.dll does not load\n", 1;
  const auto base = reinterpret_cast<const abi::ApiBase* (*)()>(
      reinterpret_cast<void (*)()>(GetProcAddress(runtime, "OrtGetApiBase")));
  api = base()->get_api(abi::kApiVersion);
  void *environment = nullptr, *options = nullptr, *handle = nullptr, *session = nullptr, *memory = nullptr;
  void* allocator = nullptr;
  call(kCreateEnv, 3, "test", &environment);
  call(kCreateSessionOptions, &options);
  call(kRegisterCustomOpsLibrary, options, static_cast<const char*>(words[2]), &handle);
  const std::string graph = words[3], folder = words[4];
  const std::wstring wide(graph.begin(), graph.end());
  call(kCreateSession, environment, wide.c_str(), options, &session);
  call(kCreateCpuMemoryInfo, 1, 0, &memory);
  std::ifstream given(folder + "/given");
  std::vector<Input> inputs;
  for (std::string line; std::getline(given, line);) inputs.push_back(read_input(folder, line, memory));
  std::vector<const char*> names, wanted;
  std::vector<abi::Value*> values;
  for (const Input& input : inputs) names.push_back(input.name.c_str()), values.push_back(input.value);
  size_t count = 0;
  call(kSessionGetOutputCount, session, &count);
  call(kGetAllocatorWithDefaultOptions, &allocator);
  for (size_t i = 0; i < count; ++i) {
    char* name = nullptr;
    call(kSessionGetOutputName, session, i, allocator, &name);
    wanted.push_back(name);
  }
  std::vector<abi::Value*> outputs(count);
  call(kRun, session, static_cast<void*>(nullptr), names.data(), values.data(), names.size(), wanted.data(), count,
       outputs.data());
  for (size_t i = 0; i < count; ++i) {
    void *data = nullptr, *shape = nullptr;
    size_t elements = 0;
    int type = 0;
    call(abi::kGetTensorMutableData, outputs[i], &data);
    call(abi::kGetTensorTypeAndShape, outputs[i], &shape);
    call(kGetTensorShapeElementCount, shape, &elements);
    call(abi::kGetTensorElementType, shape, &type);
    write(folder + "/" + wanted[i], data, elements * (type == abi::kInt64 ? 8 : type == abi::kFloat ? 4 : 1));
  }
  for (const Input& input : inputs) write(folder + "/" + input.name, input.data.data(), input.data.size());
  std::cout << base()->version() << "\n";
  std::fflush(stdout);
  std::cout.flush();
  _exit(0);  // what ONNX Runtime leaves is not the matter here
}
