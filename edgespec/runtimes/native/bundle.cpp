#include "bundle.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace edgespec {
namespace {

constexpr int64_t kOldest = 5, kNewest = 6;  // schemas of manifests that are read here
// acceptance of guesses as published (edgespec/drafters/registry.py), and the guesses that it counts as
constexpr double kDraftRate = 1 - 1 / 2.49, kSkipRate = 0.7, kPlanesRate = 0.9, kPublished = 4;
constexpr double kMedusaRate = 0.5, kBlockwiseRate = 0.48, kEagleRate = 0.66, kMtpRate = 0.6, kDflashRate = 0.68;
constexpr double kMostCost = 1e6;  // of a draft step, in passes
constexpr int64_t kMostHeads = 64, kMostBlock = 64;
constexpr double kBusySpread = 1.5,
                 kBusyOthers = 0.2;  // of the times of an export, as in edgespec/planning/profiles.py
constexpr double kTried = 1;         // least predicted speed of a candidate of auto
constexpr size_t kCandidates = 3;
constexpr int64_t kPredicted = 8;  // guesses that a speed is predicted for
constexpr int64_t kMostContext = int64_t(1) << 32, kMostExtra = 1 << 12, kHostedExtra = 64, kMostGuesses = 64,
                  kMostVocab = 1 << 24;

// A file of the folder; its name must not lead out of it.
std::string inside(const std::string& folder, const std::string& name) {
  bool fine = !name.empty() && name[0] != '/' && name.find_first_of(std::string("\\:\0", 3)) == std::string::npos;
  for (size_t at = 0; fine && at <= name.size();) {
    const size_t end = std::min(name.find('/', at), name.size());
    fine = name.compare(at, end - at, "..") != 0 && end > at;
    at = end + 1;
  }
  if (!fine) refuse("a path that leaves the bundle: " + name);
  return folder + "/" + name;
}

int64_t bounded(const Json& value, const char* name, int64_t without, int64_t least, int64_t most) {
  const int64_t found = value.number(name, without);
  if (found < least || found > most) refuse(std::string(name) + " " + std::to_string(found) + ": out of range");
  return found;
}

// The tokens of a cut LM head: little-endian int32, ascending.
std::vector<int64_t> read_head(const std::string& path, int64_t size, int64_t vocab) {
  const Mapping file(path);
  bool fine = size > 0 && uint64_t(size) * 4 == file.size();
  std::vector<int64_t> found;
  for (int64_t i = 0; fine && i < size; ++i) {
    int32_t token = 0;
    std::memcpy(&token, file.data() + 4 * i, sizeof token);
    fine = token >= 0 && token < vocab && (!i || token > found.back());
    found.push_back(token);
  }
  if (!fine) refuse(path + ": expected " + std::to_string(size) + " ascending tokens");
  return found;
}

// fused: it begins with hidden states of the target.  hosted: the caller has its graph.
ModelPart read_part(const std::string& folder, const Json& part, const char* name, bool hosted, bool fused = false) {
  ModelPart found;
  for (const char* beside : {"source", "image", "sound", "tower", "decoder"})
    if (!part[beside].is_null() && !(fused && beside == std::string("decoder")))
      refuse(std::string(name) + ": reads more than tokens: its passes are run by edgespec_run");
  if (!hosted) {
    const Json& graph = part["graphs"]["native"];
    if (graph.is_null())
      throw Failure(EDGESPEC_NO_FILE, std::string(name) + ": has no graph of native operators: export it for those");
    found.graph = inside(folder, graph["file"].text("file"));
  }
  found.context = bounded(part["facts"]["context"], "context", 0, 1, kMostContext);
  found.vocab = bounded(part["facts"]["vocab"], "vocab", 0, 1, kMostVocab);
  const Json& extra = part["extra_rows"];  // of schema 5: headroom
  found.extra_rows =
      bounded(extra.is_null() ? part["headroom"] : extra, "extra_rows", hosted ? kHostedExtra : 0, 1, kMostExtra);
  if (part["cut"].flag("cut", false))
    found.head = read_head(inside(folder, part["head_vocab"]["file"].text("head_vocab")),
                           bounded(part["head_vocab"]["size"], "head_vocab", 0, 1, found.vocab), found.vocab);
  if (hosted || part["attention"].is_null()) return found;
  const std::string attention = part["attention"]["default"].text("attention");
  if (attention == "f32")
    found.attention = EDGESPEC_ATTENTION_F32;
  else if (attention == "f16")
    found.attention = EDGESPEC_ATTENTION_F16;
  else if (attention == "int8")
    found.attention = EDGESPEC_ATTENTION_INT8;
  else
    found.attention_name = attention;
  return found;
}

// Acceptance by position: a published rate, which the export's measurement corrects.
Rates rates_of(double published, const Json& measured) {
  const std::vector<Json>& rates = measured["acceptance"].items();
  if (rates.empty()) return {published};
  Evidence seen;
  double left = double(measured["positions"].number("positions", 0));
  for (const Json& one : rates) {
    seen.tested.push_back(left);
    left *= one.real("acceptance", 0);
    seen.accepted.push_back(left);
  }
  return posterior({published}, kPublished, seen, rates.size());
}

std::optional<double> cost_of(const Json& value, const char* name) {
  if (value.is_null()) return {};
  const double found = value.real(name, 0);
  if (!(found >= 0 && found <= kMostCost)) refuse(std::string(name) + ": out of range");
  return found;
}

MethodPart read_method(const Json& method, bool self) {
  MethodPart found;
  found.guesses = bounded(method["gamma"], "gamma", 4, 1, kMostGuesses);
  const Json& skip = method["skip"];
  found.skip.attention = skip["attention"].numbers("attention");
  found.skip.mlp = skip["mlp"].numbers("mlp");
  found.skip.high_attention = skip["high_attention"].numbers("high_attention");
  found.skip.high_mlp = skip["high_mlp"].numbers("high_mlp");
  found.skip.high_head = skip["high_head"].flag("high_head", false);
  found.skip.head_rows = bounded(skip["head_rows"], "head_rows", 0, 0, kMostVocab);
  for (const auto* layers : {&found.skip.attention, &found.skip.mlp, &found.skip.high_attention, &found.skip.high_mlp})
    for (int64_t layer : *layers)
      if (layer < 0) refuse("skip: layer " + std::to_string(layer));
  found.branch = method["branch"].numbers("branch");
  check_branch(found.branch);
  found.head_rows = bounded(method["head_rows"], "head_rows", 0, 0, kMostVocab);
  static const Json none;
  const std::vector<Json>& all = method["measured"].items();
  const Json& measured = all.empty() ? none : all.front();
  const bool planes = found.skip.attention.empty() && found.skip.mlp.empty();
  found.rates = rates_of(!self ? kDraftRate : planes ? kPlanesRate : kSkipRate, measured);
  Rates confidence;
  for (const Json& one : measured["confidence"].items()) confidence.push_back(one.real("confidence", 0));
  if (!measured["acceptance"].items().empty())
    found.confidence = Confidence(confidence, measured["acceptance"].items().at(0).real("", 0));
  found.measured = !all.empty();
  found.predicted_speedup = method["predicted_speedup"].real("predicted_speedup", 0);
  found.draft_cost = cost_of(method["draft_cost"], "draft_cost");
  found.first_cost = cost_of(method["first_cost"], "first_cost");
  return found;
}

// Whether it is a drafter of hidden states that HiddenStateDrafter runs.
bool draws_chains(const Json& part) {
  if (part.is_null() || part["graphs"]["native"].is_null()) return false;
  const Json& decoder = part["decoder"];
  const std::string kind = decoder["kind"].text("kind");
  for (const Json& group : part["heads"].items())
    if (group["kind"].text("kind") == "embedding") return false;
  return (kind == "eagle" || kind == "mtp" || kind == "dflash") && decoder["masked"].is_null() &&
         decoder["block"].is_null() == (kind != "dflash") && decoder["reads"].items().empty();
}

MethodPart read_heads(const std::string& folder, const Json& method, const Json& target, int64_t vocab, double rate) {
  MethodPart found = read_method(method, false);
  static const Json none;
  const std::vector<Json>&names = method["heads"].items(), &measured = method["measured"].items();
  if (names.empty()) refuse("a method of heads names none");
  const std::string name = names[0].text("heads");
  const std::vector<Json>& groups = target["heads"].items();
  const auto group =
      std::find_if(groups.begin(), groups.end(), [&](const Json& one) { return one["name"].text("name") == name; });
  if (group == groups.end()) refuse("heads " + name + ", which the model does not have");
  found.heads.number = static_cast<int32_t>(group - groups.begin());
  found.heads.count = static_cast<int32_t>(bounded((*group)["count"], "count", 1, 1, kMostHeads));
  if (const Json& cut = target["head_vocab"]; !cut.is_null())
    found.heads.tokens = read_head(inside(folder, cut["file"].text("head_vocab")),
                                   bounded(cut["size"], "head_vocab", 0, 1, vocab), vocab);
  for (const Json& head : method["ranks"].items()) {
    found.ranks.emplace_back();
    for (const Json& share : head.items()) found.ranks.back().push_back(share.real("ranks", 0));
    if (found.ranks.back().size() > size_t(kMostVocab)) refuse("ranks: too many");
  }
  if (int64_t(found.ranks.size()) > found.heads.count) found.ranks.resize(size_t(found.heads.count));
  found.rates = rates_of(rate, measured.empty() ? none : measured.front());
  return found;
}

MethodPart by_high_planes(int layers) {
  MethodPart found;
  for (int64_t layer = 0; layer < layers; ++layer) found.skip.high_attention.push_back(layer);
  found.skip.high_mlp = found.skip.high_attention;
  found.skip.high_head = true;
  found.rates = {kPlanesRate};
  return found;
}

// Distinct experts of a layer that passes over some rows read, if rows choose independently and uniformly.
CostModel::Points reads_of(const Json& experts) {
  const double always = double(bounded(experts["always"], "always", 0, 0, kMostVocab));
  const double others = double(bounded(experts["count"], "count", 0, 1, kMostVocab)) - always;
  const double chosen = double(bounded(experts["chosen"], "chosen", 0, 1, kMostVocab)) - always;
  const double share = others > 0 ? std::min(std::max(chosen, 0.0) / others, 1.0) : 1;
  CostModel::Points found;
  for (int rows : {1, 2, 3, 5, 10})
    found[rows] = std::max(always + std::max(others, 0.0) * (1 - std::pow(1 - share, rows)), 1e-3);
  return found;
}

void expect_vocab(const edgespec_model& model, const ModelPart& part, const char* name) {
  const int64_t columns = part.head.empty() ? part.vocab : int64_t(part.head.size());
  if (model.program.vocab != columns)
    refuse(std::string(name) + ": its graph scores " + std::to_string(model.program.vocab) + " tokens, and not " +
           std::to_string(columns));
}

}  // namespace
}  // namespace edgespec

