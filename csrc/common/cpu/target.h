// Compiling part of a file for processors with more instructions than the rest of the library asks for.
#pragma once

#if defined(__x86_64__)
#define DOBB_X86 1
#endif

#define DOBB_PRAGMA(...) _Pragma(#__VA_ARGS__)

#define DOBB_AVX2 "avx2,fma"
#define DOBB_AVX512 "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"
#define DOBB_AVX512BF16 "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"
#define DOBB_AMX "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16"

#if defined(__clang__)
#define DOBB_TARGET(set) DOBB_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define DOBB_TARGET_END DOBB_PRAGMA(clang attribute pop)
#else
#define DOBB_TARGET(set) DOBB_PRAGMA(GCC push_options) DOBB_PRAGMA(GCC target(set))
#define DOBB_TARGET_END DOBB_PRAGMA(GCC pop_options)
#endif
