// How keys and values come to a warp of the decode kernel: a ring of its own, kStages chunks of sixteen tokens, K then V, and their
// scales. The warp asks for a chunk as soon as it is done with the one whose place it takes, across the ends of items, so what it
// waits for is always kStages chunks old and nobody else has a say in it.
//
// A chunk lies in panels: kPanelBytes of each of its sixteen rows, the largest power of two that divides a row and has a swizzle.
// kTma: it comes as boxes of a tensor map; else, and for pages that no box of sixteen tokens fits in, by cp.async of 16 bytes.
#pragma once
#include "sm90/decode_work.cuh"
#include "tile/hopper.cuh"
#include "tile/mma.cuh"
#include "tile/quant.cuh"

constexpr int kChunk = 16;  // tokens
constexpr int kItemWords = sizeof(DecodeItem) / 4;
constexpr int kRowBytes = kHeadDim * bits_of_format(kFormat) / 8;
constexpr int panel_bytes() { return kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : kRowBytes % 32 == 0 ? 32 : 16; }
constexpr int kPanelBytes = panel_bytes(), kPanelChunks = kPanelBytes / 16, kRowChunks = kRowBytes / 16;
constexpr int kChunkBytes = kChunk * kRowBytes, kStageBytes = 2 * kChunkBytes;
static_assert(!kTma || kPageSize % kChunk == 0, "a box of sixteen tokens lies in one page");

// Scales: K's, V's, then the zeros of both, sixteen tokens each
constexpr bool kScaled = kFormat != Format::bits16, kZeros = kFormat == Format::int4;
constexpr int kGroups = kZeros ? (kHeadDim + kGroupSize - 1) / kGroupSize : 1;
constexpr int kScaleSize = kZeros ? 2 : 4, kScalePart = kChunk * kGroups * kScaleSize;  // bytes: of one; of sixteen tokens'
template <bool kHalf> struct BitsOf { using Type = uint32_t; };
template <> struct BitsOf<true> { using Type = uint16_t; };
using ScaleBits = BitsOf<kZeros>::Type;
constexpr int kScaleParts = !kScaled ? 0 : kZeros ? 4 : 2;
constexpr int kScaleBytes = kScaleParts * kScalePart;
constexpr bool kCopies = !kTma || (kScaled && kScaleRuns);  // something comes by cp.async

// Shared memory: the tiles' ring if there is one (decode_tile.cuh) and the warps' rings on 1024 bytes, as the swizzle wants, their
// scales, barriers, then what warps have of a range whose pieces they fold: its lanes' O, then m and l.
constexpr int kAtRings = kTileStages * 2 * 64 * ((kHeadDim + 63) / 64 * 128);
constexpr int kAtScales = (kAtRings + kWarps * kStages * kStageBytes + 1023) / 1024 * 1024;
constexpr int kStreamers = kWarps + kJoiners;  // the last of them stream when their tiles are done
constexpr int kAtStreamBarriers = kAtScales + kWarps * kStages * kScaleBytes;
constexpr int kAtTileBarriers = kAtStreamBarriers + kStreamers * kStages * 8;
constexpr int kAtTaken = kAtTileBarriers + kTileStages * 16;                      // beside tiles: how many items have been taken
constexpr int kAtTileSeen = (kAtTaken + 8 + 15) / 16 * 16;                        // per thread: what its rows see
constexpr int kAtTilePlace = kAtTileSeen + (kTileStages ? 256 * 16 : 0);          // and where they go
constexpr int kAtFold = kAtTilePlace + (kTileStages ? 256 * 8 : 0);
constexpr int kFoldBytes = kRows * kHeadDim * 4 + kRows / 8 * 2 * 32 * 8;
// Warps that join have both where the tiles were.
constexpr int kJoinerBytes = (kStages * kStageBytes + kFoldBytes + 1023) / 1024 * 1024;
static_assert(kJoiners * kJoinerBytes <= kAtRings, "no room where the tiles were");
TILE_DEVICE uint32_t ring_of(int rank) { return rank < kWarps ? kAtRings + rank * kStages * kStageBytes : (rank - kWarps) * kJoinerBytes; }
TILE_DEVICE uint32_t fold_of_warp(int rank) {
    return rank < kWarps ? kAtFold + rank * kFoldBytes : (rank - kWarps) * kJoinerBytes + kStages * kStageBytes;
}

