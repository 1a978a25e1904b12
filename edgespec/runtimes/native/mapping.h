// Files: in memory, read only, and written at once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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

struct Piece {
  const void* data;
  size_t size;
};

// Writes a file that only its owner can read, in the place of an older one.  Throws std::invalid_argument.
void write_file(const std::string& path, const std::vector<Piece>& pieces);

}  // namespace edgespec
