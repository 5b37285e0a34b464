// More of ptx.cuh: copies that tell an mbarrier by themselves that they are there, and boxes that come to L2 alone.
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

// Brings a box of a tensor to the L2 cache: a tma_load of it is quick from then on.
TILE_DEVICE void prefetch_box(const TensorMap* map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3)
                 : "memory");
}

}  // namespace ptx
#endif
