// The tile body of cards without wgmma, for nodes of the prefix tree that many rows share: the four warps of a block
// take an item of up to kTileRows rows over its tokens, kTile of them at a time, which come by cp.async through a ring
// that all four read.
//
// A warp has kM sixteens of the rows, sixteen number 4m + warp, so that few rows are spread over all warps. Q stays in
// shared memory. With two sixteens each fragment of K and V serves two products. The rows may belong to any sequences
// below the node; at the ends of the node, and under a window, tiles are masked row by row.
#pragma once
#include "decode/stream.cuh"
#include "decode/warps.cuh"
#include "tile/lazy.cuh"
#include "tile/mma_rows.cuh"

constexpr int kTile = kMmaTile, kTileThreads = 32 * kTileWarps, kM = kTileRows / (16 * kTileWarps);
static_assert(kM * 16 * kTileWarps == kTileRows && kTileRows <= kTileThreads, "a thread looks up one row");
static_assert(kTileStages >= 2, "a tile is loaded while the one before is computed");
constexpr int kWitness = 256;  // a lane's sum up to which the lazy softmax keeps its reference: tile/lazy.cuh

using TileQ = SharedTile<Element, kTileRows, kHeadDim, Layout::swizzled>;
using TileK = SharedTile<Element, kTile, kHeadDim, Layout::swizzled>;
using TileV = SharedTile<Element, kTile, kValueDim, Layout::swizzled>;
static_assert(TileQ::kBytes == kMmaQBytes && TileK::kBytes + TileV::kBytes == kMmaStageBytes, "as layout.cuh has it");

TILE_DEVICE DecodeItem tile_item(const DecodeArgs& args, int round) {
    return load_item(args.tile_items, int64_t(round) * gridDim.x + blockIdx.x);
}

// What a thread looks up of a row: what it sees; the number of its row in state_o, or −1 for the output; its Q
TILE_DEVICE Shared<Visible> seen_by_rows() { return Shared<Visible>(kAtMmaRows); }
TILE_DEVICE Shared<const Element*> queries_of_rows() { return Shared<const Element*>(kAtMmaRows + 8 * kTileRows); }
TILE_DEVICE Shared<int> places_of_rows() { return Shared<int>(kAtMmaRows + 16 * kTileRows); }

// ---- K and V --------------------------------------------------------------------------------------------------------
// A tile's chunks of 16 bytes are dealt to the threads: kAcross neighbouring threads copy neighbouring chunks of a row.
template <class Tile, class Each> TILE_DEVICE void each_chunk(Each each) {
    constexpr int kChunks = Tile::kChunks, kAcross = (kChunks & -kChunks) < 32 ? (kChunks & -kChunks) : 32;
    constexpr int kStep = kTileThreads / kAcross;  // rows at a time
    const int row = threadIdx.x / kAcross, chunk = threadIdx.x % kAcross;
#pragma unroll 8
    for (int i = 0; i < (Tile::kRows + kStep - 1) / kStep * (kChunks / kAcross); i++) {
        const int at = row + i / (kChunks / kAcross) * kStep;
        if (Tile::kRows % kStep == 0 || at < Tile::kRows) each(at, chunk + i % (kChunks / kAcross) * kAcross);
    }
}

struct TileLoader {
    const DecodeArgs& args;
    const Span span;
    const PageTable table;
    const int kv_head;
    int page;  // of this thread's token in the tile that is told of next

    TILE_DEVICE TileLoader(const DecodeArgs& a, const DecodeItem& item)
        : args(a), span{item.start, item.stop},
          table(page_table(a, item.table, item.kv_head(), item.tail_from)), kv_head(item.kv_head()), page(0) {}

    TILE_DEVICE int first() const { return span.begin / kTile; }
    TILE_DEVICE int end() const { return span.end > span.begin ? (span.end + kTile - 1) / kTile : first(); }
    static TILE_DEVICE uint32_t keys(int n) { return kMmaQBytes + n % kTileStages * kMmaStageBytes; }
    static TILE_DEVICE uint32_t values(int n) { return keys(n) + TileK::kBytes; }

