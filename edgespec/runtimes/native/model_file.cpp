// Reads as much of ONNX's protocol buffers as a graph of one node needs.  Numbers of fields are those of onnx.proto
// (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3), the encoding
// https://protobuf.dev/programming-guides/encoding.
#include "model_file.h"

#include <cstring>
#include <map>
#include <stdexcept>

#include "guarded.h"
#include "node.h"

namespace edgespec {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::invalid_argument("edgespec: " + path + ": " + what);
}

struct Bytes {
  const uint8_t* data = nullptr;
  size_t size = 0;
  std::string text() const { return {reinterpret_cast<const char*>(data), size}; }
};

// The fields of a message, one after the other.
class Fields {
 public:
  explicit Fields(Bytes message) : at_(message.data), end_(message.data + message.size) {}

  int number = 0;
  uint64_t value = 0;  // of a number
  Bytes bytes;         // of anything else

  bool next() {
    if (at_ == end_) return false;
    const uint64_t tag = varint();
    if (tag >> 3 == 0 || tag >> 3 > 1 << 28) throw std::invalid_argument("not a graph of ONNX");
    number = static_cast<int>(tag >> 3);
    value = 0;
    bytes = {};
    switch (tag & 7) {
      case 0: value = varint(); break;
      case 1: bytes = take(8); break;
      case 2: bytes = take(varint()); break;
      case 5: bytes = take(4); break;
      default: throw std::invalid_argument("not a graph of ONNX");
    }
    return true;
  }

 private:
  uint64_t varint() {
    uint64_t number = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (at_ == end_) throw std::invalid_argument("cut off");
      const uint8_t byte = *at_++;
      number |= uint64_t(byte & 127) << shift;
      if (byte < 128) return number;
    }
    throw std::invalid_argument("not a graph of ONNX");
  }
  Bytes take(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) throw std::invalid_argument("cut off");
    const Bytes found{at_, static_cast<size_t>(size)};
    at_ += size;
    return found;
  }

  const uint8_t *at_, *end_;
};

struct Node {
  std::string kind, domain, program;
  std::vector<std::string> inputs;
};

Node read_node(Bytes message) {
  Node node;
  for (Fields field(message); field.next();) {
    if (field.number == 1) node.inputs.push_back(field.bytes.text());
    if (field.number == 4) node.kind = field.bytes.text();
    if (field.number == 7) node.domain = field.bytes.text();
    if (field.number != 5) continue;
    std::string name;
    Bytes said;
    for (Fields part(field.bytes); part.next();) {
      if (part.number == 1) name = part.bytes.text();
      if (part.number == 4) said = part.bytes;
    }
    if (name == "program") node.program = said.text();
  }
  return node;
}

struct Initializer {
  std::string name;
  uint64_t kind = 0, count = 1;
  Bytes raw;
  bool outside = false;
  std::map<std::string, std::string> where;

  uint64_t bytes() const {
    if (kind != 1 && kind != 2 && kind != 3) throw std::invalid_argument("weight " + name + " is not of a known type");
    if (count > uint64_t(1) << 48) throw std::invalid_argument("weight " + name + " is too large");
    return count * (kind == 1 ? 4 : 1);
  }
  uint64_t at(const char* key) const {
    const auto found = where.find(key);
    if (found == where.end() || found->second.empty() || found->second.size() > 15 ||
        found->second.find_first_not_of("0123456789") != std::string::npos)
      throw std::invalid_argument("weight " + name + " has no " + key);
    return std::stoull(found->second);
  }
};

void times(uint64_t& count, uint64_t dim) {
  const uint64_t most = uint64_t(1) << 49;  // one that is too large stays so
  count = dim > most || (dim && count > most / dim) ? most : count * dim;
}

Initializer read_initializer(Bytes message) {
  Initializer found;
  for (Fields field(message); field.next();) {
    if (field.number == 1 && field.bytes.data) {  // all at once
      for (Bytes dims = field.bytes; dims.size;) {
        uint64_t dim = 0;
        int shift = 0;
        do {
          dim |= uint64_t(*dims.data & 127) << shift;
          shift += 7;
          --dims.size;
        } while (*dims.data++ > 127 && dims.size && shift < 63);
        times(found.count, dim);
      }
    } else if (field.number == 1) {
      times(found.count, field.value);
    }
    if (field.number == 2) found.kind = field.value;
    if (field.number == 8) found.name = field.bytes.text();
    if (field.number == 9) found.raw = field.bytes;
    if (field.number == 14) found.outside = field.value == 1;
    if (field.number != 13) continue;
    std::string key, value;
    for (Fields part(field.bytes); part.next();) (part.number == 1 ? key : value) = part.bytes.text();
    found.where[key] = value;
  }
  return found;
}

