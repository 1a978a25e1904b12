// Programs that make recorded decisions of Python again, and say where theirs differ.
#pragma once

#include <cstdio>

#include "control.h"
#include "json.h"
#include "mapping.h"

namespace edgespec {

inline int64_t whole(const Json& of, const char* name) { return of[name].number(name, 0); }
inline double real(const Json& of, const char* name) { return of[name].real(name, 0); }

inline Rates rates(const Json& of) {
  Rates found;
  for (const Json& one : of.items()) found.push_back(one.real("rate", 0));
  return found;
}

// Replays the cases of a file.  first_difference: of a case -> the first round that differs, or -1.  Returns the exit
// status: 0: every decision is the same.
template <class Replayed>
int replay_all(const char* path, Replayed first_difference) {
  const Mapping file(path);
  const Json all = Json::parse(reinterpret_cast<const char*>(file.data()), file.size());
  int wrong = 0, number = 0;
  for (const Json& one : all.items()) {
    const int round = first_difference(one);
    if (round >= 0) std::printf("case %d differs in round %d\n", number, round), ++wrong;
    ++number;
  }
  std::printf("%d of %d differ\n", wrong, number);
  return wrong > 0;
}

}  // namespace edgespec
