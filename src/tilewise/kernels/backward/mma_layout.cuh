// What the backward by mma.sync has in shared memory, how its threads load it, and who makes what of dQ.
// backward_mma.cu says what the constants mean; mma_ends.cu asks here how dQ's sum lies.
#pragma once
#include "backward/arguments.cuh"
#include "tile/mma_rows.cuh"

constexpr bool kFloats = sizeof(Element) == 4;
constexpr int kInChunk = 16 / int(sizeof(Element)), kDepth = warp::kDepth<Element>, kTaken = warp::kTogether<Element>;
constexpr int kPairs = kTileKv / kPairKeys, kWarps = 2 * kPairs, kThreads = 32 * kWarps, kM = kPairKeys / 16;
static_assert(kTileKv % kPairKeys == 0 && kPairKeys % 16 == 0 && kTileQ % 16 == 0 && kHeadDim % 32 == 0);

template <int kRows> using Rows = SharedTile<Element, kRows, kHeadDim, Layout::swizzled>;
using TileKv = Rows<kTileKv>;
using TileQ = Rows<kTileQ>;
using TileDs = SharedTile<Element, kTileKv, kTileQ, Layout::swizzled>;  // Pᵀ, then dSᵀ

// Shared memory: K, V; Q and dO, a place per stage; two places for Pᵀ and dSᵀ; per stage −LSE (0) and −delta (1)
// of the queries; the tile
constexpr int kStatBytes = 4 * kTileQ;
constexpr int kAtK = 0, kAtV = TileKv::kBytes, kAtQ = 2 * TileKv::kBytes, kAtDo = kAtQ + kStages * TileQ::kBytes;
constexpr int kAtDs = kAtDo + kStages * TileQ::kBytes, kAtStats = kAtDs + 2 * TileDs::kBytes;
constexpr int kAtTile = kAtStats + 2 * kStages * kStatBytes, kSharedBytes = kAtTile + int(sizeof(KeyTile));

TILE_DEVICE Shared<KeyTile> work() { return Shared<KeyTile>(kAtTile); }

// ---- dQ -------------------------------------------------------------------------------------------------------------
// Every warp of the block makes kDqEach parts of a tile of dQ, of kDqRows × kDqColumns each. In global memory a tile
// lies part by part in the order in which fragments hold it, so that a warp adds to neighbouring floats.
constexpr int kDqDown = kWarps * kDqEach / kDqAcross;  // parts under each other
constexpr int kDqColumns = kHeadDim / kDqAcross, kDqRows = kTileQ / kDqDown, kDqM = kDqRows / 16;
constexpr int kDqSize = kDqColumns / 2;  // floats of a lane, per sixteen rows
static_assert(kWarps * kDqEach % kDqAcross == 0 && kTileQ % (16 * kDqDown) == 0 && kHeadDim % (16 * kDqAcross) == 0);
TILE_DEVICE int dq_row(int part) { return part / kDqAcross * kDqRows; }
TILE_DEVICE int dq_column(int part) { return part % kDqAcross * kDqColumns; }
// Where four floats of a lane lie in the tile's sum: beside each other if the card adds them by one instruction, else
// those of the warp's other lanes stand between them
TILE_DEVICE int dq_place(int part, int m, int n) {
    return ((part * kDqM + m) * (kDqSize / 4) + n) * 128 + warp::lane() * (kNewCard ? 4 : 1);
}
constexpr int kDqApart = kNewCard ? 1 : 32;  // floats from one of a lane's four to the next

// ---- where things lie in global memory ------------------------------------------------------------------------------
// Block `number`: which keys, and who sees them. sequence is −1 if there is no such block.
TILE_DEVICE KeyTile key_tile(const BackwardArgs& args, int number, int& kv_head) {
    KeyTile tile{};
    if (args.list) {  // all heads of the heaviest tile come first
        const int entry = number / args.kv_heads;
        kv_head = number - entry * args.kv_heads;
        tile.sequence = -1;
        if (entry < Global<const int>{args.list}[0])
            tile = Global<const KeyTile>{reinterpret_cast<const KeyTile*>(args.list + kKeyListHeader)}[entry];
        return tile;
    }
    const Place place = place_of<kInTurn>(args, number, args.sequences * args.kv_heads);
    tile.sequence = place.head / args.kv_heads;
    kv_head = place.head - tile.sequence * args.kv_heads;
    tile.key = place.tile * kTileKv;
    tile.seqlen_q = args.seqlen_q;
    tile.seqlen_k = args.seqlen_k;
    find_queries<kTileQ, kTileKv>(args.scores, tile, args.seqlen_q, args.seqlen_q);
    return tile;
}
// Of (batch, heads, q_tiles), the tile of queries `t` of a query head
TILE_DEVICE int64_t slot_of(const BackwardArgs& args, const KeyTile& tile, int head, int t) {
    const int64_t heads = args.starts_q ? 0 : int64_t(tile.sequence) * args.heads;
    return (heads + head) * args.q_tiles + tile.slot + t;
}
// Row `row` of a sequence, or of all that are packed, in a tensor of queries or of keys
template <class T>
TILE_DEVICE T* row_at(const BackwardArgs& args, T* base, const Strides& strides, int sequence, int row, int head) {
    return base + ((args.starts_q ? 0 : sequence * strides.batch) + row * strides.row + head * strides.head);
}

