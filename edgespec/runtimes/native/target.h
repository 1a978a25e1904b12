// A text over a model, as edgespec/decoding/target.py: the target's, or that of a draft model.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "texts.h"

namespace edgespec {

// When reading a text is to end.
struct Reading {
  const std::atomic<bool>* cancelled = nullptr;
  std::function<bool(int64_t, int64_t)> progress;  // tokens read, of how many -> whether to stop; may be empty

  // Throws Failure: it is cancelled.
  void check() const;
};

// Its rows come in passes, of which some are kept.  What runs them is known to those that make it.
class Target {
 public:
  virtual ~Target() = default;
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  virtual int64_t vocab() const = 0;  // columns of its logits
  virtual uint64_t bytes() const = 0;
  int64_t length() const { return int64_t(tokens_.size()); }
  int64_t context() const { return context_; }
  const std::vector<int64_t>& tokens() const { return tokens_; }  // whose keys and values are there

  // Crops the text to its common prefix with the first `count` of other tokens, of which the first `same` are known to
  // be equal -> its length.
  int64_t follow(const std::vector<int64_t>& other, int64_t count, int64_t same = 0);
  // Appends tokens `from` to `to` of a text by pieces, without the LM head.  Throws Failure: it was cancelled, and the
  // text has some of them.
  // states: takes the auxiliary hidden states of each piece, which begins at a token; may be empty.
  using States = std::function<void(int64_t first, const edgespec_result& found)>;
  void prefill(const std::vector<int64_t>& text, int64_t from, int64_t to, const Reading& reading,
               const States& states = {});
  // Keeps the states of the text, so that it can be cropped to where it is now.
  virtual void checkpoint() {}
  // Runs rows after the text.  The result is valid until the next pass over this text.
  edgespec_result run(const TextRows& rows);
  // Commits rows of the last pass, a path.
  void keep(const int32_t* rows, int32_t count);
  void keep_all();
  // Forgets what is after the first `length` tokens.
  void crop(int64_t length);

  uint64_t nanoseconds() const { return nanoseconds_; }  // in passes, since it was made

 protected:
  explicit Target(int64_t context) : context_(context) {}

  virtual edgespec_result run_pass(const TextRows& rows) = 0;
  virtual void keep_rows(const int32_t* rows, int32_t count) = 0;
  virtual int64_t crop_cache(int64_t length) = 0;  // also forgets rows that could be kept -> what is left
  // Refuses tokens that some pass of their reading would refuse, before the first of them writes.
  virtual void check_tokens(const int64_t* tokens, int64_t count) = 0;
  virtual edgespec_result read_chunk(const int64_t* tokens, int32_t count, bool auxiliary) = 0;
  virtual int64_t left() const = 0;  // tokens of the text that a pass which failed has left

  template <class Work>
  auto timed(Work work);

  int64_t context_;
  std::vector<int64_t> tokens_;
  std::vector<int64_t> rows_;  // of the last pass, that may be kept
  uint64_t nanoseconds_ = 0;
};

// A text in a cache of native operators.
class NativeTarget : public Target {
 public:
  // context: most tokens of its text.  revocable: it is a draft's.  Throws std::bad_alloc, std::invalid_argument.
  NativeTarget(edgespec_model& model, int64_t context, int64_t extra_rows, int32_t attention, bool revocable);
  ~NativeTarget() override { edgespec_cache_close(cache_); }

  // Bytes of an empty cache, and of each kKvBlock tokens in it.
  static std::pair<uint64_t, uint64_t> sizes(edgespec_model& model, int32_t attention);

  int64_t vocab() const override { return cache_->model.program.vocab; }
  uint64_t bytes() const override { return edgespec_cache_bytes(cache_); }
  int32_t hidden() const { return cache_->model.program.hidden; }  // columns of its hidden states
  int32_t given() const { return cache_->model.program.given; }    // columns of rows to begin with instead of tokens
  const Gates& gates() const { return cache_->model.gates; }
  // Runs the next passes with another adapter; a text that was read otherwise is forgotten.  0: none.
  void use_adapter(int number);
  int adapter() const { return cache_->adapter; }
  int format() const { return cache_->layout.keys * 16 + cache_->layout.values; }  // of keys and values

  void checkpoint() override;
  // Looks tokens up -> their embeddings, as hidden states.
  edgespec_result embed(const int64_t* tokens, int32_t count);
  // Runs a group of heads over a row of hidden states [hidden] -> [heads of the group, top] best tokens.
  edgespec_result run_heads(int32_t group, const float* hidden, int32_t top);

  // Writes the text with its keys and values.  key: names all that they depend on.  Throws std::invalid_argument.
  void save(const std::string& path, const std::string& key);
  // Loads a text that was saved with the same key.  Throws Failure, std::invalid_argument: nothing has changed.
  void restore(const std::string& path, const std::string& key);

 protected:
  edgespec_result run_pass(const TextRows& rows) override;
  void keep_rows(const int32_t* rows, int32_t count) override;
  int64_t crop_cache(int64_t length) override;
  void check_tokens(const int64_t* tokens, int64_t count) override;
  edgespec_result read_chunk(const int64_t* tokens, int32_t count, bool auxiliary) override;
  int64_t left() const override { return cache_->slots[0].text.length(); }

 private:
  template <class Work>
  auto exclusive(Work work);

  edgespec_cache* cache_ = nullptr;
};

}  // namespace edgespec
