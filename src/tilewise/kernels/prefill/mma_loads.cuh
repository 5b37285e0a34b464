// Where everything lies in the shared memory of the forward by mma.sync, and how its threads load Q, K and V: by
// cp.async, 16 bytes per thread and copy. forward_mma.cu says what the constants mean.
#pragma once
#include "prefill/blocks.cuh"
#include "tile/quant.cuh"
#include "tile/tiles.cuh"

// FP8 for products of halves: K and V arrive in a place of their own, and the thread that asked for a chunk widens it
// into the tile.
constexpr bool kWiden = sizeof(Operand) > sizeof(Element);
constexpr int kWarps = kTileQ / kWarpRows, kThreads = 32 * kWarps;
static_assert(kTileQ % kWarpRows == 0 && kWarpRows % 16 == 0, "whole warps of sixteens of rows");

template <int kRows, int kDim> using Tile = SharedTile<Operand, kRows, kDim, Layout::swizzled>;
using TileQ = Tile<kTileQ, kHeadDim>;
using TileK = Tile<kTileKv, kHeadDim>;
using TileV = Tile<kTileKv, kValueDim>;

// The rows of a tile of kRows × kDim and their chunks of 16 bytes as they come, dealt to the threads: kAcross
// neighbouring threads copy neighbouring chunks of a row, and all threads kStep rows at a time.
constexpr int kInChunk = 16 / int(sizeof(Element));
template <int kRows, int kDim> struct Dealt {
    static constexpr int kArriving = kDim / kInChunk;                                              // chunks per row
    static constexpr int kAcross = (kArriving & -kArriving) < 32 ? (kArriving & -kArriving) : 32;  // a power of two
    static constexpr int kStep = kThreads / kAcross, kAlong = kArriving / kAcross;
    static constexpr int kCopies = (kRows + kStep - 1) / kStep * kAlong;  // per thread
    static TILE_DEVICE int first_row() { return threadIdx.x / kAcross; }
    static TILE_DEVICE int first_chunk() { return threadIdx.x % kAcross; }
    // Each of this thread's copies: each(row, chunk, i), i the copy's number. The first is that of first_row() and
    // first_chunk().
    template <class Each> static TILE_DEVICE void each_copy(Each each) {
        const int row = first_row(), chunk = first_chunk();
        int i = 0;
#pragma unroll
        for (int r = 0; r < kRows; r += kStep)
#pragma unroll
            for (int c = 0; c < kArriving; c += kAcross, i++)
                if (kRows % kStep == 0 || row + r < kRows) each(row + r, chunk + c, i);
    }
    // Does a chunk hold some of a row's `columns`?
    static TILE_DEVICE bool has(int chunk, int columns) { return chunk < kArriving && chunk * kInChunk < columns; }
};
using DealtQ = Dealt<kTileQ, kHeadDim>;
template <int kSource> using DealtKv = Dealt<kTileKv, kSource ? kValueDim : kHeadDim>;  // source 0 is K, 1 is V

// Shared memory: Q, K, V; K and V as they arrive, if they are widened; the tile; where its K and V begin; what the
// boxes of four blocks hold
template <int kSource>
constexpr int kRawBytes = kWiden && kVectors ? DealtKv<kSource>::kCopies * kThreads * 16 : 0;
constexpr int kAtK = TileQ::kBytes, kAtV = kAtK + kStages * TileK::kBytes, kAtRaw = kAtV + kStages * TileV::kBytes;
constexpr int kAtTile = kAtRaw + kRawBytes<0> + kRawBytes<1>, kAtSources = kAtTile + int(sizeof(WorkTile));
constexpr int kAtUnits = kAtSources + 16;
constexpr int kSlots = 4, kSlotBytes = 4 * kBoxes;
constexpr int kAtPages = kAtUnits + (kListed ? kSlots * kSlotBytes : 0);
constexpr int kAtThere = kAtPages + (kPageSize > 0 ? kSlots * kSlotBytes : 0);
constexpr bool kTold = kListed || kPageSize > 0;  // where a block's rows come from is looked up
static_assert(kBoxes <= kThreads, "a thread per box");

