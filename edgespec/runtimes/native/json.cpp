#include "json.h"

#include <cstdlib>
#include <cstring>
#include <locale>
#include <sstream>

#include "guarded.h"

namespace edgespec {

namespace {
constexpr int kDeepest = 64;
constexpr size_t kMostDigits = 18;  // of a whole number that is read
}  // namespace

class JsonReader {
 public:
  JsonReader(const char* text, size_t size) : at_(text), end_(text + size) {}

  Json whole() {
    Json found = value(0);
    space();
    if (at_ != end_) fail();
    return found;
  }

 private:
  [[noreturn]] static void fail() { refuse("not JSON"); }

  void space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) ++at_;
  }
  bool take(char wanted) {
    space();
    if (at_ == end_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }
  bool word(const char* wanted) {
    const size_t size = std::strlen(wanted);
    if (size_t(end_ - at_) < size || std::memcmp(at_, wanted, size)) return false;
    at_ += size;
    return true;
  }

  Json value(int depth) {
    if (depth > kDeepest) fail();
    space();
    Json found;
    if (at_ == end_) fail();
    if (*at_ == '"') {
      found.kind_ = Json::kText;
      found.text_ = text();
    } else if (take('[')) {
      found.kind_ = Json::kList;
      if (take(']')) return found;
      do found.items_.push_back(value(depth + 1));
      while (take(','));
      if (!take(']')) fail();
    } else if (take('{')) {
      found.kind_ = Json::kObject;
      if (take('}')) return found;
      do {
        space();
        std::string name = text();
        if (!take(':')) fail();
        if (!found.members_.emplace(std::move(name), value(depth + 1)).second) fail();
      } while (take(','));
      if (!take('}')) fail();
    } else if (word("true")) {
      found.kind_ = Json::kTrue;
    } else if (word("false")) {
      found.kind_ = Json::kFalse;
    } else if (!word("null")) {
      found.kind_ = Json::kNumber;
      found.text_ = number();
    }
    return found;
  }

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  void digits(std::string& into) {
    if (at_ == end_ || !is_digit(*at_)) fail();
    while (at_ != end_ && is_digit(*at_)) into += *at_++;
  }

  std::string number() {
    std::string found;
    if (at_ != end_ && *at_ == '-') found += *at_++;
    const char* first = at_;
    digits(found);
    if (*first == '0' && at_ - first > 1) fail();
    if (at_ != end_ && *at_ == '.') {
      found += *at_++;
      digits(found);
    }
    if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
      found += *at_++;
      if (at_ != end_ && (*at_ == '+' || *at_ == '-')) found += *at_++;
      digits(found);
    }
    return found;
  }

  uint32_t four() {
    if (end_ - at_ < 4) fail();
    uint32_t found = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = *at_++;
      const int digit = is_digit(c)            ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail();
      found = found * 16 + uint32_t(digit);
    }
    return found;
  }

  void put(std::string& into, uint32_t point) {  // as UTF-8
    if (point < 0x80) {
      into += char(point);
      return;
    }
    const int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    into += char((more == 1 ? 0xc0 : more == 2 ? 0xe0 : 0xf0) | (point >> (6 * more)));
    for (int i = more - 1; i >= 0; --i) into += char(0x80 | (point >> (6 * i) & 0x3f));
  }

  std::string text() {
    if (at_ == end_ || *at_ != '"') fail();
    ++at_;
    std::string found;
    while (true) {
      if (at_ == end_ || static_cast<uint8_t>(*at_) < 0x20) fail();
      const char c = *at_++;
      if (c == '"') return found;
      if (c != '\\') {
        found += c;
        continue;
      }
      if (at_ == end_) fail();
      switch (const char escaped = *at_++) {
        case '"':
        case '\\':
        case '/': found += escaped; break;
        case 'b': found += '\b'; break;
        case 'f': found += '\f'; break;
        case 'n': found += '\n'; break;
        case 'r': found += '\r'; break;
        case 't': found += '\t'; break;
        case 'u': {
          uint32_t point = four();
          if (point >= 0xdc00 && point < 0xe000) fail();
          if (point >= 0xd800 && point < 0xdc00) {
            if (!word("\\u")) fail();
            const uint32_t low = four();
            if (low < 0xdc00 || low >= 0xe000) fail();
            point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
          }
          put(found, point);
          break;
        }
        default: fail();
      }
    }
  }

  const char *at_, *end_;
};

Json Json::parse(const char* text, size_t size) { return JsonReader(text, size).whole(); }

const Json& Json::operator[](const std::string& name) const {
  static const Json none;
  const auto found = members_.find(name);
  return found == members_.end() ? none : found->second;
}

int64_t Json::number(const char* name, int64_t without) const {
  if (is_null()) return without;
  if (kind_ != kNumber || text_.find_first_of(".eE") != std::string::npos || text_.size() > kMostDigits)
    refuse(std::string(name) + ": expected a whole number");
  return std::strtoll(text_.c_str(), nullptr, 10);
}

double Json::real(const char* name, double without) const {
  if (is_null()) return without;
  if (kind_ != kNumber) refuse(std::string(name) + ": expected a number");
  std::istringstream in(text_);  // strtod would read it as the locale says
  in.imbue(std::locale::classic());
  double found = 0;
  in >> found;
  return found;
}

bool Json::flag(const char* name, bool without) const {
  if (is_null()) return without;
  if (kind_ != kTrue && kind_ != kFalse) refuse(std::string(name) + ": expected true or false");
  return kind_ == kTrue;
}

std::string Json::text(const char* name) const {
  if (kind_ != kText) refuse(std::string(name) + ": expected a text");
  return text_;
}

std::vector<int64_t> Json::numbers(const char* name) const {
  if (!is_null() && kind_ != kList) refuse(std::string(name) + ": expected a list");
  std::vector<int64_t> found;
  for (const Json& one : items_) found.push_back(one.number(name, 0));
  return found;
}

}  // namespace edgespec
