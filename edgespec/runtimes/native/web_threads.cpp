// Work for the workers of a page.
#if defined(__wasm__)
#include "web_threads.h"

#include <system_error>

namespace edgespec {
namespace {

std::mutex g_mutex;
std::condition_variable g_come;
ThreadWork* g_first = nullptr;  // that no worker has begun
int g_idle = 0;                 // workers without work

}  // namespace

void expect_workers(int count) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_idle += count;
}

void start_thread(ThreadWork* work) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (!g_idle) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  --g_idle;
  work->next = g_first;
  g_first = work;
  g_come.notify_one();
}

void serve_threads() {
  std::unique_lock<std::mutex> lock(g_mutex);
  for (;;) {
    g_come.wait(lock, [] { return g_first != nullptr; });
    ThreadWork* work = g_first;
    g_first = work->next;
    lock.unlock();
    work->run();
    lock.lock();
    ++g_idle;
    std::atomic<int>& done = work->done;
    done = 1;  // the work is no longer there after this
    wake(done, ~0u);
  }
}

}  // namespace edgespec
#endif
