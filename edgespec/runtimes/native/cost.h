// The time of draft steps and of passes over several rows, in passes over one row, as edgespec/formulas/cost.py: given,
// and corrected by what is observed.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace edgespec {

// Milliseconds of passes by rows, and of drafts by steps, which stay comparable while the machine changes its speed: if
// several passes in a row take a different time than usual, all earlier timings are rescaled.
class Timings {
 public:
  using Windows = std::vector<std::pair<int, std::deque<std::pair<int64_t, double>>>>;  // size: when, ms; newest last

  void add_pass(int rows, double ms, int times);
  void add_draft(int steps, double ms, int times) { add(drafts_, steps, ms, times); }
  // The median of each size that was timed often enough.
  static std::map<int, double> medians(const Windows& windows);
  const Windows& passes() const { return passes_; }
  const Windows& drafts() const { return drafts_; }

 private:
  const std::deque<std::pair<int64_t, double>>& add(Windows& windows, int size, double ms, int times);
  void compare(double ratio);

  Windows passes_, drafts_;
  int64_t now_ = 0, since_ = 0;  // since_: when the first pass of `run_` was timed
  std::vector<double> run_;      // passes in a row that took clearly longer, or shorter, than usual: how much
};

// d(k), the time of k draft steps, and v(n), that of a pass over n rows.  Both are linear between their points and
// continue with the last slope.
class CostModel {
 public:
  using Points = std::map<int, double>;

  // verify: v, or any times in proportion to it; empty: assumed.  draft: of a step; first: of a round's first one.
  explicit CostModel(const Points& verify = {}, std::optional<double> draft = {}, std::optional<double> first = {});

  CostModel given() const { return CostModel(given_, given_draft_, given_first_); }  // without observations
  double d(int64_t k);
  double v(int64_t n);
  int64_t version();  // how often d and v have changed
  double plain_ms();  // milliseconds of a pass over one row; 0: not measured
  void observe_pass(int rows, double ms, int times = 1);
  void observe_draft(int steps, double ms, int times = 1);

 private:
  void refresh();

  Points given_, points_, steps_;
  double given_draft_;
  std::optional<double> given_first_;
  Timings timings_;
  int unread_ = 0;
  int64_t version_ = 0;
  double plain_ms_ = 0;
};

}  // namespace edgespec
