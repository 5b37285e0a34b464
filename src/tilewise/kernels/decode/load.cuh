// How keys and values come to a streaming warp of the decode kernels: through a ring of its own with kStages chunks of
// tokens, each K then V, and their scales. As soon as a warp is done with a chunk it requests the one that takes its
// place, across the ends of items. So a chunk was requested kStages chunks before the warp waits for it, and no warp
// depends on another.
//
// With kTma a box of a chunk comes by a tensor map; on cards without it, or if a box may lie in several pages, by
// cp.async in units of 16 bytes. layout.cuh says where it goes.
#pragma once
#include "decode/layout.cuh"

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
    TILE_DEVICE uint32_t keys(int stage) const { return boxes(stage) + KeyRows::head_at(rank); }
    TILE_DEVICE uint32_t values(int stage) const {
        if constexpr (kOneDim) return keys(stage) + kHeads * KeyRows::kPlaceBytes;
        else return boxes(stage) + kHeads * KeyRows::kPlaceBytes + ValueRows::head_at(rank);
    }
    TILE_DEVICE uint32_t scales(int stage, int part = 0) const {
        return kAtScales + (rank * kStages + stage) * kScaleBytes + kChunk * scales_before(part);
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
                    sees_back_to_first(args);
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
        ptx::mbarrier_arrive_expect(full, kHeads * (KeyRows::kChunkBytes + ValueRows::kChunkBytes));
        request_box<0>(window + boxes(stage), full, chunk * kChunk, first);
        if constexpr (kBoxes == 2)
            request_box<1>(window + boxes(stage) + KeyRows::kBoxStep, full, chunk * kChunk + 16, second);
    }
    // to: the place of K's box
    template <int kNumber> TILE_DEVICE void request_box(uint32_t to, uint32_t full, int token, int of) const {
        token %= kPageSize;
        constexpr int kApart = kHeads * KeyRows::kPlaceBytes + kNumber * (ValueRows::kBoxStep - KeyRows::kBoxStep);
        const int head = kInStep ? (kv_head - rank) / kLineHeads : kv_head;
        const int head_v = kInStep ? (kv_head - rank) / kValueLineHeads : kv_head;
        if constexpr (kTileStages > 0) {  // what is read once must not push shared nodes out of the L2 cache
            ptx::tma_load_once(to, &mK, full, 0, token, 0, head, of);
            ptx::tma_load_once(to + kApart, &mV, full, 0, token, 0, head_v, of);
        } else {
            ptx::tma_load(to, &mK, full, 0, token, 0, head, of);
            ptx::tma_load(to + kApart, &mV, full, 0, token, 0, head_v, of);
        }
    }

    // Runs of scales come by cp.async, one instruction for all lanes: a warp would wait for the TMA unit once per copy.
    // All lanes share one run of sixteen tokens; in chunks of 32 tokens each half of the lanes has a run.
    TILE_DEVICE int sixteen() const { return kTiles == 2 ? lane / 16 : 0; }
    TILE_DEVICE int piece_of_run(int round) const { return lane % kRunLanes + kRunLanes * round; }
    // K and V of two scalings: which part the n-th 16 bytes of all runs belong to
    static TILE_DEVICE int part_of(int n) { return n / kPairScales * 2 + (n % kPairScales >= kKeyScales); }
    TILE_DEVICE void point_at_scales() {
#pragma unroll
        for (int i = 0; i < kScaleRounds; i++) {
            const int n = piece_of_run(i), its = kOneScaling ? n / kKeyScales : part_of(n);
            const int part = its < kScaleParts ? its : 0, at = kOneScaling ? n % kKeyScales : n - scales_before(its);
            const Paged& of = scale_part(part);
            runs[i] = {scale_of(of, 0, 0) + at * 16, uint32_t(of.page) * kScaleSize};
        }
    }
    TILE_DEVICE void copy_scales(int stage, int of) const {
        const int token = (chunk * kChunk + 16 * sixteen()) % kPageSize;
#pragma unroll
        for (int i = 0; i < kScaleRounds; i++) {
            const int n = piece_of_run(i);
            if (n >= kRunPieces) break;
            const int part = kOneScaling ? n / kKeyScales : part_of(n), each = scales_of(part);
            const int at = kOneScaling ? n % kKeyScales : n - scales_before(part);
            const int before = kOneScaling ? part * (kChunk * kKeyScales) : kChunk * scales_before(part);
            const uint32_t to = before + (sixteen() * each + at) * 16;
            const uint8_t* from = runs[i].from + uint64_t(uint32_t(of)) * runs[i].page_bytes;
            ptx::copy_async_16(window + scales(stage) + to, from + token * each, 16);
        }
    }
    // Panels of one width are copied for K and V in turn, so that addresses are computed once for both.
    TILE_DEVICE void request_by_copies(int stage) const {
        if constexpr (KeyRows::kPanelBytes == ValueRows::kPanelBytes) {
            copy_rows<KeyRows, true, true>(stage);
        } else {
            copy_rows<KeyRows, true, false>(stage);
            copy_rows<ValueRows, false, true>(stage);
        }
        if constexpr (kScaled && kScaleRuns) copy_scales(stage, kBoxes == 2 ? page : ptx::shuffle(page, 0));
    }
    // A copy of all lanes brings one panel of kCopyRows neighbouring rows; the panels of a row come one after another.
    // Addresses are computed once per box, and then go on from row to row. Tokens outside the span become zeros and are
    // not read. Of: whose panels these are; kKeys, kValues: what is copied
    template <class Of, bool kKeys, bool kValues> TILE_DEVICE void copy_rows(int stage) const {
        const int r = lane / Of::kPanelUnits, c = lane % Of::kPanelUnits;
        const uint32_t first = window + Of::place_of(r, c, rank);
        const uint8_t* from[2];
#pragma unroll
        for (int row = 0; row < kChunk; row += Of::kCopyRows) {
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
                from[0] += Of::kCopyRows * args.k.token;
                from[1] += Of::kCopyRows * args.v.token;
            }
            const int bytes = token >= span.begin && token < span.end ? 16 : 0;
            if (Of::kPanelUnits * kBox < 32 && r >= kBox) continue;
            // The swizzle of `row` leaves alone what that of r turns: kCopyRows is a power of two.
            const uint32_t to = (first ^ (Of::kPanelBytes == 128 ? row % 8 * 16 : 0)) + row / kBox * Of::kBoxStep +
                                row % kBox * Of::kPanelBytes;
            constexpr int kMost = (kWidest == kHeadDim ? KeyRows::kBytes : ValueRows::kBytes) / Of::kPanelBytes;
#pragma unroll
            for (int panel = 0; panel < kMost; panel++)
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    if (panel >= (p ? ValueRows::kBytes : KeyRows::kBytes) / Of::kPanelBytes) continue;
                    if (!(p ? kValues : kKeys)) continue;
                    const int further = row / kBox * ((p ? ValueRows::kBoxStep : KeyRows::kBoxStep) - Of::kBoxStep);
                    ptx::copy_async_16(to + (p ? values(stage) : keys(stage)) +
                                           (panel * (kBox * Of::kPanelBytes) + further),
                                       from[p] + panel * Of::kPanelBytes, bytes);
                }
        }
    }
    // Scales that are not in runs, one by one
    TILE_DEVICE void fetch_scales(int stage) const {
        constexpr int kGroups = groups_of(kWidest), kAll = kChunk * kGroups;
        for (int i = 0; i < (kAll + 31) / 32; i++) {
            const int n = i * 32 + lane, row = n / kGroups % kChunk, group = n % kGroups, token = chunk * kChunk + row;
            const int at = ptx::shuffle(page, !kWholeBoxes ? row : kBoxes == 2 ? row & 16 : 0);
            const bool there = n < kAll && token >= span.begin && token < span.end;
#pragma unroll
            for (int part = 0; part < kScaleParts; part++) {
                const int groups = part % 2 ? kValueGroups : kKeyGroups;
                if (groups < kGroups && group >= groups) continue;
                ScaleBits x = 0;
                if (there) {
                    const uint8_t* from = scale_of(scale_part(part), at, token % kPageSize, group);
                    x = Global<const ScaleBits>{reinterpret_cast<const ScaleBits*>(from)}[0];
                }
                if (n < kAll) Shared<ScaleBits>(scales(stage, part))[groups < kGroups ? row * groups + group : n] = x;
            }
        }
    }

    // Zeroes the rows and scales of V outside the span: memory there may hold anything, and 0 · NaN is NaN. Where rows
    // come by cp.async they are zero already.
    TILE_DEVICE void clear_outside(int stage, int first_token, Span of) const {
        if constexpr (kTma) {
            const auto outside = [&](int row) { return first_token + row < of.begin || first_token + row >= of.end; };
            for (int n = lane; n < kChunk * ValueRows::kUnits; n += 32)
                if (outside(n / ValueRows::kUnits)) {
                    const uint32_t place = ValueRows::place_of(n / ValueRows::kUnits, n % ValueRows::kUnits, rank);
                    Shared<Vector16>(values(stage) + place)[0] = Vector16{};
                }
        }
        if constexpr (kScaled && kScaleRuns)
            for (int n = lane; n < kChunk * kValueGroups; n += 32)
                if (first_token + n / kValueGroups < of.begin || first_token + n / kValueGroups >= of.end) {
                    Shared<ScaleBits>(scales(stage, 1))[n] = 0;
                    if constexpr (kZeros) Shared<ScaleBits>(scales(stage, 3))[n] = 0;
                }
        if constexpr (kTma) ptx::fence_async_proxy();  // before TMA writes there again
        ptx::sync_warp();
    }
};
