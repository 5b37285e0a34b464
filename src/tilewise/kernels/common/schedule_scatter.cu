// schedule_scatter: lists of key blocks become bits, a warp a row. Whatever the lists hold, nothing outside the row is
// touched, and the order of the entries does not matter; what a careful caller would not have given is noted.
#include "common/schedule.cuh"

// Index: of counts and indices, int or int64_t
constexpr int kThreads = 256;

struct ScatterArgs {
    const void *counts, *indices;            // (rows,), (rows, width)
    const void *full_counts, *full_indices;  // the same of whole blocks, (rows, full_width), or null
    uint32_t *bits, *whole;                  // (rows, words); whole or null
    int* faults;                             // (rows,)
    int rows, cols, words, width, full_width;
};

struct Noted {  // by a lane
    int faults, entries;
};

// Sets the bits of a row's list; whole may be null.
TILE_DEVICE void scatter_list(const void* counts, const void* indices, int row, int width, int cols, uint32_t* bits,
                              uint32_t* whole, int lane, Noted& noted) {
    const Index given = Global<const Index>{static_cast<const Index*>(counts)}[row];
    const int count = given < 0 ? 0 : given > width ? width : int(given);
    if (given != count) noted.faults |= kBadCount;
    const Global<const Index> gList{static_cast<const Index*>(indices) + int64_t(row) * width};
    Index last = 0;
    for (int start = 0; start < count; start += 32) {
        const bool there = start + lane < count;
        const Index block = there ? Index(gList[start + lane]) : 0;
        const Index left = ptx::shuffle(block, lane - 1), before = lane ? left : last;
        last = ptx::shuffle(block, 31);
        if (!there) continue;
        if (start + lane > 0 && block < before) noted.faults |= kNotAscending;
        if (block < 0 || block >= cols) {
            noted.faults |= kOutOfRange;
            continue;
        }
        noted.entries++;
        ptx::atomic_or(bits + block / 32, 1u << block % 32);
        if (whole) ptx::atomic_or(whole + block / 32, 1u << block % 32);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) schedule_scatter(const __grid_constant__ ScatterArgs a) {
    const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= a.rows) return;
    uint32_t* const bits = a.bits + int64_t(row) * a.words;
    uint32_t* const whole = a.whole ? a.whole + int64_t(row) * a.words : nullptr;
    for (int word = lane; word < a.words; word += 32) {
        Global<uint32_t>{bits}[word] = 0;
        if (whole) Global<uint32_t>{whole}[word] = 0;
    }
    ptx::sync_warp();

    Noted noted{0, 0};
    scatter_list(a.counts, a.indices, row, a.width, a.cols, bits, nullptr, lane, noted);
    if (whole) scatter_list(a.full_counts, a.full_indices, row, a.full_width, a.cols, bits, whole, lane, noted);
    ptx::sync_warp();

    // Entries that are repeated set fewer bits than there are entries.
    int kept = 0;
    for (int word = lane; word < a.words; word += 32) kept += ptx::count_bits(ptx::load_relaxed(bits + word));
    if (ptx::reduce_add(kept) != ptx::reduce_add(noted.entries)) noted.faults |= kRepeated;
    const uint32_t faults = ptx::reduce_or(noted.faults);
    if (lane == 0) Global<int>{a.faults}[row] = int(faults);
}
