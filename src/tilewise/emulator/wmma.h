// What learn/kernels/wmma.cuh means, in plain C++, name for name.
//
// A fragment's element e of lane l is element e · 32 + l of the matrix by rows: not the card's layout, on purpose.
// Loads and stores are each lane's own, with no meeting: they order nothing on a card either, so a missing sync_warp
// shows.
#pragma once

namespace wmma {

template <class T> constexpr int kDepth = sizeof(T) == 4 ? 8 : 16;

template <class T> struct A {
    static constexpr int kRows = 16, kColumns = kDepth<T>, kTransposed = 0;
    T x[kRows * kColumns / 32];
};
template <class T> struct B {
    static constexpr int kRows = kDepth<T>, kColumns = 16, kTransposed = 0;
    T x[kRows * kColumns / 32];
};
template <class T> struct BTransposed {
    static constexpr int kRows = kDepth<T>, kColumns = 16, kTransposed = 1;
    T x[kRows * kColumns / 32];
};
template <class T> struct Accumulator {
    float x[8];
};

inline void check_place(uint32_t address, int pitch_bytes) {
    if (address % 32 || pitch_bytes % 16)
        emu::fail("wmma on shared offset %u with rows %d bytes apart: it takes multiples of 32 and of 16", address,
                  pitch_bytes);
}

template <class Fragment, class T> void load(Fragment& f, Shared<T> tile, int at, int pitch) {
    check_place(tile.address(at), pitch * int(sizeof(T)));
    for (int e = 0; e < Fragment::kRows * Fragment::kColumns / 32; e++) {
        int i = e * 32 + emu::self().lane, row = i / Fragment::kColumns, column = i % Fragment::kColumns;
        uint32_t address = tile.address(at + (Fragment::kTransposed ? column * pitch + row : row * pitch + column));
        std::memcpy(&f.x[e], emu::shared_load(address, sizeof(T)), sizeof(T));
        if constexpr (sizeof(T) == 4) f.x[e] = as_float(ptx::to_tf32(f.x[e]));
    }
    // A card fetches it as ldmatrix does: eight rows of 16 bytes at a time.
    constexpr int kLines = Fragment::kTransposed ? Fragment::kColumns : Fragment::kRows;
    constexpr int kParts = Fragment::kRows * Fragment::kColumns / kLines * int(sizeof(T)) / 16;
    if (emu::counters && emu::self().lane == 0)
        for (int line = 0; line < kLines; line += 8)
            for (int part = 0; part < kParts; part++) {
                uint32_t rows[8];
                for (int i = 0; i < 8; i++) rows[i] = tile.address(at + (line + i) * pitch) + uint32_t(part) * 16;
                emu::count_matrix(rows);
            }
}
// The accumulator goes by ordinary accesses of two neighbouring floats per lane, as on a card.
inline uint32_t accumulator_pair(Shared<float> tile, int at, int pitch, int pair) {
    int l = emu::self().lane, row = l / 4 + 8 * (pair % 2), column = l % 4 * 2 + 8 * (pair / 2);
    return tile.address(at + row * pitch + column);
}
template <class T> void load(Accumulator<T>& acc, Shared<float> tile, int at, int pitch) {
    check_place(tile.address(at), pitch * 4);
    for (int pair = 0; pair < 4; pair++)
        if (emu::counters) emu::count_shared(accumulator_pair(tile, at, pitch, pair), 8);
    for (int e = 0; e < 8; e++) {
        int i = e * 32 + emu::self().lane;
        std::memcpy(&acc.x[e], emu::shared_load(tile.address(at + i / 16 * pitch + i % 16), 4), 4);
    }
}
template <class T> void store(Shared<float> tile, int at, int pitch, const Accumulator<T>& acc) {
    check_place(tile.address(at), pitch * 4);
    for (int pair = 0; pair < 4; pair++)
        if (emu::counters) emu::count_shared(accumulator_pair(tile, at, pitch, pair), 8);
    for (int e = 0; e < 8; e++) {
        int i = e * 32 + emu::self().lane;
        emu::shared_store(tile.address(at + i / 16 * pitch + i % 16), &acc.x[e], 4);
    }
}
template <class T> void zero(Accumulator<T>& acc) {
    for (float& x : acc.x) x = 0.0f;
}
template <class T, class Fragment> void mma(Accumulator<T>& d, const A<T>& a, const Fragment& b) {
    struct Slot { float* d; const T* a; const T* b; } s{d.x, a.x, b.x};
    emu::meet(s, "wmma", [](Slot* const* lanes) {
        constexpr int K = kDepth<T>;
        float left[16][K], right[K][16];
        for (int i = 0; i < 16 * K; i++) {
            left[i / K][i % K] = to_float(lanes[i % 32]->a[i / 32]);
            right[i / 16][i % 16] = to_float(lanes[i % 32]->b[i / 32]);
        }
        for (int i = 0; i < 256; i++) {
            float sum = 0.0f;
            for (int k = 0; k < K; k++) sum += left[i / 16][k] * right[k][i % 16];
            lanes[i % 32]->d[i / 32] += sum;
        }
        if (emu::counters) emu::counters->tensor_flops += 2ull * 16 * 16 * K;
    });
}

}  // namespace wmma
