// Hopper's tiles: 64-column panels in shared memory under the 128-byte swizzle, as TMA writes and wgmma reads them, and
// the two products of attention on them. A tile of R rows and D columns is D / 64 panels of R × 64, one after another.
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
// eight: bytes from eight rows to the next eight, kEightBytes where panels lie one after another
TILE_DEVICE uint64_t k_major(uint32_t address, int eight = kEightBytes) { return descriptor(address, 16, eight); }
template <int kRows> TILE_DEVICE uint64_t mn_major(uint32_t address) {  // of panels of kRows rows
    return descriptor(address, kRows * kPanelRowBytes, kEightBytes);
}
// The descriptor of what lies `bytes` further on: the address field counts in units of 16 bytes. It is one 64-bit
// addition; were it taken apart into words, ptxas would build every descriptor in the same registers, and each product
// would wait until the one before has read its own.
TILE_DEVICE uint64_t further(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

namespace warpgroup {

// Values per step of depth, which is 32 bytes: 16, or 32 of FP8
template <class T> constexpr int kDepth = 32 / sizeof(T);

// S (64 × kKeys) = Q (64 × kDim) Kᵀ, or += if it is to accumulate; Q and K are K-major. Only issues: the caller commits
// and waits.
template <class T, int kKeys, int kDim, int kRowsOfQ>
TILE_DEVICE void mma_qk(float (&acc_s)[kKeys / 2], uint64_t q, uint64_t k, bool accumulate = false) {
#pragma unroll
    for (int step = 0; step < kDim / kDepth<T>; step++) {
        const uint32_t panel = step / 4 * kPanelRowBytes, inside = step % 4 * 32;
        ptx::Wgmma<T, kKeys>::template ss<false, false>(acc_s, further(q, panel * kRowsOfQ + inside),
                                                        further(k, panel * kKeys + inside), accumulate || step > 0);
    }
}

// The same with Q in registers, as A operands: sixteen rows per warp. K's panels are kPanelStep bytes apart.
template <class T, int kKeys, int kDim, int kPanelStep = kKeys * kPanelRowBytes>
TILE_DEVICE void mma_qk(float (&acc_s)[kKeys / 2], const uint32_t (&rQ)[kDim / kDepth<T>][4], uint64_t k) {
#pragma unroll
    for (int step = 0; step < kDim / kDepth<T>; step++)
        ptx::Wgmma<T, kKeys>::template rs<false>(acc_s, rQ[step], further(k, step / 4 * kPanelStep + step % 4 * 32),
                                                 step > 0);
}

// O (64 × kDim) += P (64 × kKeys) V: P comes from registers, V is MN-major (its columns are contiguous), and its groups
// of eight rows are kEightStep bytes apart. FP8 operands cannot be MN-major: there v is Vᵀ, kDim rows in panels of 128
// keys.
template <class T, int kKeys, int kDim, int kEightStep = kEightBytes>
TILE_DEVICE void mma_pv(float (&acc_o)[kDim / 2], const uint32_t (&rP)[kKeys / kDepth<T>][4], uint64_t v) {
    if constexpr (sizeof(T) == 1) {
        // FP8 blocks have 512 threads, for which ptxas starts from 128 registers: too few for 256 columns at once.
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

// The stage of a ring that comes next, and the parity of the lap around the ring
template <int kStages> struct Turn {
    uint32_t stage = 0, lap = 0;
    TILE_DEVICE void next() {
        if (++stage == kStages) {
            stage = 0;
            lap ^= 1;
        }
    }
};

// A ring of kStages tiles between a producer and consumers. Each stage has a full barrier, which tells that its bytes
// are there, and an empty barrier, which tells that all consumers are done with them. Their parity is that of the lap.
template <int kStages> struct Ring {
    static constexpr int kBytes = 2 * kStages * 8;
    uint32_t full, empty;
    TILE_DEVICE explicit Ring(uint32_t barriers) : full(barriers), empty(barriers + kStages * 8) {}
    // Called by one thread before any other uses the ring. releases, arrivals: how often per lap a stage is released,
    // and how often it is reported full
    TILE_DEVICE void init(int releases, int arrivals = 1) const {
        for (int s = 0; s < kStages; s++) {
            ptx::mbarrier_init(full + 8 * s, arrivals);
            ptx::mbarrier_init(empty + 8 * s, releases);
        }
    }
    TILE_DEVICE uint32_t full_at(Turn<kStages> turn) const { return full + 8 * turn.stage; }
    // Producer: wait until the stage is free. A fresh barrier's previous phase counts as completed, so the first lap
    // does not wait.
    TILE_DEVICE void wait_free(Turn<kStages> turn) const { ptx::mbarrier_wait(empty + 8 * turn.stage, turn.lap ^ 1); }
    // The same; then announces `bytes` and returns the barrier that the copies complete on.
    TILE_DEVICE uint32_t acquire(Turn<kStages> turn, int bytes) const {
        wait_free(turn);
        ptx::mbarrier_arrive_expect(full_at(turn), bytes);
        return full_at(turn);
    }
    // Consumers: wait for the tile, and release it, one lane per warp.
    TILE_DEVICE void wait(Turn<kStages> turn) const { ptx::mbarrier_wait(full_at(turn), turn.lap); }
    TILE_DEVICE void release(Turn<kStages> turn) const {
        if (ptx::elect_one()) ptx::mbarrier_arrive(empty + 8 * turn.stage);
    }
};

// Loads rows [row, row + kRows) of one head, panel by panel; rows outside the tensor arrive as zeros.
template <int kRows, int kDim>
TILE_DEVICE void load_tile(uint32_t to, const TensorMap* map, uint32_t barrier, int row, int head, int batch) {
    for (int panel = 0; panel < kDim / kPanel; panel++)
        ptx::tma_load(to + panel * kRows * kPanelRowBytes, map, barrier, panel * kPanel, row, head, batch);
}
