// What the threads that compute do whatever the form of their products: they walk over items and pieces, bring Q to
// shared memory, join a row's pieces, and find out what the rows of an item end with. Whoever includes this has
// included a layout of shared memory: layout.cuh or mma_layout.cuh.
#pragma once
#include "mla/items.cuh"

constexpr int kAtParts = 0, kRowAtOnce = 4;  // the ring is free when states are merged
constexpr bool kLongRuns = false;
constexpr int kStateGroup = 4;
#include "decode/states.cuh"

constexpr float kWitness = 256.0f;  // the sum of a few weights up to which a reference stays

constexpr int kFoldPlaces = kRows * kValueDim / (4 * kComputing);  // of a thread, four values of O each
TILE_DEVICE Shared<float> sSums() { return Shared<float>(kAtSums); }
TILE_DEVICE Shared<float> sFactors() { return Shared<float>(kAtFactors); }
TILE_DEVICE Shared<float> sFolded() { return Shared<float>(kAtFolded); }

struct Walk {
    const DecodeArgs& args;
    const MlaArgs& mla;
    float scale_log2;
    Table table{0};            // of the item
    int whole_from, whole_to;  // every row sees the tokens between these

    TILE_DEVICE Walk(const DecodeArgs& a, const MlaArgs& m) : args(a), mla(m) {
        // A positive scale keeps the order of scores and goes into the exponential's multiply-add. Q takes a negative
        // scale's sign, and is 0 for a scale of 0.
        scale_log2 = !Rule::kLinear ? 1.0f : args.scores.scale_log2 == 0.0f ? 1.0f : fabsf(args.scores.scale_log2);
    }
    static TILE_DEVICE int lane() { return ptx::just_in_time(threadIdx.x) & 31; }
    static TILE_DEVICE void all_sync() { ptx::barrier_sync(kAllBarrier, kComputing); }

    // ---- an item ----------------------------------------------------------------------------------------------------
    // Waits for what is known of the item, and brings Q to shared memory. False if there is no item.
    TILE_DEVICE bool begin(int slot) {
        table = Table(slot);
        if constexpr (kLooksAhead) {
            ptx::barrier_sync(kFilledBarriers + slot % 2, kComputing + 32);
        } else {
            // One warp, or every warp the same: ptxas spills with the one here, with the other there.
            if (!kFillsAlone || threadIdx.x < 32) table.fill(args, ptx::just_in_time(slot));
            all_sync();
        }
        const Shared<int> words = table.words();
        if (ptx::uniform(words[kAllRowsWord]) == 0) return false;
        whole_from = ptx::uniform(words[kWholeFromWord]);
        whole_to = ptx::uniform(words[kWholeToWord]);
        if (words[kEndWord] > words[kBeginWord]) load_queries(words[kRowsWord]);
        all_sync();
        return true;
    }
    // All copies are on their way before the first is waited for.
    TILE_DEVICE void load_queries(int rows) const {
        constexpr int kChunks = kPanels * 8;  // of 16 bytes in a row
        const auto at = [](int row, int c) {
            return kAtQ + (c / 8 * kRows + row) * kPanelRowBytes + (c % 8 ^ row % 8) * 16;
        };
        const int thread = ptx::just_in_time(threadIdx.x);
        const Shared<int64_t> queries = table.queries();
        for (int n = thread; n < kRows * kChunks; n += kComputing) {
            const int row = n / kChunks, c = n % kChunks;
            const int64_t from = int64_t(queries[row]) + 8 * c;
            ptx::copy_async_16(ptx::shared_address(at(row, c)), static_cast<const Element*>(args.q) + from,
                               row < rows ? 16 : 0);
        }
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        if (Rule::kLinear && args.scores.scale_log2 <= 0.0f) {
            const uint32_t sign = args.scores.scale_log2 < 0.0f ? 0x80008000u : 0u, kept = sign ? ~0u : 0u;
            for (int n = thread; n < kRows * kChunks; n += kComputing) {
                const Shared<Vector16> to(at(n / kChunks, n % kChunks));
                Vector16 x = to[0];
#pragma unroll
                for (int i = 0; i < 4; i++) x.word[i] = (x.word[i] & kept) ^ sign;
                to[0] = x;
            }
        }
        ptx::fence_async_proxy();
    }

