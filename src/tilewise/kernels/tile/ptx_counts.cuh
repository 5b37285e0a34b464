// More of ptx.cuh: counting in shared memory.
#pragma once
#include "tile/ptx.cuh"
#ifndef TILEWISE_EMULATOR

namespace ptx {

// Adds one, without order. Lanes that count at the same place do not wait for each other.
TILE_DEVICE void count_shared(uint32_t address) {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

}  // namespace ptx
#endif
