// Exports of the module of WebAssembly, next to edgespec.h (web/src/native.ts calls them): files in memory, threads,
// the settings of a text as JSON, and functions of the page.
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
#include "web_threads.h"

using namespace edgespec;

// The page's.  Not 0: the call ends here; of web_decode: it failed.
#define EDGESPEC_OF_PAGE(name) extern "C" __attribute__((import_module("edgespec"), import_name(name))) int32_t
EDGESPEC_OF_PAGE("progress") web_progress(double done, double total);
EDGESPEC_OF_PAGE("mask")
web_mask(const int64_t* text, int32_t count, const int64_t* path, int32_t path_count, const float* logits,
         int32_t columns, uint8_t* allowed);
EDGESPEC_OF_PAGE("decode") web_decode(const int64_t* ids, size_t count, char* text, size_t room, size_t* size);

// web/src/native.ts reads them at these places
static_assert(sizeof(void*) == 4 && offsetof(edgespec_round, tokens) == 8 && offsetof(edgespec_round, count) == 20 &&
              offsetof(edgespec_round, accepted) == 32 && offsetof(edgespec_round, logprobs) == 40 &&
              offsetof(edgespec_round, text) == 44 && offsetof(edgespec_round, top_ids) == 52 &&
              offsetof(edgespec_round, top_count) == 60 && sizeof(edgespec_round) == 68);
static_assert(offsetof(edgespec_bundle_facts, context) == 8 && offsetof(edgespec_bundle_facts, stop_count) == 28);
static_assert(offsetof(edgespec_counts, prompt_tokens) == 8 && offsetof(edgespec_counts, dropped) == 80);

namespace {

struct Settings {
  edgespec_settings given = EDGESPEC_INIT(edgespec_settings);
  std::string method;
  std::vector<std::string> stop_texts;
  std::vector<const char*> stop_words;
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
                                         "prediction",
                                         "stopTexts",
                                         "topLogprobs",
                                         "nodes",
                                         "cycles",
                                         "masked"};
    for (const auto& member : from.members()) {
      bool known = false;
      for (const char* name : kKnown) known |= member.first == name;
      if (!known) refuse("no setting is called " + member.first);
    }
    const auto whole = [&](const char* name) { return from[name].number(name, 0); };
    const auto real = [&](const char* name) { return from[name].real(name, 0); };
    // zero is the default in C; given here, it means something else
    for (const char* name : {"maxNewTokens", "topP", "repetitionPenalty"})
      if (!from[name].is_null() && !(real(name) > 0))
        refuse(std::string(name) + ": expected more than 0; leave it out for the default");
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
    if (!from["stopTexts"].is_null() && from["stopTexts"].kind() != Json::kList)
      refuse("stopTexts: expected a list of texts");
    for (const Json& one : from["stopTexts"].items()) stop_texts.push_back(one.text("stopTexts"));
    for (const std::string& one : stop_texts) stop_words.push_back(one.c_str());
    given.stop_texts = stop_words.data();
    given.stop_text_count = static_cast<int32_t>(stop_words.size());
    given.top_logprobs = small("topLogprobs", whole("topLogprobs"));
    given.nodes = small("nodes", whole("nodes"));
    given.cycles = small("cycles", whole("cycles"));
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
    if (flag("masked"))
      given.mask = [](void*, const int64_t* text, int64_t count, const int64_t* path, int32_t path_count,
                      const float* logits, int64_t columns, uint8_t* allowed) {
        return static_cast<int>(web_mask(text, static_cast<int32_t>(count), path, path_count, logits,
                                         static_cast<int32_t>(columns), allowed));
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

// Gives a bundle the page's tokenizer.
EDGESPEC_WEB int edgespec_web_codec(edgespec_bundle* bundle) {
  edgespec_codec codec = EDGESPEC_INIT(edgespec_codec);
  codec.decode = [](void*, const int64_t* ids, size_t count, char* text, size_t room, size_t* size) {
    return static_cast<int>(web_decode(ids, count, text, room, size));
  };
  return edgespec_bundle_set_codec(bundle, &codec);
}

// store: a file, or null.
EDGESPEC_WEB int edgespec_web_session(edgespec_bundle* bundle, const char* attention, double context, double max_bytes,
                                      const char* store, edgespec_session** session) {
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
  options.ngram_store = store;
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

// ---- threads: a worker of the page calls edgespec_web_serve with its memory, and stays in it

namespace {
constexpr size_t kThreadMemory = size_t(1) << 20;  // its stack, which grows down to its thread_local objects
constexpr size_t kMostLocals = 4096;
}  // namespace
__asm__(
    ".globaltype __stack_pointer, i32\n"
    ".functype __wasm_init_tls (i32) -> ()\n"
    ".functype edgespec_web_work () -> ()\n"
    ".globl edgespec_web_serve\n"
    ".type edgespec_web_serve,@function\n"
    "edgespec_web_serve:\n"
    ".functype edgespec_web_serve (i32) -> ()\n"
    "local.get 0\n"
    "i32.const 1048576\n"
    "i32.add\n"
    "global.set __stack_pointer\n"
    "local.get 0\n"
    "call __wasm_init_tls\n"
    "call edgespec_web_work\n"
    "end_function\n");
extern "C" void edgespec_web_work() { serve_threads(); }

// The memory of a worker, which is expected to come; null: there is none.
EDGESPEC_WEB void* edgespec_web_worker() {
  static_assert(kThreadMemory == 1048576);  // as above
  if (__builtin_wasm_tls_size() > kMostLocals) return nullptr;
  void* made = std::aligned_alloc(64, kThreadMemory);
  if (made) expect_workers(1);
  return made;
}
