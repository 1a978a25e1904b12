// Sessions of the C interface (edgespec.h): settings become a loop over a target and its drafters.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>

#include "auto.h"
#include "bundle.h"
#include "heads.h"
#include "hidden_state.h"
#include "hosted.h"
#include "loop.h"
#include "lora.h"
#include "ngram.h"
#include "sized.h"
#include "stream.h"

using namespace edgespec;

namespace {

constexpr int64_t kNGramGuesses = 8, kLeastGuesses = 6;
const std::vector<int> kTimed{1, 2, 3, 5};  // rows of passes that are timed before the first text
constexpr double kTimingMs = 100;           // after that no further turn starts
constexpr int kMostTurns = 3, kEnough = 3;  // kEnough: times that such a timing counts
// methods that only Python runs, and what to use here instead
const std::map<std::string, const char*> kElsewhere{
    {"eagle1", "eagle"},      {"peagle", "eagle"},
    {"dspark", "dflash"},     {"assistant", "speculative"},
    {"uno", "self-spec"},     {"swift", "self-spec"},
    {"paradecode", "medusa"}, {"chain", "the names of its methods, as in ngram,self-spec"},
};
constexpr int32_t kMostGuessesOfCaller = 64, kMostStops = 1 << 16, kMostCycles = 64, kMostLikeliest = 20;

uint64_t random_seed() {
  std::random_device device;
  return uint64_t(device()) << 32 | device();
}

// Times interleaved runs, after an untimed turn -> the median milliseconds of each size.
CostModel::Points time_turns(const std::vector<int>& sizes, const std::function<void(int)>& run) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begun) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
  };
  std::map<int, std::vector<double>> times;
  const auto begun = Clock::now();
  for (int turn = 0; turn <= kMostTurns && (turn < 2 || since(begun) <= kTimingMs); ++turn)
    for (int size : sizes) {
      const auto start = Clock::now();
      run(size);
      if (turn) times[size].push_back(since(start));
    }
  CostModel::Points found;
  for (auto& [size, taken] : times) {
    std::sort(taken.begin(), taken.end());
    found[size] = (taken[(taken.size() - 1) / 2] + taken[taken.size() / 2]) / 2;
  }
  return found;
}

template <class T>
void expect_array(const T* given, int64_t count, const char* name) {
  if (count < 0 || count > kMostStops || (count && !given)) refuse(std::string(name) + ": no such array");
}

Sampling sampling_of(const edgespec_settings& given) {
  Sampling made;
  made.temperature = given.temperature;
  made.top_k = given.top_k;
  made.top_p = given.top_p == 0 ? 1 : given.top_p;
  made.min_p = given.min_p;
  made.repetition_penalty = given.repetition_penalty == 0 ? 1 : given.repetition_penalty;
  made.presence_penalty = given.presence_penalty;
  made.frequency_penalty = given.frequency_penalty;
  made.coupled = given.coupled != 0;
  made.block = given.block != 0;
  expect_array(given.bias_tokens, given.bias_count, "bias_tokens");
  expect_array(given.biases, given.bias_count, "biases");
  if (given.mask)
    made.mask = [of = given.mask, user = given.user](const Prefix& prefix, const float* row, int64_t columns,
                                                     uint8_t* allowed) {
      const std::vector<int64_t>&text = prefix.text(), &path = prefix.path();
      if (of(user, text.data(), int64_t(text.size()), path.data(), int32_t(path.size()), row, columns, allowed))
        throw Failure(EDGESPEC_CANCELLED, "cancelled");
    };
  for (int32_t i = 0; i < given.bias_count; ++i) made.bias.emplace_back(given.bias_tokens[i], given.biases[i]);
  return made;
}

}  // namespace

