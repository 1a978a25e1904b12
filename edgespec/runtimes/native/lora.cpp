#include "lora.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>

#include "guarded.h"
#include "half.h"
#include "json.h"
#include "mapping.h"

namespace edgespec {
namespace {

// Architectures whose matrices of attention and MLP are stored as in the checkpoint
// (edgespec/runtimes/slots/adapters.py).
constexpr const char* kAsStored[] = {
    "apertus",  "exaone4", "gemma",      "gemma2",     "gemma3_text", "hunyuan_v1_dense",
    "lfm2",     "llama",   "ministral3", "mistral",    "olmo2",       "olmo3",
    "olmoe",    "phi",     "phi3",       "qwen2",      "qwen3",       "qwen3_moe",
    "seed_oss", "smollm3", "stablelm",   "starcoder2",
};
// Options that make an adapter more than W + scale * B @ A.
constexpr const char* kAltered[] = {
    "use_dora",          "lora_bias",         "use_qalora",
    "use_bdlora",        "arrow_config",      "alora_invocation_tokens",
    "layer_replication", "target_parameters", "trainable_token_indices",
    "kasa_config",       "monteclora_config",
};
const std::string kPrefix = "base_model.model.", kA = ".lora_A", kB = ".lora_B", kWeight = ".weight";
constexpr size_t kMostHeader = size_t(1) << 27;

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() > end.size() && !text.compare(text.size() - end.size(), end.size(), end);
}

bool says_yes(const Json& value) {
  switch (value.kind()) {
    case Json::kTrue: return true;
    case Json::kNumber: return value.real("", 0) != 0;
    case Json::kText: return !value.text("").empty();
    case Json::kList: return !value.items().empty();
    case Json::kObject: return !value.members().empty();
    default: return false;
  }
}

Json read_config(const std::string& path) {
  const Mapping file(path);
  Json config = Json::parse(reinterpret_cast<const char*>(file.data()), file.size());
  if (config["peft_type"].is_null() || config["peft_type"].text("peft_type") != "LORA")
    refuse(path + ": not a LoRA adapter");
  for (const char* name : kAltered)
    if (says_yes(config[name])) refuse(path + ": LoRA with " + name + ": merge it, and export the merged model");
  if (!config["bias"].is_null() && config["bias"].text("bias") != "none")
    refuse(path + ": LoRA with a bias: merge it, and export the merged model");
  const Json& start = config["init_lora_weights"];
  if (start.kind() == Json::kText && start.text("") != "gaussian" && start.text("") != "orthogonal" &&
      start.text("") != "eva")
    refuse(path + ": init_lora_weights " + start.text("") + " changes the base model: merge it");
  return config;
}

// Whether a module's name ends with a pattern of PEFT; a pattern of more than names and dots is refused.
bool matches(const std::string& module, const std::string& pattern) {
  std::string wanted;
  const bool whole = !pattern.empty() && pattern[0] == '^';
  for (size_t at = whole; at < pattern.size(); ++at) {
    if (pattern[at] == '\\' && at + 1 < pattern.size() && pattern[at + 1] == '.') continue;
    if (!std::isalnum(static_cast<unsigned char>(pattern[at])) && pattern[at] != '.' && pattern[at] != '_')
      refuse("adapter_config.json: expected names in patterns, and not " + pattern + ": merge it at export");
    wanted += pattern[at];
  }
  return module == wanted || (!whole && ends_with(module, "." + wanted));
}

// The rank or alpha of a module: of the pattern that its name ends with, else of all.
double number_of(const Json& config, const char* key, const std::string& module) {
  double found = config[key].real(key, 8);
  for (const auto& [pattern, own] : config[key == std::string("r") ? "rank_pattern" : "alpha_pattern"].members()) {
    if (!matches(module, pattern)) continue;
    found = own.real(key, 8);
    break;
  }
  if (!(found > 0) || !std::isfinite(found)) refuse(std::string("adapter_config.json: expected a positive ") + key);
  return found;
}

struct Matrix {
  int rows = 0, columns = 0;
  Kind kind = kF32;
  std::vector<float> values;
};

class Tensors {
 public:
  explicit Tensors(const std::string& path) : path_(path), file_(path) {
    uint64_t size = 0;
    if (file_.size() >= 8) std::memcpy(&size, file_.data(), 8);
    if (file_.size() < 8 || size > kMostHeader || size > file_.size() - 8) damaged();
    header_ = Json::parse(reinterpret_cast<const char*>(file_.data()) + 8, size_t(size));
    start_ = 8 + size_t(size);
  }

  const std::map<std::string, Json>& entries() const { return header_.members(); }

