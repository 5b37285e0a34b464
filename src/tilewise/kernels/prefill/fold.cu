// fold: lists the units of keys that each tile of the forward visits, from a block schedule, the window, lengths of
// blocks and a mask function, and orders tiles by the length of their lists. It runs on the device because schedules
// and captured tensors are there.
//
// A warp, or with a mask function a block of threads, takes a tile, and each of its threads a unit. Units that every
// row of the tile sees whole go to the front of the tile's row of the list, the others to its back. The last block of
// threads to finish a list orders its tiles.
// Constants: kTileQ, kUnit, kPack, Function. kPacked: the tiles are those that ragged.cu listed.
#include "prefill/kinds.cuh"

struct FoldArgs {
    const uint32_t *kept, *whole;  // the schedule's bits: blocks that are kept, and those in which the mask function is
                                   // not asked; null for all, and for none
    int* counts;                   // TileLists, to be written
    int* units;
    int* order;
    int* finished;        // (lists,): blocks of threads that are done; zero between launches
    int64_t kept_batch;   // words from one sequence's bits to the next, 0 if they share them
    int kept_head, kept_row, q_blocks, k_blocks;
    int list_heads;       // lists per sequence, or in all if they are shared by sequences
    Divisor lists_each;   // lists per head of the schedule
};
constexpr int kThreads = kKindThreads;
// Threads that share a tile: a warp, or all of them where each unit costs them interval arithmetic
constexpr int kTogether = Function::kMask ? kThreads : 32, kTilesEach = kThreads / kTogether;
// Shared memory: lengths of tiles, which block is last, two counts per warp, and what kind_of takes
constexpr int kAtWeights = 0, kAtLast = 4 * kThreads, kAtCounts = kAtLast + 4, kAtKinds = kAtCounts + kThreads / 4;

struct Fold {
    const ForwardArgs& args;
    const FoldArgs& fold;
    const Function& function;
    int list_head;  // of a sequence
    WorkTile tile;
    int first_token, last_token;
    int first_block, last_block;  // of the schedule's rows, that the tile's rows belong to
    Keys first_row, last_row;     // what the tile's first and last row see: it bounds what any of its rows sees

    TILE_DEVICE void find_rows() {
        const int beyond = (tile.row + kTileQ - 1) / kPack;
        first_token = tile.row / kPack;
        last_token = beyond < tile.seqlen_q ? beyond : tile.seqlen_q - 1;
        first_block = args.lists.block_q.quotient(first_token);
        last_block = args.lists.block_q.quotient(last_token);
        first_row = keys_of(args, tile, first_token);
        last_row = keys_of(args, tile, last_token);
    }

    // Word `word` of a plane of bits, of row `row` of the schedule; 0 past its end
    TILE_DEVICE uint32_t word_of(const uint32_t* plane, int row, int word) const {
        const int head = fold.lists_each.quotient(list_head);
        const int64_t first = tile.sequence * fold.kept_batch + int64_t(head) * fold.kept_head;
        const int64_t at = first + int64_t(row) * fold.kept_row;
        const bool there = row < fold.q_blocks && word * 32 < fold.k_blocks;
        return there ? uint32_t(Global<const uint32_t>{plane}[at + word]) : 0u;
    }
    // The words of one row of the schedule that a warp needs next, a word per lane, from word `first` on
    struct Ahead {
        int first;
        uint32_t kept, whole;
    };
    TILE_DEVICE Ahead look_ahead(int unit) const {
        Ahead ahead{args.lists.block_k.quotient(unit * kUnit) / 32, 0, 0};
        if (!fold.kept || first_block != last_block) return ahead;
        const int word = ahead.first + int(threadIdx.x % 32);
        ahead.kept = word_of(fold.kept, first_block, word);
        if (fold.whole) ahead.whole = word_of(fold.whole, first_block, word);
        return ahead;
    }