struct edgespec_session {
  edgespec_bundle& bundle;
  const edgespec_host host_of_draft;
  const bool hosted_trees;               // whether the caller's passes of the target run trees
  std::unique_ptr<NativeTarget> native;  // null: the caller runs the passes
  std::unique_ptr<HostedTarget> hosted;
  Target& target;  // either
  std::unique_ptr<NGramStore> store;
  NGram ngram{nullptr};
  std::unique_ptr<Target> draft;               // made when a text first asks for it
  std::unique_ptr<NativeTarget> drafter_text;  // the same
  std::unique_ptr<HiddenStateDrafter> hidden_state;
  std::unique_ptr<Predicted> predicted;                                        // of the text
  std::vector<MadeControl> made;                                               // of the text
  std::map<std::string, Learned> learned;                                      // by method, with its branch
  std::set<std::string> priced;                                                // of these, which know their costs
  std::map<std::pair<std::string, std::vector<int64_t>>, Standing> standings;  // of auto, by method and wishes
  std::unique_ptr<Auto> automatic;
  std::vector<int64_t> key_of_automatic;  // the wishes that it was made for
  std::unique_ptr<Policy> own_policy;     // of the text, where it is not auto's
  Policy* policy = nullptr;               // either
  Confidence confidence;                  // of guesses of the target itself
  CostModel::Points passes;               // milliseconds of passes by rows, here; empty: not timed yet
  std::atomic<bool> cancelled{false};
  Reading reading;
  std::unique_ptr<Loop> loop;
  std::unique_ptr<TextStream> stream;  // null: the bundle has no codec
  std::string text;                    // of the round
  int64_t longest = 0;                 // guesses of a round of the text

  edgespec_session(edgespec_bundle& of, const edgespec_session_options& options)
      : bundle(of),
        host_of_draft(options.draft ? host_of(of, options.draft, "draft") : edgespec_host{}),
        hosted_trees(options.target && host_of(of, options.target, "target").trees),
        native(of.hosted
                   ? nullptr
                   : std::make_unique<NativeTarget>(*of.target, context_of(of, options), of.target_part.extra_rows,
                                                    attention_of(of.target_part, options.attention), false)),
        hosted(of.hosted || options.target
                   ? std::make_unique<HostedTarget>(host_of(of, options.target, "target"), of.target_part.vocab,
                                                    context_of(of, options), of.target_part.extra_rows)
                   : nullptr),
        target(native ? static_cast<Target&>(*native) : *hosted) {
    if (options.ngram_store) store = std::make_unique<NGramStore>(options.ngram_store, target.vocab());
    ngram = NGram(store.get());
    if (const auto self = of.methods.find("self-spec"); self != of.methods.end()) confidence = self->second.confidence;
    reading.cancelled = &cancelled;
    ++bundle.users;
  }
  ~edgespec_session() { bundle.release(); }
  edgespec_session(const edgespec_session&) = delete;
  edgespec_session& operator=(const edgespec_session&) = delete;

  static edgespec_host host_of(const edgespec_bundle& of, const edgespec_host* given, const char* name) {
    if (!of.hosted) refuse(std::string(name) + ": passes of the caller, and a bundle that has its own");
    if (!given) refuse(std::string(name) + ": expected passes of the caller (edgespec_host)");
    const edgespec_host found = known(given);
    if (!found.run) refuse(std::string(name) + ": expected a function that runs passes");
    return found;
  }

  static int64_t context_of(const edgespec_bundle& of, const edgespec_session_options& options) {
    if (options.context < 0) refuse("context " + std::to_string(options.context) + ": expected a number of tokens");
    int64_t found = of.target_part.context;
    if (options.context) found = std::min(found, options.context);
    if (of.hosted && (options.max_bytes || options.attention))
      refuse("max_bytes, attention: the caller has the caches");
    if (!options.max_bytes) return found;
    auto [empty, block] = NativeTarget::sizes(*of.target, attention_of(of.target_part, options.attention));
    int64_t rows = of.target_part.extra_rows;
    for (const auto& [model, part] :
         {std::pair(of.draft.get(), &of.draft_part), {of.drafter.get(), &of.drafter_part}}) {
      if (!model) continue;
      const auto [more, each] = NativeTarget::sizes(*model, EDGESPEC_ATTENTION_EXACT);
      empty += more;
      block += each;
      rows = std::max(rows, part->extra_rows);
    }
    const uint64_t left = options.max_bytes > empty ? options.max_bytes - empty : 0;
    const int64_t fits = int64_t(std::min<uint64_t>(left / std::max<uint64_t>(block, 1), 1 << 24)) * kKvBlock - rows;
    if (fits < kKvBlock)
      throw Failure(EDGESPEC_NO_MEMORY, "max_bytes " + std::to_string(options.max_bytes) + ": expected at least " +
                                            std::to_string(empty + block * uint64_t(2 + rows / kKvBlock)));
    return std::min(found, fits);
  }

