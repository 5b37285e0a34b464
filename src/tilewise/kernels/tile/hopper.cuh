// Hopper's tiles: 64-column panels in shared memory under the 128-byte swizzle, as TMA writes and wgmma reads them, and the two
// products of attention on them. A tile of R rows and D columns is D / 64 panels of R × 64, one after another.
#pragma once
#include "tile/memory.cuh"

constexpr int kPanel = 64;           // columns of a panel of 16-bit values
constexpr int kPanelRowBytes = 128;  // one swizzle span

template <int kRows, int kColumns> constexpr int tile_bytes() { return kRows * kColumns * 2; }

// The descriptor of a 128-byte-swizzled operand, by its first byte; offsets in bytes.
TILE_DEVICE uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | 1ull << 62;
}
constexpr int kEightBytes = 8 * kPanelRowBytes;  // eight rows of a panel, in which the swizzle repeats
// From eight rows to the next eight are `eight` bytes: kEightBytes where panels lie one after another.
TILE_DEVICE uint64_t k_major(uint32_t address, int eight = kEightBytes) { return descriptor(address, 16, eight); }
template <int kRows> TILE_DEVICE uint64_t mn_major(uint32_t address) {  // of panels of kRows rows
    return descriptor(address, kRows * kPanelRowBytes, kEightBytes);
}
// What lies further on is reached by adding to the address field, in units of 16 bytes. As one 64-bit addition: taken apart into
// words, ptxas builds every descriptor in the same registers, and each product waits until the one before has read its own.
TILE_DEVICE uint64_t further(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

namespace warpgroup {

// A step of depth is 32 bytes: 16 values, or 32 of FP8.
template <class T> constexpr int kDepth = 32 / sizeof(T);

// S (64 × kKeys) = Q (64 × kDim) Kᵀ: Q and K K-major. Issues; the caller commits and waits.
template <class T, int kKeys, int kDim, int kRowsOfQ>
TILE_DEVICE void mma_qk(float (&acc_s)[kKeys / 2], uint64_t q, uint64_t k) {
#pragma unroll
    for (int step = 0; step < kDim / kDepth<T>; step++) {
        const uint32_t panel = step / 4, inside = step % 4 * 32;
        ptx::Wgmma<T, kKeys>::template ss<false, false>(acc_s, further(q, panel * kRowsOfQ * kPanelRowBytes + inside),
                                                        further(k, panel * kKeys * kPanelRowBytes + inside), step > 0);
    }
}

// The same with Q in registers, as A operands of the warps' sixteen rows each; K's panels are kPanelStep bytes apart.
template <class T, int kKeys, int kDim, int kPanelStep = kKeys * kPanelRowBytes>
TILE_DEVICE void mma_qk(float (&acc_s)[kKeys / 2], const uint32_t (&rQ)[kDim / kDepth<T>][4], uint64_t k) {
#pragma unroll
    for (int step = 0; step < kDim / kDepth<T>; step++)
        ptx::Wgmma<T, kKeys>::template rs<false>(acc_s, rQ[step], further(k, step / 4 * kPanelStep + step % 4 * 32), step > 0);
}

// O (64 × kDim) += P (64 × kKeys) V: P from registers, V MN-major (its columns are contiguous), its eights of rows kEightStep bytes
// apart. In FP8, which cannot be, v is Vᵀ: kDim rows, in panels of 128 keys.
template <class T, int kKeys, int kDim, int kEightStep = kEightBytes>
TILE_DEVICE void mma_pv(float (&acc_o)[kDim / 2], const uint32_t (&rP)[kKeys / kDepth<T>][4], uint64_t v) {
    if constexpr (sizeof(T) == 1) {
        // Its blocks are 512 threads, for which ptxas starts out from 128 registers: too few for 256 columns in one instruction.
        constexpr int kColumns = kDim > 192 ? kDim / 2 : kDim;
#pragma unroll
        for (int step = 0; step < kKeys / kDepth<T>; step++)
#pragma unroll
            for (int column = 0; column < kDim; column += kColumns)
                ptx::Wgmma<T, kColumns>::template rs<false>(
                    reinterpret_cast<float (&)[kColumns / 2]>(acc_o[column / 2]), rP[step],
                    further(v, (step / 4 * kDim + column) * kPanelRowBytes + step % 4 * 32), true);
    } else {
#pragma unroll
        for (int step = 0; step < kKeys / kDepth<T>; step++)
            ptx::Wgmma<T, kDim>::template rs<true>(acc_o, rP[step], further(v, step * 2 * kEightStep), true);
    }
}

}  // namespace warpgroup

// Which stage of a ring comes next, and the parity of the lap it is in.
template <int kStages> struct Turn {
    uint32_t stage = 0, lap = 0;
    TILE_DEVICE void next() {
        if (++stage == kStages) {
            stage = 0;
            lap ^= 1;
        }
    }
};

// A ring of kStages tiles between a producer and consumers. A full barrier a stage tells that the bytes are there, an empty one
// that all consumers are done with them; their parity is the lap's.
template <int kStages> struct Ring {
    static constexpr int kBytes = 2 * kStages * 8;
    uint32_t full, empty;
    TILE_DEVICE explicit Ring(uint32_t barriers) : full(barriers), empty(barriers + kStages * 8) {}
    // By one thread, before anybody else touches the ring; how often a stage is released, and told to be there, a lap.
    TILE_DEVICE void init(int releases, int arrivals = 1) const {
        for (int s = 0; s < kStages; s++) {
            ptx::mbarrier_init(full + 8 * s, arrivals);
            ptx::mbarrier_init(empty + 8 * s, releases);
        }
    }
    TILE_DEVICE uint32_t full_at(Turn<kStages> turn) const { return full + 8 * turn.stage; }
    // Producer: wait until the stage is free. A fresh barrier's previous phase counts as completed, so the first lap does not wait.
    TILE_DEVICE void wait_free(Turn<kStages> turn) const { ptx::mbarrier_wait(empty + 8 * turn.stage, turn.lap ^ 1); }
    // The same, announce `bytes`, and get the barrier that the copies complete on.
    TILE_DEVICE uint32_t acquire(Turn<kStages> turn, int bytes) const {
        wait_free(turn);
        ptx::mbarrier_arrive_expect(full_at(turn), bytes);
        return full_at(turn);
    }
    // Consumers: wait for the tile; let it go, one lane for its warp.
    TILE_DEVICE void wait(Turn<kStages> turn) const { ptx::mbarrier_wait(full_at(turn), turn.lap); }
    TILE_DEVICE void release(Turn<kStages> turn) const {
        if (ptx::elect_one()) ptx::mbarrier_arrive(empty + 8 * turn.stage);
    }
};

// A tile of rows [row, row + kRows) of one head, panel by panel; rows outside the tensor arrive as zeros.
template <int kRows, int kDim>
TILE_DEVICE void load_tile(uint32_t to, const TensorMap* map, uint32_t barrier, int row, int head, int batch) {
    for (int panel = 0; panel < kDim / kPanel; panel++)
        ptx::tma_load(to + panel * kRows * kPanelRowBytes, map, barrier, panel * kPanel, row, head, batch);
}
