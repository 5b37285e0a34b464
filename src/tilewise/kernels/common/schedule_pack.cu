// schedule_pack: bools become bits, a thread a word.
#include "common/schedule.cuh"

constexpr int kThreads = 256;

struct PackArgs {
    const uint8_t *blocks, *whole;  // (rows, cols), bools: the kept blocks, and the whole ones or null
    uint32_t *bits, *whole_bits;    // (rows, words)
    int rows, cols, words;
    int unit;  // bytes that every row is aligned to: 16, 4 or 1
};

// Four bools, bytes of any value but 0 being true, as four bits
TILE_DEVICE uint32_t four_bits(uint32_t bytes) {
    const uint32_t ones = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;
    return ones * 0x10204080u >> 28;  // byte i's bit comes to 28 + i
}

TILE_DEVICE uint32_t pack_word(Global<const uint8_t> gBools, int count, int unit) {
    uint32_t word = 0;
    if (unit == 16 && count == 32) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Vector16 v = gBools.as<const Vector16>()[half];
#pragma unroll
            for (int i = 0; i < 4; i++) word |= four_bits(v.word[i]) << (16 * half + 4 * i);
        }
        return word;
    }
    int i = 0;
    if (unit >= 4)
        for (; i + 4 <= count; i += 4) word |= four_bits((gBools + i).as<const uint32_t>()[0]) << i;
    for (; i < count; i++) word |= uint32_t(uint8_t(gBools[i]) != 0) << i;
    return word;
}

extern "C" __global__ void __launch_bounds__(kThreads) schedule_pack(const __grid_constant__ PackArgs a) {
    const uint32_t index = blockIdx.x * uint32_t(kThreads) + threadIdx.x;
    if (index >= uint32_t(a.rows) * uint32_t(a.words)) return;
    const int row = index / uint32_t(a.words), word = index % uint32_t(a.words);
    const int count = a.cols - word * 32 < 32 ? a.cols - word * 32 : 32;
    const int64_t at = int64_t(row) * a.cols + word * 32;
    const uint32_t kept = pack_word({a.blocks + at}, count, a.unit);
    Global<uint32_t>{a.bits}[index] = kept;
    if (a.whole) Global<uint32_t>{a.whole_bits}[index] = kept & pack_word({a.whole + at}, count, a.unit);
}
