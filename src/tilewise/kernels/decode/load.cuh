// How keys and values come to a streaming warp of the decode kernels: through a ring of its own with kStages chunks of
// tokens, each K then V, and their scales. As soon as a warp is done with a chunk it requests the one that takes its
// place, across the ends of items. So a chunk was requested kStages chunks before the warp waits for it, and no warp
// depends on another.
//
// A chunk is one box of tokens, or two boxes of sixteen where a page may end between them. A box lies in panels of
// kPanelBytes of each of its rows: the largest power of two that divides a row and has a swizzle. With kTma a box comes
// by a tensor map; on cards without it, or if a box may lie in several pages, by cp.async in units of 16 bytes.
#pragma once
#include "decode/work.cuh"
#include "tile/hopper.cuh"
#include "tile/mma.cuh"
#include "tile/quant.cuh"

constexpr bool kScaled = kFormat != Format::bits16 && kFormat != Format::bits32, kZeros = kFormat == Format::int4;
constexpr int kGroups = kZeros ? (kHeadDim + kGroupSize - 1) / kGroupSize : 1;
// Tokens per chunk. Sixteen tokens of int4 are so few bytes that waiting, requesting and bookkeeping would be half of
// the work; with more than two groups of channels there are no registers for 32.
constexpr int kChunk = kZeros && kHeadDim <= 128 && kGroups <= 2 ? 32 : 16, kTiles = kChunk / 16;
constexpr int kBox = kPageSize % kChunk == 0 ? kChunk : 16, kBoxes = kChunk / kBox;
constexpr int kRowBytes = kHeadDim * bits_of_format(kFormat) / 8;
constexpr int panel_bytes() {
    return kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : kRowBytes % 32 == 0 ? 32 : 16;
}
constexpr int kPanelBytes = kLineHeads > 1 ? 128 : panel_bytes(), kPanelChunks = kPanelBytes / 16;
constexpr int kRowChunks = kRowBytes / 16;
constexpr bool kWholeBoxes = kPageSize % kBox == 0;  // a box lies in one page
constexpr int kChunkBytes = kChunk * kRowBytes, kStageBytes = 2 * kChunkBytes, kBoxBytes = kBox * kRowBytes;
static_assert(!kTma || kWholeBoxes, "a tensor map brings what lies in one page");
// Without TMA: rows per copy of a warp, 16 bytes per lane
constexpr int kCopyRows = 32 / kPanelChunks < kBox ? 32 / kPanelChunks : kBox;
// kInStep: the warps of a block stream the same tokens of neighbouring heads, and one copy brings a chunk for all of
// them. The last warp to be done with a stage requests its next chunk. A row of int4 is only 64 bytes: warps that drift
// apart would request such short pieces from places all over the memory.
static_assert(!kInStep || (kTma && kTileStages == 0), "boxes of several heads");
constexpr int kHeads = kInStep ? kWarps : 1, kBoxStep = kHeads * kBoxBytes;  // heads per box; bytes from box to box
// kLineHeads: the rows of this many heads are one line of 128 bytes and are copied as one, because L2 serves a limited
// number of requests however short they are.
static_assert(kLineHeads == 1 || (kInStep && kLineHeads * kRowBytes == 128 && kWarps % kLineHeads == 0), "whole lines");

// Scales of a chunk, in parts: those of K, those of V, then the zero points of both
constexpr int kScaleSize = kZeros ? 2 : 4, kTokenScales = kGroups * kScaleSize;  // bytes of one scale, and of a token's
constexpr int kScalePart = kChunk * kTokenScales;
template <bool kHalf> struct BitsOf { using Type = uint32_t; };
template <> struct BitsOf<true> { using Type = uint16_t; };
using ScaleBits = BitsOf<kZeros>::Type;
constexpr int kScaleParts = !kScaled ? 0 : kZeros ? 4 : 2;
constexpr int kScaleBytes = kScaleParts * kScalePart;
// A run is the scales of sixteen tokens of one part. It is copied 16 bytes per lane, which takes kTokenScales lanes.
constexpr int kRunLanes = 32 / kTiles;  // lanes that share a run's sixteen tokens
constexpr int kScaleRounds = kScaleRuns ? (kScaleParts * kTokenScales + kRunLanes - 1) / kRunLanes : 0;
struct ScaleRun {
    const uint8_t* from;  // a lane's 16 bytes in page 0
    uint32_t page_bytes;
};
constexpr bool kCopies = !kTma || (kScaled && kScaleRuns);  // something comes by cp.async