using namespace edgespec;

void edgespec::check_branch(const std::vector<int64_t>& branch) {
  int64_t level = 1, nodes = 0;
  for (int64_t width : branch) {
    if (width < 1 || width > kMostNodes) refuse("branch: expected 1 to 64 guesses of each node");
    nodes += level *= width;
    if (nodes > kMostNodes) refuse("branch: expected a tree of at most 64 guesses");
  }
}

edgespec_bundle::edgespec_bundle(const std::string& folder, int32_t threads, uint64_t cache, bool hosted)
    : folder(folder), hosted(hosted), streamed(cache > 0) {
  const Mapping file(folder + "/edgespec.json");
  const Json manifest = Json::parse(reinterpret_cast<const char*>(file.data()), file.size());
  const int64_t schema = manifest["schema_version"].number("schema_version", 0);
  if (schema < kOldest || schema > kNewest)
    refuse("a bundle of schema " + std::to_string(schema) + ": expected " + std::to_string(kOldest) + " to " +
           std::to_string(kNewest) + "; export it again");
  target_part = read_part(folder, manifest["target"], "target", hosted);
  if (!target_part.head.empty()) refuse("target: its LM head is cut");
  if (const Json& named = manifest["target"]["facts"]["architecture"]; !named.is_null())
    architecture = named.text("architecture");
  stops = manifest["tokenizer"]["eos"].numbers("eos");
  busy = manifest["cost"]["spread"].real("spread", 1) >= kBusySpread ||
         manifest["cost"]["others"].real("others", 0) >= kBusyOthers;
  for (const auto& [rows, ms] : manifest["cost"]["verify_ms"].members())
    if (const int n = std::atoi(rows.c_str()); !busy && n > 0 && ms.real("verify_ms", 0) > 0)
      verify[n] = ms.real("verify_ms", 0);
  if (const Json& experts = manifest["target"]["facts"]["experts"]; streamed && !experts.is_null())
    verify = reads_of(experts);
  if (const Json& draft_of = manifest["draft"]; !draft_of.is_null() && !manifest["translation"].is_null()) {
    elsewhere["speculative"] = "a draft with another tokenizer runs in Python alone: use ngram";
  } else if (!draft_of.is_null()) {
    draft_part = read_part(folder, draft_of, "draft", hosted);
    methods["speculative"] = read_method(manifest["methods"]["speculative"], false);
  }
  if (hosted) {
    for (const char* name : {"self-spec", "medusa", "blockwise", "eagle", "mtp", "dflash"})
      elsewhere[name] = "the app's passes have no hidden states and layers: use ngram or speculative";
    return;
  }
  target = open_graph(target_part.graph, threads, false, cache);
  target->check_texts();
  expect_vocab(*target, target_part, "target");
  if (const Json& self = manifest["methods"]["self-spec"]; !self.is_null())
    methods["self-spec"] = read_method(self, true);
  else if (target->gates.plane < target->gates.count)  // drafts by the high planes of everything need no preparation
    methods["self-spec"] = by_high_planes(target->gates.layers);
  if (!draft_part.graph.empty()) {
    draft = open_graph(draft_part.graph, threads, true);
    draft->check_texts();
    expect_vocab(*draft, draft_part, "draft");
  }
  if (const Json& part = manifest["drafter"]; draws_chains(part)) {
    const std::string kind = part["decoder"]["kind"].text("kind");
    drafter_part = read_part(folder, part, "drafter", false, true);
    drafter = open_graph(drafter_part.graph, threads, true);
    drafter->check_texts();
    expect_vocab(*drafter, drafter_part, "drafter");
    methods[kind] = read_method(manifest["methods"][kind], false);
    static const Json none;
    const std::vector<Json>& measured = manifest["methods"][kind]["measured"].items();
    methods[kind].rates = rates_of(kind == "eagle" ? kEagleRate
                                   : kind == "mtp" ? kMtpRate
                                                   : kDflashRate,
                                   measured.empty() ? none : measured.front());
    methods[kind].at_once = kind == "dflash";
    if (kind == "dflash") {
      const Json& decoder = part["decoder"];
      block.rows = bounded(decoder["block"], "block", 0, 2, kMostBlock);
      block.mask = bounded(decoder["mask"], "mask", -1, 0, target_part.vocab - 1);
      block.anchor = decoder["anchor"].flag("anchor", false);
    }
  } else if (!part.is_null())
    elsewhere[part["decoder"]["kind"].text("kind")] = "its drafter runs in Python alone: use ngram or speculative";
  for (const auto& [name, rate] : {std::pair("medusa", kMedusaRate), std::pair("blockwise", kBlockwiseRate)})
    if (const Json& method = manifest["methods"][name]; !method.is_null())
      methods[name] = read_heads(folder, method, manifest["target"], target_part.vocab, rate);
  const Json& entry = manifest["files"][manifest["target"]["weights"].text("weights")];
  if (!entry["sha256"].is_null()) weights = entry["sha256"].text("sha256");
}

std::vector<std::pair<std::string, double>> edgespec_bundle::candidates() const {
  std::vector<std::pair<std::string, double>> found;
  for (const auto& [name, part] : methods) {
    double speed = part.predicted_speedup;
    if (speed == 0 && part.measured && busy) {  // worth trying: times of a busy machine say little
      CostModel costs({}, part.draft_cost, part.first_cost);
      std::vector<double> prices{1};
      for (int64_t n = 1; n <= kPredicted; ++n)
        prices.push_back(costs.d(part.at_once || part.heads.count ? 1 : n) + costs.v(n + 1));
      speed = std::max(best_speed(posterior(part.rates, 1, {}, size_t(kPredicted)), prices), kTried);
    }
    if (speed >= kTried) found.emplace_back(name, speed);
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  if (found.size() >= kCandidates) found.resize(kCandidates - 1);
  found.emplace_back("ngram", kTried);
  return found;
}
