// A pass over the model as a sequence of phases, executed by any number of threads.
//
// A phase is a number of independent chunks.  Threads take chunks from a shared counter.  The thread that finishes the
// last chunk prepares the next phase (running small serial steps on the way) and opens it.  Threads never wait for one
// that has not come: a single thread completes the whole pass, and a late one joins where the others are.  So it is
// safe on any pool, also on a busy one.  One parallel region covers all of a pass: waking a pool for each operator
// would cost more than many of the operators.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <thread>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace edgespec {

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#elif defined(__wasm__)
  for (int i = 0; i < 32; ++i) asm volatile("");  // there is no such instruction
#endif
}

// Work: int open(int members) prepares the next phase and returns its number of chunks, 0 at the end; members is how
// many threads have come so far.  void run(int chunk) does a part of it.
template <class Work>
class Team {
 public:
  explicit Team(Work& work) : work_(work) { advance(0); }

  // Called by every thread of the pool; returns when the pass is complete.
  void join() {
    members_.fetch_add(1, std::memory_order_relaxed);
    for (int idle = 0;;) {
      const uint64_t seen = cursor_.load(std::memory_order_acquire);
      if (seen & kEnd) return;
      if (index(seen) >= count(seen)) {  // all taken: wait for the next phase
        if (++idle < kSpins)
          relax();
        else
          std::this_thread::yield();
        continue;
      }
      // one word holds phase, count and index, so what is taken always belongs to what was counted
      const uint64_t mine = cursor_.fetch_add(1, std::memory_order_acq_rel);
      if (mine & kEnd) return;
      if (index(mine) >= count(mine)) continue;
      idle = 0;
      try {
        work_.run(index(mine));
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count(mine)) advance((mine >> 48) + 1);
      } catch (...) {  // no memory: a pool's thread must not throw, and the others must not wait
        if (!failed_.test_and_set()) failure_ = std::current_exception();
        cursor_.store(kEnd, std::memory_order_release);
        return;
      }
    }
  }

  // After every thread has returned: throws what a thread could not.
  void finish() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  // cursor: end (1 bit), phase (15), count (24), index (24)
  static constexpr uint64_t kEnd = uint64_t(1) << 63;
  static constexpr int kMostChunks = 1 << 23;  // the index runs on by one for each thread
  static constexpr int kSpins = 4096;          // about 100 us before the core is offered to others
  static int count(uint64_t cursor) { return int(cursor >> 24 & 0xffffff); }
  static int index(uint64_t cursor) { return int(cursor & 0xffffff); }

  void advance(uint64_t phase) {
    const int chunks = work_.open(std::max(1, members_.load(std::memory_order_relaxed)));
    if (chunks < 0 || chunks > kMostChunks) throw std::length_error("edgespec: a pass of too many parts");
    if (!chunks) {
      cursor_.store(kEnd, std::memory_order_release);
      return;
    }
    done_.store(0, std::memory_order_relaxed);
    cursor_.store((phase & 0x7fff) << 48 | uint64_t(chunks) << 24, std::memory_order_release);
  }

  Work& work_;
  std::atomic<uint64_t> cursor_{0};
  std::atomic<int> done_{0}, members_{0};
  std::atomic_flag failed_ = ATOMIC_FLAG_INIT;
  std::exception_ptr failure_;
};

}  // namespace edgespec
