// Sessions over one bundle, each in its own thread and with a drafter of its own, some of which are cancelled and go
// on.
//
//   texts_at_once BUNDLE SESSIONS TOKENS METHOD...    exit 0: every session got the text of a single plain one
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "edgespec.h"

namespace {

using Tokens = std::vector<int64_t>;

Tokens text_of(edgespec_bundle* bundle, const char* method, int64_t tokens, bool cancels) {
  Tokens prompt, found;
  for (int64_t i = 0; i < 150; ++i) prompt.push_back(1 + i * i % 37);
  edgespec_session* session = nullptr;
  if (edgespec_session_open(bundle, nullptr, &session)) return found;
  edgespec_settings settings = EDGESPEC_INIT(edgespec_settings);
  settings.method = method;
  settings.max_new_tokens = tokens;
  settings.ignore_eos = 1;
  settings.temperature = 0.8;
  settings.coupled = settings.seeded = 1;
  std::atomic<bool> ended{false};
  std::thread canceller([&] {
    for (; cancels && !ended; std::this_thread::yield()) edgespec_cancel(session);
  });
  int status = 0;
  for (int tries = 0; tries < 100; ++tries) {
    status = edgespec_begin(session, prompt.data(), int64_t(prompt.size()), &settings);
    if (status != EDGESPEC_CANCELLED) break;
    if (tries == 10) ended = true;
  }
  ended = true;
  canceller.join();
  edgespec_round round = EDGESPEC_INIT(edgespec_round);
  while (!status || status == EDGESPEC_CANCELLED) {
    status = edgespec_next(session, &round);
    if (status) continue;
    found.insert(found.end(), round.tokens, round.tokens + round.count);
    if (round.finish) break;
  }
  if (status) std::puts(edgespec_error());
  edgespec_session_close(session);
  return found;
}

}  // namespace

int main(int given, char** words) {
  edgespec_bundle* bundle = nullptr;
  if (edgespec_bundle_open(words[1], 2, &bundle)) return std::puts(edgespec_error()), 2;
  const int count = std::atoi(words[2]), tokens = std::atoi(words[3]);
  const Tokens alone = text_of(bundle, "plain", tokens, false);
  std::vector<Tokens> found(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i)
    threads.emplace_back(
        [&, i] { found[size_t(i)] = text_of(bundle, words[4 + i % (given - 4)], tokens, i % 2 == 1); });
  for (auto& one : threads) one.join();
  edgespec_bundle_close(bundle);
  int wrong = 0;
  for (const Tokens& text : found) wrong += text != alone;
  std::printf("%d of %d texts differ\n", wrong, count);
  return wrong || int(alone.size()) != tokens;
}