// Shared memory, in this order: the ring of tiles if there is one (tile_load.cuh), what of Q tiles read there, and the
// ring of codes that become tiles (tile_widen.cuh); the rings of the warps, on 1024 bytes as the swizzle wants; their
// scales; barriers and counters; what the threads of tiles look up rarely; what the tokens of quantised tiles are
// multiplied with; and per warp the saved state of a range that it folds piece by piece: O, then the MaxSum, lane by
// lane.
//
// Tiles by mma.sync (tile_mma.cuh) are computed while no warp of the block streams, in the same memory: Q, the ring of
// K and V, what is looked up of the rows, and where the tokens of the ring's tiles come from. The counter lies after
// both.
constexpr bool kTilesByMma = kTileStages > 0 && !kTma;
constexpr int kMmaTile = 32, kTileWarps = 4;
constexpr int kMmaQBytes = kTileRows * kHeadDim * 2, kMmaStageBytes = 2 * kMmaTile * kHeadDim * 2;
constexpr int kAtMmaRows = kMmaQBytes + kTileStages * kMmaStageBytes, kAtMmaSources = kAtMmaRows + 20 * kTileRows;
constexpr int kMmaBytes = kTilesByMma ? kAtMmaSources + kTileStages * 2 * kMmaTile * 8 : 0;
constexpr bool kTilesByWgmma = kTileStages > 0 && kTma;
// Tiles by wgmma: warpgroups of 64 rows that compute them, tokens of a tile, and how many of Q's sixteens of channels
// come from shared memory, the last ones, because registers hold only the others
constexpr int kTileGroups = kHeadDim > 128 ? 1 : 2, kTileTokens = kHeadDim > 128 ? 32 : 64;
constexpr int kTileSharedQ = kHeadDim > 128 ? kHeadDim / 16 : kScaled && kHeadDim > 96 ? (kZeros ? 8 : 4) : 0;
constexpr int kTileQPanels = (kTileSharedQ + 3) / 4;  // of 64 rows and 64 channels, per warpgroup
constexpr int kTileQBytes = kTilesByWgmma ? kTileGroups * kTileQPanels * 64 * 128 : 0;
constexpr int kAtTileQ = kTilesByMma ? 0 : kTileStages * 2 * kTileTokens * ((kHeadDim + 63) / 64 * 128);
constexpr int kAtRaw = kAtTileQ + kTileQBytes;
constexpr int kAtRings = kAtRaw + kRawStages * 2 * kTileTokens * kRowBytes;
static_assert(kAtRings % 1024 == 0 && (kRawStages > 0) == (kTilesByWgmma && kScaled), "codes become tiles");
constexpr int kAtScales = (kAtRings + kWarps * kStages * kStageBytes + 1023) / 1024 * 1024;
constexpr int kStreamers = kWarps + kJoiners;  // joiners are the last of them
constexpr int kAtStreamBarriers = kAtScales + kStreamers * kStages * kScaleBytes;
constexpr int kAtTileBarriers = kAtStreamBarriers + kStreamers * kStages * 8;
// Counters. Beside tiles: one, of the items that have been taken. In step: one per stage, of the warps that are done.
constexpr int kFoldBytes = kRows * kHeadDim * 4 + kRows / 8 * 2 * 32 * 8;
constexpr int kAtRawBarriers = kAtTileBarriers + (kTilesByMma ? 0 : kTileStages * (kRawStages > 0 ? 32 : 16));
constexpr int kAfterRings = kAtRawBarriers + kRawStages * 16 + 4 * kStages;
constexpr int kAtTileSeen = (kAfterRings + 15) / 16 * 16;  // per thread of warpgroups: what its rows see,
constexpr int kAtTilePlace = kAtTileSeen + (kTilesByWgmma ? 256 * 16 : 0);  // and where their results go
constexpr int kAtTileRows = kAtTilePlace + (kTilesByWgmma ? 256 * 8 : 0);  // int4: per group and row, Σ q
constexpr int kAtTileFactors = kAtTileRows + (kRawStages > 0 && kZeros ? kGroups * 128 * 4 : 0);
// Per tile of the ring, as tile_factors.cuh has it: a factor for each token of K and of V, and a limit; of int4 also
// what zero points add, and a scale, for each group of channels
constexpr int kTileFactorBytes = kRawStages > 0 ? kTileTokens * (8 + (kZeros ? 12 * kGroups : 0)) + 16 : 0;
constexpr int kAtFold = kAtTileFactors + kTileStages * kTileFactorBytes;
constexpr int kStreamEnd = kAtFold + kWarps * kFoldBytes;
constexpr int kAtCounters = !kTilesByMma ? kAfterRings - 4 * kStages : kStreamEnd > kMmaBytes ? kStreamEnd : kMmaBytes;
// Where a float32 Q would take too many registers, each warp has it there (stream32.cuh): rows that begin in different
// banks.
constexpr int kQueryRow = kHeadDim + 4;
constexpr int kQueryBytes = kFormat == Format::bits32 && kRows * kHeadDim > 1024 ? kRows * kQueryRow * 4 : 0;
TILE_DEVICE uint32_t queries_of_warp(int rank) { return kAtFold + kWarps * kFoldBytes + rank * kQueryBytes; }
// A joiner has its ring and its saved state where the tiles were.
constexpr int kJoinerBytes = (kStages * kStageBytes + kFoldBytes + 1023) / 1024 * 1024;
static_assert(kJoiners * kJoinerBytes <= kAtRings, "no room where the tiles were");
TILE_DEVICE uint32_t ring_of(int rank) {
    return rank < kWarps ? kAtRings + rank * kStages * kStageBytes : (rank - kWarps) * kJoinerBytes;
}
TILE_DEVICE uint32_t fold_of_warp(int rank) {
    return rank < kWarps ? kAtFold + rank * kFoldBytes : (rank - kWarps) * kJoinerBytes + kStages * kStageBytes;
}

