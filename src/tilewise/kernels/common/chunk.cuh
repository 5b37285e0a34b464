// Rows of K, V and Q in chunks of eight channels, which a lane loads, converts and stores.
#pragma once
#include "tile/memory.cuh"

constexpr int kChannels = 8;  // per chunk

struct alignas(8) Vector8 {
    uint32_t word[2];
};

// Eight channels of a row, as they lie in memory
template <class T> struct Chunk {
    static constexpr int kWords = kChannels * sizeof(T) / 4;
    uint32_t word[kWords];

    TILE_DEVICE float get(int i) const {
        if constexpr (sizeof(T) == 4) return as_float(word[i]);
        else return unpack<T>(word[i / 2], i % 2);
    }
    TILE_DEVICE void set(const float (&x)[kChannels]) {
#pragma unroll
        for (int w = 0; w < kWords; w++) {
            if constexpr (sizeof(T) == 4) word[w] = as_bits(x[w]);
            else word[w] = pack<T>(x[2 * w], x[2 * w + 1]);
        }
    }
    // Loads the first `count` channels; the others become zero
    TILE_DEVICE void load(Global<const T> g, int count, bool vectors) {
        if (vectors && count >= kChannels) {
#pragma unroll
            for (int i = 0; i < kWords / 4; i++) {
                const Vector16 x = g.template as<const Vector16>()[i];
#pragma unroll
                for (int w = 0; w < 4; w++) word[4 * i + w] = x.word[w];
            }
            return;
        }
        float x[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; i++) x[i] = i < count ? to_float(T(g[i])) : 0.0f;
        set(x);
    }
    TILE_DEVICE void store(Global<T> g, int count, bool vectors) const {
        if (vectors && count >= kChannels) {
#pragma unroll
            for (int i = 0; i < kWords / 4; i++) {
                g.template as<Vector16>()[i] =
                    Vector16{{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]}};
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kChannels; i++)
            if (i < count) g[i] = from_float<T>(get(i));
    }
};
