// schedule_lists: bits become lists of key blocks, ascending, and counts, a warp a row.
#include "common/schedule.cuh"

constexpr int kThreads = 256;

struct ListArgs {
    const uint32_t* bits;  // (rows, words)
    int* counts;           // (rows,)
    int* indices;          // (rows, width), or null: only the counts
    int rows, cols, words;
    int width;  // the most that a list has and that is counted
};

extern "C" __global__ void __launch_bounds__(kThreads) schedule_lists(const __grid_constant__ ListArgs a) {
    const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= a.rows) return;
    const Global<const uint32_t> gBits{a.bits + int64_t(row) * a.words};
    const Global<int> gList{a.indices ? a.indices + int64_t(row) * a.width : nullptr};
    int count = 0;
    for (int first = 0; first < a.words; first += 32) {
        const int own = first + lane;
        const uint32_t bits = own < a.words ? uint32_t(gBits[own]) & valid_bits(own, a.cols) : 0;
        if (!a.indices) {
            count += int(ptx::reduce_add(ptx::count_bits(bits)));
            continue;
        }
        for (int i = 0; i < 32 && first + i < a.words; i++) {
            const uint32_t word = ptx::shuffle(bits, i);
            if (!word) continue;
            const int place = count + ptx::count_bits(word & lanes_before(lane));
            if ((word >> lane & 1) && place < a.width) gList[place] = (first + i) * 32 + lane;
            count += ptx::count_bits(word);
        }
    }
    for (int i = count + lane; a.indices && i < a.width; i += 32) gList[i] = 0;
    if (lane == 0) Global<int>{a.counts}[row] = count < a.width ? count : a.width;
}
