// Files of WebAssembly: names of memory that the page fills.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace edgespec {

// Makes a file, in the place of an older one -> its memory, to be filled.  Throws std::bad_alloc.
uint8_t* make_file(const std::string& path, size_t size);
// Forgets a name.  The memory is kept while a mapping needs it.
void drop_file(const std::string& path);
// null: there is none
const uint8_t* find_file(const std::string& path, size_t* size);

}  // namespace edgespec
