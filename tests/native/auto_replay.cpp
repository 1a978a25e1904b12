// Method auto against Python's: rounds that Auto of edgespec/control/auto.py decided on, decided on again.
//
//   auto_replay FILE        exit 0: every decision is the same
#include <cmath>

#include "auto.h"
#include "replays.h"

using namespace edgespec;

namespace {

struct Scripted : Drafter {
  std::string named;
  DrafterFacts known;
  bool ready = true;

  const char* name() const override { return named.c_str(); }
  DrafterFacts facts() const override { return known; }
  bool caught_up() const override { return ready; }
  void begin(const Request&) override {}
  Proposal propose(const Request&, int64_t, const LeastGain&) override { return {}; }
};

bool close(double a, double b) { return std::fabs(a - b) <= 1e-9 * std::max(1.0, std::fabs(b)); }

class Replay {
 public:
  explicit Replay(const Json& of) : case_(of) {
    const std::vector<Json>& all = of["candidates"].items();
    drafters_.resize(all.size());
    learned_.resize(all.size());
    standings_.resize(all.size());
    std::vector<Candidate> candidates;
    for (size_t at = 0; at < all.size(); ++at) {
      const Json& given = all[at];
      Scripted& drafter = drafters_[at];
      drafter.named = given["name"].text("name");
      drafter.known = {given["cheap"].flag("cheap", false),
                       given["stops"].flag("stops", false),
                       {},
                       given["at_once"].flag("at_once", false)};
      for (const auto& [bucket, found] : given["rates"].members())
        drafter.known.rates[std::stoi(bucket)] = rates(found);
      Candidate one;
      one.name = drafter.named;
      one.promise = real(given, "promise");
      one.cheap = drafter.known.cheap;
      one.from_start = given["from_start"].flag("from_start", false);
      one.standing = &standings_[at];
      one.make = [this, at, &given] {
        if (given["fails"].flag("fails", false)) throw std::runtime_error("it does not load");
        CostModel::Points verify;
        for (const auto& [rows, cost] : case_["verify"].members()) verify[std::stoi(rows)] = cost.real("verify", 0);
        Learned& learned = learned_[at];
        learned.cost = CostModel(verify, real(given, "draft"));
        for (const auto& [rows, cost] : verify) learned.cost.observe_pass(rows, 10 * cost, 3);
        learned.cost.observe_draft(1, 10 * real(given, "draft"), 3);
        MadeControl made;
        made.drafter = &drafters_[at];
        made.control =
            std::make_unique<Control>(drafters_[at].known, learned, int(whole(given, "most")), rates(given["prior"]));
        return made;
      };
      candidates.push_back(std::move(one));
    }
    auto_ = std::make_unique<Auto>(std::move(candidates));
  }

  // The first round that differs, or -1.
  int run() {
    int number = 0;
    for (const Json& round : case_["rounds"].items()) {
      if (!decide(round)) return number;
      ++number;
    }
    return -1;
  }

 private:
  int who(const Drafter* drafter) const {
    for (size_t at = 0; at < drafters_.size(); ++at)
      if (drafter == &drafters_[at]) return int(at);
    return -1;
  }

  bool decide(const Json& round) {
    try {
      if (whole(round, "begins")) auto_->begin(case_["seeded"].flag("seeded", false));
    } catch (const std::exception&) { auto_->lose(nullptr); }
    for (int64_t token : round["text"].numbers("text")) text_.push_back(token);
    std::vector<Ask> asks;
    try {
      asks = auto_->choose(whole(round, "budget"));
    } catch (const std::exception&) { auto_->lose(nullptr); }
    const std::vector<Json>& wanted = round["asks"].items();
    if (asks.size() != wanted.size()) return false;
    std::vector<std::pair<Drafter*, double>> asked;
    Proposal winner;
    Drafter* by = nullptr;
    for (size_t i = 0; i < asks.size(); ++i) {
      const Ask& ask = asks[i];
      const Json& one = wanted[i];
      if (who(ask.drafter) != whole(one, "who") || ask.most != whole(one, "most") ||
          int64_t(ask.looks) != whole(one, "looks"))
        return false;
      const std::vector<Json>& gains = one["gains"].items();
      for (size_t depth = 1; depth <= gains.size(); ++depth)
        if (!close(ask.least_gain(int64_t(depth)), gains[depth - 1].real("gain", 0))) return false;
      Proposal found;
      found.tokens = one["guesses"].numbers("guesses");
      found.bucket = int(whole(one, "bucket"));
      auto_->review(ask, found, text_, real(one, "ms"));
      if (found.size() != whole(one, "length")) return false;
      asked.emplace_back(ask.drafter, real(one, "ms"));
      if (found.empty()) continue;
      winner = found;
      by = ask.drafter;
    }
    Verdict verdict;
    for (int32_t i = 0; i < whole(round, "right"); ++i) verdict.path.push_back(i);
    for (Scripted& one : drafters_) one.ready = whole(round, "caught_up") != 0;
    auto_->told(
        {winner, verdict, by, asked, int32_t(winner.size() + 1), real(round, "pass_ms"), real(round, "draft_ms")});
    if (const int64_t lost = whole(round, "lost"); lost >= 0) auto_->lose(&drafters_[size_t(lost)]);
    if (auto_->in_use() != round["in_use"].text("in_use")) return false;
    const std::vector<Json>& estimates = round["estimates"].items();
    for (size_t at = 0; at < estimates.size(); ++at)
      if (!close(auto_->estimate(int(at)), estimates[at].real("estimate", 0))) return false;
    return true;
  }

  const Json& case_;
  std::vector<Scripted> drafters_;
  std::vector<Learned> learned_;
  std::vector<Standing> standings_;
  std::unique_ptr<Auto> auto_;
  std::vector<int64_t> text_;
};

}  // namespace

int main(int, char** words) {
  return replay_all(words[1], [](const Json& one) { return Replay(one).run(); });
}