  Matrix read(const std::string& name) const {
    const Json& entry = header_[name];
    const std::string dtype = entry["dtype"].text("dtype");
    const std::vector<int64_t> shape = entry["shape"].numbers("shape"), at = entry["data_offsets"].numbers("offsets");
    Matrix found;
    if (dtype == "F16" || dtype == "BF16")
      found.kind = dtype == "F16" ? kF16 : kBF16;
    else if (dtype != "F32")
      refuse(path_ + ": " + name + " is stored as " + dtype + ": expected float32, float16 or bfloat16");
    const size_t bytes = found.kind == kF32 ? 4 : 2, left = file_.size() - start_;
    if (shape.size() != 2 || at.size() != 2 || shape[0] < 1 || shape[1] < 1 || shape[0] > INT32_MAX ||
        shape[1] > INT32_MAX || at[0] < 0 || at[1] < at[0] || uint64_t(at[1]) > left ||
        uint64_t(at[1] - at[0]) / bytes != uint64_t(shape[0]) * uint64_t(shape[1]) || (at[1] - at[0]) % int64_t(bytes))
      damaged();
    found.rows = static_cast<int>(shape[0]);
    found.columns = static_cast<int>(shape[1]);
    found.values.resize(size_t(shape[0]) * size_t(shape[1]));
    const uint8_t* from = file_.data() + start_ + at[0];
    for (size_t i = 0; i < found.values.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, from + i * bytes, bytes);
      float& value = found.values[i];
      if (found.kind == kF16) {
        value = half_to_float(static_cast<uint16_t>(bits));
      } else {
        if (found.kind == kBF16) bits <<= 16;
        std::memcpy(&value, &bits, 4);
      }
      if (!std::isfinite(value)) refuse(path_ + ": " + name + " holds numbers that are not finite");
    }
    return found;
  }

 private:
  [[noreturn]] void damaged() const { refuse(path_ + ": damaged, or no safetensors file"); }

  const std::string path_;
  const Mapping file_;
  Json header_;
  size_t start_ = 0;
};

// Names of lora_A and lora_B by module.
std::map<std::string, std::pair<std::string, std::string>> pairs_of(const Tensors& file, const std::string& folder) {
  std::map<std::string, std::pair<std::string, std::string>> found;
  for (const auto& [name, entry] : file.entries()) {
    if (name == "__metadata__") continue;
    std::string inside = name.compare(0, kPrefix.size(), kPrefix) ? name : name.substr(kPrefix.size());
    bool factor = ends_with(inside, kWeight);
    if (factor) inside.resize(inside.size() - kWeight.size());
    if (factor && ends_with(inside, ".default")) inside.resize(inside.size() - 8);
    if (factor && ends_with(inside, kA))
      found[inside.substr(0, inside.size() - kA.size())].first = name;
    else if (factor && ends_with(inside, kB))
      found[inside.substr(0, inside.size() - kB.size())].second = name;
    else
      refuse(folder + ": " + name + " is no lora_A or lora_B: merge it, and export the merged model");
  }
  if (found.empty()) refuse(folder + ": holds no tensors");
  return found;
}

}  // namespace

bool takes_adapters(const std::string& architecture) {
  return std::any_of(std::begin(kAsStored), std::end(kAsStored), [&](const char* one) { return architecture == one; });
}

int add_lora(AdapterStore& store, const std::string& folder) {
  const Json config = read_config(folder + "/adapter_config.json");
  const Tensors file(folder + "/adapter_model.safetensors");
  const bool stabilized = says_yes(config["use_rslora"]);
  const auto pairs = pairs_of(file, folder);
  const int number = store.open();
  for (const auto& [module, names] : pairs) {
    if (names.first.empty() || names.second.empty()) refuse(folder + ": " + module + " needs lora_A and lora_B");
    const Matrix a = file.read(names.first), b = file.read(names.second);
    const double rank = number_of(config, "r", module), alpha = number_of(config, "lora_alpha", module);
    if (a.rows != rank || b.columns != rank)
      refuse(folder + ": " + module + " is not of the rank that adapter_config.json says");
    const auto scale = static_cast<float>(alpha / (stabilized ? std::sqrt(rank) : rank));
    const auto add = [&](const std::string& name) {
      store.add(name + kWeight, a.rows, a.columns, b.rows, a.values.data(), b.values.data(), scale,
                a.kind == b.kind ? a.kind : kF32);
    };
    const size_t dot = module.find('.');
    if (dot == std::string::npos || store.has(module + kWeight))
      add(module);
    else  // a base model saved without its head lacks the first part of the name
      add(store.has(module.substr(dot + 1) + kWeight) ? module.substr(dot + 1) : module);
  }
  return number;
}

}  // namespace edgespec