    // Of the tile's rows, by slabs, the ones from which the schedule hides block `block`. asked: must a mask function
    // be asked? All lanes of a warp ask together.
    TILE_DEVICE uint32_t hidden_slabs(int block, const Ahead& ahead, bool& asked) const {
        constexpr uint32_t kEvery = (1u << kTileQ / kSlab) - 1;
        if (first_block == last_block) {
            const uint32_t kept = ptx::shuffle(ahead.kept, block / 32 - ahead.first) >> block % 32 & 1;
            asked = !(ptx::shuffle(ahead.whole, block / 32 - ahead.first) >> block % 32 & 1);
            return kept ? 0u : kEvery;
        }
        uint32_t hidden = 0;
        bool whole = fold.whole != nullptr;
        for (int row = first_block; row <= last_block; row++) {
            const bool kept = word_of(fold.kept, row, block / 32) >> block % 32 & 1;
            if (whole) whole = word_of(fold.whole, row, block / 32) >> block % 32 & 1;
            const int begin = row * int(args.lists.block_q.divisor) * kPack - tile.row;
            const int end = begin + int(args.lists.block_q.divisor) * kPack;
            const int from = row == first_block ? 0 : begin / kSlab;
            const int to = row == last_block ? kTileQ / kSlab : end / kSlab;
            if (!kept) hidden |= ((1u << (to - from)) - 1) << from;
        }
        asked = !whole;
        return hidden;
    }

    // Unit `unit`: kNone, kSome or kAll, and the slabs that it is hidden from. All lanes of a warp ask together.
    TILE_DEVICE Kind look(int unit, const Ahead& ahead, uint32_t& hidden) const {
        const TileLists& lists = args.lists;
        const int begin = unit * kUnit, end = begin + kUnit - 1, last = tile.seqlen_k - 1;
        bool none = begin > last || unit >= lists.width || begin > last_row.last || end < first_row.first;
        bool all = begin >= last_row.first && end <= first_row.last;
        bool asked = true;
        hidden = 0;
        const int block = lists.block_k.quotient(begin);
        if (fold.kept) {
            hidden = hidden_slabs(block, ahead, asked);
            none = none || hidden == (1u << kTileQ / kSlab) - 1;
            all = all && hidden == 0;
        }
        if (lists.lengths_k && !none) {
            const int64_t at = int64_t(tile.sequence) * lists.lengths_k_batch + block;
            const int there = Global<const int>{lists.lengths_k}[at] - (begin - block * int(lists.block_k.divisor));
            none = there <= 0;
            all = all && there >= kUnit;
        }
        if constexpr (Function::kMask) {
            // Heads share a list only if the mask is the same for them: one is asked for all.
            const int heads = int(lists.heads_each.divisor), head = list_head * heads * kPack;
            const double sequence = tile.sequence, first = head, beyond = head + (heads > 1 ? 1 : kPack);
            const Rectangle of{{sequence, sequence}, {first, beyond - 1},
                               first_token, last_token, begin, end < last ? end : last};
            const Kind kind = kind_of(function, of, !none && asked, kAtKinds);
            if (asked) {
                none = none || kind == kNone;
                all = all && kind == kAll;
            }
        }
        return none ? kNone : all ? kAll : kSome;
    }

    TILE_DEVICE void run(int row) const {
        const TileLists& lists = args.lists;
        const Global<int> list{fold.units + int64_t(row) * lists.width};
        const Shared<int> counts(kAtCounts);  // per warp: units seen whole, then the others
        const int lane = threadIdx.x % 32, warp = threadIdx.x % kTogether / 32;
        const uint32_t before = (1u << lane) - 1;
        const Span met = blocks_met<kUnit>(first_row, last_row);
        const int blocks_ahead = 31 * 32 * int(lists.block_k.divisor) / kUnit;  // units that a look ahead serves
        int whole = 0, others = 0;
        Ahead ahead = look_ahead(met.begin);
        for (int base = met.begin, looked = base; base < met.end; base += kTogether) {
            if (fold.kept && base + kTogether - looked > blocks_ahead) {
                looked = base;
                ahead = look_ahead(base);
            }
            uint32_t hidden;
            const int unit = base + 32 * warp + lane;
            const Kind kind = look(unit, ahead, hidden);
            const uint32_t all = ptx::ballot(kind == kAll), some = ptx::ballot(kind == kSome);
            int at_whole = whole, at_others = others;
            if constexpr (kTogether == 32) {
                whole += ptx::count_bits(all);
                others += ptx::count_bits(some);
            } else {
                if (lane == 0) {
                    counts[2 * warp] = ptx::count_bits(all);
                    counts[2 * warp + 1] = ptx::count_bits(some);
                }
                ptx::sync_threads();
                for (int w = 0; w < kTogether / 32; w++) {
                    const int of_whole = counts[2 * w], of_others = counts[2 * w + 1];
                    whole += of_whole;
                    others += of_others;
                    if (w < warp) {
                        at_whole += of_whole;
                        at_others += of_others;
                    }
                }
                ptx::sync_threads();
            }
            if (kind == kAll) list[at_whole + ptx::count_bits(all & before)] = unit;
            if (kind == kSome)
                list[lists.width - 1 - at_others - ptx::count_bits(some & before)] = unit | int(hidden << kUnitBits);
        }
        if (threadIdx.x % kTogether == 0) {
            Global<int>{fold.counts}[2 * row] = whole;
            Global<int>{fold.counts}[2 * row + 1] = whole + others;
        }
    }
};

