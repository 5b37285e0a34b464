// fold: lists the units of keys that each tile of the forward visits, from a block schedule, the window, lengths of
// blocks and a mask function, and orders tiles by the length of their lists. It runs on the device because schedules
// and captured tensors are there.
//
// A block of threads takes a tile, and each of its threads a unit. Units that every row of the tile sees whole go to the front of the
// tile's row of the list, the others to its back. The last block of threads to finish a list orders its tiles.
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
constexpr int kWarps = 8, kThreads = 32 * kWarps;
// Shared memory: lengths of tiles, which block is last, and counts per warp
constexpr int kAtWeights = 0, kAtLast = 4 * kThreads, kAtCounts = kAtLast + 4;

struct Fold {
    const ForwardArgs& args;
    const FoldArgs& fold;
    const Function& function;
    int list_head;  // of a sequence
    WorkTile tile;
    int first_token, last_token;

    // Of the tile's rows, by slabs, the ones from which the schedule hides block `block`. asked: must a mask function
    // be asked?
    TILE_DEVICE uint32_t hidden_slabs(int block, bool& asked) const {
        asked = true;
        if (!fold.kept) return 0;
        const TileLists& lists = args.lists;
        const int64_t head = tile.sequence * fold.kept_batch + int64_t(fold.lists_each.quotient(list_head)) * fold.kept_head;
        uint32_t hidden = 0;
        bool whole = fold.whole != nullptr;
        for (int token = first_token; token <= last_token;) {
            const int row = lists.block_q.quotient(token), next = (row + 1) * int(lists.block_q.divisor);
            const int64_t at = head + int64_t(row) * fold.kept_row + block / 32;
            const bool there = row < fold.q_blocks && block < fold.k_blocks;
            const bool kept = there && Global<const uint32_t>{fold.kept}[at] >> block % 32 & 1;
            if (whole) whole = there && Global<const uint32_t>{fold.whole}[at] >> block % 32 & 1;
            const int end = next <= last_token ? next * kPack - tile.row : kTileQ;
            const int from = (token * kPack - tile.row) / kSlab, to = end / kSlab;
            if (!kept) hidden |= ((1u << (to - from)) - 1) << from;
            token = next;
        }
        asked = !whole;
        return hidden;
    }

    // Unit `unit`: kNone, kSome or kAll, and the slabs that it is hidden from
    TILE_DEVICE Kind look(int unit, uint32_t& hidden) const {
        const TileLists& lists = args.lists;
        const int begin = unit * kUnit, end = begin + kUnit - 1, last = tile.seqlen_k - 1;
        const bool exists = begin <= last;
        const Keys first_row = keys_of(args, tile, first_token), last_row = keys_of(args, tile, last_token);
        bool none = !exists || begin > last_row.last || end < first_row.first;
        bool all = begin >= last_row.first && end <= first_row.last;
        bool asked = true;
        hidden = 0;
        if (!none && (fold.kept || lists.lengths_k)) {
            const int block = lists.block_k.quotient(begin);
            hidden = hidden_slabs(block, asked);
            if (lists.lengths_k) {
                const int64_t at = int64_t(tile.sequence) * lists.lengths_k_batch + block;
                const int there = Global<const int>{lists.lengths_k}[at] - (begin - block * int(lists.block_k.divisor));
                none = there <= 0;
                all = all && there >= kUnit;
            }
            none = none || hidden == (1u << kTileQ / kSlab) - 1;
            all = all && hidden == 0;
        }
        if constexpr (Function::kMask) {
            const double sequence = tile.sequence, heads = lists.heads_each.divisor * kPack;
            const Rectangle of{{sequence, sequence}, {list_head * heads, (list_head + 1) * heads - 1},
                               first_token, last_token, begin, end < last ? end : last};
            const Kind kind = kind_of(function, of, !none && asked);
            if (asked) {
                none = none || kind == kNone;
                all = all && kind == kAll;
            }
        }
        return none ? kNone : all ? kAll : kSome;
    }

    // A pass of the block of threads looks at kThreads units.
    TILE_DEVICE void run(int row) const {
        const TileLists& lists = args.lists;
        const Global<int> list{fold.units + int64_t(row) * lists.width};
        const Shared<int> counts(kAtCounts);  // per warp: units seen whole, then the others
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t before = (1u << lane) - 1;
        // What the tile's first and last row see bounds what any of its rows sees.
        const Keys first_row = keys_of(args, tile, first_token), last_row = keys_of(args, tile, last_token);
        const Span met = blocks_met<kUnit>(first_row, last_row);
        int whole = 0, others = 0;
        for (int base = met.begin; base < met.end; base += kThreads) {
            uint32_t hidden;
            const int unit = base + int(threadIdx.x);
            const Kind found = look(unit, hidden), kind = unit < met.end && unit < lists.width ? found : kNone;
            const uint32_t all = ptx::ballot(kind == kAll), some = ptx::ballot(kind == kSome);
            if (lane == 0) {
                counts[2 * warp] = ptx::count_bits(all);
                counts[2 * warp + 1] = ptx::count_bits(some);
            }
            ptx::sync_threads();
            int at_whole = whole, at_others = others;
            for (int w = 0; w < kWarps; w++) {
                const int of_whole = counts[2 * w], of_others = counts[2 * w + 1];
                whole += of_whole;
                others += of_others;
                if (w < warp) {
                    at_whole += of_whole;
                    at_others += of_others;
                }
            }
            ptx::sync_threads();
            if (kind == kAll) list[at_whole + ptx::count_bits(all & before)] = unit;
            if (kind == kSome)
                list[lists.width - 1 - at_others - ptx::count_bits(some & before)] = unit | int(hidden << kUnitBits);
        }
        if (threadIdx.x == 0) {
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
    for (int own = 0; own < lists.rows_each; own += kThreads) {
        const int tile = own + int(threadIdx.x);
        const uint32_t weight = tile < lists.rows_each ? weight_of(tile) : 0;
        int place = 0;
        for (int base = 0; base < lists.rows_each; base += kThreads) {
            ptx::sync_threads();
            const int other = base + int(threadIdx.x);
            weights[threadIdx.x] = other < lists.rows_each ? weight_of(other) : 0;
            ptx::sync_threads();
#pragma unroll 16
            for (int n = 0; n < kThreads; n++) place += weights[n] > weight;
        }
        if (tile < lists.rows_each) Global<int>{fold.order}[first + place] = tile;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) fold(const __grid_constant__ ForwardArgs args,
                                                            const __grid_constant__ FoldArgs problem,
                                                            const __grid_constant__ Function function) {
    const TileLists& lists = args.lists;
    const int list = blockIdx.y, number = blockIdx.x;
    const int sequence = kPacked ? 0 : list / problem.list_heads;
    Fold fold{args, problem, function, list - sequence * problem.list_heads};
    if constexpr (kPacked) {
        const ListHead head = Global<const ListHead>{reinterpret_cast<const ListHead*>(args.list)}[0];
        if (number >= int(head.tiles.divisor)) return;
        fold.tile = Global<const WorkTile>{reinterpret_cast<const WorkTile*>(args.list + kListHeader)}[number];
    } else {
        fold.tile = WorkTile{number * kTileQ, 0, sequence, 0, 0, args.seqlen_q, args.seqlen_k};
    }
    const int beyond = (fold.tile.row + kTileQ - 1) / kPack;
    fold.first_token = fold.tile.row / kPack;
    fold.last_token = beyond < fold.tile.seqlen_q ? beyond : fold.tile.seqlen_q - 1;
    fold.run(list * lists.rows_each + number);
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