// ---- loads ----------------------------------------------------------------------------------------------------------
// kRows rows from g on, `stride` elements apart, of which the first `rows` exist: by cp.async. The others, and columns
// behind the last, become zero.
template <int kRows>
TILE_DEVICE void load_rows(const Rows<kRows>& to, const Element* g, int64_t stride, int rows) {
    constexpr int kChunks = kHeadDim / kInChunk, kValid = kColumns / kInChunk;
    constexpr int kAcross = kThreads % kChunks == 0 ? kChunks : 8, kStep = kThreads / kAcross;
    static_assert(kChunks % kAcross == 0 && kColumns % kInChunk == 0);
    const int row0 = threadIdx.x / kAcross, chunk0 = threadIdx.x % kAcross;
    const Element* from = g + (row0 * stride + chunk0 * kInChunk);
#pragma unroll
    for (int r = 0; r < kRows; r += kStep, from += kStep * stride)
#pragma unroll
        for (int c = 0; c < kChunks; c += kAcross)
            if (kRows % kStep == 0 || row0 + r < kRows) {
                const bool is = row0 + r < rows && (kValid == kChunks || chunk0 + c < kValid);
                ptx::copy_async_16(to.address(row0 + r, chunk0 + c), from + c * kInChunk, is ? 16 : 0);
            }
}

// ---- fragments ------------------------------------------------------------------------------------------------------
using Fragments = float[kM][kTileQ / 2];
using Operand = uint32_t[kTileQ / kDepth][4];  // sixteen keys of Pᵀ or dSᵀ: 16-bit pairs, or accumulators as they are
struct alignas(8) Two {
    float of[2];
};
// Of a tile of floats, which two are those from an even column on
TILE_DEVICE int two_at(int row, int column) { return TileDs::place(row, column / 4) * 2 + column % 4 / 2; }
// Step k of an operand's depth, into the sixteen rows of a tile from row0 on; and back
TILE_DEVICE void put(const TileDs& to, int row0, int k, const uint32_t (&a)[4]) {
    if constexpr (kFloats)
#pragma unroll
        for (int h = 0; h < 2; h++)
            Shared<Two>(to.offset)[two_at(row0 + warp::fragment_row(h), 8 * k + warp::fragment_column())] =
                Two{as_float(a[2 * h]), as_float(a[2 * h + 1])};
    else if constexpr (kNewCard) warp::store_a(to, row0, k, a);
    else
#pragma unroll
        for (int r = 0; r < 4; r++)
            to.pair(row0 + warp::fragment_row(r % 2), 16 * k + r / 2 * 8 + warp::fragment_column()) = a[r];
}
TILE_DEVICE void take(uint32_t (&a)[4], const TileDs& from, int row0, int k) {
    if constexpr (kFloats)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = two_at(row0 + warp::fragment_row(h), 8 * k + warp::fragment_column());
            const Two two = Shared<Two>(from.offset)[at];
            a[2 * h] = as_bits(two.of[0]), a[2 * h + 1] = as_bits(two.of[1]);
        }
    else warp::load_a(a, from, row0, k);
}
// Two neighbours as they lie in memory and in operands: T, Element, is known where a template is made
template <class T = Element> TILE_DEVICE Two two_in(uint32_t first, uint32_t second) {
    if constexpr (sizeof(T) == 4) return {as_float(first), as_float(second)};
    else return {unpack<T>(first, 0), unpack<T>(first, 1)};
}
// Values 2i and 2i + 1 of the accumulators that an operand was made of
TILE_DEVICE Two two_of(const Operand& a, int i) {
    return kFloats ? two_in(a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]) : two_in(a[i / 4][i % 4], 0);
}
template <class T = Element> TILE_DEVICE void set_two(Operand& a, int i, float x, float y) {
    if constexpr (sizeof(T) == 4) a[i / 2][i % 2 * 2] = as_bits(x), a[i / 2][i % 2 * 2 + 1] = as_bits(y);
    else a[i / 4][i % 4] = pack<T>(x, y);
}
// What every column begins with
TILE_DEVICE void fill(Fragments& acc, int stage, int which) {
    const Shared<Two> columns(kAtStats + (2 * stage + which) * kStatBytes);
#pragma unroll
    for (int n = 0; n < kTileQ / 8; n++) {
        const Two two = columns[4 * n + warp::fragment_column() / 2];
#pragma unroll
        for (int i = 0; i < 4 * kM; i++) acc[i / 4][4 * n + i % 4] = two.of[i % 2];
    }
}
// Rows of a gradient, as far as they exist, and of their columns the first `columns`
template <class T, int kSize>
TILE_DEVICE void store_gradient(const Global<T> (&rows)[2], const bool (&exists)[2], const float (&acc)[kSize],
                                int columns) {
    if constexpr (sizeof(T) == 2)
        if (columns >= 2 * kSize) {
            warp::store_rows<2 * kSize>(rows, exists, acc);
            return;
        }
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
        const int column = i / 4 * 8 + warp::fragment_column();
        const Global<T> to = rows[i / 2 % 2] + column;
        if (exists[i / 2 % 2] && column < columns) {
            if constexpr (sizeof(T) == 4) to.template as<Two>()[0] = Two{acc[i], acc[i + 1]};
            else to.template as<uint32_t>()[0] = pack<T>(acc[i], acc[i + 1]);
        }
    }
}
