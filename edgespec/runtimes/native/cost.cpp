#include "cost.h"

#include <algorithm>
#include <iterator>

namespace edgespec {
namespace {

constexpr size_t kWindow = 15, kKnown = 3, kSizes = 32, kInARow = 5, kEnough = 3;
constexpr double kBeyond = 1.1;  // a pass this far off took clearly longer, or shorter
constexpr int kRefresh = 8;      // timings between two evaluations of the medians
constexpr double kAssumedDraft = 0.05;

double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  const size_t middle = all.size() / 2;
  return all.size() % 2 ? all[middle] : (all[middle - 1] + all[middle]) / 2;
}

double interpolate(const CostModel::Points& points, double n) {
  const auto first = points.begin();
  if (n <= first->first || points.size() == 1) return first->second;
  auto right = std::find_if(std::next(first), points.end(), [&](const auto& one) { return n <= one.first; });
  if (right == points.end()) --right;
  const auto left = std::prev(right);
  return left->second + (right->second - left->second) * (n - left->first) / (right->first - left->first);
}

// Makes points non-decreasing: a dip is noise, and the best length would be chosen by it.
CostModel::Points rising(CostModel::Points points) {
  double top = 0;
  for (auto& one : points) one.second = top = std::max(top, one.second);
  return points;
}

}  // namespace

const std::deque<std::pair<int64_t, double>>& Timings::add(Windows& windows, int size, double ms, int times) {
  ++now_;
  const auto known = std::find_if(windows.begin(), windows.end(), [&](const auto& one) { return one.first == size; });
  if (known == windows.end())
    windows.push_back({size, {}});
  else
    std::rotate(known, std::next(known), windows.end());
  if (windows.size() > kSizes)
    windows.erase(std::find_if(windows.begin(), windows.end(), [](const auto& one) { return one.first > 1; }));
  auto& mine = windows.back().second;
  for (int i = 0; i < times; ++i) mine.emplace_back(now_, ms);
  while (mine.size() > kWindow) mine.pop_front();
  return mine;
}

void Timings::add_pass(int rows, double ms, int times) {
  const int64_t before = run_.empty() ? now_ + 1 : since_;
  std::vector<double> known;
  for (const auto& [when, taken] : add(passes_, rows, ms, times))
    if (when < before) known.push_back(taken);
  std::sort(known.begin(), known.end());
  if (known.size() >= kKnown && known[known.size() / 2] != 0 && ms > 0) compare(ms / known[known.size() / 2]);
}

void Timings::compare(double ratio) {
  if (1 / kBeyond <= ratio && ratio <= kBeyond) return run_.clear();
  if (!run_.empty() && (run_[0] > 1) != (ratio > 1)) run_.clear();
  if (run_.empty()) since_ = now_;
  run_.push_back(ratio);
  if (run_.size() < kInARow) return;
  const double factor = median(run_);
  for (Windows* windows : {&passes_, &drafts_})
    for (auto& window : *windows)
      for (auto& [when, ms] : window.second)
        if (when < since_) ms *= factor;
  run_.clear();
}

std::map<int, double> Timings::medians(const Windows& windows) {
  std::map<int, double> found;
  for (const auto& [size, window] : windows) {
    if (window.size() < kEnough) continue;
    std::vector<double> all;
    for (const auto& one : window) all.push_back(one.second);
    found[size] = median(std::move(all));
  }
  return found;
}

CostModel::CostModel(const Points& verify, std::optional<double> draft, std::optional<double> first)
    : given_draft_(draft.value_or(kAssumedDraft)), given_first_(first) {
  // int4 on stock operators, 0.5B shape, 2 threads of a Cascade Lake machine
  const Points points = verify.empty() ? Points{{1, 1}, {4, 1.67}, {8, 2.57}, {16, 3.95}} : verify;
  const double one = points.count(1) ? points.at(1) : points.begin()->second;
  for (const auto& [rows, cost] : points) given_[rows] = cost / one;
  given_[1] = 1;
  points_ = given_;
  steps_ = {{0, 0}, {1, given_draft_}};
  if (first) steps_ = {{0, 0}, {1, *first}, {2, *first + given_draft_}};
}

double CostModel::d(int64_t k) {
  if (unread_ >= kRefresh) refresh();
  return interpolate(steps_, double(k));
}

double CostModel::v(int64_t n) {
  if (unread_ >= kRefresh) refresh();
  return interpolate(points_, double(n));
}

int64_t CostModel::version() {
  if (unread_ >= kRefresh) refresh();
  return version_;
}

double CostModel::plain_ms() {
  if (unread_ >= kRefresh) refresh();
  return plain_ms_;
}

void CostModel::observe_pass(int rows, double ms, int times) {
  timings_.add_pass(rows, ms, times);
  unread_ += times;
}

void CostModel::observe_draft(int steps, double ms, int times) {
  if (steps < 1) return;
  timings_.add_draft(steps, ms, times);
  unread_ += times;
}

void CostModel::refresh() {
  unread_ = 0;
  ++version_;
  const Points ms = Timings::medians(timings_.passes());
  if (ms.empty()) return;
  // one-row passes may never happen, as each round drafts: then the given curve says what one would take
  const double one = plain_ms_ = ms.begin()->second / interpolate(given_, ms.begin()->first);
  Points points = given_;
  for (const auto& [rows, taken] : ms) points[rows] = taken / one;
  points[1] = 1;
  // measured points stay; a given point between them may contradict them
  const int least = ms.begin()->first, most = ms.rbegin()->first;
  for (auto at = points.begin(); at != points.end();) {
    const int n = at->first;
    at = ms.count(n) || n == 1 || !(least < n && n < most) ? std::next(at) : points.erase(at);
  }
  points_ = rising(std::move(points));
  Points steps{{0, 0}};
  for (const auto& [count, taken] : Timings::medians(timings_.drafts())) steps[count] = taken / one;
  if (steps.size() > 1) steps_ = rising(std::move(steps));
}

}  // namespace edgespec
