// decode_plan: the list of a decode step, made where the page table and the lengths are, so that a captured graph
// decodes sequences that come and go.
//
// One block. The host says which sequences there are, in an order in which those below a node are neighbours, and which
// nodes they share. Nodes are cut into pieces and passes (plan_cut.cuh), and so is what sequences have of their own, as
// its length says; both as plan/ranges.py and plan/items.py do. Then pieces are sorted and dealt to blocks and warps
// (plan_deal.cuh) as plan/deal.py does, and items are written. Sequences that are not there are empty ones.
//
// The list has room for what is asked of it, whatever that is: if too many ranges would be cut, none is that need not
// be; if nodes take more states, pieces or rounds than there is room for, nothing is shared; if a balanced deal does
// not fit the slots of its busiest bin, units are dealt in turn.
//
// Everything stands once in the code, and what stands in a loop is not unrolled: the planner runs once per step, and
// fetching its instructions takes as long as running them.
//
// Constants: kSelected, false; Rule, whose kChunked counts; kPlanThreads, as many as there are rows or more.
#include "decode/plan_cut.cuh"
#include "decode/plan_deal.cuh"

struct Planner {
    const PlanArgs& args;
    const Cuts cuts;
    int node_count, pieces, tiles;

    TILE_DEVICE explicit Planner(const PlanArgs& a) : args(a), cuts{a}, node_count(0), pieces(0), tiles(0) {}

    TILE_DEVICE void run() {
        node_count = read();
        bool done = false;
#pragma unroll 1
        while (!done) {
            done = cut() || !node_count;
            if (done) {
                tell(kRounds, 0);
                clear_bins();
#pragma unroll 1
                for (int what = tiles ? kChains : kStreams; done && what <= kStreams; what++)
                    done = plan(what == kChains) || !node_count;
            }
            if (!done) node_count = 0;
        }
    }
    // Tells who asks: PlanArgs.made
    TILE_DEVICE void tell(int what, int value) const {
        if (threadIdx.x == 0) Global<int>{args.made}[what] = value;
    }

    // ---- what the host says -----------------------------------------------------------------------------------------
    // How many nodes there are
    TILE_DEVICE int read() const {
        const int n = threadIdx.x;
        const Global<const Vector16> step{reinterpret_cast<const Vector16*>(args.step)};
        // Asked for together: who is not there has room there all the same.
        const Vector16 head = step[0];
        Vector16 of = step[1 + smaller(n, args.rows - 1)];
        const int sequences = int(head.word[0]), given = int(head.word[1]);
        const Global<const int> nodes{args.step + kStepWords + 4 * sequences};
        if (n < args.rows) {
            if (n >= sequences) of = Vector16{{uint32_t(n), 0, 0, 0}};  // idle
            Shared<int>(args.room.caller)[n] = int(of.word[0]);
            Shared<int>(args.room.place)[n] = int(of.word[1]);
            Shared<int>(args.room.length)[n] = int(of.word[2]);
            Global<int>{args.order}[n] = int(of.word[0]);
            Global<int>{args.lengths}[n] = int(of.word[2]);
        }
#pragma unroll 1
        for (int i = n; i < given; i += kPlanThreads) {
            PlanNode node{};
            node.first = nodes[5 * i], node.sequences = nodes[5 * i + 1];
            node.start = nodes[5 * i + 2], node.stop = nodes[5 * i + 3], node.above = nodes[5 * i + 4];
            Shared<PlanNode>(args.room.nodes)[i] = node;
        }
        ptx::sync_threads();
        return given;
    }

