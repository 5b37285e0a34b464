// Hopper's tiles: 64-column panels in shared memory under the 128-byte swizzle, as TMA writes and wgmma reads them, and the two
// products of attention on them. A tile of R rows and D columns is D / 64 panels of R × 64, one after another.
#pragma once
#include "tile/memory.cuh"

constexpr int kPanel = 64;           // columns of a panel: 128 bytes of 16-bit values, one swizzle span
constexpr int kPanelRowBytes = 128;

template <int kRows, int kColumns> constexpr int tile_bytes() { return kRows * kColumns * 2; }

// The descriptor of a 128-byte-swizzled operand; offsets in bytes.
TILE_DEVICE uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | 1ull << 62;
}

namespace warpgroup {

// S (64 × kKeys) = Q (64 × kDim) Kᵀ: Q and K K-major, 16 columns of the head dimension a step. Issues; the caller commits and waits.
template <class T, int kKeys, int kDim, int kRowsOfQ>
TILE_DEVICE void mma_qk(float (&acc_s)[kKeys / 2], uint32_t sQ, uint32_t sK) {
#pragma unroll
    for (int step = 0; step < kDim / 16; step++) {
        const uint32_t panel = step / 4, inside = step % 4 * 32;
        const uint64_t q = descriptor(sQ + panel * kRowsOfQ * kPanelRowBytes + inside, 16, 8 * kPanelRowBytes);
        const uint64_t k = descriptor(sK + panel * kKeys * kPanelRowBytes + inside, 16, 8 * kPanelRowBytes);
        ptx::Wgmma<T, kKeys>::template ss<false, false>(acc_s, q, k, step > 0);
    }
}

// O (64 × kDim) += P (64 × kKeys) V: P from registers, V MN-major (its columns are contiguous), 16 keys a step.
template <class T, int kKeys, int kDim>
TILE_DEVICE void mma_pv(float (&acc_o)[kDim / 2], const uint32_t (&rP)[kKeys / 16][4], uint32_t sV) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; step++) {
        const uint64_t v = descriptor(sV + step * 16 * kPanelRowBytes, kKeys * kPanelRowBytes, 8 * kPanelRowBytes);
        ptx::Wgmma<T, kDim>::template rs<true>(acc_o, rP[step], v, true);
    }
}

}  // namespace warpgroup

// A ring of kStages tiles between a producer and consumers: turn j uses stage j % kStages. A full barrier a stage tells that the
// bytes are there, an empty one that all consumers are done with them; their parity is the lap's.
template <int kStages> struct Ring {
    static constexpr int kBytes = 2 * kStages * 8;
    uint32_t full, empty;
    TILE_DEVICE explicit Ring(uint32_t barriers) : full(barriers), empty(barriers + kStages * 8) {}
    // By one thread, before anybody else touches the ring; `releases` is how often a stage is released a lap.
    TILE_DEVICE void init(int releases) const {
        for (int s = 0; s < kStages; s++) {
            ptx::mbarrier_init(full + 8 * s, 1);
            ptx::mbarrier_init(empty + 8 * s, releases);
        }
    }
    static TILE_DEVICE uint32_t stage(int turn) { return uint32_t(turn) % kStages; }
    static TILE_DEVICE uint32_t lap(int turn) { return uint32_t(turn) / kStages % 2; }
    // Producer: wait until the stage is free, announce `bytes`, and get the barrier that the copies complete on. A fresh barrier's
    // previous phase counts as completed, so the first lap does not wait.
    TILE_DEVICE uint32_t acquire(int turn, int bytes) const {
        ptx::mbarrier_wait(empty + 8 * stage(turn), lap(turn) ^ 1);
        ptx::mbarrier_arrive_expect(full + 8 * stage(turn), bytes);
        return full + 8 * stage(turn);
    }
    // Consumers: wait for the tile; let it go, one lane for its warp.
    TILE_DEVICE void wait(int turn) const { ptx::mbarrier_wait(full + 8 * stage(turn), lap(turn)); }
    TILE_DEVICE void release(int turn) const {
        if (ptx::elect_one()) ptx::mbarrier_arrive(empty + 8 * stage(turn));
    }
};

// A tile of rows [row, row + kRows) of one head, panel by panel; rows outside the tensor arrive as zeros.
template <int kRows, int kDim>
TILE_DEVICE void load_tile(uint32_t to, const TensorMap* map, uint32_t barrier, int row, int head, int batch) {
    for (int panel = 0; panel < kDim / kPanel; panel++)
        ptx::tma_load(to + panel * kRows * kPanelRowBytes, map, barrier, panel * kPanel, row, head, batch);
}
