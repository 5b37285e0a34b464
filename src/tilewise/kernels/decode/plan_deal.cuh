// Dealing: sorted units go to bins, each to the bin that is done first, as if from a heap. A heap's turns are taken
// many at a time: the bins in their order get one unit each, up to the first bin that one of those before it, with its
// new unit, still comes before.
#pragma once
#include "decode/plan_work.cuh"

using Load = unsigned long long;  // of a bin: when it is done, and in the lowest kBinBits its number; no two are equal
TILE_DEVICE int bin_of(Load load) { return int(load & ((1 << kBinBits) - 1)); }

// Bins in the order of their loads, which a block keeps in args.room.loads
struct Bins {
    static constexpr int kEach = (1 << kBinBits) / kPlanThreads;  // bins of a thread: threadIdx.x + kPlanThreads · j
    const PlanArgs& args;
    const int count;

    TILE_DEVICE Shared<Load> loads() const { return Shared<Load>(args.room.loads); }
    TILE_DEVICE Shared<Load> fresh() const { return Shared<Load>(args.room.fresh); }
    TILE_DEVICE Shared<int> ranks() const { return Shared<int>(args.room.ranks); }
    static TILE_DEVICE int mine(int j) { return int(threadIdx.x) + kPlanThreads * j; }

    // How many of the first `among` loads come before this one
    TILE_DEVICE int before(Load load, int among) const {
        int low = 0, high = among;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (Load(loads()[middle]) < load) low = middle + 1;
            else high = middle;
        }
        return low;
    }

    // Puts the loads in order. The first `changed` of them were replaced by the `fresh` ones; the others are in order.
    // skipped[j]: of this thread's bins, how many unchanged loads come before a fresh one. Several threads share the
    // comparisons of a bin: each compares with a part of the fresh loads.
    TILE_DEVICE void reorder(int changed, const int (&skipped)[kEach]) const {
        const int parts = count < kPlanThreads ? kPlanThreads / count : 1, part = int(threadIdx.x) / count;
        const int share = (changed + parts - 1) / parts, from = part * share;
        const int to = from + share < changed ? from + share : changed;
        Load key[kEach];
#pragma unroll
        for (int j = 0; j < kEach; j++) {
            const int of = parts > 1 ? int(threadIdx.x) % count : mine(j);
            if (of >= count || part >= parts || (parts > 1 && j > 0)) continue;
            key[j] = of < changed ? fresh()[of] : loads()[of];
            int rank = part > 0 ? 0 : of < changed ? skipped[j] : of - changed;
#pragma unroll 4
            for (int i = from; i < to; i++) rank += Load(fresh()[i]) < key[j];
            ptx::atomic_add_shared(ranks().address(of), rank);
        }
        ptx::sync_threads();
#pragma unroll
        for (int j = 0; j < kEach; j++)
            if (mine(j) < count) loads()[ranks()[mine(j)]] = key[j];
        ptx::sync_threads();
    }
    // key(i): of unit i of `units`, the costliest first. after(load, key): what a bin's load becomes. place(i, bin):
    // called once per unit. unsorted: the loads are not in their order yet.
    template <class Key, class After, class Place>
    TILE_DEVICE void deal(int units, bool unsorted, Key key, After after, Place place) const {
#pragma unroll 1
        for (int done = 0; done < units;) {
            const int turns = unsorted ? count : smaller(count, units - done);
            int stop = turns, skipped[kEach] = {};
            Load taken[kEach];
#pragma unroll
            for (int j = 0; j < kEach; j++) {
                const int i = mine(j);
                if (i < count) ranks()[i] = 0;
                if (i >= turns) continue;
                taken[j] = loads()[i];
                const Load made = unsorted ? taken[j] : after(taken[j], key(done + i));
                fresh()[i] = made;
                // A bin that is further on than this one, and behind its new load, waits for the next round.
                if (unsorted) continue;
                skipped[j] = before(made, count);
                stop = smaller(stop, larger(i + 1, skipped[j]));
            }
            stop = least_of(stop);
            if (unsorted) {
                reorder(count, skipped);
                unsorted = false;
                continue;
            }
#pragma unroll
            for (int j = 0; j < kEach; j++)
                if (mine(j) < stop) {
                    place(done + mine(j), bin_of(taken[j]));
                    skipped[j] = larger(0, skipped[j] - stop);
                }
            done += stop;
            if (done < units) reorder(stop, skipped);
        }
        ptx::sync_threads();
    }
};
