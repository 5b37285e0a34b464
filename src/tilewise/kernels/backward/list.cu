// list: the tiles of keys of packed sequences, those that most query tiles see first. It runs on the device because the
// lengths are there.
//
// One block. A warp takes a sequence, and each of its lanes a tile of it; where keys have ends, a warp takes a tile. A
// tile goes into a bucket by the number of query tiles that see it, with four buckets per power of two, and the buckets
// stand in the list from the heaviest down. The order within a bucket is a race between threads: it changes when a tile
// runs, never what it computes. kInTurn: tiles stand in the order in which they add to dQ instead, so that none waits
// for one that begins later: the last of the last sequence first, with gaps between sequences.
// Constants: Index (int or int64_t), kTileQ, kTileKv, kInTurn.
#include "backward/arguments.cuh"

struct KeyListArgs {
    int* list;     // BackwardArgs::list, with room for kv_tiles tiles
    int* buckets;  // kBuckets
};
constexpr int kBuckets = 128, kThreads = 1024, kWarps = kThreads / 32;

TILE_DEVICE int bucket_of(int tiles) {
    int octave = 0;
    while (tiles >> (octave + 1)) octave++;
    const int quarter = (octave >= 2 ? tiles >> (octave - 2) : tiles << (2 - octave)) & 3;
    return kBuckets - 1 - (octave * 4 + quarter);
}

struct Lister {
    const BackwardArgs& args;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Whatever the starts say, no tile reaches outside the tensors.
    static TILE_DEVICE int within(int64_t x, int low, int high) { return x < low ? low : x > high ? high : int(x); }
    TILE_DEVICE Span span_of(const void* starts, int sequence, int total) const {
        const Global<const Index> of{static_cast<const Index*>(starts)};
        const int begin = sequence < 0 ? 0 : within(of[sequence], 0, total);
        return {begin, sequence < args.sequences ? within(of[sequence + 1], begin, total) : total};
    }
    TILE_DEVICE KeyTile tile_of(int sequence, Span queries, Span keys, int key, int least, int most) const {
        const int known = within(sequence, 0, args.sequences - 1);
        KeyTile tile{known, key, queries.begin, keys.begin, queries.end - queries.begin, keys.end - keys.begin};
        tile.slot = first_slot<kTileQ>(queries.begin, sequence);
        find_queries<kTileQ, kTileKv>(args.scores, tile, least, most);
        return tile;
    }
    // act(tile, sequence): of sequences −1 and args.sequences, too, which have keys and no queries
    template <class Act> TILE_DEVICE void each_tile(Act act) const {
        for (int s = args.ends ? -1 : warp - 1; s <= args.sequences; s += args.ends ? 1 : kWarps) {
            Span queries = span_of(args.starts_q, s, args.seqlen_q);
            if (s < 0 || s == args.sequences) queries.end = queries.begin;
            const Span keys = span_of(args.starts_k, s, args.seqlen_k);
            const int length = keys.end - keys.begin, rows = queries.end - queries.begin;
            // Unrolled, these loops would take more than the 64 registers that a thread of 1024 may have.
            if (!args.ends) {
#pragma unroll 1
                for (int key = lane * kTileKv; key < length; key += 32 * kTileKv)
                    act(tile_of(s, queries, keys, key, rows, rows), s);
                continue;
            }
#pragma unroll 1
            for (int key = warp * kTileKv; key < length; key += kWarps * kTileKv) {
                // The first and the last end of the tile's keys, as numbers from 0 to rows
                uint32_t least = rows, most = 0;
#pragma unroll 1
                for (int i = key + lane; i < key + kTileKv && i < length; i += 32) {
                    const int end = Global<const int>{args.ends}[keys.begin + i];
                    const uint32_t own = within(int64_t(end) - queries.begin, 0, rows);
                    least = own < least ? own : least;
                    most = own > most ? own : most;
                }
                least = rows - ptx::reduce_max(rows - least);
                most = ptx::reduce_max(most);
                if (lane == 0) act(tile_of(s, queries, keys, key, least, most), s);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    list(const __grid_constant__ BackwardArgs args, const __grid_constant__ KeyListArgs to) {
    const Lister lister{args};
    const Global<int> buckets{to.buckets}, head{to.list};
    const Global<KeyTile> tiles{reinterpret_cast<KeyTile*>(to.list + kKeyListHeader)};
    if constexpr (kInTurn) {
        KeyTile none{};
        none.sequence = -1;
        for (int i = threadIdx.x; i < args.kv_tiles; i += kThreads) tiles[i] = none;
        if (threadIdx.x == 0) head[0] = args.kv_tiles;
        ptx::sync_threads();
        lister.each_tile([&](const KeyTile& tile, int sequence) {
            const int place = listed_at<kTileKv>(args, tile.k_start, sequence, tile.key / kTileKv);
            if (place >= 0) tiles[place] = tile;
        });
        return;
    }
    if (threadIdx.x < kBuckets) buckets[threadIdx.x] = 0;
    ptx::sync_threads();
    lister.each_tile([&](const KeyTile& tile, int) {
        ptx::atomic_add(buckets.address(bucket_of(tile.end - tile.begin)), 1);
    });
    ptx::sync_threads();
    if (threadIdx.x == 0) {
        int total = 0;
        for (int b = 0; b < kBuckets; b++) {
            const int count = ptx::load_acquire(buckets.address(b));
            buckets[b] = total;
            total += count;
        }
        head[0] = total < args.kv_tiles ? total : args.kv_tiles;
    }
    ptx::sync_threads();
    lister.each_tile([&](const KeyTile& tile, int) {
        const int place = ptx::atomic_add(buckets.address(bucket_of(tile.end - tile.begin)), 1);
        if (place < args.kv_tiles) tiles[place] = tile;
    });
}
