// More of ptx.cuh: what L2 is told of data.
#pragma once
#include "tile/ptx.cuh"
#ifndef TILEWISE_EMULATOR

namespace ptx {

// 16 bytes of global memory that will be read again after much else was: L2 evicts them last.
constexpr uint64_t kEvictLast = 0x14f0000000000000ull;  // as createpolicy makes it
TILE_DEVICE void store_kept(void* p, const uint32_t (&x)[4]) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3]), "l"(kEvictLast)
                 : "memory");
}
TILE_DEVICE void load_kept(uint32_t (&x)[4], const void* p) {
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(p), "l"(kEvictLast)
                 : "memory");
}

}  // namespace ptx
#endif
