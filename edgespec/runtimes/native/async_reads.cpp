#include "async_reads.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>

#if defined(_WIN32) || defined(__wasm__)

namespace edgespec {

std::unique_ptr<AsyncReads> AsyncReads::open(const std::string&, bool) {
  throw std::invalid_argument("edgespec: weights are not streamed on this system");
}

}  // namespace edgespec

#else

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#define EDGESPEC_URING
#endif
#endif

namespace edgespec {
namespace {

// A file that is read past the page cache, where the system can.
class File {
 public:
  explicit File(const std::string& path) {
#ifdef O_DIRECT
    handle_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    direct_ = handle_ >= 0;
    void* page = nullptr;
    if (direct_ && posix_memalign(&page, kReadAlign, kReadAlign)) throw std::bad_alloc();
    if (direct_ && pread(handle_, page, kReadAlign, 0) < 0 && errno == EINVAL) {  // a file system without
      close(handle_);
      handle_ = -1;
      direct_ = false;
    }
    std::free(page);
#endif
    if (handle_ < 0) handle_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (handle_ < 0)
      throw std::invalid_argument("edgespec: " + path + ": cannot be opened: " + std::string(std::strerror(errno)));
#ifdef F_NOCACHE
    direct_ = fcntl(handle_, F_NOCACHE, 1) == 0;
#endif
  }
  ~File() { close(handle_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int handle() const { return handle_; }
  uint64_t size() const {
    const off_t end = lseek(handle_, 0, SEEK_END);
    return end < 0 ? 0 : static_cast<uint64_t>(end);
  }
  // Pages that the system keeps all the same would hide how much memory is taken.
  void forget(const Read& read) const {
#ifdef POSIX_FADV_DONTNEED
    if (!direct_)
      posix_fadvise(handle_, static_cast<off_t>(read.offset), static_cast<off_t>(read.bytes), POSIX_FADV_DONTNEED);
#endif
    (void)read;
  }

 private:
  int handle_ = -1;
  bool direct_ = false;
};

std::string cut_off(const Read& read, size_t got) {
  return "the file ends at byte " + std::to_string(read.offset + got) + ", expected " +
         std::to_string(read.least - got) + " bytes more";
}

// The consequence of a result of the kernel: there is more to read, or the read has ended.
enum class Next { kAgain, kDone };
Next advance(Read& left, int64_t result, std::string& failure) {
  if (result == -EINTR || result == -EAGAIN) return Next::kAgain;
  if (result < 0) {
    failure = std::strerror(static_cast<int>(-result));
    return Next::kDone;
  }
  const size_t got = static_cast<size_t>(result);
  if (got >= left.least) return Next::kDone;
  if (!got || got % kReadAlign) {  // the end of the file
    failure = cut_off(left, got);
    return Next::kDone;
  }
  left.offset += got;
  left.to += got;
  left.bytes -= got;
  left.least -= got;
  return Next::kAgain;
}

class ThreadReads : public AsyncReads {
 public:
  explicit ThreadReads(std::unique_ptr<File> file) : file_(std::move(file)) {
    try {
      for (int i = 0; i < kThreads; ++i) all_.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadReads() override { stop(); }

  void start(const Read& read) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    wanted_.push_back(read);
    ++going_;
    wake_.notify_one();
  }
  void collect(bool wait, std::vector<Ended>& ended) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait && going_) done_.wait(lock, [this] { return !ended_.empty(); });
    going_ -= static_cast<int>(ended_.size());
    std::move(ended_.begin(), ended_.end(), std::back_inserter(ended));
    ended_.clear();
  }
  const char* name() const override { return "threads"; }
  uint64_t size() const override { return file_->size(); }

 private:
  static constexpr int kThreads = 8;

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopped_ || !wanted_.empty(); });
      if (stopped_) return;
      const Read read = wanted_.front();
      wanted_.pop_front();
      lock.unlock();
      Ended one{read.owner, {}};
      Read left = read;
      int64_t got;
      do {
        got = pread(file_->handle(), left.to, left.bytes, static_cast<off_t>(left.offset));
        if (got < 0) got = -errno;
      } while (advance(left, got, one.failure) == Next::kAgain);
      file_->forget(read);
      lock.lock();
      ended_.push_back(std::move(one));
      done_.notify_one();
    }
  }
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      wake_.notify_all();
    }
    for (std::thread& one : all_) one.join();
  }

  std::unique_ptr<File> file_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Read> wanted_;
  std::vector<Ended> ended_;
  bool stopped_ = false;
  std::vector<std::thread> all_;
};

#ifdef EDGESPEC_URING

