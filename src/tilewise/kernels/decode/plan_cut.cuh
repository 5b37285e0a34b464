// Which ranges a step has, and how they are cut: nodes into even shares for all blocks, what sequences have of their
// own by its length alone.
#pragma once
#include "decode/plan_work.cuh"

struct Cuts {
    const PlanArgs& args;

    // May rows not see back to the first token?
    TILE_DEVICE bool windowed() const { return Rule::kChunked || args.left < kFar; }
    // The first token that the row at `position` sees
    TILE_DEVICE int first_seen(int position) const {
        const int first = larger(0, position - args.left);
        return Rule::kChunked ? larger(first, position / args.positions * args.positions) : first;
    }

    TILE_DEVICE Shared<PlanNode> nodes() const { return Shared<PlanNode>(args.room.nodes); }
    TILE_DEVICE Shared<PlanRange> ranges() const { return Shared<PlanRange>(args.room.ranges); }
    // The sequence of a range, and nothing else of it: another thread may be storing the rest
    TILE_DEVICE int sequence_of(int range) const {
        return Shared<int>(args.room.ranges)[range * int(sizeof(PlanRange) / 4) + kRangeSequenceWord];
    }
    TILE_DEVICE PlanNode node(int n) const { return nodes()[n]; }
    TILE_DEVICE int above(int n) const {  // likewise
        return Shared<int>(args.room.nodes)[n * int(sizeof(PlanNode) / 4) + kAboveWord];
    }
    // States that a sequence has of the nodes above it
    TILE_DEVICE int node_states(int sequence) const {
        const int under = Shared<int>(args.room.under)[sequence];
        return under < 0 ? 0 : node(under).after;
    }

