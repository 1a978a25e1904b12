// Text of tokens as they come, as edgespec/runtimes/text/stream.py: whole characters only, and nothing that may still
// become a stop text.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "codec.h"

namespace edgespec {

// Texts that end an answer.
class StopTexts {
 public:
  explicit StopTexts(std::vector<std::string> texts);

  // Where the first one begins; std::string::npos: there is none.
  size_t find(const std::string& text) const;
  // Bytes of the longest end of a text that begins a stop text, and is not the whole of it.
  size_t beginning(const std::string& text) const;

 private:
  std::vector<std::string> sorted_;
  std::vector<size_t> sizes_;
};

class TextStream {
 public:
  // prompt: tokens, which some tokenizers need to decode a word's leading space.  codec: outlives this.
  TextStream(const Codec& codec, const std::vector<int64_t>& prompt, StopTexts stops);

  // Adds a token -> what it adds to the text, perhaps nothing.  Once stopped, nothing more comes.
  std::string push(int64_t token);
  // Ends the text -> the rest, which was held back.
  std::string finish();

  bool stopped() const { return stopped_; }

 private:
  std::string decode(size_t from = 0) const { return codec_.decode(window_.data() + from, window_.size() - from); }
  std::string give(std::string candidate);

  const Codec& codec_;
  const StopTexts stops_;
  std::vector<int64_t> window_;  // the last tokens that gave text, and those after them
  size_t settled_ = 0;           // tokens of the window whose text is out
  size_t out_ = 0;               // bytes of the window's text that are out
  std::string held_;             // complete text that may begin a stop text
  bool stopped_ = false;
};

}  // namespace edgespec
