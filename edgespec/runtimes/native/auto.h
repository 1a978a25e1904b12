// Method auto, as edgespec/control/auto.py: drafts with the candidate of the highest estimated speed, and switches if
// another is clearly faster.  Every candidate has a budget of plain steps, so that a text without any gain costs little
// more than plain decoding.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "policy.h"

namespace edgespec {

// A drafter with its control, once it is made.
struct MadeControl {
  std::unique_ptr<Drafter> own;  // null: another owns it
  Drafter* drafter = nullptr;
  std::unique_ptr<Control> control;  // null: not made yet
};

// A method to choose from.
struct Candidate {
  std::string name;
  double promise = 1;                 // estimated speed over plain decoding before its drafter is made
  std::function<MadeControl()> make;  // called at its first turn; may throw
  bool cheap = false;                 // looking without guessing costs next to nothing
  bool from_start = false;            // it needs a text from its beginning
  Standing* standing = nullptr;       // in all texts of a session
  MadeControl made;
};

class Auto : public Adaptive {
 public:
  explicit Auto(std::vector<Candidate> candidates) : Adaptive({}, {}), candidates_(std::move(candidates)) {}

  void set_first(std::vector<Drafter*> first) { first_ = std::move(first); }  // asked before all, in the next text
  void begin(bool reproducible) override;
  std::vector<Ask> choose(int64_t budget) override;
  void review(const Ask& ask, Proposal& proposal, const std::vector<int64_t>& text, double ms) override;
  void told(const Outcome& round) override;
  void lose(Drafter* drafter) override;
  std::string in_use() const override { return in_use_.which < 0 ? "" : candidates_[size_t(in_use_.which)].name; }

  double estimate(int which);  // the speed of a candidate over plain decoding

 private:
  struct InUse {
    int which = -1;  // -1: plain decoding
    int rounds = 0;
    Pace pace;
  };

  Standing& standing(int which) { return seeded_ ? own_[size_t(which)] : *candidates_[size_t(which)].standing; }
  Control* control(int which) const { return candidates_[size_t(which)].made.control.get(); }
  int count() const { return static_cast<int>(candidates_.size()); }
  void add_lookers(int64_t budget, std::vector<Ask>& asks);
  double plain_ms() const;
  void count_round(Control& control, const Outcome& round, bool own);
  double gain();
  void judge(const Control& control);
  void switch_candidate(double gain, bool spent);
  double hope(int which);
  bool looks_on(int which) const;
  bool ready(int which) { return !out_.count(which) && standing(which).ready(); }
  int best_candidate(int besides = -1);
  int next();
  Control& made(int which);
  void enter(int which);
  void take(int which);

  std::vector<Candidate> candidates_;
  std::vector<Drafter*> first_;
  int64_t depth_ = 8;  // guesses that the last round might have had
  bool seeded_ = false;
  std::vector<Standing> own_;  // of a seeded text
  InUse in_use_;
  std::set<int> begun_;            // candidates whose control has begun this text
  std::set<int> out_, left_;       // failed, or cannot follow the text any more; given up for a faster one
  std::map<int, double> look_ms_;  // of cheap candidates: what looking took lately
};

}  // namespace edgespec
