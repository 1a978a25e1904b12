// Sessions over one model, each in its own thread, as in a program that serves several users.
//
//   sessions GRAPH SESSIONS TOKENS        exit 0: every session got the text of a single one
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "edgespec.h"

namespace {

constexpr int64_t kPrompt[] = {1, 5, 9, 33, 7};

// Decodes greedily, with a guess in each pass that is thrown away -> tokens; none where a call failed.
std::vector<int64_t> session(edgespec_model* model, int tokens) {
  std::vector<int64_t> text{kPrompt[4]};
  edgespec_cache* cache = nullptr;
  if (edgespec_cache_open(model, 1, 256, EDGESPEC_ATTENTION_EXACT, &cache)) return {};
  bool fine = !edgespec_prefill(cache, 0, kPrompt, 4);
  for (int i = 0; fine && i < tokens; ++i) {
    const int64_t rows[] = {text.back(), 11};
    edgespec_request request = EDGESPEC_INIT(edgespec_request);
    edgespec_result result = EDGESPEC_INIT(edgespec_result);
    request.rows = 2;
    request.tokens = rows;
    request.logits = EDGESPEC_ALL_ROWS;
    request.top = 1;
    fine = !edgespec_pass(cache, &request, &result);
    if (fine) text.push_back(result.ids[0]);
    const int32_t kept = 0;
    fine = fine && !edgespec_keep(cache, 0, &kept, 1);
    if (i % 16 == 15) fine = fine && !edgespec_checkpoint(cache, 0);
  }
  edgespec_cache_close(cache);
  return fine ? text : std::vector<int64_t>{};
}

}  // namespace

int main(int, char** words) {
  edgespec_model* model = nullptr;
  if (edgespec_open(words[1], 2, &model)) return std::puts(edgespec_error()), 2;
  const int count = std::atoi(words[2]), tokens = std::atoi(words[3]);
  const std::vector<int64_t> alone = session(model, tokens);
  std::vector<std::vector<int64_t>> found(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (auto& text : found) threads.emplace_back([&] { text = session(model, tokens); });
  for (auto& one : threads) one.join();
  edgespec_close(model);
  int wrong = 0;
  for (const auto& text : found) wrong += text != alone;
  std::printf("%d of %d texts differ\n", wrong, count);
  return wrong || alone.empty();
}
