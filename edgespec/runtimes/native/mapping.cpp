#include "mapping.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
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

[[noreturn]] static void fail(const std::string& path, const std::string& what) { refuse(path + ": " + what); }

#ifdef _WIN32
static std::wstring wide_path(const std::string& path) {
  std::wstring wide(path.size() + 1, L'\0');  // never more units than bytes
  if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path.c_str(), -1, &wide[0], int(wide.size())))
    fail(path, "not a path in UTF-8");
  return wide;
}

Mapping::Mapping(const std::string& path) {
  const std::wstring wide = wide_path(path);
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

void write_file(const std::string& path, const std::vector<Piece>& pieces) {
  const std::wstring made = wide_path(path + ".part"), wanted = wide_path(path);
  const HANDLE file =
      CreateFileW(made.c_str(), GENERIC_WRITE, 0, nullptr, CREATE_ALWAYS, FILE_ATTRIBUTE_NORMAL, nullptr);
  bool fine = file != INVALID_HANDLE_VALUE;
  for (const Piece& piece : pieces)
    for (size_t at = 0; fine && at < piece.size;) {
      DWORD written = 0;
      const size_t most = std::min<size_t>(piece.size - at, size_t(1) << 30);
      fine = WriteFile(file, static_cast<const char*>(piece.data) + at, DWORD(most), &written, nullptr) && written;
      at += written;
    }
  if (file != INVALID_HANDLE_VALUE) fine = CloseHandle(file) && fine;
  if (fine && MoveFileExW(made.c_str(), wanted.c_str(), MOVEFILE_REPLACE_EXISTING)) return;
  const DWORD error = GetLastError();
  DeleteFileW(made.c_str());
  fail(path, "cannot be written (error " + std::to_string(error) + ")");
}
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

void write_file(const std::string& path, const std::vector<Piece>& pieces) {
  const std::string made = path + ".part";
  const int file = open(made.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  bool fine = file >= 0;
  for (const Piece& piece : pieces)
    for (size_t at = 0; fine && at < piece.size;) {
      const ssize_t written = write(file, static_cast<const char*>(piece.data) + at, piece.size - at);
      fine = written > 0 || (written < 0 && errno == EINTR);
      at += written > 0 ? size_t(written) : 0;
    }
  int error = errno;
  if (file >= 0 && close(file) && fine) fine = false, error = errno;
  if (fine && !rename(made.c_str(), path.c_str())) return;
  if (fine) error = errno;
  if (file >= 0) unlink(made.c_str());
  fail(path, std::string("cannot be written: ") + std::strerror(error));
}
#endif

}  // namespace edgespec
