// The whole selftest in one unit: reading the headers is most of what each of its parts takes to compile.

#include "selftest.cpp"
#include "selftest_accuracy.cpp"
#include "selftest_attention.cpp"
#include "selftest_hash.cpp"
#include "selftest_nan.cpp"
#include "selftest_parts.cpp"
#include "selftest_pass.cpp"
#if !defined(_WIN32) && !defined(__wasm__)  // whose memory is mapped otherwise
#include "selftest_speed.cpp"
#endif
