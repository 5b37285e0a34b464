// What the kernels that make and turn block schedules have in common; tilewise.gpu.schedules launches them.
//
// A row is a block of queries of one head of one sequence. Bit j % 32 of its word j / 32 says that key block j is kept.
#pragma once
#include "tile/memory.cuh"

// What is wrong with a row of lists or scores, as plan/schedule_device.py names it
constexpr int kOutOfRange = 1, kRepeated = 2, kNotAscending = 4, kBadCount = 8, kNegative = 16;

// The bits [from, to) of a word, cut to 0 … 32
TILE_DEVICE uint32_t bit_range(int from, int to) {
    const int low = from < 0 ? 0 : from, high = to > 32 ? 32 : to;
    if (low >= high) return 0;
    return (high == 32 ? ~0u : (1u << high) - 1) & ~((1u << low) - 1);
}
// Those of a word's bits that stand for one of `cols` key blocks
TILE_DEVICE uint32_t valid_bits(int word, int cols) { return bit_range(0, cols - word * 32); }

// The lanes before this one, as bits
TILE_DEVICE uint32_t lanes_before(int lane) { return (1u << lane) - 1; }
