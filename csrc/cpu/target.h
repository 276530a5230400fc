// Compiling part of a file for processors with more instructions than the rest of the library asks for.
#pragma once

#if defined(__x86_64__)
#define DOBB_X86 1
#endif

#define DOBB_PRAGMA(...) _Pragma(#__VA_ARGS__)

#if defined(__clang__)
#define DOBB_TARGET_AVX2 DOBB_PRAGMA(clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function))
#define DOBB_TARGET_AVX512                                                                                   \
    DOBB_PRAGMA(clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))), \
                                     apply_to = function))
#define DOBB_TARGET_END DOBB_PRAGMA(clang attribute pop)
#else
#define DOBB_TARGET_AVX2 DOBB_PRAGMA(GCC push_options) DOBB_PRAGMA(GCC target("avx2,fma"))
#define DOBB_TARGET_AVX512 \
    DOBB_PRAGMA(GCC push_options) DOBB_PRAGMA(GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))
#define DOBB_TARGET_END DOBB_PRAGMA(GCC pop_options)
#endif
