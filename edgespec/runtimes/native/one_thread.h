// The part of C++'s library that a build without threads lacks, as for WebAssembly: locks that no other thread can
// hold. tools/build_web.py includes it first.
#pragma once
#include <version>

#if defined(__wasm__) && !_LIBCPP_HAS_THREADS
#include <mutex>
#include <system_error>

namespace std {

class mutex {
 public:
  void lock() {}
  void unlock() {}
  bool try_lock() { return true; }
};

struct condition_variable {
  void notify_one() {}
  void notify_all() {}
  template <class Lock, class... More>
  void wait(Lock&, More&&...) {}
};

class thread {
 public:
  thread() = default;
  template <class Function, class... Arguments>
  explicit thread(Function&&, Arguments&&...) {
    throw system_error(make_error_code(errc::resource_unavailable_try_again));
  }
  bool joinable() const { return false; }
  void join() {}
  static unsigned hardware_concurrency() { return 1; }
};

namespace this_thread {
inline void yield() {}
}  // namespace this_thread

}  // namespace std
#endif
