// A file in memory, read only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace edgespec {

class Mapping {
 public:
  // Throws Failure: it cannot be opened; std::invalid_argument: it is empty or cannot be mapped.
  explicit Mapping(const std::string& path);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace edgespec
