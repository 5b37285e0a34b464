// More of ptx.cuh: copies that tell an mbarrier by themselves that they are there.
#pragma once
#include "tile/ptx.cuh"
#ifndef TILEWISE_EMULATOR

namespace ptx {

// Arrives at the mbarrier as soon as all copies by copy_async_16 that this thread has asked for are there. It counts as
// one of the arrivals that the barrier was made for, and nobody waits for anything here. What the thread has stored by
// itself is not announced with it.
TILE_DEVICE void copy_async_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace ptx
#endif
