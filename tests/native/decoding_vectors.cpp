// The decoding core of the C interface against tests/vectors: noise, distributions, verdicts and n-grams of Python.
//
//   decoding_vectors FOLDER        exit 0: nothing differs.  In the files, -1e300 stands for -infinity.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "json.h"
#include "mapping.h"
#include "ngram.h"
#include "verify.h"

using namespace edgespec;

namespace {

int wrong = 0, compared = 0;

void expect(bool same, const char* what, int number) {
  ++compared;
  if (!same && ++wrong < 20) std::printf("%s %d differs\n", what, number);
}

bool near(double a, double b) { return std::fabs(a - b) <= 1e-12 * std::max(1.0, std::fabs(b)); }

double real(const Json& of, const char* name, double without) {
  const double found = of[name].real(name, without);
  return found <= -1e300 ? -HUGE_VAL : found;
}

int64_t whole(const Json& of, const char* name, int64_t without = 0) { return of[name].number(name, without); }

// As tools/vector_rows.py makes it.
std::vector<float> row(int64_t seed, int64_t vocab, double scale = 6) {
  std::vector<float> made;
  for (uint64_t token = 0; token < uint64_t(vocab); ++token) {
    uint64_t hashed = (token * 2654435761 + uint64_t(seed) * 40503 + 12345) % (uint64_t(1) << 32);
    hashed = (hashed * 2246822519 + uint64_t(seed)) % (uint64_t(1) << 32);
    made.push_back(float((double(hashed) / 4294967296.0 * 2 - 1) * scale));
  }
  return made;
}

Sampling sampling_of(const Json& given) {
  Sampling made;
  made.temperature = real(given, "temperature", 0);
  made.top_k = whole(given, "top_k");
  made.top_p = real(given, "top_p", 1);
  made.min_p = real(given, "min_p", 0);
  made.repetition_penalty = real(given, "repetition_penalty", 1);
  made.presence_penalty = real(given, "presence_penalty", 0);
  made.frequency_penalty = real(given, "frequency_penalty", 0);
  made.coupled = !given["acceptance"].is_null() && given["acceptance"].text("acceptance") == "coupled";
  made.block = !given["verification"].is_null() && given["verification"].text("verification") == "block";
  for (const char* token : {"1", "2", "3", "7"})
    if (!given["logit_bias"][token].is_null())
      made.bias.emplace_back(std::stoll(token), real(given["logit_bias"], token, 0));
  return made;
}

// A text of which the first `prompt` tokens are not counted.
struct Text {
  std::vector<int64_t> tokens;
  Prefix prefix;

