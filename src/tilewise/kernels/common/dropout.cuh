// Which of the softmax's weights are dropped: a function of a seed and of where a weight stands, the same in every
// kernel and on the CPU; tilewise/cpu/dropout.py says what it is. tilewise.gpu.abi.DropoutArgs mirrors Dropout.
//
// One draw of Philox4x32-7 serves a group of eight weights: rows r and r + 8 of sixteen, keys k, k + 1, k + 8 and k + 9
// of sixteen. Those are what a lane holds of a 16 × 16 fragment whose rows are queries. Where rows are keys, two lanes
// share two groups, and each draws one of them.
#pragma once
#include "tile/mma.cuh"

struct Dropout {
    const int64_t* seed;
    uint32_t below;  // a weight is dropped if its 16 bits, above sixteen others, are below this
    float factor;    // what the kept ones are multiplied with: 1 / (1 − p)
    // Is the weight kept whose bits are this half of the word?
    TILE_DEVICE bool keeps(uint32_t word, int half) const { return (half ? word : word << 16) >= below; }
};

// The draws of a head of a sequence
struct Draws {
    const Dropout& dropout;
    uint32_t low, high, head, sequence;
    TILE_DEVICE Draws(const Dropout& dropout_, int sequence_, int head_)
        : dropout(dropout_), head(uint32_t(head_)), sequence(uint32_t(sequence_)) {
        const uint64_t seed = uint64_t(int64_t(Global<const int64_t>{dropout.seed}[0]));
        low = uint32_t(seed);
        high = uint32_t(seed >> 32);
    }
    // Of the group that has the row and the key, which are the first of their group
    TILE_DEVICE void draw(uint32_t (&words)[4], uint32_t row, uint32_t key) const {
        uint32_t a = key / 16 * 4 + key % 8 / 2, b = row / 16 * 8 + row % 8, c = head, d = sequence;
        uint32_t first = low, second = high;
#pragma unroll
        for (int round = 0; round < 7; round++) {
            const uint64_t of_a = uint64_t(0xD2511F53u) * a, of_c = uint64_t(0xCD9E8D57u) * c;
            a = uint32_t(of_c >> 32) ^ b ^ first;
            b = uint32_t(of_c);
            c = uint32_t(of_a >> 32) ^ d ^ second;
            d = uint32_t(of_a);
            first += 0x9E3779B9u;
            second += 0xBB67AE85u;
        }
        words[0] = a, words[1] = b, words[2] = c, words[3] = d;
    }

    // Rows are queries: of P over kSize / 8 · 16 keys, what is dropped becomes 0. row, key: of the fragment's first
    template <int kSize> TILE_DEVICE void drop(float (&p)[kSize], int row, int key) const {
#pragma unroll
        for (int c = 0; c < kSize / 8; c++) {
            uint32_t words[4];
            if (c > 0 && c % 2 == 0) ptx::sync_warp();  // later draws stay behind it, and take no registers before
            draw(words, uint32_t(row + warp::fragment_row(0)), uint32_t(key + warp::fragment_column() + 16 * c));
#pragma unroll
            for (int i = 0; i < 8; i++)  // the key's half, the row's half, the key's parity
                if (!dropout.keeps(words[i % 2 * 2 + i / 2 % 2], i / 4)) p[8 * c + i] = 0.0f;
        }
    }
    // Rows are keys: the words of a lane's weights over sixteen keys and sixteen queries, by the query's parity and its
    // half; a word's half is the key's. row, key: of the fragment's first query and key
    TILE_DEVICE void draw_transposed(uint32_t (&words)[2][2], int row, int key) const {
        const int lane = warp::lane();
        const bool odd = lane / 4 % 2;  // the key; the lane beside it has the even one, and the same two groups
        uint32_t drawn[4];
        draw(drawn, uint32_t(row + warp::fragment_column() + odd), uint32_t(key + lane / 8 * 2));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t own = odd ? drawn[2 + half] : drawn[half];
            const uint32_t other = ptx::shuffle_xor(odd ? drawn[half] : drawn[2 + half], 4);
            words[0][half] = odd ? other : own;
            words[1][half] = odd ? own : other;
        }
    }
};
