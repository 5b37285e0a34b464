// Dealing: sorted units go to bins, each to the bin that is done first, as if from a heap. A heap's turns are taken
// many at a time: the bins in their order get one unit each, up to the first bin that one of those before it, with its
// new unit, still comes before.
#pragma once
#include "decode/plan_work.cuh"

using Load = unsigned long long;  // of a bin: when it is done, and in the lowest kBinBits its number
TILE_DEVICE int bin_of(Load load) { return int(load & ((1 << kBinBits) - 1)); }
TILE_DEVICE Load no_bin(int n) { return Load(1) << 62 | Load(n); }  // after all bins

TILE_DEVICE void sort_loads(const PlanArgs& args, int bins) {
    const int all = power_of_two(32, bins);
    const Shared<Load> loads(args.room.loads);
    if (2 * all <= kPlanThreads) sort_few(loads, Shared<int>(args.room.ranks), all);
    else sort_keys(loads, all);
}

// loads: in their order at first. cost(i): of unit i, of `units`, in descending order. after(load, cost): what a bin's
// load becomes. place(i, bin): called once per unit.
template <class Cost, class After, class Place>
TILE_DEVICE void deal(const PlanArgs& args, int units, int bins, Cost cost, After after, Place place) {
    const Shared<Load> loads(args.room.loads);
    const int first = 2 * int(threadIdx.x);  // this thread's two bins
    for (int done = 0; done < units;) {
        if (done) sort_loads(args, bins);
        const int k = smaller(bins, units - done);
        Load mine[2], made[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            mine[j] = first + j < k ? Load(loads[first + j]) : 0;
            made[j] = first + j < k ? after(mine[j], cost(done + first + j)) : ~Load(0) >> 1;
        }
        Load least;
        const Load before = scan<Least>(made[0] < made[1] ? made[0] : made[1], least);
        int stop = k;
        if (first < k && before < mine[0]) stop = first;
        else if (first + 1 < k && (before < mine[1] || made[0] < mine[1])) stop = first + 1;
        stop = int(reduce<Least>(Load(stop)));
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (first + j < stop) {
                loads[first + j] = made[j];
                place(done + first + j, bin_of(mine[j]));
            }
        done += stop;
        ptx::sync_threads();
    }
}