  static int32_t attention_of(const ModelPart& part, int32_t wanted) {
    if (!wanted && !part.attention_name.empty())
      refuse("the bundle's attention " + part.attention_name + " is not offered here: expected f32, f16 or int8");
    return wanted ? wanted : part.attention;
  }

  // Makes the drafter of an expected text; null: none is expected.
  std::unique_ptr<Predicted> prediction_of(const edgespec_settings& given, int64_t prompt) const {
    if (given.prediction_count < 0 || (given.prediction_count && !given.prediction))
      refuse("prediction: no such array");
    if (!given.prediction_count) return nullptr;
    std::vector<int64_t> expected(given.prediction, given.prediction + given.prediction_count);
    for (int64_t token : expected)
      if (token < 0 || token >= target.vocab())
        refuse("prediction: token " + std::to_string(token) + " is outside the vocabulary");
    return std::make_unique<Predicted>(std::move(expected), prompt);
  }

  // The wishes of a text for its drafters.
  struct Wanted {
    int64_t guesses;  // of a round, 0: the method's
    std::vector<int64_t> branch;
    int64_t nodes, cycles;
  };

  Wanted wanted_of(const edgespec_settings& given) const {
    if (given.guesses < 0 || given.guesses > kMostGuessesOfCaller) refuse("guesses: expected 0 to 64");
    if (given.nodes < 0 || given.nodes > kMostNodes || given.cycles < 0 || given.cycles > kMostCycles)
      refuse("nodes or cycles: out of range");
    expect_array(given.branch, given.branch_count, "branch");
    Wanted made{given.guesses, {given.branch, given.branch + given.branch_count}, given.nodes, given.cycles};
    check_branch(made.branch);
    if (bundle.hosted && !(hosted_trees && host_of_draft.trees) && !made.branch.empty())
      refuse("branch: the caller's passes run no trees");
    return made;
  }

  const MethodPart& part_of(const std::string& method) const {
    static const MethodPart none;
    if (method == "ngram") return none;
    const auto part = bundle.methods.find(method);
    if (part != bundle.methods.end()) return part->second;
    std::string known = "auto, plain, ngram";
    for (const auto& one : bundle.methods) known += ", " + one.first;
    std::string why;
    if (const auto elsewhere = kElsewhere.find(method); elsewhere != kElsewhere.end())
      why = std::string("runs in Python alone: use ") + elsewhere->second + "; ";
    if (const auto own = bundle.elsewhere.find(method); own != bundle.elsewhere.end()) why = own->second + "; ";
    refuse("method " + method + ": " + why + "expected one of this bundle: " + known);
  }

  static bool reads_states(const std::string& method) {
    return method == "eagle" || method == "mtp" || method == "dflash";
  }

  int64_t guesses_of(const std::string& method, const Wanted& wanted) const {
    if (wanted.guesses) return wanted.guesses;
    return method == "ngram" ? kNGramGuesses : std::max(part_of(method).guesses, kLeastGuesses);
  }

  // Makes the drafter of a method, and its control, if it is to have one.
  MadeControl make(const std::string& method, const Wanted& wanted, bool controlled) {
    const MethodPart& part = part_of(method);
    MadeControl found;
    std::string name = method;
    if (method == "ngram") {
      found.drafter = &ngram;
    } else if (reads_states(method)) {
      if (!wanted.branch.empty()) refuse("branch: " + method + " draws chains here");
      const ModelPart& own = bundle.drafter_part;
      if (!hidden_state) {
        drafter_text = std::make_unique<NativeTarget>(*bundle.drafter, std::min(own.context, target.context()),
                                                      own.extra_rows, EDGESPEC_ATTENTION_EXACT, true);
        hidden_state =
            std::make_unique<HiddenStateDrafter>(*native, *drafter_text, method, own.vocab, own.head, bundle.block);
      }
      found.drafter = hidden_state.get();
    } else if (method == "medusa" || method == "blockwise") {
      name += "," + std::to_string(wanted.nodes) + "," + std::to_string(wanted.cycles);
      found.own = heads_of(method, part, wanted);
    } else if (method == "self-spec") {
      found.own = std::make_unique<SelfDraft>(*native, part.skip, confidence);
    } else {
      const ModelPart& own = bundle.draft_part;
      if (!draft) draft = draft_text(own);
      std::vector<int64_t> branch = wanted.branch;
      if (branch.empty() && !(bundle.hosted && !(hosted_trees && host_of_draft.trees))) branch = part.branch;
      for (int64_t width : branch) name += "," + std::to_string(width);
      found.own = std::make_unique<DraftModel>(*draft, target.vocab(), own.vocab, own.head, std::move(branch),
                                               bundle.hosted ? 0 : part.head_rows);
    }
    if (found.own) found.drafter = found.own.get();
    if (!controlled) return found;
    Learned& known = learned[name];
    if (!priced.count(name)) {
      known.cost = costs_of(part, *found.drafter);
      priced.insert(name);
    }
    found.control =
        std::make_unique<Control>(found.drafter->facts(), known, int(guesses_of(method, wanted)), part.rates);
    return found;
  }