TILE_DEVICE Shared<WorkTile> work() { return Shared<WorkTile>(kAtTile); }
// The first key of the tile's sequence and head, in K and in V; of pages, that of the first page
TILE_DEVICE Shared<const Element*> sources() { return Shared<const Element*>(kAtSources); }
TILE_DEVICE void find_sources(const ForwardArgs& args, const WorkTile& tile) {
    auto find = [&](const void* base, const Strides& strides) {
        int64_t first = tile.kv_head * strides.head;
        if constexpr (kPageSize == 0)
            first += (args.list ? 0 : tile.sequence * strides.batch) + tile.k_start * strides.row;
        return static_cast<const Element*>(base) + first;
    };
    sources()[0] = find(args.k, args.k_strides);
    sources()[1] = find(args.v, args.v_strides) + TileValues(tile).first;
}
// By the last bits of a block's number: its boxes' units, as lists have them; the pages that hold them; and where
// blocks of keys have lengths, how many of their keys are there
TILE_DEVICE Shared<int> units_of(int n) { return Shared<int>(kAtUnits + n % kSlots * kSlotBytes); }
TILE_DEVICE Shared<int> pages_of(int n) { return Shared<int>(kAtPages + n % kSlots * kSlotBytes); }
TILE_DEVICE Shared<int> there_of_block(int n) { return Shared<int>(kAtThere + n % kSlots * kSlotBytes); }

// The first key of a unit; past every sequence's end for kNoUnit
TILE_DEVICE int key_of_unit(int unit) { return (unit & kUnitMask) * kBoxRows; }

// ---- one chunk or element ---------------------------------------------------------------------------------------
TILE_DEVICE uint32_t halves_of(uint32_t bytes, bool high) {
    return high ? quant::from_fp8<true>(bytes) : quant::from_fp8<false>(bytes);
}
// 16 values of FP8 as two chunks of halves
template <class T> TILE_DEVICE void put_wide(const T& tile, int row, int chunk, const Vector16& x) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        Vector16 wide;
#pragma unroll
        for (int w = 0; w < 4; w++) wide.word[w] = halves_of(x.word[2 * i + w / 2], w % 2);
        tile.chunk(row, 2 * chunk + i) = wide;
    }
}
template <class T, class E> TILE_DEVICE void put_element(const T& tile, int row, int column, E x) {
    if constexpr (kWiden) {
        const uint32_t wide = halves_of(x.bits, false);
        Shared<uint16_t>(tile.offset)[T::place(row, column / 8) * 8 + column % 8] = uint16_t(wide);
    } else {
        tile.element(row, column) = x;
    }
}

// Element by element, where rows do not begin at multiples of 16 bytes: a warp takes a row. columns: that are there;
// at(row): the row's address, null for a row of zeros
template <class T, class At> TILE_DEVICE void load_elements(const T& tile, int columns, At at) {
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < T::kRows; row += kWarps) {
        const Global<const Element> g{at(row)};
#pragma unroll 2
        for (int column = threadIdx.x % 32; column < T::kColumns; column += 32)
            put_element(tile, row, column, g.base && column < columns ? Element(g[column]) : Element{});
    }
}

TILE_DEVICE void load_q(const ForwardArgs& args, const WorkTile& tile) {
    const TileQ sQ(0);
    const Strides& strides = args.q_strides;
    const Element* q = static_cast<const Element*>(args.q) + (args.list ? 0 : tile.sequence * strides.batch);
    q += tile.q_start * strides.row + tile.head * kPack * strides.head;
    // A row's distance from there, in elements
    auto from = [&](int row) -> int64_t {
        return (tile.row + row) / kPack * strides.row + (tile.row + row) % kPack * strides.head;
    };
    auto is_there = [&](int row) {
        const int token = (tile.row + row) / kPack;
        // Rows past their block's length are zeros: what they hold must not move other rows' references.
        return token < tile.seqlen_q && (!kLengths || row_there(args.lists, tile, token));
    };
    if constexpr (!kVectors) {
        load_elements(sQ, kColumns, [&](int row) { return is_there(row) ? q + from(row) : nullptr; });
    } else if constexpr (kWiden) {
        DealtQ::each_copy([&](int row, int chunk, int) {
            const Global<const Vector16> g{reinterpret_cast<const Vector16*>(q + (from(row) + chunk * kInChunk))};
            put_wide(sQ, row, chunk, is_there(row) && DealtQ::has(chunk, kColumns) ? Vector16(g[0]) : Vector16{});
        });
    } else {
        const int row0 = DealtQ::first_row();
        const int64_t from0 = from(row0);
        DealtQ::each_copy([&](int row, int chunk, int) {
            const int64_t at = kPack == 1 ? from0 + (row - row0) * strides.row : from(row);
            ptx::copy_async_16(sQ.address(row, chunk), q + (at + chunk * kInChunk),
                               is_there(row) && DealtQ::has(chunk, kColumns) ? 16 : 0);
        });
    }
}