    // The first 2 · kTile threads have a token each, first of K and then of V.
    static TILE_DEVICE bool has_token() { return threadIdx.x < 2 * kTile; }
    TILE_DEVICE int token_of(int n) const { return n * kTile + int(threadIdx.x) % kTile; }
    TILE_DEVICE bool inside(int token) const { return token >= span.begin && token < span.end; }
    static TILE_DEVICE Shared<const uint8_t*> sources(int n) {
        return Shared<const uint8_t*>(kAtMmaSources + n % kTileStages * 2 * kTile * 8);
    }
    // Of a token outside the span no page is looked at: its number may be anything.
    TILE_DEVICE int page_of(int n) const {
        const int token = token_of(n);
        return has_token() && inside(token) ? table.page(token / kPageSize) : 0;
    }
    // Where the rows of tile n lie, null for those outside the span: memory there may hold anything, and 0 · NaN is NaN
    TILE_DEVICE void tell(int n, int page) const {
        if (!has_token()) return;
        const int token = token_of(n);
        const Paged& of = threadIdx.x < kTile ? args.k : args.v;
        const uint8_t* from = static_cast<const uint8_t*>(of.base) + int64_t(page) * of.page +
                              int64_t(token % kPageSize) * of.token + kv_head * of.head;
        sources(n)[threadIdx.x] = inside(token) ? from : nullptr;
    }
    // Asks for tile n, of which was told before a barrier. There is a group of copies for every tile, even one past the
    // end.
    TILE_DEVICE void load(int n) const {
        if (n < end()) {
            load_part(TileK(keys(n)), n, 0);
            load_part(TileV(values(n)), n, 1);
        }
        ptx::copy_async_commit();
    }
    template <class Tile> TILE_DEVICE void load_part(const Tile& to, int n, int is_v) const {
        const Shared<const uint8_t*> rows = sources(n);
        each_chunk<Tile>([&](int row, int chunk) {
            const uint8_t* from = rows[is_v * kTile + row];
            ptx::copy_async_16(to.address(row, chunk), from ? from + 16 * chunk : args.k.base, from ? 16 : 0);
        });
    }
    // Before a barrier, and after it
    TILE_DEVICE void tell_first() {
        int pages[kTileStages];
#pragma unroll
        for (int i = 0; i < kTileStages; i++) pages[i] = page_of(first() + i);
        page = page_of(first() + kTileStages);
#pragma unroll
        for (int i = 0; i < kTileStages; i++) tell(first() + i, pages[i]);
    }
    TILE_DEVICE void load_first() const {
        for (int n = first(); n < first() + kTileStages - 1; n++) load(n);
    }
    // Waits until tile n is there for all threads, and asks for the one that takes the place of tile n − 1
    TILE_DEVICE void next(int n) {
        ptx::copy_async_wait<kTileStages - 2>();
        ptx::sync_threads();
        load(n + kTileStages - 1);
        tell(n + kTileStages, page);
        page = page_of(n + kTileStages + 1);
    }
};

// ---- the rows of a warp ---------------------------------------------------------------------------------------------
struct TileBody {
    const DecodeArgs& args;
    const int rank;  // of the warp
    float scale_log2;
    float acc_o[kM][kValueDim / 2], acc_s[kM][kTile / 2];
    uint32_t rP[kM][kTile / 16][4];
    warp::RowState state[kM];
    int whole_from, whole_to;  // every row of the warp sees the tokens between these

    TILE_DEVICE TileBody(const DecodeArgs& a, int r) : args(a), rank(r) {
        // A positive scale keeps the order of scores and goes into the exponential's multiply-add. Q takes a negative
        // scale's sign, and is 0 for a scale of 0.
        scale_log2 = !Rule::kLinear ? 1.0f : args.scores.scale_log2 == 0.0f ? 1.0f : fabsf(args.scores.scale_log2);
    }
    TILE_DEVICE int sixteen(int m) const { return kTileWarps * m + rank; }
    TILE_DEVICE int row(int m, int h) const { return 16 * sixteen(m) + warp::fragment_row(h); }

