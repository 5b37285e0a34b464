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

template <int kRows> using Tile = SharedTile<Operand, kRows, kHeadDim, Layout::swizzled>;
using TileQ = Tile<kTileQ>;
using TileKv = Tile<kTileKv>;

// A tile's rows and chunks of 16 bytes as they come, dealt to the threads: kAcross neighbouring threads copy
// neighbouring chunks of a row, and all threads kStep rows at a time.
constexpr int kArriving = kHeadDim * int(sizeof(Element)) / 16;                        // chunks per row
constexpr int kValid = kColumns * int(sizeof(Element)) / 16;                           // of them, those with columns
constexpr int kAcross = (kArriving & -kArriving) < 32 ? (kArriving & -kArriving) : 32;  // a power of two
constexpr int kStep = kThreads / kAcross;
template <int kRows> constexpr int kCopies = (kRows + kStep - 1) / kStep * (kArriving / kAcross);  // per thread

// Shared memory: Q, K, V; K and V as they arrive, if they are widened; the tile; what the boxes of four blocks hold
constexpr int kRawBytes = kWiden && kVectors ? kCopies<kTileKv> * kThreads * 16 : 0;
constexpr int kAtK = TileQ::kBytes, kAtV = kAtK + kStagesK * TileKv::kBytes, kAtRaw = kAtV + kStagesV * TileKv::kBytes;
constexpr int kAtTile = kAtRaw + 2 * kRawBytes, kAtUnits = kAtTile + int(sizeof(WorkTile));
constexpr int kSlots = 4, kSlotBytes = 4 * kBoxes;
constexpr int kAtPages = kAtUnits + (kListed ? kSlots * kSlotBytes : 0);
constexpr int kAtThere = kAtPages + (kPageSize > 0 ? kSlots * kSlotBytes : 0);
constexpr bool kTold = kListed || kPageSize > 0;  // where a block's rows come from is looked up
static_assert(kBoxes <= kThreads, "a thread per box");

TILE_DEVICE Shared<WorkTile> work() { return Shared<WorkTile>(kAtTile); }
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

// Each of this thread's copies of a tile of kRows rows: each(row, chunk, i), i the copy's number
template <int kRows, class Each> TILE_DEVICE void each_copy(Each each) {
    const int row = threadIdx.x / kAcross, chunk = threadIdx.x % kAcross;
    int i = 0;
#pragma unroll
    for (int r = 0; r < kRows; r += kStep)
#pragma unroll
        for (int c = 0; c < kArriving; c += kAcross, i++)
            if (kRows % kStep == 0 || row + r < kRows) each(row + r, chunk + c, i);
}
TILE_DEVICE bool has_columns(int chunk) { return kValid == kArriving || chunk < kValid; }

// Element by element, where rows do not begin at multiples of 16 bytes: a warp takes a row. at(row): the row's address,
// null for a row of zeros
template <int kRows, class At> TILE_DEVICE void load_elements(const Tile<kRows>& tile, At at) {
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < kRows; row += kWarps) {
        const Global<const Element> g{at(row)};
#pragma unroll 2
        for (int column = threadIdx.x % 32; column < kHeadDim; column += 32)
            put_element(tile, row, column, g.base && column < kColumns ? Element(g[column]) : Element{});
    }
}

TILE_DEVICE void load_q(const ForwardArgs& args, const WorkTile& tile) {
    const TileQ sQ(0);
    const Element* q = static_cast<const Element*>(args.q) + (args.list ? 0 : tile.sequence * args.q_strides.batch);
    auto at = [&](int row) {
        const int token = (tile.row + row) / kPack, head = tile.head * kPack + (tile.row + row) % kPack;
        const int64_t from = (tile.q_start + token) * args.q_strides.row + head * args.q_strides.head;
        // Rows past their block's length are zeros: what they hold must not move other rows' references.
        const bool there = token < tile.seqlen_q && (!kLengths || row_there(args.lists, tile, token));
        return there ? q + from : nullptr;
    };
    if constexpr (!kVectors) {
        load_elements<kTileQ>(sQ, at);
    } else {
        each_copy<kTileQ>([&](int row, int chunk, int) {
            const Element* from = at(row);
            const bool there = from && has_columns(chunk);
            constexpr int kInChunk = 16 / sizeof(Element);
            if constexpr (kWiden) {
                const Global<const Vector16> g{reinterpret_cast<const Vector16*>(from + chunk * kInChunk)};
                put_wide(sQ, row, chunk, there ? Vector16(g[0]) : Vector16{});
            } else {
                ptx::copy_async_16(sQ.address(row, chunk), there ? from + chunk * kInChunk : q, there ? 16 : 0);
            }
        });
    }
}