    // ---- nodes ------------------------------------------------------------------------------------------------------
    TILE_DEVICE int depth_of(int n) const {
        int depth = 0;
#pragma unroll 1
        for (int up = above(n); up >= 0; up = above(up)) depth++;
        return depth;
    }
    // pieces, tiles: what there is, for streaming warps and for tiles; with the nodes' added
    TILE_DEVICE void cut_nodes(int count, int& pieces, int& tiles) const {
        const int n = threadIdx.x;
        if (n < args.rows) Shared<int>(args.room.under)[n] = -1;
        if (!count) {
            ptx::sync_threads();
            return;
        }
        Sums streamed = 0, tiled = 0;  // tokens, once for each pass
        // Where a block has one item at a time: what sequences have of their own, in tokens, and above kCountBits how
        // many there are
        constexpr int kCountBits = 44;
        const bool alone = !args.tile_rounds && args.warps == 1;
        Sums own = 0;
        if (n < args.rows && alone) {
            const int length = Shared<int>(args.room.length)[n];
            own = Sums(length) | Sums(length > 0) << kCountBits;
        }
        int deepest = 0;
#pragma unroll 1
        for (int i = n; i < count; i += kPlanThreads) {
            const PlanNode of = node(i);
            const int rows = of.sequences * int(args.rows_each.divisor);
            const Sums tokens = of.stop - of.start;
            const bool wide = rows >= args.wide_rows;
            const Sums all = tokens * ceil_shift(rows, wide ? args.tile_bits : args.pass_bits);
            (wide ? tiled : streamed) += all;
            if (alone) own -= tokens * of.sequences;
            deepest = larger(deepest, depth_of(i));
        }
        double share[2], beside = 0.0;  // Cutter.own_work
        if (alone) {
            own = scan(own).all;
            const double items = double((long long)(own >> kCountBits)) * 16 * (args.item_chunks + args.state_chunks);
            const double tokens = double((long long)(own & ((Sums(1) << kCountBits) - 1)));
            beside = args.passes.divisor * (tokens + items);
        }
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const double nodes = double((long long)scan(b ? tiled : streamed).all);
            const double all = (b ? nodes : nodes + beside) * args.heads.divisor;
            const double even = quotient(all, double(args.blocks.divisor));
            share[b] = even > args.shared_tokens ? even : args.shared_tokens;
        }
        deepest = largest_of(deepest);
#pragma unroll 1
        for (int level = 0; level <= deepest; level++) {
#pragma unroll 1
            for (int i = n; i < count; i += kPlanThreads)
                if (depth_of(i) == level) nodes()[i] = cut_node(node(i), share);
            ptx::sync_threads();
#pragma unroll 1
            for (int i = n / 32; i < count; i += kPlanWarps) {
                if (depth_of(i) != level) continue;
                const PlanNode of = node(i);
#pragma unroll 1
                for (int k = n % 32; k < of.sequences; k += 32) Shared<int>(args.room.under)[of.first + k] = i;
            }
            ptx::sync_threads();
        }
#pragma unroll 1
        for (int from = 0; from < count; from += kPlanThreads) {
            const int i = from + n;
            PlanNode of{};
            if (i < count) of = node(i);
            const Sums made = Sums(of.parts) * of.passes;
            const Scanned at = scan(of.tiled ? made << 32 : made);
            of.unit = pieces + int(uint32_t(at.before)), of.tile_unit = tiles + int(at.before >> 32);
            if (i < count) nodes()[i] = of;
            pieces += int(uint32_t(at.all)), tiles += int(at.all >> 32);
        }
        if (n == 0) Shared<int>(args.room.sums)[0] = pieces;
        ptx::sync_threads();
    }
    // Equal pieces of about an even share per block. Where it begins at the end of the node above, and its passes are
    // passes of that node, the same block may go on with it: the two then leave one state.
    TILE_DEVICE PlanNode cut_node(PlanNode of, const double (&share)[2]) const {
        const int rows = of.sequences * int(args.rows_each.divisor), tokens = of.stop - of.start;
        of.tiled = rows >= args.wide_rows;
        of.passes = ceil_shift(rows, of.tiled ? args.tile_bits : args.pass_bits);
        const int wanted = larger(1, int(quotient(double(tokens), of.tiled ? share[1] : share[0]) + 1e-9));
        const int step = of.tiled ? kTileTokens : 1 << args.chunk_bits;
        of.piece = ceil_div(tokens, wanted * kTileTokens) * kTileTokens;
        of.begin = of.start & ~(step - 1);
        of.parts = ceil_div(of.stop - of.begin, of.piece);
        of.last = of.stop - (of.begin + (of.parts - 1) * of.piece);
        of.state = 0, of.joins = -1;
        if (of.above >= 0) {
            const PlanNode up = node(of.above);
            const int ahead = (of.first - up.first) * int(args.rows_each.divisor);
            const bool same_end = of.first + of.sequences == up.first + up.sequences;
            of.state = up.after;
            const int whole = ahead >> args.tile_bits;  // passes before its own
            if (of.tiled && !windowed() && of.start == up.stop && ahead == whole << args.tile_bits &&
                (rows == of.passes << args.tile_bits || same_end) &&
                up.last + smaller(of.piece, of.stop - of.begin) <= kChainShare * share[1]) {
                of.joins = (up.parts - 1) * up.passes + whole;
                of.state--;
                if (of.parts == 1) of.last += up.last;
            }
        }
        of.after = of.state + of.parts;
        return of;
    }
    // Pieces of streaming warps that nodes have
    TILE_DEVICE int node_pieces(int count) const { return count ? int(Shared<int>(args.room.sums)[0]) : 0; }
    // The node that has piece n of streaming warps, or of tiles
    TILE_DEVICE PlanNode node_of(int n, int count, bool tiled) const {
        const int unit = tiled ? kTileUnitWord : kUnitWord;
        return node(find_last(args.room.nodes + 4 * unit, sizeof(PlanNode) / 4, count, n));
    }

    // ---- what sequences have of their own ---------------------------------------------------------------------------
    // What rows see before and between nodes, where that is not all, and what comes after the last; their number
    TILE_DEVICE int find_ranges() const {
        const int n = threadIdx.x;
        const bool there = n < args.rows;
        int length = 0, begin = 0, under = -1, gaps = 0;
        if (there) {
            length = Shared<int>(args.room.length)[n];
            under = Shared<int>(args.room.under)[n];
            if (windowed()) begin = first_seen(length - args.tokens);
#pragma unroll 1
            for (int at = under; windowed() && at >= 0; at = node(at).above)
                gaps += node(at).start > gap_from(at, begin);
        }
        const Scanned found = scan(there ? gaps + 1 : 0);
        const int all = int(found.all);
        if (all > args.max_ranges || !there) return all;
        int to = int(found.before) + gaps;
        const int start = under < 0 ? begin : larger(begin, node(under).stop);
        PlanRange range{};
        range.sequence = n, range.start = smaller(start, length), range.stop = length;
        range.parts = under < 0 || length > start;
        ranges()[to--] = range;
#pragma unroll 1
        for (int at = under; windowed() && at >= 0; at = node(at).above) {
            const int from = gap_from(at, begin);
            if (node(at).start <= from) continue;
            range.start = from, range.stop = node(at).start, range.parts = 1;
            ranges()[to--] = range;
        }
        return all;
    }
    TILE_DEVICE int gap_from(int n, int begin) const {
        const int above = node(n).above;
        return above < 0 ? begin : larger(begin, node(above).stop);
    }

    TILE_DEVICE int limit(int n) const { return n == 0 ? 0 : n == kLimits ? args.longest : 32 << n; }

    // Which ranges one warp takes whole: those of up to `best` chunks; and whether others are cut into groups of
    // pieces. Each candidate gets an estimate, the larger of what all warps do on average and what the longest item
    // takes a warp that runs faster because the others are done. False if even with the last candidate there are more
    // pieces or states than there is room for.
    TILE_DEVICE bool choose_limit(int count, int pieces, int& best, bool& groups) const {
        bool fits = false;
        double least = 0;
        best = args.longest, groups = false;
#pragma unroll 1
        for (int way = 0; way <= (args.group_bits > 0); way++)
            try_limits(count, pieces, way, best, groups, fits, least);
        return fits;
    }
    TILE_DEVICE void try_limits(int count, int pieces, bool way, int& best, bool& groups, bool& fits,
                                double& least) const {
        enum { kItemSum, kStateSum, kPartSum, kLongest, kFoldSum, kSums };
        const int n = threadIdx.x, lane = n % 32, warp = n / 32;
        // Every warp leaves its sums, lane s the s-th; then a warp adds up the s-th of all.
        const Shared<uint32_t> of_warps(args.room.sums + 4 * 32), sums_of(args.room.sums + 4 * 32 * (1 + kPlanWarps));
        static_assert(kTries * kSums + 2 <= 32);
        uint32_t mine = 0;
        ptx::sync_threads();  // ranges are found
#pragma unroll 1
        for (int t = 0; t < kTries; t++) {
            uint32_t sums[kSums] = {}, chunks = 0;
#pragma unroll 1
            for (int i = n; i < count; i += kPlanThreads) {
                const PlanRange range = ranges()[i];
                if (!range.parts) continue;
                const RangeCut of(args, range.start, range.stop);
                const bool whole = of.whole(limit(t));
                const int bits = way && of.may_be_grouped() ? args.group_bits : 0, parts = ceil_shift(of.pieces, bits);
                const int most = 1 << (of.size_bits + bits - 4), cut = way ? smaller(most, of.chunks) : most;
                chunks += of.chunks;
                sums[kItemSum] += whole ? 1 : parts;
                sums[kStateSum] += whole ? 0 : parts;
                sums[kPartSum] += whole ? 1 : ceil_shift(of.cut_parts, bits);
                sums[kLongest] = larger(sums[kLongest], whole ? of.chunks : cut);
                sums[kFoldSum] += of.pieces - (whole ? 1 : parts);
            }
#pragma unroll
            for (int s = 0; s < kSums; s++) {
                const uint32_t all = s == kLongest ? ptx::reduce_max(sums[s]) : ptx::reduce_add(sums[s]);
                if (lane == 2 + t * kSums + s) mine = all;
            }
            const uint32_t all = ptx::reduce_add(chunks);
            if (lane == 0) mine = all;
        }
        const uint32_t all_states = ptx::reduce_add(n < args.rows ? node_states(n) : 0);
        if (lane == 1) mine = all_states;
        of_warps[32 * warp + lane] = mine;
        ptx::sync_threads();
#pragma unroll 1
        for (int i = warp; i < 2 + kTries * kSums; i += kPlanWarps) {
            const uint32_t x = lane < kPlanWarps ? uint32_t(of_warps[32 * lane + i]) : 0;
            const bool most = i >= 2 && (i - 2) % kSums == kLongest;
            const uint32_t all = most ? ptx::reduce_max(x) : ptx::reduce_add(x);
            if (lane == 0) sums_of[i] = all;
        }
        ptx::sync_threads();
#pragma unroll 1
        for (int t = 0; t < kTries; t++) {
            const auto sum = [&](int of) { return double(uint32_t(sums_of[2 + t * kSums + of])); };
            if (sum(kPartSum) * args.passes.divisor + pieces > args.max_pieces ||
                sum(kPartSum) + double(uint32_t(sums_of[1])) > args.max_states)
                continue;
            const double all = double(uint32_t(sums_of[0])) + sum(kItemSum) * args.item_chunks +
                               sum(kStateSum) * args.state_chunks + sum(kFoldSum) * args.fold_chunks;
            const uint32_t times = args.heads.divisor * args.passes.divisor, warps = args.blocks.divisor * args.warps;
            const double average = quotient(all * times, double(warps));
            const double longest = quotient(sum(kLongest) + args.item_chunks, args.sprint);
            const double cost = average > longest ? average : longest;
            if (!fits || cost < least) least = cost, best = limit(t), groups = way;
            fits = true;
        }
    }

    // Numbers pieces and states: after this ranges know theirs, and StateSplits are written.
    TILE_DEVICE void number(int count, int best, bool groups, int& pieces, int& states) const {
        const int n = threadIdx.x;
        const bool there = n < args.rows;
#pragma unroll 1
        for (int i = n; i < count; i += kPlanThreads) {
            PlanRange range = ranges()[i];
            if (range.parts) {
                const RangeCut of(args, range.start, range.stop);
                range.whole = of.whole(best);
                range.groups = groups && of.may_be_grouped();
                range.parts = range.whole ? 1 : ceil_shift(of.cut_parts, range.groups ? args.group_bits : 0);
                ranges()[i] = range;
            }
        }
        ptx::sync_threads();
        // Ranges of a sequence are neighbours: this one's are found from the first of them.
        int first = there ? n : 0, own = 0;
        if (there && windowed()) {
            int high = count - 1;
#pragma unroll 1
            while (first < high) {
                const int middle = (first + high) / 2;
                if (sequence_of(middle) < n) first = middle + 1;
                else high = middle;
            }
        }
        const auto mine = [&](int i) { return there && i < count && sequence_of(i) == n; };
#pragma unroll 1
        for (int i = first; mine(i); i++) own += PlanRange(ranges()[i]).parts;
        const int before = there ? node_states(n) : 0, total = before + own;
        const Scanned at = scan(Sums(own) * args.passes.divisor << 32 | Sums(there && total > 1 ? total : 0));
        int unit = pieces + int(at.before >> 32), state = before;
        StateSplit split{int(uint32_t(at.before)), total, kNoEnd, kNoEnd};
#pragma unroll 1
        for (int i = first; mine(i); i++) {
            PlanRange range = ranges()[i];
            range.unit = unit, range.state = state;
            unit += range.parts * int(args.passes.divisor), state += range.parts;
            ranges()[i] = range;
            if (range.stop == int(Shared<int>(args.room.length)[n]) && range.parts && !range.whole) {
                const RangeCut of(args, range.start, range.stop);
                split.before -= range.parts, split.grows_from = of.begin;
                split.piece = 1 << (of.size_bits + (range.groups ? args.group_bits : 0));
            }
        }
        if (there) {
            Shared<StateSplit>(args.room.split)[n] = split;
            Global<StateSplit>{args.states}[n] = split;
            if (n == args.rows - 1) Shared<int>(args.room.sums)[1] = count;
        }
        pieces += int(at.all >> 32), states = int(uint32_t(at.all));
        ptx::sync_threads();
    }
    // The range that has piece n
    TILE_DEVICE PlanRange range_of(int n) const {
        const int count = Shared<int>(args.room.sums)[1];
        return ranges()[find_last(args.room.ranges + 4 * kRangeUnitWord, sizeof(PlanRange) / 4, count, n)];
    }
};
