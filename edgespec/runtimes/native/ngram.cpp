#include "ngram.h"

#include <algorithm>
#include <cstring>

namespace edgespec {
namespace {

constexpr double kShare = 0.6;    // least share of the cases in which a guessed token followed
constexpr size_t kFurthest = 32;  // a match is measured no further back
constexpr std::array<size_t, 5> kBuckets{2, 3, 5, 10, 16};  // lengths of a match at which the next bucket starts
constexpr int kStored = int(kBuckets.size()) + 1;           // first bucket of guesses from a store
constexpr int64_t kEqual = 3;  // tokens in a row that say where a text is in an expected one
constexpr int kShort = 2;      // a match of the text no longer than this gives way to a longer one of a store
constexpr int64_t kMostSeen = (1 << 20) - 1;
constexpr size_t kHeader = 256, kEntry = 16, kEntries = 24, kVocab = 16;  // bytes, and places in the header
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15;

template <class T>
T read(const uint8_t* at) {  // little endian, as every processor that there are kernels for
  T found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

}  // namespace

// ---- a store -------------------------------------------------------------------------------------------------------

NGramStore::NGramStore(const std::string& path, int64_t vocab) : file_(path), vocab_(vocab) {
  const uint8_t* head = file_.data();
  if (file_.size() < kHeader || std::memcmp(head, "EDGENGRM", 8)) refuse(path + ": not an n-gram store");
  if (read<uint32_t>(head + 8) != 1 || read<uint32_t>(head + 12) != kLongestGram)
    refuse(path + ": a store of another version");
  const uint64_t entries = read<uint64_t>(head + kEntries);
  if (!entries || entries > file_.size() || file_.size() != kHeader + kEntry * entries)
    refuse(path + ": truncated or altered");
  if (read<uint32_t>(head + kVocab) != uint64_t(vocab)) refuse(path + ": was built with another tokenizer");
  entries_ = size_t(entries);
}

NGramStore::Hit NGramStore::likely(const int64_t* tail, size_t count, double share) const {
  const uint8_t *keys = file_.data() + kHeader, *tokens = keys + 8 * entries_, *seen = tokens + 4 * entries_,
                *of = seen + 2 * entries_;
  Hit found{0, -1, 0};
  uint64_t key = 0;
  for (size_t n = 1; n <= std::min<size_t>(count, kLongestGram); ++n) {
    key = (key ^ (uint64_t(tail[count - n]) + 1)) * kMultiplier;
    key ^= key >> 32;
    size_t low = 0, high = entries_;
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if (read<uint64_t>(keys + 8 * middle) < key)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == entries_ || read<uint64_t>(keys + 8 * low) != key) continue;
    const int64_t token = read<int32_t>(tokens + 4 * low);
    const int32_t times = read<uint16_t>(seen + 2 * low);
    if (times >= share * read<uint16_t>(of + 2 * low) && token >= 0 && token < vocab_)
      found = {static_cast<int32_t>(n), token, times};
  }
  return found;
}

// ---- the text ------------------------------------------------------------------------------------------------------

size_t NGram::Hash::operator()(const Key& key) const {
  uint64_t hash = 0;
  for (uint32_t token : key) {
    hash = (hash ^ token) * kMultiplier;
    hash ^= hash >> 32;
  }
  return size_t(hash);
}

// Acceptance where nothing was measured: between plain prose and texts that repeat themselves.
DrafterFacts NGram::facts() const {
  return {true,
          false,
          {{0, {0.3, 0.65}}, {1, {0.5, 0.75}}, {2, {0.6, 0.8}}, {3, {0.7, 0.85}}, {4, {0.75, 0.9}}, {5, {0.85, 0.93}}}};
}

void NGram::begin(const Request& request) {
  const auto& tokens = request.tokens;
  const bool continues = text_.size() <= tokens.size() && std::equal(text_.begin(), text_.end(), tokens.begin());
  if (!continues) {
    text_.clear();
    for (auto& one : index_) one.clear();
  }
  follow(tokens, text_.size());
}

void NGram::follow(const std::vector<int64_t>& tokens, size_t known) {
  for (size_t at = known; at < tokens.size(); ++at) push(tokens[at]);
}

// Indexes that a token followed the text.
void NGram::push(int64_t token) {
  const int64_t at = int64_t(text_.size());
  Key key{};
  for (int n = 1; n <= std::min<int64_t>(kLongestGram, at); ++n) {
    key[size_t(n - 1)] = static_cast<uint32_t>(text_[size_t(at - n)]);
    const auto [entry, is_new] = index_[size_t(n - 1)].try_emplace(key, Followed{at, 1, {}});
    if (is_new) continue;
    Followed& known = entry->second;
    const int64_t before = text_[size_t(known.last)];
    if (known.more.empty() && before != token) known.more = {{before, known.seen}};
    if (!known.more.empty()) {
      const auto same =
          std::find_if(known.more.begin(), known.more.end(), [&](const auto& one) { return one.first == token; });
      if (same != known.more.end())
        ++same->second;
      else
        known.more.emplace_back(token, 1);
    }
    known.seen = std::min(known.seen + 1, kMostSeen);
    known.last = at;
  }
  text_.push_back(token);
}

// The longest indexed key that ends a text.
NGram::Match NGram::match(const std::vector<int64_t>& tail) const {
  Match found;
  Key key{};
  for (int n = 1; n <= std::min<int>(kLongestGram, int(tail.size())); ++n) {
    key[size_t(n - 1)] = static_cast<uint32_t>(tail[tail.size() - size_t(n)]);
    const auto known = index_[size_t(n - 1)].find(key);
    if (known == index_[size_t(n - 1)].end()) break;  // then no longer key is there either
    found.n = n;
    found.known[size_t(n - 1)] = &known->second;
  }
  return found;
}

// The token that mostly followed the end of a text, by the longest key that is sure enough; else -1.
int64_t NGram::likely(const Match& found) const {
  for (int n = found.n; n > 0; --n) {
    const Followed& known = *found.known[size_t(n - 1)];
    const int64_t latest = text_[size_t(known.last)];
    if (known.more.empty()) return latest;
    int64_t most = 0, all = 0, best = -1, of_latest = 0;
    for (const auto& [token, times] : known.more) {
      all += times;
      if (times > most) most = times, best = token;
      if (token == latest) of_latest = times;
    }
    if (double(most) >= kShare * double(all)) return of_latest == most ? latest : best;
  }
  return -1;
}

std::vector<int64_t> NGram::end(size_t count) const {
  return {text_.end() - std::min(count, text_.size()), text_.end()};
}

Proposal NGram::propose(const Request& request, int64_t budget, const LeastGain&) {
  follow(request.tokens, text_.size());
  Proposal chain;
  std::vector<int64_t> tail = end(kLongestGram);
  Match found = match(tail);
  size_t matched = 0;
  if (found.n) {
    const size_t start = size_t(found.known[size_t(found.n - 1)]->last), size = text_.size();
    matched = size_t(found.n);
    while (matched < std::min(kFurthest, start) && text_[start - matched - 1] == text_[size - matched - 1]) ++matched;
    const int64_t most = std::min<int64_t>(budget, int64_t(matched) + 1);
    for (int64_t token; chain.size() < most && (token = likely(found)) >= 0;) {
      tail.push_back(token);
      chain.tokens.push_back(token);
      if (chain.size() < most) found = match(tail);
    }
  }
  if (store_ && (chain.empty() || matched <= kShort)) {
    Proposal stored = from_store(chain.empty() ? 0 : int(matched), budget);
    if (!stored.empty()) return stored;
  }
  chain.bucket = int(std::upper_bound(kBuckets.begin(), kBuckets.end(), matched) - kBuckets.begin());
  return chain;
}

// Guesses from the store, if it knows more than the last `beyond` tokens: at most two for each token that matched.
Proposal NGram::from_store(int beyond, int64_t budget) const {
  std::vector<int64_t> tail = end(kLongestGram);
  Proposal chain;
  NGramStore::Hit hit = store_->likely(tail.data(), tail.size(), kShare);
  if (hit.n <= beyond) return chain;
  // what was seen once is as sure as the text is close to the store's; else length and count are alike good
  chain.bucket = kStored + (hit.seen == 1 ? 0 : hit.n + (hit.seen >= 4) + (hit.seen >= 16));
  const int64_t most = std::min<int64_t>(budget, 2 * hit.n);
  while (hit.n && chain.size() < most) {
    chain.tokens.push_back(hit.token);
    tail.push_back(hit.token);
    hit = store_->likely(tail.data(), tail.size(), kShare);
  }
  return chain;
}

// ---- an expected text
// ------------------------------------------------------------------------------------------------

Proposal Predicted::propose(const Request& request, int64_t budget, const LeastGain&) {
  const std::vector<int64_t>& tokens = request.tokens;
  const int64_t size = int64_t(expected_.size());
  for (; read_ < int64_t(tokens.size()); ++read_) {
    if (at_ >= 0 && at_ < size && expected_[size_t(at_)] == tokens[size_t(read_)])
      last_ = ++at_;
    else
      at_ = -1;
  }
  if (at_ < 0 && read_ - prompt_ >= kEqual) {
    at_ = found(tokens.data() + tokens.size() - kEqual);
    if (at_ >= 0) last_ = at_;
  }
  Proposal chain;
  if (at_ >= 0 && at_ < size)
    chain.tokens.assign(expected_.begin() + at_, expected_.begin() + std::min(at_ + budget, size));
  return chain;
}

// Where the last tokens end in the expected text: after the last place, or else where they first do; -1: nowhere.
int64_t Predicted::found(const int64_t* last) const {
  int64_t first = -1;
  for (int64_t end = kEqual; end <= int64_t(expected_.size()); ++end) {
    if (!std::equal(last, last + kEqual, expected_.begin() + (end - kEqual))) continue;
    if (end >= last_) return end;
    if (first < 0) first = end;
  }
  return first;
}

}  // namespace edgespec
