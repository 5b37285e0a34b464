// select_pages: the pages that sequences read, from bits to lists. It runs before decode, on the device because the
// bits are there and may be others with every launch.
//
// What is selected of a sequence is a shorter sequence: the selected pages in their order, of which only the last may
// be partly filled, because only the sequence's last page may. A block makes one such list. A warp takes a word of the
// bits at a time, and a lane a page.
//
// Bits beyond a sequence's end, whatever they are, select nothing.
#include "common/args.cuh"

struct SelectArgs {
    const uint32_t* bits;    // bit j % 32 of word j / 32: page j of the sequence is selected
    const int* order;        // (sequences,): the caller's number of each sequence
    const int* lengths;      // (sequences,)
    const int* tail_from;    // (sequences,): pages from this number on stand in `tails`
    const int* tails;        // (sequences, tail_pages)
    const int* pages;        // (sequences, table_pages)
    int* selected;           // (sequences, selections, most): page numbers
    int* tokens;             // (sequences, selections): tokens of those pages
    uint32_t* own;           // (sequences, selections): bit t tells whether the key of query token t is among them
    int64_t batch, head;     // strides of `bits` in words; 0 where all share one selection
    int num_pages;           // pages that the bits tell about
    int most;                // pages of a list: of more, the first ones are taken
    int page_size, queries;  // queries: query tokens per sequence, up to 32
    int table_pages, tail_pages;
};
constexpr int kWarps = 16, kThreads = 32 * kWarps;

// Grid: (sequences, selections per sequence)
extern "C" __global__ void __launch_bounds__(kThreads) select_pages(const __grid_constant__ SelectArgs args) {
    const int sequence = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int length = Global<const int>{args.lengths}[sequence], held = (length + args.page_size - 1) / args.page_size;
    const int pages = held < args.num_pages ? held : args.num_pages;  // that may be selected
    const int64_t caller = Global<const int>{args.order}[sequence], to = int64_t(sequence) * gridDim.y + blockIdx.y;
    const Global<const uint32_t> bits{args.bits + caller * args.batch + blockIdx.y * args.head};
    const auto word_of = [&](int n) {
        const int there = pages - 32 * n;
        return there <= 0 ? 0u : bits[n] & (there < 32 ? (1u << there) - 1 : ~0u);
    };
    const auto has = [&](int page) { return word_of(page / 32) >> page % 32 & 1; };

    const int tail_from = Global<const int>{args.tail_from}[sequence];
    const Global<const int> first{args.pages + int64_t(sequence) * args.table_pages};
    const Global<const int> tail{args.tails + int64_t(sequence) * args.tail_pages - tail_from};
    const Global<int> selected{args.selected + to * args.most};
    int found = 0;
    for (int from = 0; 32 * from < pages; from += kWarps) {
        const uint32_t words = lane < kWarps ? word_of(from + lane) : 0, word = ptx::shuffle(words, warp);
        const int count = ptx::count_bits(words), before = ptx::reduce_add(lane < warp ? count : 0);
        const int rank = found + before + ptx::count_bits(word & ((1u << lane) - 1));
        const int page = 32 * (from + warp) + lane;
        if ((word >> lane & 1) && rank < args.most) selected[rank] = page < tail_from ? first[page] : tail[page];
        found += ptx::reduce_add(count);
    }

    if (warp > 0) return;
    // A lane asks whether the page of its query token is among those that were taken: as many come before it as were
    // found and do not come from it on.
    const int token = length - args.queries + lane, page = token / args.page_size;
    bool own = lane < args.queries && token >= 0 && has(page);
    int rank = found;
    for (int n = page; own && n < pages; n++) rank -= has(n);
    own = own && rank < args.most;
    const uint32_t queries = ptx::ballot(own);
    if (lane > 0) return;
    const bool has_last = queries >> (args.queries - 1) & 1;  // the last page, that of the last query token
    const int taken = found < args.most ? found : args.most;
    Global<int>{args.tokens}[to] = taken * args.page_size - (has_last ? held * args.page_size - length : 0);
    Global<uint32_t>{args.own}[to] = queries;
}
