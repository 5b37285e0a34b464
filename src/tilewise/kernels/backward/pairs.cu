// pairs: which query tiles each tile of keys meets, from a block schedule, the window, lengths of blocks, positions of
// tokens and a mask function, and which queries see which keys where a tile is seen in part. It runs on the device
// because schedules and captured tensors are there. The main kernel then knows nothing of functions.
//
// A block takes a key tile of a list. Its threads look at query tiles, one each: the schedule and interval arithmetic
// tell most of them. Of the others they make the bits together, element by element, which tell the rest. Tiles stand in
// their order in the list, so that sums are the same in every run.
// Constants: kTileQ, kTileKv, kPacked, Function.
#include "backward/arguments.cuh"

struct PairArgs {
    // The schedule's bits: blocks that are kept, and those in which no function is asked; null for all, and for none
    const uint32_t *kept, *whole;
    const int *lengths_q, *lengths_k;      // (sequences or 1, blocks): valid rows of each block; null: all
    int *counts, *tiles;                   // QueryLists, to be written
    uint32_t *bits, *visits;               // visits: zero before; null if nobody asks
    int64_t kept_batch;                    // words from one sequence's bits to the next, 0 if they share them
    int kept_head, kept_row, q_blocks, k_blocks;
    int lengths_q_batch, lengths_k_batch;  // elements from one sequence to the next
    int list_heads;                        // lists per sequence, or in all if they are shared by sequences
    int left;                              // where tokens have positions: how far back the window reaches among them
    Divisor lists_each, block_q, block_k;  // lists_each: per head of the schedule
};
constexpr int kThreads = kTileQ * kTileKv / 32, kWarps = kThreads / 32;  // a word of bits per thread
// Shared memory: what threads found of their query tiles, and what warps found of one
constexpr int kAtFound = 0, kAtWarps = 4 * kThreads, kPairBytes = kAtWarps + 4 * kWarps;
enum Kind { kNone = 0, kSome = 1, kAll = 2 };

struct Pairs {
    const BackwardArgs& args;
    const PairArgs& pairs;
    const Function& function;
    KeyTile tile;
    int list, list_head, head;  // head: one of the query heads that share the list

    // Bit `block` of row `row` of a plane; past its end there is none.
    TILE_DEVICE bool bit(const uint32_t* plane, int row, int block) const {
        if (row >= pairs.q_blocks || block >= pairs.k_blocks) return false;
        const int64_t of_head = int64_t(pairs.lists_each.quotient(list_head)) * pairs.kept_head;
        const int64_t first = tile.sequence * pairs.kept_batch + of_head;
        return Global<const uint32_t>{plane}[first + int64_t(row) * pairs.kept_row + block / 32] >> block % 32 & 1;
    }
    TILE_DEVICE bool asked(int row, int block) const { return !(pairs.whole && bit(pairs.whole, row, block)); }
    // Is token `token` within the length of its block?
    static TILE_DEVICE bool there(const int* lengths, int64_t first, const Divisor& size, int token) {
        if (!lengths) return true;
        const int block = size.quotient(token);
        return token - block * int(size.divisor) < Global<const int>{lengths}[first + block];
    }

    // Of a query tile: kNone and kAll are certain
    TILE_DEVICE Kind look(int tile_q) const {
        const int q0 = tile_q * kTileQ, q1 = (q0 + kTileQ < tile.seqlen_q ? q0 + kTileQ : tile.seqlen_q) - 1;
        const int k0 = tile.key, k1 = (k0 + kTileKv < tile.seqlen_k ? k0 + kTileKv : tile.seqlen_k) - 1;
        bool any = true, every = tile_q >= tile.whole_begin && tile_q < tile.whole_end, asks = true;
        if (pairs.kept) {
            any = asks = false;
            for (int row = pairs.block_q.quotient(q0); row <= pairs.block_q.quotient(q1); row++)
                for (int block = pairs.block_k.quotient(k0); block <= pairs.block_k.quotient(k1); block++) {
                    const bool kept = bit(pairs.kept, row, block);
                    any |= kept;
                    every &= kept;
                    asks |= kept && asked(row, block);
                }
        }
        if (pairs.lengths_q || pairs.lengths_k || args.positions) every = false;
        if (Function::kMask && any && asks) {
            const double sequence = tile.sequence, of = head;
            const Interval seen = function.seen({sequence, sequence}, {of, of}, {double(q0), double(q1)},
                                                {double(k0), double(k1)});
            // Blocks in which it is not asked are seen, whatever it says.
            if (!pairs.whole) any = seen.high > 0.0;
            every &= seen.low >= 1.0;
        }
        return !any ? kNone : every ? kAll : kSome;
    }

