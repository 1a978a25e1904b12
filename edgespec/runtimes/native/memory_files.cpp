// Files of WebAssembly, which has no file system: names of memory that the page has filled.  In place of mapping.cpp.
#include "memory_files.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <new>

#include "guarded.h"
#include "mapping.h"

namespace edgespec {
namespace {

constexpr size_t kAlign = 64;  // packed weights begin with a cache line

struct File {
  size_t size;
  int users;  // its name, and each mapping
};

std::map<const uint8_t*, File>& files() {
  static std::map<const uint8_t*, File> all;
  return all;
}
std::map<std::string, uint8_t*>& names() {
  static std::map<std::string, uint8_t*> all;
  return all;
}

void release(const uint8_t* data) {
  const auto found = files().find(data);
  if (--found->second.users) return;
  files().erase(found);
  std::free(const_cast<uint8_t*>(data));
}

}  // namespace

uint8_t* make_file(const std::string& path, size_t size) {
  drop_file(path);
  if (size > SIZE_MAX - kAlign) throw std::bad_alloc();
  void* made = std::aligned_alloc(kAlign, (size + kAlign) / kAlign * kAlign);
  if (!made) throw std::bad_alloc();
  files()[static_cast<uint8_t*>(made)] = {size, 1};
  return names()[path] = static_cast<uint8_t*>(made);
}

void drop_file(const std::string& path) {
  const auto found = names().find(path);
  if (found == names().end()) return;
  release(found->second);
  names().erase(found);
}

const uint8_t* find_file(const std::string& path, size_t* size) {
  const auto found = names().find(path);
  if (found == names().end()) return nullptr;
  *size = files().at(found->second).size;
  return found->second;
}

Mapping::Mapping(const std::string& path) {
  data_ = find_file(path, &size_);
  if (!data_) throw Failure(EDGESPEC_NO_FILE, path + ": no such file");
  if (!size_) refuse(path + ": is empty");
  ++files().at(data_).users;
}

Mapping::~Mapping() { release(data_); }

void write_file(const std::string& path, const std::vector<Piece>& pieces) {
  size_t size = 0;
  for (const Piece& piece : pieces) size += piece.size;
  uint8_t* at = make_file(path, size);
  for (const Piece& piece : pieces) {
    if (piece.size) std::memcpy(at, piece.data, piece.size);
    at += piece.size;
  }
}

}  // namespace edgespec