  std::unique_ptr<Target> draft_text(const ModelPart& own) const {
    const int64_t context = std::min(own.context, target.context());
    if (!bundle.hosted)
      return std::make_unique<NativeTarget>(*bundle.draft, context, own.extra_rows, EDGESPEC_ATTENTION_EXACT, true);
    const int64_t columns = own.head.empty() ? own.vocab : int64_t(own.head.size());
    return std::make_unique<HostedTarget>(host_of_draft, columns, context, own.extra_rows);
  }

  std::unique_ptr<Drafter> heads_of(const std::string& method, const MethodPart& part, const Wanted& wanted) {
    if (method == "blockwise")
      return std::make_unique<Medusa>(*native, part.heads, "blockwise", head_chain(size_t(part.heads.count)),
                                      wanted.cycles);
    std::vector<HeadPath> paths;
    if (wanted.nodes) {
      for (auto& one : grow_tree(part.ranks, size_t(wanted.nodes))) paths.push_back(one.first);
    } else {
      CostModel costs = pass_costs();
      paths = best_tree(part.ranks, [&](int64_t rows) { return costs.v(rows); }, part.draft_cost.value_or(0));
    }
    if (paths.empty()) paths = head_chain(std::min<size_t>(1, part.ranks.size()));
    return std::make_unique<Medusa>(*native, part.heads, "medusa", std::move(paths));
  }

  // Costs as the export measured them, corrected by a few passes here and now.
  CostModel costs_of(const MethodPart& part, Drafter& drafter) {
    if (bundle.streamed && drafter.name() == std::string("self-spec")) {
      // a step reads the target's layers from the disk as well, and takes too long to time some first
      const double read = 1 - double(part.skip.mlp.size()) / std::max(bundle.target->gates.layers, 1);
      return pass_costs(std::max(part.draft_cost.value_or(0), read), part.first_cost);
    }
    const bool cheap = drafter.facts().cheap;
    CostModel made = pass_costs(cheap ? 0 : part.draft_cost, cheap ? std::nullopt : part.first_cost);
    if (!cheap) made.observe_draft(1, time_turns({1}, [&](int) { drafter.benchmark_step(); }).at(1), kEnough);
    return made;
  }

  CostModel pass_costs(std::optional<double> draft = {}, std::optional<double> first = {}) {
    if (passes.empty() && !bundle.streamed) {  // where each pass reads a disk, these would take too long
      const std::vector<int64_t> zeros(size_t(*std::max_element(kTimed.begin(), kTimed.end())), 0);
      passes = time_turns(kTimed, [&](int rows) { target.run({zeros.data(), rows}); });
    }
    CostModel made(bundle.verify, draft, first);
    for (const auto& [rows, ms] : passes) made.observe_pass(rows, ms, kEnough);
    return made;
  }

  // The methods of a text, which are separated by commas.  Throws std::invalid_argument: they cannot be made.
  std::vector<std::string> names_of(const std::string& methods, const Wanted& wanted) const {
    std::vector<std::string> names;
    for (size_t at = 0; at <= methods.size();) {
      const size_t end = std::min(methods.find(',', at), methods.size());
      names.push_back(methods.substr(at, end - at));
      if (std::count(names.begin(), names.end(), names.back()) > 1)
        refuse("method " + names.back() + ": expected each one once");
      at = end + 1;
    }
    if (names == std::vector<std::string>{"auto"}) return names;
    if (std::count(names.begin(), names.end(), "auto")) refuse("method auto: expected no other method");
    for (const std::string& method : names) {
      if (method == "plain" || method == "ar") continue;
      part_of(method);
      if (reads_states(method) && !wanted.branch.empty()) refuse("branch: " + method + " draws chains here");
      if (method == "speculative" && bundle.hosted && !host_of_draft.run)
        refuse("method speculative: expected passes of a draft (edgespec_session_options)");
    }
    return names;
  }