// Chunk c of row r in a chunk of tokens at `at`, by its offset in shared memory
TILE_DEVICE uint32_t place_of(uint32_t at, int row, int c) {
    const int turn = kPanelBytes == 128 ? row & 7 : kPanelBytes == 64 ? row >> 1 & 3 : kPanelBytes == 32 ? row >> 2 & 1 : 0;
    return at + c / kPanelChunks * (kChunk * kPanelBytes) + row * kPanelBytes + ((c % kPanelChunks) ^ turn) * 16;
}

// What comes of an item without tokens: decode_merge.cuh
TILE_DEVICE void put_empty(const DecodeArgs& args, const DecodeItem& item);

struct Loader {
    const DecodeArgs& args;
    const TensorMap &mK, &mV;
    const int rank, lane;  // rank: of this warp among those of its block that stream
    int next;              // where there are no tiles: the item that is this warp's next
    int taken, begun;      // how many items with tokens were taken, and how many of them the warp has begun with;
    int slots;             // lane n's: which the n-th was, counted round and round
    bool more;
    // What is asked for next: chunk `chunk` of the item at hand
    int chunk, end, kv_head;
    Span span;
    PageTable table;
    int page;    // of that chunk, or of this lane's token of it; looked up a chunk ahead
    bool fresh;  // the item's first chunk, which is asked for before its end is known
    int word;    // a lane's of that item

    TILE_DEVICE Loader(const DecodeArgs& a, const TensorMap& k, const TensorMap& v, int w)
        : args(a), mK(k), mV(v), rank(w), lane(warp::lane()), next(w), taken(0), begun(0), slots(0), more(true), chunk(0), end(0), kv_head(0),
          span{0, 0}, table{0, 0}, page(0), fresh(false), word(0) {}

    TILE_DEVICE uint32_t keys(int stage) const { return ring_of(rank) + stage * kStageBytes; }
    TILE_DEVICE uint32_t values(int stage) const { return keys(stage) + kChunkBytes; }
    // Part 0: K's scales, 1: V's, 2 and 3: their zeros
    TILE_DEVICE uint32_t scales(int stage, int part) const { return kAtScales + (rank * kStages + stage) * kScaleBytes + part * kScalePart; }
    TILE_DEVICE uint32_t barrier(int stage) const { return ptx::shared_address(uint32_t(kAtStreamBarriers + (rank * kStages + stage) * 8)); }
    // By all threads of a block, a barrier each; and what the first copy would wait for is asked for: the maps, and the items that the
    // last kWarps warps begin with.
    static TILE_DEVICE void init(const DecodeArgs& args, const TensorMap& mK, const TensorMap& mV) {
        const int slot = int(threadIdx.x / 32) - int(blockDim.x / 32 - kWarps);
        if (threadIdx.x % 32 == 0 && slot >= 0 && slot < args.slots) ptx::touch(args.items + int64_t(blockIdx.x) * args.slots + slot);
        if constexpr (kTma) {
            if (threadIdx.x < kStreamers * kStages) {
                ptx::mbarrier_init(ptx::shared_address(uint32_t(kAtStreamBarriers + 8 * threadIdx.x)), 1);
                ptx::fence_mbarrier_init();
            }
            if (threadIdx.x == blockDim.x - 32) {
                ptx::prefetch_tensor_map(&mK);
                ptx::prefetch_tensor_map(&mV);
            }
        }
    }

    // A block's items stand together. Where there are no tiles a warp has every kWarps-th; beside tiles whoever is free takes the next.
    static TILE_DEVICE DecodeItem item(const DecodeArgs& args, int slot) { return load_item(args.items, int64_t(blockIdx.x) * args.slots + slot); }
    TILE_DEVICE int take() {
        int slot = next;
        if constexpr (kTileStages > 0) slot = ptx::shuffle(lane == 0 ? ptx::atomic_add_shared(ptx::shared_address(uint32_t(kAtTaken)), 1) : 0, 0);
        else next += kWarps;
        return slot;
    }
    static TILE_DEVICE int field(int words, int n) { return ptx::shuffle(words, n); }  // in the order of DecodeItem

    // Does the warp have an item to begin with? Which?
    TILE_DEVICE bool has_item() const { return begun < taken; }
    TILE_DEVICE int begin_item() { return ptx::shuffle(slots, begun++ % 32); }

