// The part of C++'s library that Zig's for WebAssembly lacks: locks and threads, over the instructions for shared
// memory.  A thread is a worker of the page that waits in `serve_threads` (web.cpp).  tools/build_web.py includes this
// first.
#pragma once
#include <version>

#if defined(__wasm__) && !_LIBCPP_HAS_THREADS
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace edgespec {

// Sleeps while a word has a value, at most for a time; negative: without end.
inline void wait_while(std::atomic<int>& word, int value, int64_t nanoseconds = -1) {
  __builtin_wasm_memory_atomic_wait32(reinterpret_cast<int*>(&word), value, nanoseconds);
}
inline void wake(std::atomic<int>& word, unsigned most) {
  __builtin_wasm_memory_atomic_notify(reinterpret_cast<int*>(&word), most);
}

// Work that a worker does.
struct ThreadWork {
  std::function<void()> run;
  std::atomic<int> done{0};
  ThreadWork* next = nullptr;
};
// Gives work to a worker that has none; it is the caller's, and must be kept until it is done.  Throws
// std::system_error: there is none.
void start_thread(ThreadWork* work);
// The number of workers that will come.
void expect_workers(int count);
// Does what start_thread gives, without end.
[[noreturn]] void serve_threads();

}  // namespace edgespec

namespace std {

class mutex {
 public:
  constexpr mutex() = default;
  mutex(const mutex&) = delete;
  mutex& operator=(const mutex&) = delete;
  void lock() {
    int seen = 0;
    if (state_.compare_exchange_strong(seen, kHeld)) return;
    while (state_.exchange(kWaitedFor)) edgespec::wait_while(state_, kWaitedFor);
  }
  bool try_lock() {
    int seen = 0;
    return state_.compare_exchange_strong(seen, kHeld);
  }
  void unlock() {
    if (state_.exchange(0) == kWaitedFor) edgespec::wake(state_, 1);
  }

 private:
  static constexpr int kHeld = 1, kWaitedFor = 2;
  atomic<int> state_{0};
};

class condition_variable {
 public:
  void notify_one() {
    ++turn_;
    edgespec::wake(turn_, 1);
  }
  void notify_all() {
    ++turn_;
    edgespec::wake(turn_, ~0u);
  }
  template <class Lock>
  void wait(Lock& lock) {
    const int seen = turn_;
    lock.unlock();
    edgespec::wait_while(turn_, seen);
    lock.lock();
  }
  template <class Lock, class Predicate>
  void wait(Lock& lock, Predicate come) {
    while (!come()) wait(lock);
  }

 private:
  atomic<int> turn_{0};
};

class thread {
 public:
  thread() = default;
  template <class Function>
  explicit thread(Function function) : work_(make_unique<edgespec::ThreadWork>()) {
    work_->run = std::move(function);
    edgespec::start_thread(work_.get());
  }
  bool joinable() const { return work_ != nullptr; }
  void join() {
    while (!work_->done) edgespec::wait_while(work_->done, 0);
    work_.reset();
  }
  static unsigned hardware_concurrency() { return 1; }  // the page says how many

 private:
  unique_ptr<edgespec::ThreadWork> work_;
};

namespace this_thread {
inline void yield() {  // no instruction gives a core up, but to sleep does
  atomic<int> never{0};
  edgespec::wait_while(never, 0, 20'000);
}
}  // namespace this_thread

}  // namespace std
#endif
