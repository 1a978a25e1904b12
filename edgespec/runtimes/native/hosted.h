// A text whose passes the caller of the C interface runs (edgespec_host).
#pragma once
#include <cstdint>
#include <vector>

#include "target.h"

namespace edgespec {

class HostedTarget : public Target {
 public:
  // vocab: columns of its logits.  host: a copy of the caller's.
  HostedTarget(const edgespec_host& host, int64_t vocab, int64_t context, int64_t extra_rows)
      : Target(context), host_(host), vocab_(vocab), room_(context + extra_rows) {}

  int64_t vocab() const override { return vocab_; }
  uint64_t bytes() const override { return 0; }  // the caller has them

 protected:
  edgespec_result run_pass(const TextRows& rows) override;
  void keep_rows(const int32_t* rows, int32_t count) override;
  int64_t crop_cache(int64_t length) override;
  void check_tokens(const int64_t* tokens, int64_t count) override;
  edgespec_result read_chunk(const int64_t* tokens, int32_t count, bool auxiliary) override;
  int64_t left() const override { return left_; }

 private:
  void call(const TextRows& rows, int32_t scored);

  const edgespec_host host_;
  const int64_t vocab_, room_;
  std::vector<int64_t> moves_;  // of kept rows to their places in the caller's cache: from and to of each, ascending
  std::vector<int64_t> positions_;
  std::vector<float> logits_, values_;
  std::vector<int64_t> ids_;
  int64_t left_ = 0;
};

}  // namespace edgespec