    // This thread's word of bits: 32 queries and one key. beyond: queries that do not exist
    TILE_DEVICE uint32_t word(int tile_q, uint32_t& beyond) const {
        const int key = tile.key + threadIdx.x / 2, q0 = tile_q * kTileQ + threadIdx.x % 2 * 32;
        const int64_t first_q = int64_t(tile.sequence) * pairs.lengths_q_batch;
        const int64_t first_k = int64_t(tile.sequence) * pairs.lengths_k_batch;
        uint32_t bits = 0;
        beyond = 0;
        int end = tile.seqlen_q, position = 0;
        if (key < tile.seqlen_k) {
            const int token = tile.k_start + key;
            if (args.ends) end = Global<const int>{args.ends}[token] - tile.q_start;
            if (args.positions) position = Global<const int>{args.positions}[token];
        }
        if (end > tile.seqlen_q) end = tile.seqlen_q;
        Visible seen = queries_of(args.scores, key, tile.seqlen_q, tile.seqlen_k, end);
        if (key < tile.seqlen_k && !there(pairs.lengths_k, first_k, pairs.block_k, key)) seen.count = 0;
        const int block = pairs.block_k.quotient(key);
        for (int i = 0; i < 32; i++) {
            const int q = q0 + i;
            if (q >= tile.seqlen_q) beyond |= 1u << i;
            if (!seen.has(q) || !there(pairs.lengths_q, first_q, pairs.block_q, q)) continue;
            if (args.positions && Global<const int>{args.positions}[tile.q_start + q] - position > pairs.left) continue;
            const int row = pairs.block_q.quotient(q);
            if (pairs.kept && !bit(pairs.kept, row, block)) continue;
            if (Function::kMask && asked(row, block) &&
                !function.mask(tile.sequence, head, q, key, float(q), float(key), q, 0, key, 0))
                continue;
            bits |= 1u << i;
        }
        return bits;
    }

    // The truth of a query tile, which the block finds together, and the bits
    TILE_DEVICE Kind look_closer(int tile_q, uint32_t& bits) const {
        const Shared<int> found(kAtWarps);
        uint32_t beyond;
        bits = word(tile_q, beyond);
        const bool some = ptx::any(bits != 0), every = ptx::all((bits | beyond) == ~0u);
        if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = some + 2 * every;
        ptx::sync_threads();
        bool any = false, all = tile.key + kTileKv <= tile.seqlen_k;
        for (int w = 0; w < kWarps; w++) {
            const int of_warp = found[w];
            any |= of_warp & 1;
            all &= of_warp >> 1;
        }
        ptx::sync_threads();
        return !any ? kNone : all ? kAll : kSome;
    }

    TILE_DEVICE void run(int64_t row, int key_tile) const {
        const Shared<int> found(kAtFound);
        const QueryLists& lists = args.lists;
        const Global<int> tiles{pairs.tiles + row * lists.width};
        int masked = 0, whole = 0;
        for (int base = tile.begin; base < tile.end; base += kThreads) {
            const int own = base + threadIdx.x;
            found[threadIdx.x] = own < tile.end ? look(own) : kNone;
            ptx::sync_threads();
            for (int i = 0; i < kThreads && base + i < tile.end; i++) {
                uint32_t bits = 0;
                Kind kind = Kind(int(found[i]));
                if (kind == kSome) kind = look_closer(base + i, bits);
                if (kind == kNone) continue;
                if (kind == kSome)
                    Global<uint32_t>{pairs.bits}[(row * lists.width + masked) * (2 * kTileKv) + threadIdx.x] = bits;
                if (threadIdx.x == 0) {
                    tiles[kind == kSome ? masked : lists.width - 1 - whole] = base + i;
                    const int64_t of_tile = int64_t(list) * args.q_tiles + tile.slot + base + i;
                    if (pairs.visits && key_tile / 32 < lists.words)
                        ptx::atomic_or(pairs.visits + of_tile * lists.words + key_tile / 32, 1u << key_tile % 32);
                }
                kind == kSome ? masked++ : whole++;
            }
            ptx::sync_threads();
        }
        if (threadIdx.x == 0) {
            const Global<int> counts{pairs.counts};
            counts[2 * row] = masked;
            counts[2 * row + 1] = masked + whole;
        }
    }
};

// Blocks per multiprocessor: without a number ptxas aims at twelve of 128 threads, and spills.
extern "C" __global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    pairs(const __grid_constant__ BackwardArgs args, const __grid_constant__ PairArgs problem,
          const __grid_constant__ Function function) {
    const int list = blockIdx.y, sequence = kPacked ? 0 : list / problem.list_heads;
    const int entry = args.lists.first + blockIdx.x;
    KeyTile tile{};
    if constexpr (kPacked) {
        if (entry >= Global<const int>{args.list}[0]) return;
        tile = Global<const KeyTile>{reinterpret_cast<const KeyTile*>(args.list + kKeyListHeader)}[entry];
        if (tile.sequence < 0) return;
    } else {
        tile = KeyTile{sequence, entry * kTileKv, 0, 0, args.seqlen_q, args.seqlen_k};
        find_queries<kTileQ, kTileKv>(args.scores, tile, args.seqlen_q, args.seqlen_q);
    }
    // Heads share a list only if they see the same: one is asked for all.
    const int list_head = list - sequence * problem.list_heads, room = tile.begin + args.lists.width;
    if (tile.end > room) tile.end = room;  // whatever was said of the longest sequence
    const Pairs work{args, problem, function, tile, list, list_head, list_head * int(args.lists.heads_each.divisor)};
    work.run(int64_t(list) * args.lists.rows_each + blockIdx.x, tile.key / kTileKv);
}
