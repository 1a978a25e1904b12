// Errors of functions that C can call: a status, and a text for the thread that made the call.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "edgespec.h"

namespace edgespec {

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument("edgespec: " + what); }

// An error with its status.
struct Failure : std::runtime_error {
  Failure(int status, const std::string& what) : std::runtime_error("edgespec: " + what), status(status) {}
  int status;
};

inline thread_local std::array<char, 512> g_error{};

// Errors may quote any bytes of a file: bytes that are not UTF-8 become question marks.
inline void set_error(const char* what) noexcept {
  size_t size = 0;
  while (*what) {
    const auto first = static_cast<uint8_t>(*what);
    const size_t length = first < 0x80 ? 1 : first >= 0xf0 && first < 0xf5 ? 4 : first >= 0xe0 ? 3 : 2;
    bool good = first < 0x80 || (first >= 0xc2 && first < 0xf5);
    for (size_t i = 1; good && i < length; ++i) {
      const auto next = static_cast<uint8_t>(what[i]);
      const uint8_t least = i > 1 ? 0x80 : first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
      const uint8_t most = i > 1 ? 0xbf : first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
      good = next >= least && next <= most;
    }
    if (size + (good ? length : 1) >= g_error.size()) break;
    if (good)
      for (size_t i = 0; i < length; ++i) g_error[size++] = *what++;
    else
      g_error[size++] = '?', ++what;
  }
  g_error[size] = 0;
}

template <class Work>
int guarded(Work work) noexcept {
  try {
    work();
    return EDGESPEC_OK;
  } catch (const std::invalid_argument& error) {
    set_error(error.what());
    return EDGESPEC_REFUSED;
  } catch (const Failure& failure) {
    set_error(failure.what());
    return failure.status;
  } catch (const std::bad_alloc&) { set_error("edgespec: no memory"); } catch (const std::exception& error) {
    set_error(error.what());
  }
  return EDGESPEC_NO_MEMORY;
}

// The number that `work` returns; below 0: it failed.
template <class Work>
int64_t answered(Work work) noexcept {
  int64_t found = 0;
  const int status = guarded([&] { found = work(); });
  return status ? -status : found;
}

}  // namespace edgespec
