// Threads that join in passes where no ONNX Runtime lends its own.
#pragma once
#include <condition_variable>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

namespace edgespec {

// Sleeping threads, woken for a pass.  The caller works as well and waits only for those that did come: one that wakes
// too late finds nothing to do.
class Threads {
 public:
  explicit Threads(int count) {  // the caller's included
    try {
      for (int i = 1; i < count; ++i) all_.emplace_back([this] { serve(); });
    } catch (...) {  // fewer than asked for would be a surprise
      stop();
      throw;
    }
  }
  ~Threads() { stop(); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  // Limits the number of threads in later passes, including the caller's; all results stay the same.
  void limit(int most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    most_ = most;
  }

  // work is called once by each thread that comes in time, and throws nothing.
  void run(const std::function<void()>& work) {
    if (!all_.empty()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      ++turn_;
      wake_.notify_all();
    }
    work();
    if (all_.empty()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = nullptr;
    left_.wait(lock, [this] { return inside_ == 0; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (uint64_t seen = 0; !ended_;) {
      if (!work_ || turn_ == seen) {
        wake_.wait(lock);
        continue;
      }
      seen = turn_;
      if (inside_ + 1 >= most_) continue;
      const std::function<void()>& work = *work_;
      ++inside_;
      lock.unlock();
      work();
      lock.lock();
      if (!--inside_) left_.notify_one();
    }
  }
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      wake_.notify_all();
    }
    for (std::thread& one : all_) one.join();
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  const std::function<void()>* work_ = nullptr;
  uint64_t turn_ = 0;
  int inside_ = 0;
  int most_ = std::numeric_limits<int>::max();
  bool ended_ = false;
  std::vector<std::thread> all_;
};

}  // namespace edgespec