  // Makes the policy of methods, or of auto.
  void choose(std::vector<std::string> names, const Wanted& wanted, bool fixed, std::vector<Drafter*> first) {
    if (names == std::vector<std::string>{"auto"}) {
      std::vector<std::pair<std::string, double>> all = bundle.candidates();
      if (bundle.hosted && !host_of_draft.run)
        all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.first == "speculative"; }),
                  all.end());
      if (!fixed) return choose_auto(all, wanted, std::move(first));
      names = {all.front().first};
    }
    std::vector<Control*> controls(first.size(), nullptr);
    for (const std::string& method : names) {
      if (method == "plain" || method == "ar") continue;
      made.push_back(make(method, wanted, !fixed));
      first.push_back(made.back().drafter);
      controls.push_back(made.back().control.get());
      longest = std::max(longest, guesses_of(method, wanted));
    }
    own_policy = fixed ? std::make_unique<Policy>(std::move(first))
                       : std::make_unique<Adaptive>(std::move(first), std::move(controls));
    policy = own_policy.get();
  }

  // Keeps the policy of auto with its candidates as long as texts want the same.
  void choose_auto(const std::vector<std::pair<std::string, double>>& all, const Wanted& wanted,
                   std::vector<Drafter*> first) {
    std::vector<int64_t> key{wanted.guesses, wanted.nodes, wanted.cycles};
    key.insert(key.end(), wanted.branch.begin(), wanted.branch.end());
    if (!automatic || key != key_of_automatic) {
      pass_costs();  // these passes must come before the prompt is read
      std::vector<Candidate> candidates;
      for (const auto& [method, promise] : all) {
        Candidate one;
        one.name = method;
        one.promise = promise;
        one.make = [this, wanted, method = method] { return make(method, wanted, true); };
        one.cheap = method == "ngram";
        one.from_start = reads_states(method);
        one.standing = &standings[{method, key}];
        candidates.push_back(std::move(one));
      }
      automatic = std::make_unique<Auto>(std::move(candidates));
      key_of_automatic = std::move(key);
    }
    for (const auto& one : all) longest = std::max(longest, guesses_of(one.first, wanted));
    automatic->set_first(std::move(first));
    policy = automatic.get();
  }

  void begin(const int64_t* prompt, int64_t count, const edgespec_settings& given) {
    // what can be refused is, before anything of the text before is given up
    expect_array(given.stops, given.stop_count, "stops");
    if (given.max_new_tokens < 0) refuse("max_new_tokens: expected 0 or more");
    StopTexts stop_texts = stop_texts_of(given);
    if (given.adapter && !bundle.adapters.count(given.adapter))
      refuse("adapter " + std::to_string(given.adapter) +
             ": expected one that was added (edgespec_bundle_add_adapter)");
    LoopOptions options;
    options.sampling = sampling_of(given);
    options.logprobs = given.logprobs != 0;
    if (given.top_logprobs < 0 || given.top_logprobs > kMostLikeliest) refuse("top_logprobs: expected 0 to 20");
    options.top_logprobs = given.top_logprobs;
    options.seed = given.seeded ? uint64_t(given.seed) : random_seed();
    options.new_tokens = given.max_new_tokens ? given.max_new_tokens : std::numeric_limits<int64_t>::max();
    options.stops.assign(given.stops, given.stops + given.stop_count);
    if (!given.ignore_eos) options.stops.insert(options.stops.end(), bundle.stops.begin(), bundle.stops.end());
    options.seeded = given.seeded != 0;
    std::vector<int64_t> tokens(prompt, prompt + count);
    check_prompt(tokens, target);
    options.sampling.check(target.vocab());
    std::unique_ptr<Predicted> expected = prediction_of(given, count);
    const Wanted wanted = wanted_of(given);
    std::vector<std::string> names = names_of(given.method ? given.method : "auto", wanted);

    loop.reset();
    stream.reset();
    use_adapter(given.adapter);
    policy = nullptr;
    own_policy.reset();
    made.clear();
    predicted = std::move(expected);
    longest = 0;
    std::vector<Drafter*> first;
    if (predicted) {  // it is asked before those of the methods
      first.push_back(predicted.get());
      longest = given.guesses > 0 ? given.guesses : kLeastGuesses;
    }
    choose(std::move(names), wanted, given.fixed != 0, std::move(first));
    options.guesses = longest;
    reading.progress = nullptr;
    if (given.progress)
      reading.progress = [of = given.progress, user = given.user](int64_t done, int64_t total) {
        return of(user, done, total) != 0;
      };
    loop = std::make_unique<Loop>(target, *policy, std::move(tokens), std::move(options), reading);
    if (bundle.codec) stream = std::make_unique<TextStream>(*bundle.codec, loop->tokens(), std::move(stop_texts));
  }

  // Forgets what was learned of drafts, and the states that they keep: both are of texts with one adapter.
  void use_adapter(int32_t number) {
    if (!native || number == native->adapter()) return;
    native->use_adapter(number);
    automatic.reset();
    hidden_state.reset();
    drafter_text.reset();
  }

  StopTexts stop_texts_of(const edgespec_settings& given) const {
    expect_array(given.stop_texts, given.stop_text_count, "stop_texts");
    if (given.stop_text_count && !bundle.codec) refuse("stop_texts: they need a codec (edgespec_bundle_load_codec)");
    std::vector<std::string> found;
    for (int32_t i = 0; i < given.stop_text_count; ++i) {
      if (!given.stop_texts[i]) refuse("stop_texts: no such text");
      found.emplace_back(given.stop_texts[i]);
    }
    return StopTexts(std::move(found));
  }

  // Writes a round's tokens; a stop text ends the round.
  void write(const Round& found) {
    text.clear();
    for (size_t at = 0; at < found.tokens.size(); ++at) {
      const bool last = at + 1 == found.tokens.size();
      if (last && found.finish == EDGESPEC_STOPPED) break;  // what ends a text is not text, even if it is a word
      text += stream->push(found.tokens[at]);
      if (!stream->stopped()) continue;
      loop->end(at + 1, EDGESPEC_STOP_TEXT);
      return;
    }
    if (found.finish) text += stream->finish();
  }

  // Names all that keys and values depend on.
  std::string key() const {
    if (bundle.hosted) refuse("the caller has the keys and values: this session cannot save them");
    if (native->adapter()) refuse("the text of an adapter: it cannot be saved or restored");
    if (bundle.weights.empty()) refuse("the manifest does not say what its weights are: export the bundle again");
    return bundle.weights + " " + std::to_string(native->format());
  }

  edgespec_round next() {
    if (!loop) refuse("expected a text that was begun");
    const Round& found = loop->next();
    if (stream) write(found);
    edgespec_round told{};
    told.finish = found.finish;
    told.tokens = found.tokens.data();
    told.drafted = found.drafted.data();
    told.rejected = found.rejected.data();
    told.count = static_cast<int32_t>(found.tokens.size());
    told.drafted_count = static_cast<int32_t>(found.drafted.size());
    told.rejected_count = static_cast<int32_t>(found.rejected.size());
    told.accepted = found.accepted;
    told.drafter = found.drafter.c_str();
    told.logprobs = found.logprobs.empty() ? nullptr : found.logprobs.data();
    told.top_ids = found.top_ids.empty() ? nullptr : found.top_ids.data();
    told.top_logprobs = found.top_logprobs.empty() ? nullptr : found.top_logprobs.data();
    told.top_count = static_cast<int32_t>(found.top_ids.size() / std::max<size_t>(found.tokens.size(), 1));
    told.text = stream ? text.c_str() : nullptr;
    told.text_size = text.size();
    return told;
  }
};