    TILE_DEVICE void start() {
        settle();
        for (int stage = 0; stage < kStages; stage++) ask(stage);
    }
    // On to the next item that has a chunk, if this one has no more; then the page
    TILE_DEVICE void settle() {
        while (chunk >= end) {
            if (!more) return;
            const int slot = take(), ahead = slot + (kTileStages > 0 ? kStreamers : kWarps);
            const Global<const int> gItems{reinterpret_cast<const int*>(args.items + int64_t(blockIdx.x) * args.slots)};
            word = slot < args.slots ? int(gItems[slot * kItemWords + lane % kItemWords]) : 0;
            if (lane == 0 && ahead < args.slots) ptx::touch(args.items + int64_t(blockIdx.x) * args.slots + ahead);
            const int rows = field(word, 2), caller_head = field(word, 3);
            if (rows == 0) {  // nor is there anything after it
                more = false;
                return;
            }
            kv_head = caller_head & 0xfff;
            const int group = args.group.divisor, head = lane * 64 / kHeadDim;  // of the first token's Q, a line a lane
            if (head < rows && head < group)
                ptx::touch(static_cast<const Element*>(args.q) + (caller_head >> 12) * args.q_strides.batch +
                           (kv_head * group + head) * args.q_strides.head + lane * 64 % kHeadDim);
            table = {field(word, 4), field(word, 9)};
            page = field(word, 8);
            fresh = kTma && (!kScaled || kScaleRuns) && page >= 0 && args.left >= kFar;
            if (!fresh) {
                measure();
                if (chunk >= end) {
                    put_empty(args, item(args, slot));
                    continue;
                }
            }
            if (lane == taken % 32) slots = slot;  // of those not begun with there are never more than chunks in the ring
            taken++;
            if (!fresh) continue;
            chunk = field(word, 5) / kChunk;
            end = chunk + 1;
            // What the second chunk waits for is looked up together, and while the first is on its way.
            ptx::touch(args.lengths + table.sequence);
            if ((chunk + 1) * kChunk / kPageSize < table.tail_from)
                ptx::touch(args.pages + int64_t(table.sequence) * args.table_pages + (chunk + 1) * kChunk / kPageSize);
            return;
        }
        if constexpr (kTma) {
            page = table.page(args, chunk * kChunk / kPageSize);
        } else {
            const int token = chunk * kChunk + lane % kChunk;
            page = token >= span.begin && token < span.end ? table.page(args, token / kPageSize) : 0;
        }
    }
    // Where the item begins and ends; nowhere if it is of a piece that the sequence does not reach
    TILE_DEVICE void measure() {
        span = span_of(args, field(word, 14) & kOwn, field(word, 5), field(word, 6), Global<const int>{args.lengths}[table.sequence]);
        chunk = span.begin / kChunk;
        end = span.end > span.begin ? (span.end + kChunk - 1) / kChunk : 0;
    }

    // The chunk at hand into `stage`, which all lanes are done with; then on to the next
    TILE_DEVICE void ask(int stage) {
        if (chunk < end) {
            if constexpr (kTma) ask_by_tma(stage);
            else ask_by_copies(stage);
            if constexpr (kScaled && !kScaleRuns) fetch_scales(stage);
            if (fresh) measure();
            fresh = false;
            chunk++;
            settle();
        }
        if constexpr (kCopies) ptx::copy_async_commit();  // also of nothing: groups are counted
    }
    // Until `stage`, whose turn it is, is there
    TILE_DEVICE void wait(Turn<kStages> turn) const {
        if constexpr (kTma) ptx::mbarrier_wait(barrier(turn.stage), turn.lap);
        if constexpr (kCopies) ptx::copy_async_wait<kStages - 1>();
        if constexpr (kCopies || kScaled) ptx::sync_warp();  // other lanes' copies
    }

    TILE_DEVICE const uint8_t* scale_of(const Paged& part, int page, int token, int group = 0) const {
        return static_cast<const uint8_t*>(part.base) +
               kScaleSize * (page * part.page + token * part.token + kv_head * part.head + group * part.group);
    }
    TILE_DEVICE const Paged& scale_part(int part) const {
        return part == 0 ? args.k_scale : part == 1 ? args.v_scale : part == 2 ? args.k_zero : args.v_zero;
    }