// The tiles of a list by the lengths of their rows, the longest first, and of equal ones the last first: tiles that run
// side by side then read the same keys. A tile's place is the number of tiles that come before it.
TILE_DEVICE void order_tiles(const TileLists& lists, const FoldArgs& fold, int list) {
    const Shared<uint32_t> weights(kAtWeights);
    const int64_t first = int64_t(list) * lists.rows_each;
    auto weight_of = [&](int tile) {
        const int length = ptx::load_acquire(fold.counts + 2 * (first + tile) + 1);
        return uint32_t(length < 0xffff ? length : 0xffff) << 16 | uint32_t(tile);
    };
    constexpr int kOwn = 4;  // tiles per thread and pass
    for (int begin = 0; begin < lists.rows_each; begin += kOwn * kThreads) {
        uint32_t own[kOwn];
        int place[kOwn] = {};
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const int tile = begin + i * kThreads + int(threadIdx.x);
            own[i] = tile < lists.rows_each ? weight_of(tile) : 0;
        }
        for (int base = 0; base < lists.rows_each; base += kThreads) {
            ptx::sync_threads();
            const int other = base + int(threadIdx.x);
            weights[threadIdx.x] = other < lists.rows_each ? weight_of(other) : 0;
            ptx::sync_threads();
#pragma unroll 8
            for (int n = 0; n < kThreads; n++) {
                const uint32_t weight = weights[n];
#pragma unroll
                for (int i = 0; i < kOwn; i++) place[i] += weight > own[i];
            }
        }
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const int tile = begin + i * kThreads + int(threadIdx.x);
            if (tile < lists.rows_each) Global<int>{fold.order}[first + place[i]] = tile;
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) fold(const __grid_constant__ ForwardArgs args,
                                                            const __grid_constant__ FoldArgs problem,
                                                            const __grid_constant__ Function function) {
    const TileLists& lists = args.lists;
    const int list = blockIdx.y, number = blockIdx.x * kTilesEach + threadIdx.x / kTogether;
    const int sequence = kPacked ? 0 : list / problem.list_heads;
    Fold fold{args, problem, function, list - sequence * problem.list_heads};
    bool there = number < lists.rows_each;
    if constexpr (kPacked) {
        const ListHead head = Global<const ListHead>{reinterpret_cast<const ListHead*>(args.list)}[0];
        there = number < int(head.tiles.divisor);
        const Global<const WorkTile> tiles{reinterpret_cast<const WorkTile*>(args.list + kListHeader)};
        if (there) fold.tile = tiles[number];
    } else {
        fold.tile = WorkTile{number * kTileQ, 0, sequence, 0, 0, args.seqlen_q, args.seqlen_k};
    }
    if (there) {
        fold.find_rows();
        fold.run(list * lists.rows_each + number);
    }
    if constexpr (kPacked) return;
    ptx::fence_device();
    ptx::sync_threads();
    const Shared<int> last(kAtLast);
    if (threadIdx.x == 0) last[0] = ptx::atomic_add(problem.finished + list, 1) == int(gridDim.x) - 1;
    ptx::sync_threads();
    if (!last[0]) return;
    if (threadIdx.x == 0) Global<int>{problem.finished}[list] = 0;
    ptx::fence_device();
    order_tiles(lists, problem, list);
}