// ---- blocks of K and V ------------------------------------------------------------------------------------------
// Where block n of K or V (source 0 or 1) goes; n may be −1, of which nothing is there
template <int kSource> using TileOf = Tile<kTileKv, kSource ? kValueDim : kHeadDim>;
template <int kSource> TILE_DEVICE uint32_t place_of(int n) {
    return (kSource ? kAtV : kAtK) + (n & (kStages - 1)) * TileOf<kSource>::kBytes;
}
// This thread's copies of one block. Where blocks follow each other in memory and have two places, the copies are made
// between products (kWoven).
constexpr bool kWoven = !kTold && kVectors && kStages == 2;
template <int kSource> struct Copies {
    using Dealt = DealtKv<kSource>;
    using Tile = TileOf<kSource>;
    const Strides& strides;
    const Element* first;  // this thread's first row and chunk of the block that begins where the source does
    const int columns;     // of a row that are there
    uint32_t to, begin;

    TILE_DEVICE Copies(const Strides& s, int n)
        : strides(s), first(sources()[kSource]),
          columns(!kSource ? kColumns : kValueColumns % kValueDim ? TileValues(work()[0]).count() : kValueDim),
          to(place_of<kSource>(n)) {
        first += Dealt::first_row() * strides.row + Dealt::first_chunk() * kInChunk;
        begin = kWiden ? ptx::shared_address(kAtRaw + kSource * kRawBytes<0>) + threadIdx.x * 16
                       : Tile(to).address(Dealt::first_row(), Dealt::first_chunk());
    }
    // Copy i, `further` elements on. Of what is not there no byte is read, wherever it would lie.
    TILE_DEVICE void one(int i, int64_t further, bool there) const {
        // Where the swizzle comes round with the rows of a step, a thread's copies lie a constant apart.
        constexpr bool kEvenly = Dealt::kStep % Tile::kTurns == 0 && Dealt::kAlong == 1;
        const int row = Dealt::first_row() + i / Dealt::kAlong * Dealt::kStep;
        const int along = i % Dealt::kAlong * Dealt::kAcross;
        const int chunk = Dealt::first_chunk() + along;
        const uint32_t at = kWiden ? begin + i * kThreads * 16
                            : kEvenly ? begin + i * Dealt::kStep * Tile::kRowBytes
                                      : Tile(to).address(row, chunk);
        const bool has = columns == Tile::kColumns || Dealt::has(chunk, columns);
        ptx::copy_async_16(at, first + (further + along * kInChunk), there && has ? 16 : 0);
    }
    // Part `part` of kParts of block n, if it is there, and all of its rows with it
    template <int kParts> TILE_DEVICE void some(int n, int part, bool there) const {
#pragma unroll
        for (int i = part * Dealt::kCopies / kParts; i < (part + 1) * Dealt::kCopies / kParts; i++) {
            const int r = i / Dealt::kAlong * Dealt::kStep, row = Dealt::first_row() + r;
            if (kTileKv % Dealt::kStep == 0 || row < kTileKv)
                one(i, (int64_t(n) * kTileKv + r) * strides.row, there);
        }
    }
};

struct Loader {
    const ForwardArgs& args;
    // This thread's box of the next block that is to be told of, and its unit of the one after. All are read a block
    // ahead, so that nobody waits for them.
    int unit, page, there, later;

    // The first key of this thread's box of block n
    TILE_DEVICE int key_of_box(int n) const {
        return kListed ? key_of_unit(unit) : n * kTileKv + int(threadIdx.x) * kBoxRows;
    }
    TILE_DEVICE int unit_of(const WorkTile& tile, int n) const {
        if (!kListed || n < 0 || threadIdx.x >= kBoxes) return kNoUnit;
        return unit_at(args.lists, tile.list, tile.whole, tile.units, n * kBoxes + int(threadIdx.x));
    }
    // What else is to be known of a box of block n
    TILE_DEVICE void look_up(const WorkTile& tile, int n, int found) {
        unit = found;
        const int key = key_of_box(n);
        const bool is = n >= 0 && key < tile.seqlen_k && threadIdx.x < kBoxes;
        if constexpr (kPageSize > 0)
            page = is ? Global<const int>{args.page_table + tile.sequence * args.page_table_stride}[key / kPage] : 0;
        if constexpr (kLengths) {
            const TileLists& lists = args.lists;
            there = is ? kBoxRows : 0;
            if (is && lists.lengths_k) {
                const int of = lists.block_k.quotient(key), inside = key - of * int(lists.block_k.divisor);
                const int64_t at = int64_t(tile.sequence) * lists.lengths_k_batch + of;
                there = Global<const int>{lists.lengths_k}[at] - inside;
            }
        }
    }
    TILE_DEVICE void tell(int n) const {
        if (threadIdx.x < kBoxes) {
            if constexpr (kListed) units_of(n)[threadIdx.x] = unit;
            if constexpr (kPageSize > 0) pages_of(n)[threadIdx.x] = page;
            if constexpr (kLengths) there_of_block(n)[threadIdx.x] = there;
        }
    }
    // Before the first block, whose boxes and the next one's can be read after a barrier
    TILE_DEVICE void tell_first(const WorkTile& tile) {
        if constexpr (kTold) {
            for (int n = tile.end - 1; n >= tile.end - 2; n--) {
                look_up(tile, n, unit_of(tile, n));
                if (n >= 0) tell(n);
            }
            look_up(tile, tile.end - 3, unit_of(tile, tile.end - 3));
            later = unit_of(tile, tile.end - 4);
        }
    }
    // While block n is at hand: tells of block n − 2, which can be read after the next barrier
    TILE_DEVICE void tell_next(const WorkTile& tile, int n) {
        if constexpr (kTold) {
            if (n >= 2) tell(n - 2);
            look_up(tile, n - 3, later);
            later = unit_of(tile, n - 4);
        }
    }