    // ---- pieces -----------------------------------------------------------------------------------------------------
    // False if there is not enough room for them
    TILE_DEVICE bool cut() {
        pieces = tiles = 0;
        cuts.cut_nodes(node_count, pieces, tiles);
        const int ranges = cuts.find_ranges();
        if (ranges > args.max_ranges || tiles > args.max_tiles) return false;
        int best, states;
        bool groups;
        const bool fits = cuts.choose_limit(ranges, pieces, best, groups);
        cuts.number(ranges, best, groups, pieces, states);
        tell(kPieces, pieces);
        tell(kStates, states);
        tell(kNodes, node_count);
        return fits;
    }
    // Query rows from the first row of `first` on, over tokens of that sequence
    struct Piece {
        int first, row, rows, state_fold, kind;
        Span span;
        bool continues;  // a tile piece that goes on from another
    };
    TILE_DEVICE Piece piece_at(int n, bool tiled) const {
        if (tiled || n < cuts.node_pieces(node_count)) {
            const PlanNode node = cuts.node_of(n, node_count, tiled);
            const int k = n - (tiled ? node.tile_unit : node.unit), part = floor_div(k, node.passes);
            const int most = 1 << (tiled ? args.tile_bits : args.pass_bits), row = (k - part * node.passes) * most;
            const int rows = smaller(most, node.sequences * int(args.rows_each.divisor) - row);
            const int begin = node.begin + part * node.piece;
            const Span span{larger(begin, node.start), smaller(begin + node.piece, node.stop)};
            return {node.first, row, rows, (node.state + part) << 16, kAllSee, span, part == 0 && node.joins >= 0};
        }
        const PlanRange range = cuts.range_of(n);
        const RangeCut of(args, range.start, range.stop);
        const int k = n - range.unit, part = args.passes.quotient(k);
        const int row = (k - part * int(args.passes.divisor)) << args.pass_bits;
        const int rows = smaller(1 << args.pass_bits, int(args.rows_each.divisor) - row);
        const int bits = of.size_bits + (range.groups ? args.group_bits : 0);
        const int begin = of.begin + (part << bits), end = begin + (1 << bits);
        const int fold = range.whole || range.groups ? 1 << (of.size_bits - args.chunk_bits) : 0;
        const Span span{larger(begin, range.start), range.whole ? range.stop : smaller(end, range.stop)};
        return {range.sequence, row, rows, (range.state + part) << 16 | fold, kOwn, span, false};
    }

