// list: the tiles of keys of packed sequences, those that most query tiles see first. It runs on the device because the
// lengths are there.
//
// One block. A warp takes a sequence, and each of its lanes a tile of it; where keys have ends, a warp takes a tile. A
// tile goes into a bucket by the number of query tiles that see it, with four buckets per power of two, and the buckets
// stand in the list from the heaviest down. The order within a bucket is a race between threads: it changes when a tile
// runs, never what it computes. kInTurn: tiles stand in the order in which they add to dQ instead, so that none waits
// for one that has not begun.
// Constants: Index (int or int64_t), kTileQ, kTileKv, kInTurn.
#include "backward/arguments.cuh"

constexpr int kBuckets = 128, kThreads = 1024, kWarps = kThreads / 32;
