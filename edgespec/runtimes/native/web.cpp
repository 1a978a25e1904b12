// Exports of the module of WebAssembly, next to edgespec.h (web/src/native.ts calls them): files in memory, and the
// settings of a text as JSON.
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "edgespec.h"
#include "guarded.h"
#include "json.h"
#include "memory_files.h"

using namespace edgespec;

// The host's: whether to end the reading of a prompt here.
extern "C" __attribute__((import_module("edgespec"), import_name("progress"))) int32_t web_progress(double done,
                                                                                                    double total);

// web/src/native.ts reads them at these places
static_assert(sizeof(void*) == 4 && offsetof(edgespec_round, tokens) == 8 && offsetof(edgespec_round, count) == 20 &&
              offsetof(edgespec_round, accepted) == 32 && offsetof(edgespec_round, logprobs) == 40);
static_assert(offsetof(edgespec_bundle_facts, context) == 8 && offsetof(edgespec_bundle_facts, stop_count) == 28);
static_assert(offsetof(edgespec_counts, prompt_tokens) == 8 && offsetof(edgespec_counts, dropped) == 80);

namespace {

struct Settings {
  edgespec_settings given = EDGESPEC_INIT(edgespec_settings);
  std::string method;
  std::vector<int64_t> stops, prediction, bias_tokens;
  std::vector<double> biases;
  std::vector<int32_t> branch;

  explicit Settings(const Json& from) {
    static const char* const kKnown[] = {"method",
                                         "guesses",
                                         "maxNewTokens",
                                         "stops",
                                         "ignoreEos",
                                         "temperature",
                                         "topK",
                                         "topP",
                                         "minP",
                                         "repetitionPenalty",
                                         "presencePenalty",
                                         "frequencyPenalty",
                                         "logitBias",
                                         "seed",
                                         "coupled",
                                         "block",
                                         "branch",
                                         "logprobs",
                                         "fixed",
                                         "prediction"};
    for (const auto& member : from.members()) {
      bool known = false;
      for (const char* name : kKnown) known |= member.first == name;
      if (!known) refuse("no setting is called " + member.first);
    }
    const auto whole = [&](const char* name) { return from[name].number(name, 0); };
    const auto real = [&](const char* name) { return from[name].real(name, 0); };
    const auto flag = [&](const char* name) { return from[name].flag(name, false) ? 1 : 0; };
    const auto small = [&](const char* name, int64_t value) {
      if (value < 0 || value > INT32_MAX) refuse(std::string(name) + ": out of range");
      return static_cast<int32_t>(value);
    };
    if (!from["method"].is_null()) given.method = (method = from["method"].text("method")).c_str();
    given.guesses = small("guesses", whole("guesses"));
    given.max_new_tokens = whole("maxNewTokens");
    stops = from["stops"].numbers("stops");
    given.ignore_eos = flag("ignoreEos");
    given.temperature = real("temperature");
    given.top_k = whole("topK");
    given.top_p = real("topP");
    given.min_p = real("minP");
    given.repetition_penalty = real("repetitionPenalty");
    given.presence_penalty = real("presencePenalty");
    given.frequency_penalty = real("frequencyPenalty");
    for (const auto& [token, bias] : from["logitBias"].members()) {
      bias_tokens.push_back(std::atoll(token.c_str()));
      biases.push_back(bias.is_null() ? -std::numeric_limits<double>::infinity() : bias.real("logitBias", 0));
    }
    given.seeded = !from["seed"].is_null();
    given.seed = whole("seed");
    given.coupled = flag("coupled");
    given.block = flag("block");
    for (int64_t width : from["branch"].numbers("branch")) branch.push_back(small("branch", width));
    given.logprobs = flag("logprobs");
    given.fixed = flag("fixed");
    prediction = from["prediction"].numbers("prediction");
    given.stops = stops.data();
    given.stop_count = static_cast<int32_t>(stops.size());
    given.bias_tokens = bias_tokens.data();
    given.biases = biases.data();
    given.bias_count = static_cast<int32_t>(biases.size());
    given.branch = branch.data();
    given.branch_count = static_cast<int32_t>(branch.size());
    given.prediction = prediction.data();
    given.prediction_count = static_cast<int64_t>(prediction.size());
    given.progress = [](void*, int64_t done, int64_t total) {
      return static_cast<int>(web_progress(static_cast<double>(done), static_cast<double>(total)));
    };
  }
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;
};

}  // namespace

#define EDGESPEC_WEB extern "C" __attribute__((visibility("default")))

EDGESPEC_WEB void* edgespec_web_alloc(size_t size) { return std::malloc(size); }
EDGESPEC_WEB void edgespec_web_free(void* memory) { std::free(memory); }

// Memory for a file of `size` bytes, which the host fills before anything opens it; null: there is none.
EDGESPEC_WEB uint8_t* edgespec_web_file(const char* path, size_t size) {
  uint8_t* made = nullptr;
  guarded([&] { made = make_file(path, size); });
  return made;
}
EDGESPEC_WEB void edgespec_web_drop(const char* path) { drop_file(path); }
EDGESPEC_WEB const uint8_t* edgespec_web_find(const char* path, size_t* size) { return find_file(path, size); }

EDGESPEC_WEB int edgespec_web_session(edgespec_bundle* bundle, const char* attention, double context, double max_bytes,
                                      edgespec_session** session) {
  const int status = guarded([&] {
    const std::string name = attention;
    if (name != "" && name != "f32" && name != "f16" && name != "int8")
      refuse("attention " + name + ": expected f32, f16 or int8");
    if (!(context >= 0 && context <= 1e12 && max_bytes >= 0 && max_bytes <= 1e15))
      refuse("context, maxBytes: out of range");
  });
  if (status) return status;
  edgespec_session_options options = EDGESPEC_INIT(edgespec_session_options);
  const std::string name = attention;
  options.attention = name == "f32"    ? EDGESPEC_ATTENTION_F32
                      : name == "f16"  ? EDGESPEC_ATTENTION_F16
                      : name == "int8" ? EDGESPEC_ATTENTION_INT8
                                       : 0;
  options.context = static_cast<int64_t>(context);
  options.max_bytes = static_cast<uint64_t>(max_bytes);
  return edgespec_session_open(bundle, &options, session);
}

// settings: JSON, of the names of Settings in web/src/types.ts.
EDGESPEC_WEB int edgespec_web_begin(edgespec_session* session, const int64_t* prompt, int32_t count,
                                    const char* settings, size_t size) {
  int status = EDGESPEC_OK;
  const int failed = guarded([&] {
    const Json json = Json::parse(settings, size);
    if (json.kind() != Json::kObject) refuse("settings: expected an object");
    const Settings read(json);
    status = edgespec_begin(session, prompt, count, &read.given);
  });
  return failed ? failed : status;
}