namespace {

// Runs a call of a session; a cancellation is over with the call that it ended.
template <class Work>
int session_call(edgespec_session* session, Work work) {
  const int status = guarded([&] {
    if (!session) refuse("expected a session");
    work();
  });
  if (status == EDGESPEC_CANCELLED) session->cancelled = false;
  return status;
}

void check_prompt_array(const int64_t* prompt, int64_t count) {
  if (count < 0 || (count && !prompt)) refuse("expected a prompt");
}

}  // namespace

int edgespec_bundle_open(const char* folder, int32_t threads, edgespec_bundle** bundle) {
  return guarded([&] {
    if (!folder || !bundle) refuse("expected a folder, and where to put the bundle");
    *bundle = new edgespec_bundle(folder, threads);
  });
}

int edgespec_bundle_open_streamed(const char* folder, int32_t threads, uint64_t cache, edgespec_bundle** bundle) {
  return guarded([&] {
    if (!folder || !bundle) refuse("expected a folder, and where to put the bundle");
    if (!cache) refuse("a cache of 0 bytes for streamed weights");
    *bundle = new edgespec_bundle(folder, threads, cache);
  });
}

int edgespec_bundle_open_hosted(const char* folder, edgespec_bundle** bundle) {
  return guarded([&] {
    if (!folder || !bundle) refuse("expected a folder, and where to put the bundle");
    *bundle = new edgespec_bundle(folder, 1, 0, true);
  });
}