  Text(const std::vector<int64_t>& all, int64_t prompt, int64_t vocab) {
    tokens.assign(all.begin(), all.begin() + prompt);
    tokens.reserve(all.size());
    prefix.begin(tokens, vocab);
    for (size_t at = size_t(prompt); at < all.size(); ++at) {
      tokens.push_back(all[at]);
      prefix.commit(all[at]);
    }
  }
};

void compare_noise(const Json& one, int number) {
  const Noise noise(uint64_t(std::stoll(one["seed"].digits())));
  const uint64_t stream = uint64_t(whole(one, "stream")), state = noise.state(whole(one, "position"), stream);
  const std::vector<int64_t> tokens = one["tokens"].numbers("tokens"), bits = one["bits"].numbers("bits");
  for (size_t i = 0; i < tokens.size(); ++i) {
    const uint64_t found = Noise::bits(state, tokens[i]);
    expect(found == uint64_t(bits[i]), "bits", number);
    expect(near(gumbel_of(found), one["gumbel"].items()[i].real("gumbel", 0)), "gumbel", number);
  }
  expect(noise.uniform(whole(one, "position"), stream) == real(one, "uniform", 0), "uniform", number);
}

void compare_sampling(const Json& one, int number) {
  const Sampling sampling = sampling_of(one["params"]);
  const int64_t vocab = whole(one, "vocab"), seed = whole(one, "row");
  Text text(one["prefix"].numbers("prefix"), whole(one["params"], "prompt"), vocab);
  Adjusted adjusted(sampling);
  const Support found = adjusted.support(row(seed, vocab).data(), vocab, text.prefix);
  const Chances chances = found.chances();
  const std::vector<int64_t> ids = one["ids"].numbers("ids"), drawn = one["drawn"].numbers("drawn");
  expect(int64_t(found.ids.size()) == whole(one, "size"), "size of a support", number);
  expect(found.ids.size() >= ids.size() && std::equal(ids.begin(), ids.end(), found.ids.begin()), "ids", number);
  const std::vector<Json>& probs = one["probs"].items();
  for (size_t i = 0; i < probs.size(); ++i) expect(near(chances.probs[i], probs[i].real("probs", 0)), "probs", number);
  for (size_t i = 0; i < drawn.size(); ++i)
    expect(found.draw(Noise(uint64_t(seed)), whole(one, "first_position") + int64_t(i), kTargetNoise) == drawn[i],
           "drawn token", number);
}

Chances softmax(const std::vector<float>& logits) {
  Support all;
  const float best = *std::max_element(logits.begin(), logits.end());
  for (size_t i = 0; i < logits.size(); ++i) {
    all.ids.push_back(int64_t(i));
    all.logits.push_back(double(logits[i]) - double(best));
  }
  return all.chances();
}

void compare_verdict(const Json& one, int number) {
  if (one["accept"].text("accept") != "exact" || whole(one, "min_block")) return;  // lossy
  const int64_t vocab = whole(one, "vocab");
  Proposal proposal;
  proposal.tokens = one["tokens"].numbers("tokens");
  for (int64_t parent : one["parents"].numbers("parents")) proposal.parents.push_back(int32_t(parent));
  for (int64_t seed : one["q_rows"].numbers("q_rows")) proposal.probs.push_back(softmax(row(seed, vocab, 2)));
  proposal.replacement = proposal.chain();
  std::vector<float> logits;
  for (int64_t seed : one["rows"].numbers("rows")) {
    const std::vector<float> more = row(seed, vocab, 2);
    logits.insert(logits.end(), more.begin(), more.end());
  }
  edgespec_result rows{};
  rows.columns = int32_t(vocab);
  rows.logits = logits.data();
  Text text(one["committed"].numbers("committed"), 0, vocab);
  const Verdict found =
      verify(proposal, rows, sampling_of(one["params"]), Noise(uint64_t(whole(one, "seed"))), text.prefix);
  const std::vector<int64_t> path(found.path.begin(), found.path.end());
  expect(path == one["path"].numbers("path") && found.next == whole(one, "next_token"), "verdict", number);
}

void compare_ngram(const Json& one, int number) {
  if (!one["settings"]["n_max"].is_null() || !one["settings"]["n_min"].is_null()) return;
  const std::vector<int64_t> text = one["text"].numbers("text");
  std::vector<int64_t> tokens;
  const Sampling sampling;
  const Noise noise;
  Prefix prefix;
  const Reading reading;
  const Request request{tokens, sampling, noise, prefix, reading};
  NGram drafter(nullptr);
  size_t at = 0;
  for (size_t length = 8; length <= text.size(); length += 3) {
    tokens.assign(text.begin(), text.begin() + int64_t(length));
    if (!at) drafter.begin(request);
    const Proposal found = drafter.propose(request, 1 + int64_t(length) % 8, {});
    std::vector<int64_t> expected = one["proposals"].items()[at++].numbers("proposals");
    expected.erase(expected.begin());  // its bucket
    expect(found.tokens == expected, "proposal", number);
  }
}

}  // namespace

int main(int, char** words) {
  const std::pair<const char*, void (*)(const Json&, int)> kinds[] = {
      {"noise", compare_noise}, {"sampling", compare_sampling}, {"verify", compare_verdict}, {"ngram", compare_ngram}};
  for (const auto& [name, compare] : kinds) {
    const Mapping file(std::string(words[1]) + "/" + name + ".json");
    const Json all = Json::parse(reinterpret_cast<const char*>(file.data()), file.size());
    int number = 0;
    for (const Json& one : all.items()) compare(one, number++);
  }
  std::printf("%d of %d differ\n", wrong, compared);
  return wrong > 0;
}
