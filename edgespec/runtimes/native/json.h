// A strict reader of JSON (RFC 8259), as far as a bundle's manifest needs it.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace edgespec {

class Json {
 public:
  enum Kind { kNull, kFalse, kTrue, kNumber, kText, kList, kObject };

  // Throws std::invalid_argument: it is not JSON, or deeper than a manifest is.
  static Json parse(const char* text, size_t size);

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == kNull; }
  const std::vector<Json>& items() const { return items_; }
  const std::map<std::string, Json>& members() const { return members_; }
  // A member of an object; null where there is none, or where this is no object.
  const Json& operator[](const std::string& name) const;

  // The value, or `without` for null.  Throws std::invalid_argument with the name: it has another type.
  int64_t number(const char* name, int64_t without) const;  // whole
  double real(const char* name, double without) const;
  const std::string& digits() const { return text_; }  // of a number, as it is written
  bool flag(const char* name, bool without) const;
  std::string text(const char* name) const;
  std::vector<int64_t> numbers(const char* name) const;

 private:
  friend class JsonReader;
  Kind kind_ = kNull;
  std::string text_;  // or a number, as it is written
  std::vector<Json> items_;
  std::map<std::string, Json> members_;
};

}  // namespace edgespec