    TILE_DEVICE void ask_by_tma(int stage) const {
        if constexpr (kScaled && kScaleRuns) copy_scales(stage, page);
        if (lane != 0) return;
        const uint32_t full = barrier(stage);
        const int token = chunk * kChunk % kPageSize;
        ptx::mbarrier_arrive_expect(full, kStageBytes);
        if constexpr (kTileStages > 0) {  // what is read once must not push shared nodes out of the L2 cache
            ptx::tma_load_once(ptx::shared_address(keys(stage)), &mK, full, 0, token, 0, kv_head, page);
            ptx::tma_load_once(ptx::shared_address(values(stage)), &mV, full, 0, token, 0, kv_head, page);
        } else {
            ptx::tma_load(ptx::shared_address(keys(stage)), &mK, full, 0, token, 0, kv_head, page);
            ptx::tma_load(ptx::shared_address(values(stage)), &mV, full, 0, token, 0, kv_head, page);
        }
    }
    // Scales that lie in runs, 16 bytes a lane: one instruction for all, where each copy by TMA keeps a warp waiting for its unit.
    TILE_DEVICE void copy_scales(int stage, int at) const {
        const int token = chunk * kChunk % kPageSize;
        for (int n = lane; n < kScaleBytes / 16; n += 32) {
            const int part = n / (kScalePart / 16), piece = n % (kScalePart / 16);
            ptx::copy_async_16(ptx::shared_address(scales(stage, part) + 16 * piece), scale_of(scale_part(part), at, token) + 16 * piece, 16);
        }
    }
    // Tokens outside the span become zeros, and their pages are not looked at.
    TILE_DEVICE void ask_by_copies(int stage) const {
        constexpr int kWhole = kChunk * kRowChunks / 32;
        static_assert(kChunk * kRowChunks % 32 == 0 || kRowChunks == 3, "whole copies for all lanes");
#pragma unroll
        for (int i = 0; i < (kChunk * kRowChunks + 31) / 32; i++) {
            const int n = i * 32 + lane, row = n / kRowChunks % kChunk, c = n % kRowChunks, token = chunk * kChunk + row;
            const int64_t at = ptx::shuffle(page, row);
            const bool there = token >= span.begin && token < span.end;
            if (i >= kWhole && n >= kChunk * kRowChunks) continue;
            const Paged* parts[2] = {&args.k, &args.v};
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const uint8_t* from = static_cast<const uint8_t*>(parts[p]->base);
                if (there) from += at * parts[p]->page + token % kPageSize * parts[p]->token + kv_head * parts[p]->head + 16 * c;
                ptx::copy_async_16(ptx::shared_address(place_of(p ? values(stage) : keys(stage), row, c)), from, there ? 16 : 0);
            }
        }
        if constexpr (kScaled && kScaleRuns) copy_scales(stage, ptx::shuffle(page, lane_of_first()));  // a run lies in one page
    }
    TILE_DEVICE int lane_of_first() const { return span.begin > chunk * kChunk ? span.begin - chunk * kChunk : 0; }
    // Scales that do not lie in runs: number by number
    TILE_DEVICE void fetch_scales(int stage) const {
        constexpr int kAll = kChunk * kGroups;
        for (int i = 0; i < (kAll + 31) / 32; i++) {
            const int n = i * 32 + lane, row = n / kGroups % kChunk, group = n % kGroups, token = chunk * kChunk + row;
            const int at = kTma ? page : ptx::shuffle(page, row);
            const bool there = n < kAll && token >= span.begin && token < span.end;
#pragma unroll
            for (int part = 0; part < kScaleParts; part++) {
                ScaleBits x = 0;
                if (there) x = Global<const ScaleBits>{reinterpret_cast<const ScaleBits*>(scale_of(scale_part(part), at, token % kPageSize, group))}[0];
                if (n < kAll) Shared<ScaleBits>(scales(stage, part))[n] = x;
            }
        }
    }

    // V's rows and scales outside the span become zeros: they may hold anything, and 0 · NaN is NaN. By copies they are already.
    TILE_DEVICE void clear_outside(int stage, int first_token, Span of) const {
        if constexpr (kTma) {
            const auto outside = [&](int row) { return first_token + row < of.begin || first_token + row >= of.end; };
            for (int n = lane; n < kChunk * kRowChunks; n += 32)
                if (outside(n / kRowChunks)) Shared<Vector16>(place_of(values(stage), n / kRowChunks, n % kRowChunks))[0] = Vector16{};
        }
        if constexpr (kScaled && kScaleRuns)
            for (int n = lane; n < kChunk * kGroups; n += 32)
                if (first_token + n / kGroups < of.begin || first_token + n / kGroups >= of.end) {
                    Shared<ScaleBits>(scales(stage, 1))[n] = 0;
                    if constexpr (kZeros) Shared<ScaleBits>(scales(stage, 3))[n] = 0;
                }
        if constexpr (kTma) ptx::fence_async_proxy();  // before TMA writes there again
        ptx::sync_warp();
    }
};