    // ---- the beginning and the end of an item -----------------------------------------------------------------------
    // Looks up what the item's rows see of the span and where they go, one row per thread
    TILE_DEVICE void find_rows(const DecodeItem& item, Span span) const {
        const int n = threadIdx.x;
        if (n >= kTileRows) return;
        const bool exists = n < item.rows;
        const DecodeRow at = row_of(args, item, exists ? n : 0);
        const States states = states_of(args, at.sequence);
        Visible seen{span.begin, span.end - span.begin};
        if (exists && !(item.is(kAllSee) && sees_back_to_first(args)))
            seen = seen_by(args, at, Global<const int>{args.lengths}[at.sequence], span);
        const int64_t caller = Global<const int>{args.order}[at.sequence];
        const Element* q = static_cast<const Element*>(args.q) + caller * args.q_strides.batch +
                           at.token * args.q_strides.row + at.head * args.q_strides.head;
        seen_by_rows()[n] = seen;
        queries_of_rows()[n] = exists ? q : nullptr;
        places_of_rows()[n] =
            states.count == 1 ? -1 : int(state_row(args, states, item.kv_head(), item.state(), at.row));
    }
    // After a barrier: Q, which lies on eight bytes
    TILE_DEVICE void load_q() const {
        const uint32_t sign = Rule::kLinear && args.scores.scale_log2 < 0.0f ? 0x80008000u : 0u;
        const bool zero = Rule::kLinear && args.scores.scale_log2 == 0.0f;
        const TileQ sQ(0);
        each_chunk<TileQ>([&](int row, int chunk) {
            const Element* q = queries_of_rows()[row];
            Vector16 x{};
            if (q && !zero) {
                const Global<const Vector8> g = Global<const Element>{q}.template as<const Vector8>();
                const Vector8 low = g[2 * chunk], high = g[2 * chunk + 1];
                x = {{low.word[0] ^ sign, low.word[1] ^ sign, high.word[0] ^ sign, high.word[1] ^ sign}};
            }
            sQ.chunk(row, chunk) = x;
        });
    }
    TILE_DEVICE void find_whole() {
        const int lane = warp::lane();
        const Visible seen = seen_by_rows()[16 * sixteen(kM == 2 ? lane / 16 : 0) + lane % 16];
        int from = seen.first, to = seen.first + seen.count;
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) {
            const int other_from = ptx::shuffle_xor(from, mask), other_to = ptx::shuffle_xor(to, mask);
            from = other_from > from ? other_from : from;
            to = other_to < to ? other_to : to;
        }
        whole_from = from;
        whole_to = to;
    }
    TILE_DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < kM; m++) {
            warp::zero(acc_o[m]);
            state[m] = warp::RowState();
        }
    }
    TILE_DEVICE void store(const DecodeItem& item) {
#pragma unroll
        for (int i = 0; i < 2 * kM; i++) {
            const int m = i / 2, h = i % 2, n = row(m, h);
            const float sum = warp::row_sum(state[m].sum[h]), max = sum == 0.0f ? kLowest : state[m].max[h];
            if (n >= item.rows) continue;
            const float(&o)[kValueDim / 2] = acc_o[m];
            const int column = warp::lane() % 4;
            const int64_t to = places_of_rows()[n];
            if (to < 0) {
                const DecodeRow at = row_of(args, item, n);
                const RowEnd end = end_row(args, at.head, max, sum);
                const int64_t caller = Global<const int>{args.order}[at.sequence];
                const Global<uint32_t> gO = output_row(args, at, caller).template as<uint32_t>();
#pragma unroll
                for (int c = 0; c < kValueDim / 8; c++)
                    gO[4 * c + column] =
                        pack<Element>(o[4 * c + 2 * h] * end.factor, o[4 * c + 2 * h + 1] * end.factor);
                if (column == 0) store_lse(args, at, caller, end.lse);
            } else {
                const Global<Vector8> gO = Global<float>{args.state_o + to * kValueDim}.template as<Vector8>();
#pragma unroll
                for (int c = 0; c < kValueDim / 8; c++)
                    gO[4 * c + column] = Vector8{{as_bits(o[4 * c + 2 * h]), as_bits(o[4 * c + 2 * h + 1])}};
                if (column == 0) put_ml(args, to, max, sum);
            }
        }
    }

    // ---- a tile -----------------------------------------------------------------------------------------------------
    // kCount: the sixteens of this warp that have rows
    template <int kCount, class T, int kSize> static TILE_DEVICE T (&some(T (&x)[kM][kSize]))[kCount][kSize] {
        return reinterpret_cast<T(&)[kCount][kSize]>(x);
    }
    // S = Q Kᵀ
    template <int kCount> TILE_DEVICE void multiply_qk(const TileK& sK) {
        const int lane = ptx::just_in_time(warp::lane());  // addresses kept from tile to tile would take registers
#pragma unroll
        for (int m = 0; m < kCount; m++) warp::zero(acc_s[m]);
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; step++) {
            uint32_t a[1][kCount][4];
#pragma unroll
            for (int m = 0; m < kCount; m++) warp::load_a(a[0][m], TileQ(0), 16 * sixteen(m), step, lane);
            warp::mma_qk_step(some<kCount>(acc_s), a, sK, step, lane);
        }
    }
    // S of one sixteen once more: both operands are still in shared memory
    TILE_DEVICE void again(int m, const TileK& sK) {
        const int lane = ptx::just_in_time(warp::lane());
        float(&s)[1][kTile / 2] = reinterpret_cast<float(&)[1][kTile / 2]>(acc_s[m]);
        warp::zero(s[0]);
#pragma unroll 1  // it runs rarely, and must not take registers from the steps that always run
        for (int step = 0; step < kHeadDim / 16; step++) {
            uint32_t a[1][1][4];
            warp::load_a(a[0][0], TileQ(0), 16 * sixteen(m), step, lane);
            warp::mma_qk_step(s, a, sK, step, lane);
        }
        score(m);
    }
    TILE_DEVICE void score(int m) {
        if constexpr (!Rule::kLinear) Rule::apply(acc_s[m], args.scores, Rule::first_factor(args.scores));
    }
    // The careful way: a tile that some row of the warp does not see whole, and the first of a span
    TILE_DEVICE void careful(int m, int first_token, bool whole) {
        float correction[2];
        score(m);
        if (!whole)
#pragma unroll
            for (int h = 0; h < 2; h++) warp::mask_row(acc_s[m], h, first_token, Visible(seen_by_rows()[row(m, h)]));
        warp::online_softmax(acc_s[m], correction, state[m], scale_log2);
        warp::scale_rows(acc_o[m], correction);
    }
    // The lazy softmax, which looks for no maximum: tile/lazy.cuh
    TILE_DEVICE void quick(int m, const TileK& sK) {
        float sum[2], correction[2];
        score(m);
        if (!warp::lazy_softmax<kWitness>(acc_s[m], sum, state[m], scale_log2)) {
            warp::add_sums(state[m], sum);
            return;
        }
        warp::raise<0>(acc_s[m], sum, correction, state[m], scale_log2, [&](float(&)[kTile / 2]) { again(m, sK); });
        warp::scale_rows(acc_o[m], correction);
    }
    template <int kCount> TILE_DEVICE void add_tile(int n, bool first) {
        const TileK sK(TileLoader::keys(n));
        const TileV sV(TileLoader::values(n));
        multiply_qk<kCount>(sK);
        const bool whole = n * kTile >= whole_from && (n + 1) * kTile <= whole_to;
        if (first || !whole) {
#pragma unroll
            for (int m = 0; m < kCount; m++) careful(m, n * kTile, whole);
        } else {
#pragma unroll
            for (int m = 0; m < kCount; m++) quick(m, sK);
        }
#pragma unroll
        for (int m = 0; m < kCount; m++) warp::to_operand<Element>(rP[m], acc_s[m]);
        // O += P V
        warp::mma_pv(some<kCount>(acc_o), reinterpret_cast<uint32_t(&)[kCount][kTile / 16][4]>(rP), sV);
    }
    template <int kCount> TILE_DEVICE void add_span(TileLoader& loader) {
#pragma unroll 1
        for (int n = loader.first(); n < loader.end(); n++) {
            loader.next(n);
            if constexpr (kCount > 0) add_tile<kCount>(n, n == loader.first());
        }
    }
    TILE_DEVICE void run() {
#pragma unroll 1
        for (int round = 0; round < args.tile_rounds; round++) {
            const DecodeItem item = tile_item(args, round);
            if (item.rows == 0) break;  // no item follows an empty one
            clear();
#pragma unroll 1
            for (bool goes_on = false;; goes_on = true) {
                const DecodeItem at = tile_item(args, ptx::just_in_time(round));
                TileLoader loader(args, at);
                ptx::sync_threads();  // nobody needs the memory any more
                // The rows of a chain stay, and see all tokens of the nodes that they go on with.
                if (!goes_on) find_rows(at, loader.span);
                else if (threadIdx.x < kTileRows)
                    seen_by_rows()[threadIdx.x] = Visible{loader.span.begin, loader.span.end - loader.span.begin};
                loader.tell_first();
                ptx::sync_threads();
                loader.load_first();
                if (!goes_on) load_q();
                find_whole();
                const int rows = ptx::uniform(at.rows);
                if (kM == 2 && rows > 16 * sixteen(1)) add_span<kM>(loader);
                else if (rows > 16 * sixteen(0)) add_span<1>(loader);
                else add_span<0>(loader);
                if (!tile_item(args, ptx::just_in_time(round)).is(kGoesOn)) break;
                round++;
            }
            store(tile_item(args, ptx::just_in_time(round)));
        }
    }
};