// The rings of io_uring (io_uring_setup(2)), by system calls: Android and small systems have no liburing.
class UringReads : public AsyncReads {
 public:
  // Throws std::runtime_error: the kernel has no io_uring, or does not permit it.
  explicit UringReads(std::unique_ptr<File> file) : file_(std::move(file)) {
    io_uring_params params{};
    ring_ = static_cast<int>(syscall(__NR_io_uring_setup, kEntries, &params));
    if (ring_ < 0) throw std::runtime_error("no io_uring");
    const size_t submissions = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    size_ = std::max(submissions, completions);
    entries_size_ = params.sq_entries * sizeof(io_uring_sqe);
    void* rings = MAP_FAILED;
    void* entries = MAP_FAILED;
    if (params.features & IORING_FEAT_SINGLE_MMAP) {
      rings = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, IORING_OFF_SQ_RING);
      entries = mmap(nullptr, entries_size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, IORING_OFF_SQES);
    }
    if (rings == MAP_FAILED || entries == MAP_FAILED) {
      if (rings != MAP_FAILED) munmap(rings, size_);
      close(ring_);
      throw std::runtime_error("no io_uring");
    }
    rings_ = static_cast<uint8_t*>(rings);
    entries_ = static_cast<io_uring_sqe*>(entries);
    const auto at = [this](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    tail_ = at(params.sq_off.tail);
    mask_ = *at(params.sq_off.ring_mask);
    array_ = at(params.sq_off.array);
    completed_head_ = at(params.cq_off.head);
    completed_tail_ = at(params.cq_off.tail);
    completed_mask_ = *at(params.cq_off.ring_mask);
    completed_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
    open_.resize(kEntries);
    for (int i = 0; i < kEntries; ++i) free_.push_back(i);
  }
  ~UringReads() override {
    std::vector<Ended> ended;
    try {
      while (going_) collect(true, ended);  // the kernel writes to their memory until then
    } catch (...) {}
    munmap(entries_, entries_size_);
    munmap(rings_, size_);
    close(ring_);
  }

  void start(const Read& read) override {
    waiting_.push_back(read);
    ++going_;
    submit();
  }
  void collect(bool wait, std::vector<Ended>& ended) override {
    for (size_t before = ended.size();;) {
      take(ended);
      submit();
      if (!wait || !going_ || ended.size() > before) return;
      enter(0, 1);
    }
  }
  const char* name() const override { return "io_uring"; }
  uint64_t size() const override { return file_->size(); }

 private:
  static constexpr int kEntries = 64;

  void submit() {
    unsigned count = 0;
    unsigned tail = *tail_;  // only this side writes it
    while (!waiting_.empty() && !free_.empty()) {
      const int id = free_.back();
      free_.pop_back();
      const Read& read = open_[static_cast<size_t>(id)] = waiting_.front();
      waiting_.pop_front();
      io_uring_sqe& entry = entries_[tail & mask_];
      entry = {};
      entry.opcode = IORING_OP_READ;
      entry.fd = file_->handle();
      entry.off = read.offset;
      entry.addr = reinterpret_cast<uintptr_t>(read.to);
      entry.len = static_cast<unsigned>(read.bytes);
      entry.user_data = static_cast<uint64_t>(id);
      array_[tail & mask_] = tail & mask_;
      ++tail;
      ++count;
    }
    if (!count) return;
    __atomic_store_n(tail_, tail, __ATOMIC_RELEASE);
    enter(count, 0);
  }
  void enter(unsigned count, unsigned least) {
    const unsigned flags = least ? IORING_ENTER_GETEVENTS : 0;
    for (;;) {
      const long taken = syscall(__NR_io_uring_enter, ring_, count, least, flags, nullptr, 0);
      if (taken >= 0 && static_cast<unsigned>(taken) >= count) return;
      if (taken > 0) count -= static_cast<unsigned>(taken);
      if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY)
        throw std::runtime_error(std::string("edgespec: io_uring: ") + std::strerror(errno));
    }
  }
  void take(std::vector<Ended>& ended) {
    unsigned head = *completed_head_;
    while (head != __atomic_load_n(completed_tail_, __ATOMIC_ACQUIRE)) {
      const io_uring_cqe entry = completed_[head & completed_mask_];
      __atomic_store_n(completed_head_, ++head, __ATOMIC_RELEASE);
      const int id = static_cast<int>(entry.user_data);
      Read& read = open_[static_cast<size_t>(id)];
      Ended one{read.owner, {}};
      const Next next = advance(read, entry.res, one.failure);
      if (next == Next::kAgain) {
        waiting_.push_front(read);
      } else {
        file_->forget(read);
        ended.push_back(std::move(one));
        --going_;
      }
      free_.push_back(id);
    }
  }

  std::unique_ptr<File> file_;
  int ring_ = -1;
  uint8_t* rings_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  size_t size_ = 0, entries_size_ = 0;
  unsigned *tail_ = nullptr, *array_ = nullptr, *completed_head_ = nullptr, *completed_tail_ = nullptr;
  unsigned mask_ = 0, completed_mask_ = 0;
  io_uring_cqe* completed_ = nullptr;
  std::deque<Read> waiting_;
  std::vector<Read> open_;  // by the number of their entry
  std::vector<int> free_;
};

#endif

}  // namespace

std::unique_ptr<AsyncReads> AsyncReads::open(const std::string& path, bool threads) {
  auto file = std::make_unique<File>(path);
#ifdef EDGESPEC_URING
  if (!threads) {
    try {
      return std::make_unique<UringReads>(std::move(file));
    } catch (const std::runtime_error&) { file = std::make_unique<File>(path); }
  }
#endif
  (void)threads;
  return std::make_unique<ThreadReads>(std::move(file));
}

}  // namespace edgespec

#endif
