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
#pragma unroll
        for (int j = 0; j < kEach; j++) {
            const int of = parts > 1 ? int(threadIdx.x) % count : mine(j);
            if (of >= count || part >= parts || (parts > 1 && j > 0)) continue;
            const Load key = of < changed ? fresh()[of] : loads()[of];
            if (of >= changed && part == 0) fresh()[of] = key;
            int rank = part > 0 ? 0 : of < changed ? skipped[j] : of - changed;
#pragma unroll 4
            for (int i = from; i < to; i++) rank += Load(fresh()[i]) < key;
            ptx::atomic_add_shared(ranks().address(of), rank);
        }
        ptx::sync_threads();
#pragma unroll
        for (int j = 0; j < kEach; j++)
            if (mine(j) < count) loads()[ranks()[mine(j)]] = Load(fresh()[mine(j)]);
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
#pragma unroll
            for (int j = 0; j < kEach; j++) {
                const int i = mine(j);
                if (i < count) ranks()[i] = 0;
                if (i >= turns) continue;
                const Load load = loads()[i], made = unsorted ? load : after(load, key(done + i));
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
                    place(done + mine(j), bin_of(loads()[mine(j)]));
                    skipped[j] = larger(0, skipped[j] - stop);
                }
            done += stop;
            if (done < units) reorder(stop, skipped);
        }
        ptx::sync_threads();
    }
};

// What is dealt: chains of tile pieces, stream pieces in a kernel without tiles, or stream pieces beside tiles
enum Dealt { kDealChains, kDealAlone, kDealBeside };

// Sorted pieces, a unit for each head or group of heads, to the first `count` bins. Beside tiles, loads are not in
// their order yet.
TILE_DEVICE void deal_units(const PlanArgs& args, int units, int count, Dealt what) {
    const Shared<int> counts(args.room.counts), work(args.room.work), next(args.room.next);
    const Shared<uint32_t> keys(args.room.keys);
    const Global<int> placed{args.placed};
    const auto key = [&](int i) {
        return uint32_t(keys[what == kDealChains ? args.heads.quotient(i) : args.groups.quotient(i)]);
    };
    // What a unit with such a key adds to the work of its bin
    const auto work_of = [&](uint32_t key) {
        if (what == kDealChains) return cost_of(key) * args.step_cost;
        return (cost_of(key) * kUnit + args.item_cost) * (what == kDealBeside ? args.together : 1);
    };
    const auto after = [&](Load load, uint32_t key) {
        if (what != kDealBeside) return load + (Load(what == kDealChains ? cost_of(key) : work_of(key)) << kBinBits);
        // Times are compared as multiples of 1 / (warps · (warps + joiners)).
        const Load free = load >> kBinBits & ((1 << kAfterBits) - 1), warps = args.warps;
        const Load all = args.warps + args.joiners, now = Load(int(work[bin_of(load)]) + work_of(key));
        const Load done = args.in_turn          ? free * warps + now
                          : now <= warps * free ? now * all
                                                : free * warps * all + (now - warps * free) * warps;
        return done << (kBinBits + kAfterBits) | (load & ((Load(1) << (kBinBits + kAfterBits)) - 1));
    };
    const auto place = [&](int i, int bin) {
        const uint32_t of = key(i);
        int turn = counts[bin];
        placed[i] = bin | turn << kBinBits;
        turn++;
        if (what == kDealChains)
#pragma unroll 1
            for (int at = next[piece_of(of)]; at >= 0; at = next[at]) turn++;
        counts[bin] = turn;
        work[bin] = work[bin] + work_of(of);
    };
    Bins{args, count}.deal(units, what == kDealBeside, key, after, place);
}