// ---- blocks of K and V ------------------------------------------------------------------------------------------
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

    // Asks for block n of K or V, which goes to `to`; raw: where it arrives if it is widened
    TILE_DEVICE void load(const WorkTile& tile, const void* base, const Strides& strides, int n, uint32_t to,
                          uint32_t raw) const {
        const TileKv s(to);
        const Element* first = static_cast<const Element*>(base) + tile.kv_head * strides.head;
        auto place = [&](int row, int chunk, int i) {
            return kWiden ? ptx::shared_address(raw + (i * kThreads + threadIdx.x) * 16) : s.address(row, chunk);
        };
        constexpr int kInChunk = 16 / sizeof(Element);
        if constexpr (kTold) {
            auto at = [&](int row) -> const Element* {
                const int box = row / kBoxRows, inside = row % kBoxRows;
                const int key = kListed ? key_of_unit(units_of(n)[box]) + inside : n * kTileKv + row;
                if (key >= tile.seqlen_k || (kLengths && inside >= there_of_block(n)[box])) return nullptr;
                if constexpr (kPageSize > 0)
                    return first + (pages_of(n)[box] * strides.batch + key % kPage * strides.row);
                else
                    return first + ((args.list ? 0 : tile.sequence * strides.batch) +
                                    (tile.k_start + key) * strides.row);
            };
            if constexpr (!kVectors) {
                load_elements<kTileKv>(s, at);
            } else {
                each_copy<kTileKv>([&](int row, int chunk, int i) {
                    const Element* from = at(row);
                    const bool is = from && has_columns(chunk);
                    ptx::copy_async_16(place(row, chunk, i), is ? from + chunk * kInChunk : first, is ? 16 : 0);
                });
            }
        } else {
            first += (args.list ? 0 : tile.sequence * strides.batch) +
                     (tile.k_start + int64_t(n) * kTileKv) * strides.row;
            const int rows = tile.seqlen_k - n * kTileKv;
            if constexpr (!kVectors) {
                load_elements<kTileKv>(s, [&](int row) { return row < rows ? first + row * strides.row : nullptr; });
            } else {
                const Element* mine = first + threadIdx.x / kAcross * strides.row + threadIdx.x % kAcross * kInChunk;
                auto copy = [&](bool whole) {
                    const int row0 = threadIdx.x / kAcross, chunk0 = threadIdx.x % kAcross;
                    each_copy<kTileKv>([&](int row, int chunk, int i) {
                        const bool is = (whole || row < rows) && has_columns(chunk);
                        const Element* from = mine + ((row - row0) * strides.row + (chunk - chunk0) * kInChunk);
                        ptx::copy_async_16(place(row, chunk, i), is ? from : first, is ? 16 : 0);
                    });
                };
                if (rows >= kTileKv) copy(true);
                else copy(false);
            }
        }
    }
    TILE_DEVICE void load_k(const WorkTile& tile, int n) const {
        load(tile, args.k, args.k_strides, n, kAtK + n % kStagesK * TileKv::kBytes, kAtRaw);
    }
    TILE_DEVICE void load_v(const WorkTile& tile, int n) const {
        load(tile, args.v, args.v_strides, n, kAtV + n % kStagesV * TileKv::kBytes, kAtRaw + kRawBytes);
    }
    // Widens what this thread has asked for and waited for
    static TILE_DEVICE void widen(uint32_t to, uint32_t raw) {
        if constexpr (kWiden && kVectors)
            each_copy<kTileKv>([&](int row, int chunk, int i) {
                put_wide(TileKv(to), row, chunk, Vector16(Shared<Vector16>(raw)[i * kThreads + threadIdx.x]));
            });
    }
    static TILE_DEVICE void widen_k(int n) { widen(kAtK + n % kStagesK * TileKv::kBytes, kAtRaw); }
    static TILE_DEVICE void widen_v(int n) { widen(kAtV + n % kStagesV * TileKv::kBytes, kAtRaw + kRawBytes); }
};
