// A library that is loaded at run time, and stays loaded.
#pragma once
#include <cstring>
#include <string>

#include "guarded.h"

namespace edgespec {

class SharedLibrary {
 public:
  // path: in UTF-8; without a folder the system looks for it.  Throws Failure: it cannot be loaded.
  explicit SharedLibrary(const std::string& path);

  // Throws std::invalid_argument: it has no such function.
  template <class Function>
  void find(const char* name, Function*& found) const {
    void* symbol = address(name);
    static_assert(sizeof symbol == sizeof found, "functions have addresses");
    if (!symbol) refuse(path_ + ": has no function " + name);
    std::memcpy(&found, &symbol, sizeof found);
  }

 private:
  void* address(const char* name) const;

  std::string path_;
  void* handle_ = nullptr;
};

}  // namespace edgespec