    // ---- from pieces to items ---------------------------------------------------------------------------------------
    enum { kChains, kStreams };
    // Sorts, deals and writes tile pieces, or those of streaming warps. False if tiles take too many rounds
    TILE_DEVICE bool plan(bool tiled) const {
        const Shared<uint32_t> keys(args.room.keys);
        const int count = tiled ? tiles : pieces, filled = power_of_two(32, count), n = threadIdx.x;
        const bool sorts = count <= kMostKeys;
        int sorted = count;
        if (sorts) {
            if (tiled) link_chains();
#pragma unroll 1
            for (int i = n; i < filled; i += kPlanThreads) keys[i] = i < count ? key_at(i, tiled) : ~0u;
            sort_by_runs<kMostKeys>(args.room.keys, filled);
            if (tiled) sorted = chains(count);
        }
        const int units = sorted * int(tiled ? args.heads.divisor : args.groups.divisor);
        const int bins = tiled ? int(args.blocks.divisor) : args.bins;
        const int room = tiled ? args.tile_rounds : args.slots;
        bool in_turn = !sorts || (!tiled && !args.tile_rounds && cost_of(keys[0]) == cost_of(keys[count - 1]));
        int most = ceil_div(units, bins);
        if (!in_turn) {
            deal_units(args, units, bins, tiled ? kDealChains : args.tile_rounds ? kDealBeside : kDealAlone);
            const int busiest = most_of(bins);
            if (tiled && busiest > room) return false;
            in_turn = busiest > room;
            if (!in_turn) most = busiest;
        }
        tell(tiled ? kRounds : kSlots, most);
        if (!tiled) tell(kInTurn, in_turn);
        write(tiled, units, bins, in_turn);
        return true;
    }
    // Which tile pieces go on from others
    TILE_DEVICE void link_chains() const {
        const Shared<int> next(args.room.next);
        const Shared<PlanNode> nodes(args.room.nodes);
#pragma unroll 1
        for (int i = threadIdx.x; i < tiles; i += kPlanThreads) next[i] = -1;
        ptx::sync_threads();
#pragma unroll 1
        for (int i = threadIdx.x; i < node_count; i += kPlanThreads) {
            const PlanNode node = nodes[i];
            if (node.joins < 0) continue;
            const int from = PlanNode(nodes[node.above]).tile_unit + node.joins;
#pragma unroll 1
            for (int k = 0; k < node.passes; k++) next[from + k] = node.tile_unit + k;
        }
        ptx::sync_threads();
    }
    // By the chunks of a stream piece, or the steps of a chain; what goes on from another piece comes last.
    TILE_DEVICE uint32_t key_at(int n, bool tiled) const {
        int cost = 0;
#pragma unroll 1
        for (int at = n; at >= 0; at = tiled ? int(Shared<int>(args.room.next)[at]) : -1) {
            const Piece piece = piece_at(at, tiled);
            if (at == n && piece.continues) return ~0u;
            const int step = tiled ? 6 : 4, begin = tiled ? piece.span.begin : piece.span.begin & ~15;
            cost += larger(0, ceil_shift(piece.span.end - begin, step));
        }
        return key_of(cost, n);
    }
    // How many there are
    TILE_DEVICE int chains(int count) const {
        int low = 0, high = count;
#pragma unroll 1
        while (low < high) {
            const int middle = (low + high) / 2;
            if (uint32_t(Shared<uint32_t>(args.room.keys)[middle]) != ~0u) low = middle + 1;
            else high = middle;
        }
        return low;
    }
    // The most that one of the first bins has
    TILE_DEVICE int most_of(int bins) const {
        int most = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < bins; i += kPlanThreads) most = larger(most, Shared<int>(args.room.counts)[i]);
        return largest_of(most);
    }
    TILE_DEVICE void clear_bins() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < args.bins; i += kPlanThreads) {
            Shared<Load>(args.room.loads)[i] = Load(i);
            Shared<int>(args.room.counts)[i] = 0;
            Shared<int>(args.room.work)[i] = 0;
        }
        // Tiles that there were and are not any more; those that there are clear their own.
        if (!tiles) clear_unused(true, int(args.blocks.divisor), 0, false, used_by(true, int(args.blocks.divisor)));
        ptx::sync_threads();
    }

    // ---- items ------------------------------------------------------------------------------------------------------
    // The first item of a unit
    TILE_DEVICE int64_t item_at(bool tiled, int bin, int turn) const {
        const int blocks = args.blocks.divisor, over = args.blocks.quotient(bin), block = bin - over * blocks;
        if (tiled) return int64_t(turn) * blocks + bin;
        const int64_t slot = int64_t(block) * args.slots + turn;
        return args.tile_rounds ? slot * args.together : slot * args.warps + over;
    }
    TILE_DEVICE void write(bool tiled, int units, int bins, bool in_turn) const {
        const Shared<uint32_t> keys(args.room.keys);
        const Shared<int> next(args.room.next);
        const Global<int> placed{args.placed};
        const bool sorted = (tiled ? tiles : pieces) <= kMostKeys;
        const int used = used_by(tiled, bins);
        // Whole warps go on together: four lanes store an item.
#pragma unroll 1
        for (int i = threadIdx.x; i - int(threadIdx.x) % 32 < units; i += kPlanThreads) {
            const int rank = tiled ? args.heads.quotient(i) : args.groups.quotient(i);
            const int head = tiled ? i - rank * int(args.heads.divisor)
                                   : (i - rank * int(args.groups.divisor)) * args.together;
            int at = -1, to = 0;
            if (i < units) {
                at = sorted ? piece_of(keys[rank]) : rank;
                int turn = in_turn ? floor_div(i, bins) : int(placed[i]), bin = i - turn * bins;
                if (!in_turn) bin = turn & ((1 << kBinBits) - 1), turn >>= kBinBits;
                to = int(item_at(tiled, bin, turn));
            }
#pragma unroll 1
            while (ptx::any(at >= 0)) {
                Vector16 item[4]{};
                int after = -1;
                if (at >= 0) {
                    if (tiled) after = next[at];
                    make_item(item, head, piece_at(at, tiled), tiled);
                    if (after >= 0) item[3].word[2] |= kGoesOn;
                }
                store_items(tiled ? args.tile_items : args.items, at < 0 ? -1 : to, tiled ? 1 : args.together, item);
                at = after, to += int(args.blocks.divisor);  // of tiles: the next round
            }
        }
        clear_unused(tiled, bins, units, in_turn, used);
        ptx::sync_threads();
        if (tiled) {
            // What streams goes beside them: by when a block is done with its streams, and when its tiles are.
#pragma unroll 1
            for (int i = threadIdx.x; i < args.bins; i += kPlanThreads) {
                const Load after = int(Shared<int>(args.room.work)[i]), done = args.in_turn ? after * args.warps : 0;
                Shared<Load>(args.room.loads)[i] = done << (kBinBits + kAfterBits) | after << kBinBits | Load(i);
                Shared<int>(args.room.counts)[i] = 0;
                Shared<int>(args.room.work)[i] = 0;
            }
            ptx::sync_threads();
        }
    }
    // Slots of this thread's first bin that hold an item of the list before
    TILE_DEVICE int used_by(bool tiled, int bins) const {
        return int(threadIdx.x) < bins ? int(Global<int>{args.used}[(tiled ? args.bins : 0) + int(threadIdx.x)]) : 0;
    }
    // Empties what the list before had and this one has not
    TILE_DEVICE void clear_unused(bool tiled, int bins, int units, bool in_turn, int first) const {
        const Global<int> used{args.used + (tiled ? args.bins : 0)};
        const int whole = floor_div(units, bins), more = units - whole * bins;
#pragma unroll 1
        for (int b = threadIdx.x; b < bins; b += kPlanThreads) {
            const int count = in_turn ? whole + (b < more) : int(Shared<int>(args.room.counts)[b]);
            const int before = b < kPlanThreads ? first : int(used[b]);
#pragma unroll 1
            for (int turn = count; turn < before; turn++) {
                const Global<Vector16> to{reinterpret_cast<Vector16*>((tiled ? args.tile_items : args.items) +
                                                                      item_at(tiled, b, turn))};
#pragma unroll 1
                for (int w = 0; w < 4 * (tiled ? 1 : args.together); w++) to[w] = Vector16{};
            }
            used[b] = count;
        }
    }
    // The page of a token, −1 if the sequence has none there
    TILE_DEVICE int page_of(int sequence, int token) const {
        const int length = Shared<int>(args.room.length)[sequence], number = args.page_size.quotient(token);
        if (number * int(args.page_size.divisor) >= length) return -1;
        const int64_t row = int(Shared<int>(args.room.place)[sequence]);
        return Global<const int>{args.table}[row * args.width + number];
    }
    // The item of a head, in vectors
    TILE_DEVICE void make_item(Vector16 (&item)[4], int head, const Piece& piece, bool tiled) const {
        const int first = piece.first, ahead = args.rows_each.quotient(piece.row), sequence = first + ahead;
        const auto words = [](int a, int b, int c, int d) {
            return Vector16{{uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d)}};
        };
        const Span span = piece.span;
        StateSplit split = Shared<StateSplit>(args.room.split)[sequence];
        if (tiled) {  // pages of the first tile in its place
            const int at = span.begin & ~(kTileTokens - 1);
            split = {page_of(first, at), page_of(first, at + args.tile_box), page_of(first, at + 2 * args.tile_box),
                     page_of(first, at + 3 * args.tile_box)};
        }
        // All pages stand in the table: none is looked for elsewhere.
        const int begin = span.begin >> args.chunk_bits << args.chunk_bits;
        const int later = larger(begin, smaller(begin + (1 << args.chunk_bits) - 16, span.end - 1));
        const int both[2] = {page_of(first, begin), page_of(first, later)};  // asked for together
        const int page = span.end > span.begin ? both[0] : -1, row = ahead * int(args.rows_each.divisor);
        const int second = page < 0 || later < begin + 16 ? page : both[1];
        const int caller_head = (Shared<int>(args.room.caller)[sequence] << 12) + head;
        item[0] = words(sequence, piece.row - row, piece.rows, caller_head);
        item[1] = words(Shared<int>(args.room.place)[first], span.begin, span.end, piece.state_fold);
        item[2] = words(page, kNoEnd, split.first, split.before);
        item[3] = words(split.grows_from, split.piece, piece.kind, second);
    }
    // Each lane's item, for `count` neighbouring heads, to `items` from number `to` on; none if that is negative. Four
    // lanes store an item: a store of a warp then goes to eight places, not to 32.
    TILE_DEVICE void store_items(DecodeItem* items, int to, int count, const Vector16 (&item)[4]) const {
        const Global<Vector16> out{reinterpret_cast<Vector16*>(items)};
        const int lane = threadIdx.x % 32, part = lane % 4;
#pragma unroll 1
        for (int from = lane - part; from < lane - part + 4; from++) {
            const int64_t at = ptx::shuffle(to, from);
            Vector16 mine{};
#pragma unroll
            for (int w = 0; w < 4; w++)
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    const uint32_t word = ptx::shuffle(item[v].word[w], from);
                    if (part == v) mine.word[w] = word;
                }
#pragma unroll 1
            for (int h = 0; at >= 0 && h < count; h++) {
                out[4 * (at + h) + part] = mine;
                mine.word[3] += part == 0;  // the head
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kPlanThreads, 1) decode_plan(const __grid_constant__ PlanArgs args) {
    Planner(args).run();
}
