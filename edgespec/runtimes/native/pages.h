// Pages of memory that a caller made.
#pragma once
#include <cstdint>

#if !defined(_WIN32) && !defined(__wasm__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace edgespec {

// Gives the whole pages of some private memory back to the system, where it takes them: their contents are lost.
inline void give_back(uint8_t* first, uint8_t* last) {
#if !defined(_WIN32) && !defined(__wasm__) && defined(MADV_DONTNEED)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(first) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(last) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#else
  static_cast<void>(first);
  static_cast<void>(last);
#endif
}

}  // namespace edgespec
