#include "shared_library.h"

#ifdef _WIN32
#include <windows.h>
#elif !defined(__wasm__)
#include <dlfcn.h>
#endif

namespace edgespec {

#ifdef _WIN32
SharedLibrary::SharedLibrary(const std::string& path) : path_(path) {
  const int size = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path.c_str(), -1, nullptr, 0);
  std::wstring wide(size > 0 ? size_t(size) : 1, 0);
  if (size > 0) MultiByteToWideChar(CP_UTF8, 0, path.c_str(), -1, wide.data(), size);
  handle_ = reinterpret_cast<void*>(LoadLibraryW(wide.c_str()));
  if (!handle_)
    throw Failure(EDGESPEC_NO_FILE, path + ": cannot be loaded (error " + std::to_string(GetLastError()) + ")");
}

void* SharedLibrary::address(const char* name) const {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(handle_), name));
}
#elif defined(__wasm__)  // nothing is loaded there
SharedLibrary::SharedLibrary(const std::string& path) : path_(path) {
  throw Failure(EDGESPEC_NO_FILE, path + ": this system loads no libraries");
}

void* SharedLibrary::address(const char*) const { return nullptr; }
#else
SharedLibrary::SharedLibrary(const std::string& path) : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW)) {
  if (handle_) return;
  const char* why = dlerror();
  throw Failure(EDGESPEC_NO_FILE, why ? why : path + ": cannot be loaded");
}

void* SharedLibrary::address(const char* name) const { return dlsym(handle_, name); }
#endif

}  // namespace edgespec