    // What was told of a box of block n; where it begins, in elements after its source; how many of its rows are there
    struct Box {
        int unit, page, there;
        TILE_DEVICE Box() {}
        TILE_DEVICE Box(int n, int box) {
            if constexpr (kListed) unit = units_of(n)[box];
            if constexpr (kPageSize > 0) page = pages_of(n)[box];
            if constexpr (kLengths) there = there_of_block(n)[box];
        }
        TILE_DEVICE int key(int n, int box) const {
            return kListed ? key_of_unit(unit) : n * kTileKv + box * kBoxRows;
        }
        TILE_DEVICE int64_t from(const Strides& strides, int first_key) const {
            if constexpr (kPageSize > 0) return page * strides.batch + first_key % kPage * strides.row;
            else return first_key * strides.row;
        }
        TILE_DEVICE int rows(int left) const { return kLengths && there < left ? there : left; }
    };

    // Asks for block n of K or V (source 0 or 1)
    template <int kSource> TILE_DEVICE void load(const WorkTile& tile, int n) const {
        const Strides& strides = kSource ? args.v_strides : args.k_strides;
        if constexpr (!kVectors) {
            const Element* first = sources()[kSource];
            const int columns = kSource ? TileValues(tile).count() : kColumns;
            load_elements(TileOf<kSource>(place_of<kSource>(n)), columns, [&](int row) -> const Element* {
                const Box box(n, row / kBoxRows);
                const int inside = row % kBoxRows, key = box.key(n, row / kBoxRows);
                return inside < box.rows(tile.seqlen_k - key) ? first + (box.from(strides, key) + inside * strides.row)
                                                              : nullptr;
            });
        } else if (!kTold && (n + 1) * kTileKv <= tile.seqlen_k) {
            copy<kSource, true>(tile, strides, n);
        } else {
            copy<kSource, false>(tile, strides, n);
        }
    }
    // kWhole: all rows of the block are there.
    template <int kSource, bool kWhole>
    TILE_DEVICE void copy(const WorkTile& tile, const Strides& strides, int n) const {
        using Dealt = DealtKv<kSource>;
        // Do all of a thread's copies of some rows lie in one box, the same for every thread? Then what was told of the
        // boxes is read first: a copy would hold up what is read after it.
        constexpr bool kSteady = kBoxRows % Dealt::kStep == 0;
        constexpr int kCopiesEach = kSteady ? kBoxRows / Dealt::kStep * Dealt::kAlong : 1;
        const Copies<kSource> copies(strides, n);
        const int row0 = Dealt::first_row(), seqlen_k = tile.seqlen_k;
        Box told[kSteady ? kBoxes : 1];
        if constexpr (kSteady && kTold)
#pragma unroll
            for (int box = 0; box < kBoxes; box++) told[box] = Box(n, box);
        int64_t from = 0;
        int rows = 0;
        Dealt::each_copy([&](int row, int, int i) {
            const int r = row - row0, inside = kSteady ? row0 + r % kBoxRows : row % kBoxRows;
            if (i % kCopiesEach == 0) {  // another box
                const int box = kSteady ? r / kBoxRows : row / kBoxRows;
                if (!kSteady) told[0] = Box(n, box);
                const int key = told[kSteady ? box : 0].key(n, box);
                from = told[kSteady ? box : 0].from(strides, key);
                rows = told[kSteady ? box : 0].rows(seqlen_k - key);
            }
            copies.one(i, from + (inside - row0) * strides.row, kWhole || inside < rows);
        });
    }
    // Widens what this thread has asked for and waited for
    template <int kSource> static TILE_DEVICE void widen(int n) {
        const uint32_t to = place_of<kSource>(n), raw = kAtRaw + kSource * kRawBytes<0>;
        if constexpr (kWiden && kVectors)
            DealtKv<kSource>::each_copy([&](int row, int chunk, int i) {
                put_wide(TileOf<kSource>(to), row, chunk, Vector16(Shared<Vector16>(raw)[i * kThreads + threadIdx.x]));
            });
    }
};
