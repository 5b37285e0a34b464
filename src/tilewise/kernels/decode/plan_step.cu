// decode_plan_step: what became of a standing plan's batch since the last step, from the host's memory to where the
// planner and the kernels that write tokens look for it. One block.
//
// The host says who is there, anew or only that each has a token more, and which pages came. The page table is kept
// here from step to step, so whatever is said once is done once: the planner itself may run often, or not at all,
// between two steps.
#include "common/args.cuh"
#include "tile/memory.cuh"

constexpr int kStageThreads = 512;
constexpr int kStepWords = 4;  // of a step's header: sequences, nodes, 0, 0

// A message, in ints. The step, unless `grown`: its header; four for each sequence in the plan's order (the caller's
// number, the row of the page table, the length, 0); five for each node; filled up to a multiple of four. Then of all
// updates of the page table the rows, the first pages and, unless `grown`, how many there are and where they stand;
// and the pages. `grown`: one page for each update.
struct StageArgs {
    const int* message;
    int* step;            // as the planner reads it
    int* table;           // (rows, width): the pages of each sequence
    int64_t* positions;   // (room,): of each caller's last token, 0 for who is not there; null: nobody asks
    int64_t* index;       // (room,): where it is, page · page_size + offset, and −1
    int64_t* seen;        // the host's: the number of the last message that was read
    int64_t number;       // of this message
    int sequences, nodes, updates;
    int grown;            // 1: the step is the last one, with a token more for each
    int width, room;
    Divisor page_size;
};

extern "C" __global__ void __launch_bounds__(kStageThreads) decode_plan_step(const __grid_constant__ StageArgs args) {
    const int n = threadIdx.x, lane = n % 32;
    const int words = args.grown ? 0 : kStepWords + (4 * args.sequences + 5 * args.nodes + 3) / 4 * 4;
    const Global<const Vector16> message{reinterpret_cast<const Vector16*>(args.message)};
    const Global<Vector16> step{reinterpret_cast<Vector16*>(args.step)};
#pragma unroll 1
    for (int i = n; i < words / 4; i += kStageThreads) step[i] = Vector16(message[i]);
#pragma unroll 1
    for (int i = n; args.grown && i < args.sequences; i += kStageThreads) {
        const Global<int> length{args.step + kStepWords + 4 * i + 2};
        length[0] = length[0] + 1;
    }
    const int count = args.updates;
    const Global<const int> changes{args.message + words};
    const auto row_of = [&](int i) { return Global<int>{args.table + int64_t(int(changes[i])) * args.width}; };
    if (args.grown) {
#pragma unroll 1
        for (int i = n; i < count; i += kStageThreads) row_of(i)[changes[count + i]] = int(changes[2 * count + i]);
    } else {
#pragma unroll 1
        for (int i = n / 32; i < count; i += kStageThreads / 32) {
            const Global<const int> from = changes + (4 * count + changes[3 * count + i]);
            const Global<int> to = row_of(i) + changes[count + i];
            const int pages = changes[2 * count + i];
#pragma unroll 4
            for (int k = lane; k < pages; k += 32) to[k] = int(from[k]);
        }
    }
    ptx::sync_threads();
    if (n == 0) Global<int64_t>{args.seen}[0] = args.number;
    if (!args.positions) return;
    const Global<int64_t> positions{args.positions}, index{args.index};
#pragma unroll 1
    for (int i = n; i < args.room; i += kStageThreads) {
        int at = i, last = -1;
        int64_t row = 0;
        if (i < args.sequences) {
            const Vector16 of = step[1 + i];
            at = int(of.word[0]), row = int(of.word[1]), last = int(of.word[2]) - 1;
        }
        positions[at] = last < 0 ? 0 : last;
        if (last < 0) {
            index[at] = -1;
            continue;
        }
        const int page = args.page_size.quotient(last), size = args.page_size.divisor;
        index[at] = int64_t(int(Global<int>{args.table}[row * args.width + page])) * size + (last - page * size);
    }
}
