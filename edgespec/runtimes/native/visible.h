// Symbols that the library exports.
#pragma once

#ifdef _WIN32
#define EDGESPEC_EXPORT extern "C" __declspec(dllexport)
#else
#define EDGESPEC_EXPORT extern "C" __attribute__((visibility("default")))
#endif