    // ---- a piece ----------------------------------------------------------------------------------------------------
    // Where this thread keeps four values of O while the next piece, or of_groups the next group, is computed: beside
    // those of its neighbours
    TILE_DEVICE Global<Vector16> fold_place(bool of_groups, int n) const {
        const int64_t block = of_groups * int64_t(gridDim.x) + blockIdx.x;
        const int64_t at = (block * kFoldPlaces + n) * kComputing + threadIdx.x;
        return Global<float>{mla.folds + 4 * at}.template as<Vector16>();
    }
    // A row's sum of weights, against the reference max, is joined with that of what came before
    TILE_DEVICE MaxSum join_row(int row, bool first, MaxSum before, float all, float max) const {
        const Shared<float> factors = sFactors(), folded = sFolded();
        if (!first) {
            const Fold fold = fold_of(before.max, max);
            factors[2 * row] = fold.before;
            factors[2 * row + 1] = fold.after;
            all = fold.join(before.sum, all);
            max = fold.max;
        }
        folded[2 * row] = max;
        folded[2 * row + 1] = all;
        return {max, all};
    }
    // This piece's sum with those of the pieces before it in its group
    TILE_DEVICE void join_piece(int row, bool first, float all, float max) const {
        const Shared<float> folded = sFolded();
        join_row(row, first, MaxSum{folded[2 * row], folded[2 * row + 1]}, all, max);
    }
    // This group's sums with those of the groups before it. last: none follows
    TILE_DEVICE void join_group(bool first, bool last) const {
        const int row = threadIdx.x;
        if (row >= kRows) return;
        const int64_t places = int64_t(2 * gridDim.x) * kRows * kValueDim / 2;
        const Global<MaxSum> before{reinterpret_cast<MaxSum*>(mla.folds) + places + blockIdx.x * kRows};
        const Shared<float> folded = sFolded();
        MaxSum kept{};
        if (!first) kept = before[row];
        kept = join_row(row, first, kept, folded[2 * row + 1], folded[2 * row]);
        if (!last) before[row] = kept;
    }
    // What each row of O is to be multiplied with, to shared memory, for all pieces are in; and the rows' LSE, or the
    // sums of their states
    TILE_DEVICE Shared<float> end_rows(const DecodeItem& item) const {
        // Not where end_piece has its factors, which other threads may still read
        const Shared<float> factors = sSums(), folded = sFolded();
        const int n = threadIdx.x;
        if (n < item.rows) {
            const int64_t target = Target(table.target()[n]).at;
            const float max = folded[2 * n], all = folded[2 * n + 1];
            factors[n] = 1.0f;
            if (target >= 0 && target % 2) {
                put_ml(args, target / (2 * kValueDim), max, all);
            } else if (target >= 0) {
                const DecodeRow row = row_of(args, item, n);
                const RowEnd end = end_row(args, row.head, max, all);
                factors[n] = end.factor;
                store_lse(args, row, caller_of(args, item, row), end.lse);
            }
        }
        all_sync();
        return factors;
    }
    // The table of an item is no longer read: the rows of another take the places of these.
    TILE_DEVICE void leave_table(int slot) const {
        if constexpr (kLooksAhead) ptx::barrier_arrive(kFreeBarriers + slot % 2, kComputing + 32);
        else all_sync();
    }
};

// A piece of an item that begins with block `at`. Pieces are counted from the range's first block, even if a window
// hides it. The state of a piece is folded into that of the pieces before it in its group, and that of a group into
// that of the groups before it, as merging does.
struct PieceOf {
    int stop;
    bool first, closes, last;  // of its group; the last one of it that there is; the last one of all
    bool first_group;
    TILE_DEVICE PieceOf(const Table& table, int at) {
        const Span blocks = blocks_of(table.span());
        const int start = table.words()[kStartWord] / kKeys, fold = table.words()[kStateFoldWord] & 0xffff;
        const int whole = fold > 0 ? fold : 1 << 30, number = (at - start) / whole, end = start + (number + 1) * whole;
        stop = fold > 0 && end < blocks.end ? end : blocks.end;
        last = stop == blocks.end;
        first = at == blocks.begin || number % kStateGroup == 0;
        closes = last || number % kStateGroup == kStateGroup - 1;
        first_group = number / kStateGroup == (blocks.begin - start) / whole / kStateGroup;
    }
};
template <class Body> TILE_DEVICE void end_piece(Body& body, const PieceOf& of) {
    body.join_sums(of.first);
    bool more = of.closes && !(of.first_group && of.last), loads = !of.first, stores = !of.closes;
#pragma unroll 1
    for (int level = 0; level < 2; level++) {
        body.fold_output(level > 0, loads, stores);
        if (!more) break;
        more = false, loads = !of.first_group, stores = !of.last;
        body.all_sync();  // factors have been read
        body.join_group(of.first_group, of.last);
        body.all_sync();
    }
}

// All items of this block. A body begins, adds blocks of keys to a piece, ends a piece, and stores an item's result.
template <class Body> TILE_DEVICE void walk_items(Body& body) {
    for (int slot = 0; slot < body.args.slots; slot++) {
        if (!body.begin(slot)) break;  // no item follows an empty one
        const Table& table = body.table;
        const Span span = table.span();
        int at = ptx::uniform(blocks_of(span).begin);
#pragma unroll 1
        while (true) {
            body.add_blocks(at, ptx::uniform(PieceOf(table, at).stop), span);
            // Looked up once more: of these numbers none takes a register from the loop over blocks.
            const PieceOf piece(table, ptx::just_in_time(at));
            end_piece(body, piece);
            if (ptx::uniform(piece.last)) break;
            at = ptx::uniform(piece.stop);
        }
        body.store(slot);
    }
}

// After its items, if there are such sequences: the results of those that have several states
TILE_DEVICE void merge_items(const DecodeArgs& args, Mergers all) {
    if (args.sequences * int(args.merge_jobs.divisor) <= int(gridDim.x)) merge_together(args, all);
    else merge_apart<WholeRow, kRowAtOnce>(args, all);
}