void edgespec_bundle_close(edgespec_bundle* bundle) {
  if (bundle) bundle->release();
}

int edgespec_bundle_add_adapter(edgespec_bundle* bundle, const char* folder, int32_t* adapter) {
  return guarded([&] {
    if (!bundle || !folder || !adapter) refuse("expected a bundle, a folder, and where to put the adapter's number");
    if (bundle->users != 1) refuse("adapters are added before sessions are opened");
    if (bundle->hosted || !takes_adapters(bundle->architecture))
      refuse("adapters of " + bundle->architecture + " models cannot be added here: merge it at export");
    auto& store = bundle->target->adapters;
    if (!store) store = std::make_shared<AdapterStore>(bundle->target_part.graph);
    *adapter = add_lora(*store, folder);
    bundle->adapters.insert(*adapter);
  });
}

int edgespec_bundle_limit(edgespec_bundle* bundle, int32_t threads) {
  return guarded([&] {
    if (!bundle || threads < 1) refuse("expected a bundle, and at least one thread");
    for (edgespec_model* model : {bundle->target.get(), bundle->draft.get(), bundle->drafter.get()})
      if (model) model->threads.limit(threads);
  });
}

int edgespec_bundle_describe(const edgespec_bundle* bundle, edgespec_bundle_facts* facts) {
  return guarded([&] {
    if (!bundle) refuse("expected a bundle");
    edgespec_bundle_facts found{};
    found.has_draft = bundle->draft_part.vocab > 0;
    found.context = bundle->target_part.context;
    found.vocab = bundle->target_part.vocab;
    found.stops = bundle->stops.data();
    found.stop_count = static_cast<int32_t>(bundle->stops.size());
    answer(facts, found);
  });
}

int edgespec_session_open(edgespec_bundle* bundle, const edgespec_session_options* options,
                          edgespec_session** session) {
  return guarded([&] {
    if (!bundle || !session) refuse("expected a bundle, and where to put the session");
    *session = new edgespec_session(*bundle, options ? known(options) : edgespec_session_options{});
  });
}

void edgespec_session_close(edgespec_session* session) { delete session; }

uint64_t edgespec_session_bytes(const edgespec_session* session) {
  return session ? session->target.bytes() + (session->draft ? session->draft->bytes() : 0) +
                       (session->drafter_text ? session->drafter_text->bytes() : 0)
                 : 0;
}

int edgespec_session_save(edgespec_session* session, const char* path) {
  return session_call(session, [&] {
    if (!path) refuse("expected a path");
    const std::string key = session->key();
    session->native->save(path, key);
  });
}

int edgespec_session_restore(edgespec_session* session, const char* path, int64_t* tokens) {
  return session_call(session, [&] {
    if (!path) refuse("expected a path");
    const std::string key = session->key();
    session->native->restore(path, key);
    session->loop.reset();
    if (tokens) *tokens = int64_t(session->target.tokens().size());
  });
}

int edgespec_begin(edgespec_session* session, const int64_t* prompt, int64_t count, const edgespec_settings* settings) {
  return session_call(session, [&] {
    check_prompt_array(prompt, count);
    session->begin(prompt, count, known(settings));
  });
}

int edgespec_next(edgespec_session* session, edgespec_round* round) {
  return session_call(session, [&] {
    expect_size(round);
    answer(round, session->next());
  });
}

