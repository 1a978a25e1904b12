#include "mapping.h"

#include <cerrno>
#include <cstring>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include "guarded.h"

namespace edgespec {

static void fail(const std::string& path, const std::string& what) { refuse(path + ": " + what); }

#ifdef _WIN32
Mapping::Mapping(const std::string& path) {
  std::wstring wide(path.size() + 1, L'\0');  // never more units than bytes
  if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path.c_str(), -1, &wide[0], int(wide.size())))
    fail(path, "not a path in UTF-8");
  // others may read, rename or delete it while it is open
  const HANDLE file = CreateFileW(wide.c_str(), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, nullptr,
                                  OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE)
    throw Failure(EDGESPEC_NO_FILE, path + ": cannot be opened (error " + std::to_string(GetLastError()) + ")");
  LARGE_INTEGER size;
  HANDLE mapped = nullptr;
  if (GetFileSizeEx(file, &size) && size.QuadPart)
    mapped = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
  CloseHandle(file);  // the mapping keeps it open
  if (!mapped) fail(path, "is empty or cannot be mapped");
  data_ = static_cast<const uint8_t*>(MapViewOfFile(mapped, FILE_MAP_READ, 0, 0, 0));
  CloseHandle(mapped);  // the view keeps it
  if (!data_) fail(path, "cannot be mapped");
  size_ = static_cast<size_t>(size.QuadPart);
}

Mapping::~Mapping() { UnmapViewOfFile(data_); }
#else
Mapping::Mapping(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw Failure(EDGESPEC_NO_FILE, path + ": cannot be opened: " + std::strerror(errno));
  struct stat facts;
  if (fstat(file, &facts) || !S_ISREG(facts.st_mode) || !facts.st_size) {
    close(file);
    fail(path, "is empty or no file");
  }
  void* found = mmap(nullptr, static_cast<size_t>(facts.st_size), PROT_READ, MAP_PRIVATE, file, 0);
  close(file);  // the mapping keeps it open
  if (found == MAP_FAILED) fail(path, std::string("cannot be mapped: ") + std::strerror(errno));
  data_ = static_cast<const uint8_t*>(found);
  size_ = static_cast<size_t>(facts.st_size);
}

Mapping::~Mapping() { munmap(const_cast<uint8_t*>(data_), size_); }
#endif

}  // namespace edgespec
