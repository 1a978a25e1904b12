# Windows x86-64 from Debian, by clang over the headers and libraries of g++-mingw-w64-x86-64-posix.  Not GCC: it spills
# AVX registers to memory that Windows does not align (https://gcc.gnu.org/PR54412), and frees what a thread has of its
# own before it is destroyed (so nothing of GCC that a thread has of its own may be used: no std::call_once).
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(EDGESPEC_CLANG "clang++" CACHE STRING "A clang that knows Windows, as Debian's clang++-16")
set(EDGESPEC_LLD "lld" CACHE STRING "Its linker, as lld-16")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES EDGESPEC_CLANG EDGESPEC_LLD)
find_program(EDGESPEC_MINGW x86_64-w64-mingw32-g++-posix REQUIRED)
execute_process(COMMAND ${EDGESPEC_MINGW} -print-file-name=include/c++ OUTPUT_VARIABLE headers OUTPUT_STRIP_TRAILING_WHITESPACE)
execute_process(COMMAND ${EDGESPEC_MINGW} -print-libgcc-file-name OUTPUT_VARIABLE libgcc OUTPUT_STRIP_TRAILING_WHITESPACE)
get_filename_component(libraries ${libgcc} DIRECTORY)
set(CMAKE_CXX_COMPILER ${EDGESPEC_CLANG})
set(CMAKE_CXX_COMPILER_TARGET x86_64-w64-mingw32)
set(CMAKE_CXX_FLAGS_INIT "-isystem ${headers} -isystem ${headers}/x86_64-w64-mingw32")
# no library of the compiler need lie beside ours; lld, which looks for libraries in any order
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "-L${libraries} -static -lpthread -s -fuse-ld=${EDGESPEC_LLD}")
endforeach()
