#include "kvstrata.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

int32_t kvs_abi_version(void) { return KVS_ABI_VERSION; }

uint32_t kvs_cpu_levels(void) {
    uint32_t levels = KVS_LEVEL_PORTABLE;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    // Not every compiler's __builtin_cpu_supports knows f16c.
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool half = __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
    const bool fused = half && __builtin_cpu_supports("fma");
    if (fused && __builtin_cpu_supports("avx2")) levels |= KVS_LEVEL_AVX2;
    if (fused && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        levels |= KVS_LEVEL_AVX512;
#endif
    return levels;
}