// A file in the graph's folder, never elsewhere.
std::string beside(const std::string& path, const std::string& name) {
  if (name.empty() || name == "." || name == ".." || name.find_first_of("/\\:") != std::string::npos ||
      name.find('\0') != std::string::npos)
    throw std::invalid_argument("weights in '" + name + "': expected the name of a file beside it");
#ifdef _WIN32
  const size_t slash = path.find_last_of("/\\");
#else
  const size_t slash = path.find_last_of('/');
#endif
  return slash == std::string::npos ? name : path.substr(0, slash + 1) + name;
}

class Weights {
 public:
  Weights(const std::string& path, ModelFile& model) : path_(path), model_(model) {}

  Tensor place(const Initializer& weight) {
    const uint64_t bytes = weight.bytes();
    if (!weight.outside) {
      if (weight.raw.size != bytes) throw std::invalid_argument("weight " + weight.name + " is not as long as it says");
      model_.small.emplace_back();  // graph files align nothing
      void* kept = model_.small.back().get(static_cast<size_t>(bytes) + 64);
      if (bytes) std::memcpy(kept, weight.raw.data, static_cast<size_t>(bytes));
      model_.places.push_back({{}, 0, bytes});
      return {kept, static_cast<size_t>(bytes)};
    }
    const auto file = weight.where.find("location");
    const Mapping& in = open(file == weight.where.end() ? "" : file->second);
    const uint64_t offset = weight.at("offset"), length = weight.at("length");
    if (length != bytes || offset > in.size() || length > in.size() - offset)
      throw std::invalid_argument("weight " + weight.name + " does not lie within a file of " +
                                  std::to_string(in.size()) + " bytes");
    if (offset % 4) throw std::invalid_argument("weight " + weight.name + " is not aligned");
    model_.places.push_back({beside(path_, file->second), offset, bytes});
    return {in.data() + offset, static_cast<size_t>(length)};
  }

 private:
  const Mapping& open(const std::string& name) {
    const auto found = open_.find(name);
    if (found != open_.end()) return *found->second;
    model_.in.push_back(std::make_unique<Mapping>(beside(path_, name)));
    return *(open_[name] = model_.in.back().get());
  }

  const std::string& path_;
  ModelFile& model_;
  std::map<std::string, Mapping*> open_;
};

Bytes graph_of(Bytes model) {
  for (Fields field(model); field.next();)
    if (field.number == 7) return field.bytes;
  throw std::invalid_argument("not a graph of ONNX");
}

// Whether an input after the fixed ones belongs to a pass (node.h) rather than being a weight.
bool is_given(const std::string& name) {
  return name == "memory" || name == "sources" || name == "inserted" || name == "axes";
}

ModelFile read(const std::string& path, Bytes bytes) {
  ModelFile model;
  std::vector<Node> nodes;
  std::map<std::string, Initializer> weights;
  for (Fields field(graph_of(bytes)); field.next();) {
    if (field.number == 1) nodes.push_back(read_node(field.bytes));
    if (field.number != 5) continue;
    Initializer one = read_initializer(field.bytes);
    weights[one.name] = one;
  }
  if (nodes.size() != 1 || nodes[0].domain != "edgespec" || nodes[0].kind != "Decoder" || nodes[0].program.empty())
    throw std::invalid_argument("expected one node of native operators (model.native.onnx), got a graph of " +
                                std::to_string(nodes.size()) + (nodes.size() == 1 ? " other node" : " nodes"));
  Node& node = nodes[0];
  Weights places(path, model);
  size_t first = kFixedInputs;
  while (first < node.inputs.size() && is_given(node.inputs[first])) ++first;
  for (size_t i = first; i < node.inputs.size(); ++i) {
    const auto found = weights.find(node.inputs[i]);
    if (found == weights.end()) throw std::invalid_argument("no weight " + node.inputs[i]);
    model.weights.push_back(places.place(found->second));
    model.names.push_back(node.inputs[i]);
  }
  model.program = std::move(node.program);
  return model;
}

}  // namespace

ModelFile read_model(const std::string& path) {
  const Mapping graph(path);
  try {
    return read(path, {graph.data(), graph.size()});
  } catch (const std::invalid_argument& error) {
    const std::string said = error.what();
    if (said.rfind("edgespec: ", 0) == 0) throw;
    fail(path, said);
  }
}

}  // namespace edgespec
