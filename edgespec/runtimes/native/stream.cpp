#include "stream.h"

#include <algorithm>

namespace edgespec {
namespace {

constexpr size_t kContext = 8;  // tokens of the prompt that are enough context, if no character is cut
constexpr size_t kHalf = 3;     // maximum bytes of an incomplete character, each perhaps decoded as U+FFFD
const std::string kReplacement = "\xef\xbf\xbd";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && !text.compare(text.size() - end.size(), end.size(), end);
}

// The text between two places, the first one moved to the next beginning of a character.
std::string between(const std::string& text, size_t begin, size_t end) {
  while (begin < end && (uint8_t(text[begin]) & 0xc0) == 0x80) ++begin;
  return begin < end ? text.substr(begin, end - begin) : std::string();
}

// Bytes at the end that may be the beginning of another character.
size_t unfinished(const std::string& text) {
  size_t count = 0;
  while (count < kHalf && text.size() >= (count + 1) * kReplacement.size() &&
         !text.compare(text.size() - (count + 1) * kReplacement.size(), kReplacement.size(), kReplacement))
    ++count;
  return count * kReplacement.size();
}

}  // namespace

StopTexts::StopTexts(std::vector<std::string> texts) : sorted_(std::move(texts)) {
  sorted_.erase(std::remove(sorted_.begin(), sorted_.end(), std::string()), sorted_.end());
  std::sort(sorted_.begin(), sorted_.end());
  for (const std::string& one : sorted_) sizes_.push_back(one.size());
  std::sort(sizes_.begin(), sizes_.end());
  sizes_.erase(std::unique(sizes_.begin(), sizes_.end()), sizes_.end());
}

size_t StopTexts::find(const std::string& text) const {
  for (size_t at = 0; at < text.size() && !sizes_.empty(); ++at)
    for (size_t size : sizes_)
      if (size <= text.size() - at && std::binary_search(sorted_.begin(), sorted_.end(), text.substr(at, size)))
        return at;
  return std::string::npos;
}

size_t StopTexts::beginning(const std::string& text) const {
  for (size_t size = sizes_.empty() ? 0 : std::min(text.size(), sizes_.back() - 1); size; --size) {
    const std::string tail = text.substr(text.size() - size);
    const auto at = std::lower_bound(sorted_.begin(), sorted_.end(), tail);
    if (at != sorted_.end() && !at->compare(0, size, tail)) return size;
  }
  return 0;
}

TextStream::TextStream(const Codec& codec, const std::vector<int64_t>& prompt, StopTexts stops)
    : codec_(codec), stops_(std::move(stops)) {
  size_t count = kContext;
  if (count < prompt.size()) {
    const std::string whole = codec_.decode(prompt.data(), prompt.size());
    for (; count < prompt.size(); count *= 2) {
      const std::string part = codec_.decode(prompt.data() + prompt.size() - count, count);
      if (!part.empty() && ends_with(whole, part)) break;
    }
  }
  window_.assign(prompt.end() - ptrdiff_t(std::min(count, prompt.size())), prompt.end());
  settled_ = window_.size();
  out_ = decode().size();
}

std::string TextStream::push(int64_t token) {
  if (stopped_) return {};
  window_.push_back(token);
  const std::string text = decode();
  const size_t half = unfinished(text), whole = text.size() - half;
  const std::string fresh = between(text, out_, whole);
  out_ = std::min(std::max(out_, whole), text.size());  // a prompt may end within a character
  if (!half) {
    // others stay: some decoders strip the spaces before the first word they see
    if (fresh.find_first_not_of(' ') != std::string::npos) {
      window_.erase(window_.begin(), window_.begin() + ptrdiff_t(settled_));
      out_ = decode().size();
    }
    settled_ = window_.size();
  }
  return give(held_ + fresh);
}

std::string TextStream::finish() {
  if (stopped_) return {};
  const std::string text = decode();
  const std::string rest = between(text, out_, text.size());
  out_ = text.size();
  settled_ = window_.size();
  std::string given = give(held_ + rest);
  given += held_;  // empty if a stop text was found
  held_.clear();
  return given;
}

std::string TextStream::give(std::string candidate) {
  held_.clear();
  const size_t at = stops_.find(candidate);
  stopped_ = at != std::string::npos;
  if (stopped_) return candidate.substr(0, at);
  const size_t keep = stops_.beginning(candidate);
  held_ = candidate.substr(candidate.size() - keep);
  candidate.resize(candidate.size() - keep);
  return candidate;
}

}  // namespace edgespec
