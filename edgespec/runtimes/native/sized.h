// Structures of the C interface, which begin with the size that their caller knows.
#pragma once
#include <algorithm>
#include <cstring>

#include "guarded.h"

namespace edgespec {

template <class T>
void expect_size(const T* given) {
  if (!given || given->size < 2 * sizeof(uint32_t)) refuse("expected a structure with its size (EDGESPEC_INIT)");
}

// Reads what another version of a structure has of this one.
template <class T>
T known(const T* given) {
  expect_size(given);
  T found{};
  std::memcpy(&found, given, std::min<size_t>(given->size, sizeof(T)));
  return found;
}

template <class T>
void answer(T* asked, T found) {
  expect_size(asked);
  found.size = asked->size;
  std::memcpy(asked, &found, std::min<size_t>(found.size, sizeof(T)));
}

}  // namespace edgespec
