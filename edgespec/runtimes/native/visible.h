// What the library lets others see.
#pragma once

#ifdef _WIN32
#define EDGESPEC_EXPORT extern "C" __declspec(dllexport)
#else
#define EDGESPEC_EXPORT extern "C" __attribute__((visibility("default")))
#endif