namespace {

void generate(edgespec_session& session, const int64_t* prompt, int64_t count, const edgespec_settings* settings,
              int (*on_round)(void* user, const edgespec_round* round), void* user) {
  session.begin(prompt, count, known(settings));
  while (!session.loop->ended()) {
    edgespec_round round = session.next();
    round.size = sizeof round;
    if (on_round && on_round(user, &round)) throw Failure(EDGESPEC_CANCELLED, "cancelled");
  }
}

const Codec& codec_of(const edgespec_bundle* bundle) {
  if (!bundle) refuse("expected a bundle");
  if (!bundle->codec) refuse("the bundle has no codec (edgespec_bundle_load_codec)");
  return *bundle->codec;
}

// Writes as much of an array as there is room for, and says how much there is.
template <class T>
void write(const T& found, typename T::value_type* to, size_t room, size_t* count) {
  if (!count) refuse("expected where to say how many there are");
  *count = found.size();
  if (to) std::copy_n(found.begin(), std::min(room, found.size()), to);
}

void expect_no_codec(const edgespec_bundle* bundle) {
  if (!bundle) refuse("expected a bundle");
  if (bundle->codec || bundle->users != 1) refuse("expected a bundle without a codec and without sessions");
}

}  // namespace

int edgespec_bundle_set_codec(edgespec_bundle* bundle, const edgespec_codec* codec) {
  return guarded([&] {
    expect_no_codec(bundle);
    bundle->codec = std::make_unique<Codec>(known(codec));
  });
}

int edgespec_bundle_load_codec(edgespec_bundle* bundle, const char* path) {
  return guarded([&] {
    expect_no_codec(bundle);
    bundle->codec = Codec::load(bundle->folder, path ? path : "");
  });
}

int edgespec_encode(const edgespec_bundle* bundle, const char* text, size_t size, int32_t special, int64_t* ids,
                    size_t room, size_t* count) {
  return guarded([&] {
    if (size && !text) refuse("expected a text");
    write(codec_of(bundle).encode(std::string(text, text + size), special != 0), ids, room, count);
  });
}

int edgespec_decode(const edgespec_bundle* bundle, const int64_t* ids, size_t count, char* text, size_t room,
                    size_t* size) {
  return guarded([&] {
    if (count && !ids) refuse("expected tokens");
    write(codec_of(bundle).decode(ids, count), text, room, size);
  });
}

int edgespec_encode_chat(const edgespec_bundle* bundle, const edgespec_message* messages, int32_t message_count,
                         const char* more, int64_t* ids, size_t room, size_t* count) {
  return guarded([&] {
    const Codec& codec = codec_of(bundle);
    write(codec.encode_chat(conversation_of(messages, message_count, more)), ids, room, count);
  });
}

int edgespec_chat(edgespec_session* session, const edgespec_message* messages, int32_t message_count, const char* more,
                  const edgespec_settings* settings, int (*on_round)(void* user, const edgespec_round* round),
                  void* user) {
  return session_call(session, [&] {
    const Codec& codec = codec_of(&session->bundle);
    const std::vector<int64_t> prompt = codec.encode_chat(conversation_of(messages, message_count, more));
    generate(*session, prompt.data(), int64_t(prompt.size()), settings, on_round, user);
  });
}

int edgespec_generate(edgespec_session* session, const int64_t* prompt, int64_t count,
                      const edgespec_settings* settings, int (*on_round)(void* user, const edgespec_round* round),
                      void* user) {
  return session_call(session, [&] {
    check_prompt_array(prompt, count);
    generate(*session, prompt, count, settings, on_round, user);
  });
}

void edgespec_cancel(edgespec_session* session) {
  if (session) session->cancelled = true;
}

int edgespec_session_counts(const edgespec_session* session, edgespec_counts* counts) {
  return guarded([&] {
    if (!session || !session->loop) refuse("expected a session with a text");
    const LoopCounts& found = session->loop->counts();
    edgespec_counts told{};
    told.prompt_tokens = found.prompt_tokens;
    told.reused_tokens = found.reused_tokens;
    told.rounds = found.rounds;
    told.tokens = found.tokens;
    told.drafted = found.drafted;
    told.accepted = found.accepted;
    told.prompt_ns = found.prompt_ns;
    told.round_ns = found.round_ns;
    told.pass_ns = found.pass_ns;
    told.dropped = session->loop->dropped().c_str();
    answer(counts, told);
  });
}
