// Text to tokens and back: functions of the app, or those of the tokenizer's library (edgespec_tokenizer.h).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "guarded.h"

namespace edgespec {

class Codec {
 public:
  explicit Codec(const edgespec_codec& functions) : functions_(functions) {}
  ~Codec() {
    if (functions_.close) functions_.close(functions_.user);
  }
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  // Opens the tokenizer of a folder by a library that is loaded now, and stays.  path: empty: found by its name.
  // Throws Failure, std::invalid_argument.
  static std::unique_ptr<Codec> load(const std::string& folder, const std::string& path);

  // Each throws std::invalid_argument: refused.
  std::vector<int64_t> encode(const std::string& text, bool special) const;
  std::vector<int64_t> encode_chat(const std::string& conversation) const;
  std::string decode(const int64_t* ids, size_t count) const;

 private:
  template <class T, class Call>
  T filled(const char* name, size_t room, Call call) const;

  edgespec_codec functions_;
};

// A conversation in JSON.  more: an object whose fields join `messages`; null: none.
std::string conversation_of(const edgespec_message* messages, int32_t count, const char* more);

}  // namespace edgespec
