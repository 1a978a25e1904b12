// The part of C++'s runtime that Zig's for WebAssembly lacks: the tag of exceptions, and ends of threads.
#if defined(__wasm__)
__asm__(
    ".tagtype __cpp_exception i32\n"
    ".globl __cpp_exception\n"
    "__cpp_exception:\n");

// The only thread ends with the module, whose memory is forgotten as a whole.
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }
#endif
