// ragged: lists the query tiles of packed sequences, heaviest first. It runs on the device because the lengths are
// there.
//
// One block. A warp takes a sequence, and each of its lanes a tile of it. A tile goes into a bucket by the number of
// key blocks that it visits, with four buckets per power of two, and the buckets stand in the list from the heaviest
// down. The order within a bucket is a race between threads: it changes when a tile runs, never what it computes.
// Constants: Index (int or int64_t), kTileQ, kTileKv, kPack.
#include "prefill/work.cuh"

struct RaggedArgs {
    const void *starts_q, *starts_k;  // (sequences + 1,)
    int* list;     // kListHeader ints, then WorkTiles without their head
    int* buckets;  // kBuckets
    int sequences, total_q, total_k;
    int longest_k;  // keys per sequence, at most: as many as a row of the page table has room for
    int capacity;   // tiles that the list has room for: enough if the starts increase
    int reserved;
};
constexpr int kBuckets = 128, kThreads = 1024;

TILE_DEVICE int bucket_of(int blocks) {
    int octave = 0;
    while (blocks >> (octave + 1)) octave++;
    const int quarter = (octave >= 2 ? blocks >> (octave - 2) : blocks << (2 - octave)) & 3;
    return kBuckets - 1 - (octave * 4 + quarter);
}
TILE_DEVICE int within(int64_t x, int low, int high) { return x < low ? low : x > high ? high : int(x); }

extern "C" __global__ void __launch_bounds__(kThreads) ragged(const ForwardArgs args, const RaggedArgs problem) {
    const Global<const Index> starts_q{static_cast<const Index*>(problem.starts_q)};
    const Global<const Index> starts_k{static_cast<const Index*>(problem.starts_k)};
    const Global<int> buckets{problem.buckets};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto each_tile = [&](auto act) {
        for (int s = warp; s < problem.sequences; s += kThreads / 32) {
            // Whatever the starts say, no tile reaches outside the tensors.
            const int q0 = within(starts_q[s], 0, problem.total_q);
            const int q1 = within(starts_q[s + 1], q0, problem.total_q);
            const int k0 = within(starts_k[s], 0, problem.total_k);
            const int k1 = within(starts_k[s + 1], k0, problem.total_k);
            const int keys = within(k1 - k0, 0, problem.longest_k);
            for (int row = lane * kTileQ; row < (q1 - q0) * kPack; row += 32 * kTileQ) {
                WorkTile tile{row, 0, s, q0, k0, q1 - q0, keys};
                find_blocks<kTileQ, kTileKv, kPack>(args, tile);
                act(tile, bucket_of(tile.end - tile.begin));
            }
        }
    };
    if (threadIdx.x < kBuckets) buckets[threadIdx.x] = 0;
    ptx::sync_threads();
    each_tile([&](const WorkTile&, int bucket) { ptx::atomic_add(buckets.address(bucket), 1); });
    ptx::sync_threads();
    if (threadIdx.x == 0) {
        int total = 0;
        for (int b = 0; b < kBuckets; b++) {
            const int count = ptx::load_acquire(buckets.address(b));
            buckets[b] = total;
            total += count;
        }
        if (total > problem.capacity) total = problem.capacity;
        ListHead head{divisor_of(total ? total : 1)};
        head.tiles.divisor = total;
        Global<ListHead>{reinterpret_cast<ListHead*>(problem.list)}[0] = head;
    }
    ptx::sync_threads();
    each_tile([&](const WorkTile& tile, int bucket) {
        const Global<WorkTile> tiles{reinterpret_cast<WorkTile*>(problem.list + kListHeader)};
        const int place = ptx::atomic_add(buckets.address(bucket), 1);
        if (place < problem.capacity) tiles[place] = tile;
    });
}