// The offset within a chunk of the c-th 16 bytes of row `row`; rank: of the warp, whose head stands in the line
TILE_DEVICE uint32_t place_of(int row, int c, int rank) {
    c += rank % kLineHeads * kRowChunks;
    const int turn = kPanelBytes == 128  ? row & 7
                     : kPanelBytes == 64 ? row >> 1 & 3
                     : kPanelBytes == 32 ? row >> 2 & 1
                                         : 0;
    const int panel = c / kPanelChunks * (kBox * kPanelBytes);
    return row / kBox * kBoxStep + panel + row % kBox * kPanelBytes + ((c % kPanelChunks) ^ turn) * 16;
}
// From the place of (row r, c) with c = 0 or 1 to that of (row 16t + r, c + 2p)
TILE_DEVICE uint32_t place_further(uint32_t first, int p, int t) {
    const int panel = 2 * p / kPanelChunks, in_panel = 2 * p % kPanelChunks;
    const int row = 16 * t / kBox * kBoxStep + 16 * t % kBox * kPanelBytes;
    return (first ^ (in_panel * 16)) + panel * (kBox * kPanelBytes) + row;
}

// Leaves the result of an item that has no tokens: merge.cuh
TILE_DEVICE void put_empty(const DecodeArgs& args, const DecodeItem& item);

struct Loader {
    const DecodeArgs& args;
    const TensorMap &mK, &mV;
    const int rank, lane;   // rank: of this warp among the block's streaming warps
    const uint32_t window;  // the address of shared memory; the compiler would compute it again for every chunk
    // Beside tiles, items are taken from a common counter, ahead of the warp that computes them:
    uint32_t counts;  // items with tokens taken · 2^16 + those of them that the warp has begun to compute, modulo 2^16
    int slots;        // lane n % 32 holds the slot of the n-th item taken
    // What is requested next: chunk `chunk` of item `slot`
    int slot, chunk, end, kv_head;
    Span span;
    PageTable table;
    int page;    // the page of that chunk's box lane / 16, or of this lane's token if a box may lie in several pages;
                 // looked up one chunk ahead
    bool fresh;  // the chunk is its item's first, and is requested before the item's end is known
    ScaleRun runs[kScaleRounds > 0 ? kScaleRounds : 1];

