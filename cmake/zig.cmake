# Another system by Zig's clang, which brings headers and libraries with it (pip install ziglang): for Linux those of any
# glibc, for macOS Apple's.  libc++ is linked into the library.  tools/build_wheels.py uses it.
#   EDGESPEC_ZIG_PYTHON  a Python that has ziglang
#   EDGESPEC_ZIG_TARGET  x86_64-linux-gnu.2.28, aarch64-linux-gnu.2.28, aarch64-macos.13.0
set(EDGESPEC_ZIG_PYTHON "python3" CACHE STRING "A Python that has ziglang")
set(EDGESPEC_ZIG_TARGET "x86_64-linux-gnu.2.28" CACHE STRING "Processor, system and the oldest version of it")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES EDGESPEC_ZIG_PYTHON EDGESPEC_ZIG_TARGET)
string(REPLACE "-" ";" words "${EDGESPEC_ZIG_TARGET}")
list(GET words 0 CMAKE_SYSTEM_PROCESSOR)
list(GET words 1 system)
set(CMAKE_SYSTEM_NAME Linux)
if(system MATCHES "^macos")
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON) # nothing here relinks Mach-O
  set(CMAKE_INSTALL_NAME_TOOL ${CMAKE_COMMAND} CACHE FILEPATH "" FORCE) # not needed without relinking
endif()
set(CMAKE_CXX_COMPILER ${EDGESPEC_ZIG_PYTHON} -m ziglang c++ -target ${EDGESPEC_ZIG_TARGET})
set(CMAKE_AR ${CMAKE_COMMAND} CACHE FILEPATH "" FORCE) # a module needs none
