// Reads of a file in the background: by io_uring, or by threads where the kernel does not permit it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace edgespec {

constexpr size_t kReadAlign = 4096;  // of places, sizes and memory of reads that bypass the page cache

// A read of whole pages of a file.
struct Read {
  uint64_t offset = 0;
  uint8_t* to = nullptr;
  size_t bytes = 0;  // to read
  size_t least = 0;  // of those, that must be there: the last page of a file may be short
  int owner = 0;     // returned when it ends
};

struct Ended {
  int owner = 0;
  std::string failure;  // empty: it was read
};

// One thread at a time calls an object of this.
class AsyncReads {
 public:
  // Opens a file.  threads: never io_uring.  Throws std::invalid_argument: it cannot be opened, or this system has no
  // such reads.
  static std::unique_ptr<AsyncReads> open(const std::string& path, bool threads);
  virtual ~AsyncReads() = default;

  virtual void start(const Read& read) = 0;
  // Adds the reads that have ended to `ended`; waits for one if `wait` and some have not ended.
  virtual void collect(bool wait, std::vector<Ended>& ended) = 0;
  virtual const char* name() const = 0;
  virtual uint64_t size() const = 0;    // bytes of the file
  int going() const { return going_; }  // reads that were started and not collected

 protected:
  int going_ = 0;
};

}  // namespace edgespec