    TILE_DEVICE Loader(const DecodeArgs& a, const TensorMap& k, const TensorMap& v, int w)
        : args(a), mK(k), mV(v), rank(w), lane(warp::lane()),
          window(kTma ? ptx::uniform(ptx::shared_address(0u)) : ptx::shared_address(0u)), counts(0), slots(0),
          slot(w - kWarps), chunk(0), end(0), kv_head(0), span{0, 0}, table{nullptr, nullptr, 0}, page(0),
          fresh(false) {}

    // Offsets in shared memory. scales: part 0 has the scales of K, 1 those of V, 2 and 3 their zero points
    TILE_DEVICE uint32_t boxes(int stage) const { return ring_of(kInStep ? 0 : rank) + stage * kHeads * kStageBytes; }
    TILE_DEVICE uint32_t keys(int stage) const {
        return boxes(stage) + (kInStep ? rank / kLineHeads * kLineHeads * kBoxBytes : 0);
    }
    TILE_DEVICE uint32_t values(int stage) const { return keys(stage) + kHeads * kChunkBytes; }
    TILE_DEVICE uint32_t scales(int stage, int part = 0) const {
        return kAtScales + (rank * kStages + stage) * kScaleBytes + part * kScalePart;
    }
    TILE_DEVICE uint32_t barrier(int stage) const {
        return window + uint32_t(kAtStreamBarriers + ((kInStep ? 0 : rank) * kStages + stage) * 8);
    }
    // Called by all threads of a block. Initialises the barriers, one per thread, and prefetches what the first copy
    // would wait for: the tensor maps, and the items that the last kWarps warps begin with.
    static TILE_DEVICE void init(const DecodeArgs& args, const TensorMap& mK, const TensorMap& mV) {
        const int slot = int(threadIdx.x / 32) - int(blockDim.x / 32 - kWarps);
        if (threadIdx.x % 32 == 0 && slot >= 0 && slot < args.slots)
            ptx::touch(args.items + int64_t(blockIdx.x) * args.slots + slot);
        if (kTilesByMma ? threadIdx.x == 0 : kTma && threadIdx.x < kStages)
            Shared<int>(uint32_t(kAtCounters))[threadIdx.x] = 0;
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

    // A block's items are contiguous. Without tiles, a warp has every kWarps-th; beside tiles, the next free warp takes
    // the next item.
    static TILE_DEVICE DecodeItem item(const DecodeArgs& args, int slot) {
        return load_item(args.items, int64_t(blockIdx.x) * args.slots + slot);
    }
    TILE_DEVICE void take() {
        if constexpr (kTileStages > 0)
            slot = ptx::shuffle(lane == 0 ? ptx::atomic_add_shared(window + kAtCounters, 1) : 0, 0);
        else
            slot += kWarps;
    }
    // An item's words, one per lane, so that they hold one register while chunks are streamed
    TILE_DEVICE const int* word_of(int of) const {
        return reinterpret_cast<const int*>(args.items + int64_t(blockIdx.x) * args.slots + of) + lane % kItemWords;
    }
    TILE_DEVICE int words() const { return Global<const int>{word_of(slot)}[0]; }
    static TILE_DEVICE int field(int words, ItemWord n) { return ptx::shuffle(words, n); }

    // Moves `of` on to the item that the warp computes next; it starts out as rank − kWarps. False if there is none
    TILE_DEVICE bool next_item(int& of) {
        if constexpr (kTileStages == 0) {
            of += kWarps;
            return of < args.slots;
        }
        if (counts >> 16 == (counts & 0xffff)) return false;
        of = ptx::shuffle(slots, counts % 32);
        counts = (counts & 0xffff0000u) | (counts + 1 & 0xffff);
        return true;
    }

    TILE_DEVICE void start() {
        advance();
        for (int stage = 0; stage < kStages; stage++) request(stage);
    }
    // The item at hand has no more chunks, as far as is known: finds what to request next, if there is anything
    TILE_DEVICE void advance() {
        if (fresh) {
            const int next_chunk = chunk;
            measure(words());
            chunk = next_chunk;
            fresh = false;
        }
        while (chunk >= end) {
            if (slot >= args.slots) return;
            take();
            const int word = slot < args.slots ? words() : 0, ahead = slot + (kTileStages > 0 ? kStreamers : kWarps);
            if (ahead < args.slots) ptx::touch(word_of(ahead));
            const int rows = field(word, kRowsWord), caller_head = field(word, kCallerHeadWord);
            const int sequence = field(word, kSequenceWord);
            if (rows == 0) {  // no item follows an empty one
                slot = args.slots;
                return;
            }
            kv_head = caller_head & 0xfff;
            // Q of the first token is prefetched, one line of 64 elements per lane.
            const int group = args.group.divisor, head = lane * 64 / kHeadDim;
            if (head < rows && head < group)
                ptx::touch(static_cast<const Element*>(args.q) + (caller_head >> 12) * args.q_strides.batch +
                           (kv_head * group + head) * args.q_strides.head + lane * 64 % kHeadDim);
            table = page_table(args, field(word, kTableWord), kv_head, field(word, kTailFromWord));
            if constexpr (kScaled && kScaleRuns) point_at_scales();
            page = ptx::shuffle(word, kBoxes == 2 && lane >= 16 ? kSecondPageWord : kPageWord);
            fresh = kTma && !kSelected && (!kScaled || kScaleRuns) && field(word, kPageWord) >= 0 &&
                    args.scores.sees_back_to_first();
            if (!fresh) {
                if constexpr (kSelected) ptx::touch(table.pages + field(word, kStartWord) / kPageSize);
                measure(word);
                if (chunk >= end) {
                    if constexpr (kTileStages > 0) put_empty(args, item(args, slot));
                    continue;
                }
            }
            if constexpr (kTileStages > 0) {
                // 32 lanes are enough: no more items can be waiting than there are chunks in the ring.
                if (lane == (counts >> 16) % 32) slots = slot;
                counts += 1u << 16;
            }
            if (!fresh) continue;
            chunk = field(word, kStartWord) / kChunk;
            end = chunk + 1;
            // What the second chunk needs is fetched at once, while the first is on its way.
            ptx::touch(args.lengths + sequence);
            const int further = (chunk + 1) * kChunk / kPageSize;
            if (further < table.tail_from) ptx::touch(table.pages + further);
            return;
        }
        look_up();
    }
    // Finds where the item begins and ends; the span is empty if the sequence does not reach the item's piece
    TILE_DEVICE void measure(int word) {
        const int length = length_of(args, field(word, kSequenceWord), kv_head);
        span = span_of(args, field(word, kKindWord) & kOwn, field(word, kStartWord), field(word, kStopWord), length);
        chunk = span.begin / kChunk;
        end = span.end > span.begin ? (span.end + kChunk - 1) / kChunk : 0;
    }
    // Looks up the page of the chunk at hand; never one of tokens outside the span. Half of the lanes look sixteen
    // tokens further even where there is only one box: if all lanes read the same page, the compiler would move it into
    // a uniform register and so wait for it at once.
    TILE_DEVICE void look_up() {
        if constexpr (kWholeBoxes) {
            const int token = chunk * kChunk + (lane & 16), last = span.end - 1, seen = token < last ? token : last;
            page = table.page((seen > span.begin ? seen : span.begin) / kPageSize);
        } else {
            const int token = chunk * kChunk + lane % kChunk;
            page = token >= span.begin && token < span.end ? table.page(token / kPageSize) : 0;
        }
    }

    // Requests the chunk at hand into `stage`, which all lanes are done with, and moves on to the next chunk
    TILE_DEVICE void request(int stage) {
        if (chunk < end) {
            if constexpr (kTma) request_by_tma(stage);
            else request_by_copies(stage);
            if constexpr (kScaled && !kScaleRuns) fetch_scales(stage);
            if (++chunk >= end) advance();
            else if (!kWholeBoxes || kBoxes == 2 || chunk * kChunk % kPageSize == 0) look_up();
        }
        if constexpr (kCopies) ptx::copy_async_commit();  // an empty group too: wait() counts groups
    }
    // Waits until the stage whose turn it is has arrived
    TILE_DEVICE void wait(Turn<kStages> turn) const {
        if constexpr (kTma) ptx::mbarrier_wait(barrier(turn.stage), turn.lap);
        if constexpr (kCopies) ptx::copy_async_wait<kStages - 1>();
        if constexpr (kCopies || kScaled) ptx::sync_warp();  // the copies of the other lanes too
    }

    TILE_DEVICE const uint8_t* scale_of(const Paged& part, int page, int token, int group = 0) const {
        return static_cast<const uint8_t*>(part.base) +
               kScaleSize * (page * part.page + token * part.token + kv_head * part.head + group * part.group);
    }
    TILE_DEVICE const Paged& scale_part(int part) const {
        return part == 0 ? args.k_scale : part == 1 ? args.v_scale : part == 2 ? args.k_zero : args.v_zero;
    }

    TILE_DEVICE void request_by_tma(int stage) const {
        if constexpr (kScaled && kScaleRuns) copy_scales(stage, kBoxes == 2 ? page : ptx::shuffle(page, 0));
        const int first = ptx::shuffle(page, 0), second = kBoxes == 2 ? ptx::shuffle(page, 16) : 0;
        if constexpr (kInStep) {
            const uint32_t counter = window + kAtCounters + 4 * stage;
            const int before = ptx::shuffle(lane == 0 ? ptx::atomic_add_shared(counter, 1) : 0, 0);
            if (before % kWarps != kWarps - 1) return;  // another warp is still to come, and will request the chunk
        }
        if (!ptx::elect_leader()) return;
        const uint32_t full = barrier(stage);
        ptx::mbarrier_arrive_expect(full, kHeads * kStageBytes);
        request_box(window + boxes(stage), full, chunk * kChunk, first);
        if constexpr (kBoxes == 2) request_box(window + boxes(stage) + kBoxStep, full, chunk * kChunk + 16, second);
    }
    TILE_DEVICE void request_box(uint32_t to, uint32_t full, int token, int of) const {
        token %= kPageSize;
        const int head = kInStep ? (kv_head - rank) / kLineHeads : kv_head;
        if constexpr (kTileStages > 0) {  // what is read once must not push shared nodes out of the L2 cache
            ptx::tma_load_once(to, &mK, full, 0, token, 0, head, of);
            ptx::tma_load_once(to + kHeads * kChunkBytes, &mV, full, 0, token, 0, head, of);
        } else {
            ptx::tma_load(to, &mK, full, 0, token, 0, head, of);
            ptx::tma_load(to + kHeads * kChunkBytes, &mV, full, 0, token, 0, head, of);
        }
    }

    // Runs of scales come by cp.async, one instruction for all lanes: a warp would wait for the TMA unit once per copy.
    // All lanes share one run of sixteen tokens; in chunks of 32 tokens each half of the lanes has a run.
    TILE_DEVICE int sixteen() const { return kTiles == 2 ? lane / 16 : 0; }
    TILE_DEVICE int piece_of_run(int round) const { return lane % kRunLanes + kRunLanes * round; }
    TILE_DEVICE void point_at_scales() {
#pragma unroll
        for (int i = 0; i < kScaleRounds; i++) {
            const int n = piece_of_run(i), part = n / kTokenScales < kScaleParts ? n / kTokenScales : 0;
            const Paged& of = scale_part(part);
            runs[i] = {scale_of(of, 0, 0) + n % kTokenScales * 16, uint32_t(of.page) * kScaleSize};
        }
    }
    TILE_DEVICE void copy_scales(int stage, int at) const {
        const int token = (chunk * kChunk + 16 * sixteen()) % kPageSize;
#pragma unroll
        for (int i = 0; i < kScaleRounds; i++) {
            const int n = piece_of_run(i);
            if (n >= kScaleParts * kTokenScales) break;
            const uint32_t to = n / kTokenScales * kScalePart + (sixteen() * kTokenScales + n % kTokenScales) * 16;
            const uint8_t* page = runs[i].from + uint64_t(uint32_t(at)) * runs[i].page_bytes;
            ptx::copy_async_16(window + scales(stage) + to, page + token * kTokenScales, 16);
        }
    }
    // A copy of all lanes brings one panel of kCopyRows neighbouring rows; the panels of a row come one after another.
    // Addresses are computed once per box, and then go on from row to row. Tokens outside the span become zeros and are
    // not read.
    TILE_DEVICE void request_by_copies(int stage) const {
        const int r = lane / kPanelChunks, c = lane % kPanelChunks;
        const uint32_t first = window + place_of(r, c, rank);
        const uint8_t* from[2];
#pragma unroll
        for (int row = 0; row < kChunk; row += kCopyRows) {
            const int token = chunk * kChunk + row + r;
            if (!kWholeBoxes || row % kBox == 0) {
                const int64_t at = ptx::shuffle(page, kWholeBoxes ? row / kBox * 16 : (row + r) % kChunk);
                const int in_page = kWholeBoxes ? (chunk * kChunk + row) % kPageSize + r : token % kPageSize;
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    const Paged& of = p ? args.v : args.k;
                    from[p] = static_cast<const uint8_t*>(of.base) + at * of.page + in_page * of.token +
                              kv_head * of.head + 16 * c;
                }
            } else {
                from[0] += kCopyRows * args.k.token;
                from[1] += kCopyRows * args.v.token;
            }
            const int bytes = token >= span.begin && token < span.end ? 16 : 0;
            if (kPanelChunks * kBox < 32 && r >= kBox) continue;
            // The swizzle of `row` leaves alone what that of r turns: kCopyRows is a power of two.
            const uint32_t to = (first ^ (kPanelBytes == 128 ? row % 8 * 16 : 0)) + row / kBox * kBoxStep +
                                row % kBox * kPanelBytes;
#pragma unroll
            for (int panel = 0; panel < kRowBytes / kPanelBytes; panel++)
#pragma unroll
                for (int p = 0; p < 2; p++)
                    ptx::copy_async_16(to + (p ? values(stage) : keys(stage)) + panel * (kBox * kPanelBytes),
                                       from[p] + panel * kPanelBytes, bytes);
        }
        if constexpr (kScaled && kScaleRuns) copy_scales(stage, kBoxes == 2 ? page : ptx::shuffle(page, 0));
    }
    // Scales that are not in runs, one by one
    TILE_DEVICE void fetch_scales(int stage) const {
        constexpr int kAll = kChunk * kGroups;
        for (int i = 0; i < (kAll + 31) / 32; i++) {
            const int n = i * 32 + lane, row = n / kGroups % kChunk, group = n % kGroups, token = chunk * kChunk + row;
            const int at = ptx::shuffle(page, !kWholeBoxes ? row : kBoxes == 2 ? row & 16 : 0);
            const bool there = n < kAll && token >= span.begin && token < span.end;
#pragma unroll
            for (int part = 0; part < kScaleParts; part++) {
                ScaleBits x = 0;
                if (there) {
                    const uint8_t* from = scale_of(scale_part(part), at, token % kPageSize, group);
                    x = Global<const ScaleBits>{reinterpret_cast<const ScaleBits*>(from)}[0];
                }
                if (n < kAll) Shared<ScaleBits>(scales(stage, part))[n] = x;
            }
        }
    }

    // Zeroes the rows and scales of V outside the span: memory there may hold anything, and 0 · NaN is NaN. Where rows
    // come by cp.async they are zero already.
    TILE_DEVICE void clear_outside(int stage, int first_token, Span of) const {
        if constexpr (kTma) {
            const auto outside = [&](int row) { return first_token + row < of.begin || first_token + row >= of.end; };
            for (int n = lane; n < kChunk * kRowChunks; n += 32)
                if (outside(n / kRowChunks)) {
                    const uint32_t place = place_of(n / kRowChunks, n % kRowChunks, rank);
                    Shared<Vector16>(values(stage) + place)[0] = Vector16{};
                }
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
