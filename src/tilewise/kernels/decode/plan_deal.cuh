// Dealing: sorted units go to bins, each to the bin that is done first, as if from a heap. A heap's turns are taken
// many at a time: the bins in their order get one unit each, up to the first bin that one of those before it, with its
// new unit, still comes before.
#pragma once
#include "decode/plan_work.cuh"

using Load = unsigned long long;  // of a bin: when it is done, and in the lowest kBinBits its number; no two are equal
TILE_DEVICE int bin_of(Load load) { return int(load & ((1 << kBinBits) - 1)); }

// Bins in the order of their loads, which a block keeps in args.room.loads
struct Bins {
    const PlanArgs& args;
    const int count;

    TILE_DEVICE Shared<Load> loads() const { return Shared<Load>(args.room.loads); }
    TILE_DEVICE Shared<Load> fresh() const { return Shared<Load>(args.room.fresh); }
    TILE_DEVICE Shared<int> ranks() const { return Shared<int>(args.room.ranks); }
    TILE_DEVICE Shared<int> skipped() const { return Shared<int>(args.room.skipped); }

    // How many of the first `among` loads come before this one
    TILE_DEVICE int before(Load load, int among) const {
        int low = 0, high = among;
#pragma unroll 1
        while (low < high) {
            const int middle = (low + high) / 2;
            if (Load(loads()[middle]) < load) low = middle + 1;
            else high = middle;
        }
        return low;
    }

    // Puts the loads in order. The first `changed` of them were replaced by the `fresh` ones; the others are in order.
    // Several threads share the comparisons of a bin: each compares with a part of the fresh loads.
    TILE_DEVICE void reorder(int changed) const {
        const int n = threadIdx.x, parts = count < kPlanThreads ? floor_div(kPlanThreads, count) : 1;
        const int part = parts > 1 ? floor_div(n, count) : 0;
        const int share = ceil_div(changed, parts), from = part * share, to = smaller(from + share, changed);
#pragma unroll 1
        for (int of = n - part * count; part < parts && of < count; of += kPlanThreads) {
            const Load key = of < changed ? fresh()[of] : loads()[of];
            if (of >= changed && part == 0) fresh()[of] = key;
            int rank = part > 0 ? 0 : of < changed ? larger(0, skipped()[of] - changed) : of - changed;
#pragma unroll 4
            for (int i = from; i < to; i++) rank += Load(fresh()[i]) < key;
            ptx::atomic_add_shared(ranks().address(of), rank);
        }
        ptx::sync_threads();
#pragma unroll 1
        for (int i = n; i < count; i += kPlanThreads) loads()[ranks()[i]] = Load(fresh()[i]);
        ptx::sync_threads();
    }
    // key(i): of unit i of `units`, the costliest first. after(load, key): what a bin's load becomes. place(i, bin):
    // called once per unit. unsorted: the loads are not in their order yet.
    template <class Key, class After, class Place>
    TILE_DEVICE void deal(int units, bool unsorted, Key key, After after, Place place) const {
#pragma unroll 1
        for (int done = 0; done < units;) {
            const int turns = unsorted ? count : smaller(count, units - done);
            int stop = turns;
#pragma unroll 1
            for (int i = threadIdx.x; i < count; i += kPlanThreads) {
                ranks()[i] = 0;
                if (i >= turns) continue;
                const Load load = loads()[i], made = unsorted ? load : after(load, key(done + i));
                fresh()[i] = made;
                const int ahead = unsorted ? 0 : before(made, count);
                skipped()[i] = ahead;
                // A bin that is further on than this one, and behind its new load, waits for the next round.
                if (!unsorted) stop = smaller(stop, larger(i + 1, ahead));
            }
            stop = least_of(stop);
            if (!unsorted) {
#pragma unroll 1
                for (int i = threadIdx.x; i < stop; i += kPlanThreads) place(done + i, bin_of(loads()[i]));
                done += stop;
            }
            if (done < units) reorder(stop);
            unsorted = false;
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
