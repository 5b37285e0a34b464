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
// Constants: kSelected, false.
#include "decode/plan_cut.cuh"
#include "decode/plan_deal.cuh"

struct Planner {
    const PlanArgs& args;
    const Cuts cuts;
    int node_count, pieces, tiles, chains, rounds;

    TILE_DEVICE explicit Planner(const PlanArgs& a)
        : args(a), cuts{a}, node_count(0), pieces(0), tiles(0), chains(0), rounds(0) {}

    TILE_DEVICE void run() {
        const Global<const int> step{args.step};
        const int sequences = step[0], given = step[1], updates = step[2];
        read(sequences, given, updates);
#pragma unroll 1
        for (int attempt = 0; attempt < 2; attempt++) {
            node_count = attempt ? 0 : given;
            const bool fits = cut();
            if (!fits && node_count) continue;
            rounds = chains = 0;
            tell(kRounds, 0);
            clear_loads();
            if (tiles) deal_tiles();
            if (rounds <= args.tile_rounds) break;
        }
        if (args.tile_rounds) write_tiles();
        const bool in_turn = deal_streams();
        tell(kInTurn, in_turn);
        write_streams(in_turn);
    }
    // Tells the host, if it asks: PlanArgs.made
    TILE_DEVICE void tell(int what, int value) const {
        if (threadIdx.x == 0) Global<int>{args.made}[what] = value;
    }

    // ---- what the host says -----------------------------------------------------------------------------------------
    TILE_DEVICE void read(int sequences, int given, int updates) const {
        const int n = threadIdx.x, lane = n % 32, warp = n / 32;
        const Global<const int> nodes{args.step + kStepWords + 4 * sequences};
        const int* changes = args.step + kStepWords + (4 * sequences + 5 * given + 3) / 4 * 4;
        if (n < args.rows) {
            Vector16 of{{uint32_t(n), 0, 0, 0}};  // idle
            if (n < sequences) of = Global<const Vector16>{reinterpret_cast<const Vector16*>(args.step)}[1 + n];
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
#pragma unroll 1
        for (int i = warp; i < updates; i += kPlanWarps) {
            const Vector16 change = Global<const Vector16>{reinterpret_cast<const Vector16*>(changes)}[i];
            const Global<const int> from{changes + 4 * updates + change.word[3]};
            const Global<int> to{args.table + int64_t(change.word[0]) * args.width + change.word[1]};
#pragma unroll 1
            for (int k = lane; k < int(change.word[2]); k += 32) to[k] = from[k];
        }
        ptx::sync_threads();
    }

    // ---- pieces -----------------------------------------------------------------------------------------------------
    // False if there is not enough room for them
    TILE_DEVICE bool cut() {
        pieces = tiles = 0;
        cuts.cut_nodes(node_count, pieces, tiles);
        const int ranges = cuts.find_ranges(node_count);
        if (ranges > args.max_ranges || tiles > args.max_tiles) return false;
        int best, states;
        const bool fits = cuts.choose_limit(ranges, pieces, best);
        cuts.number(ranges, best, pieces, states);
        tell(kPieces, pieces);
        tell(kStates, states);
        tell(kNodes, node_count);
        return fits;
    }

    TILE_DEVICE void clear_loads() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < args.bins; i += kPlanThreads) {
            Shared<Load>(args.room.loads)[i] = Load(i);
            Shared<int>(args.room.counts)[i] = 0;
            Shared<int>(args.room.work)[i] = 0;
        }
        ptx::sync_threads();
    }
    TILE_DEVICE void clear_keys(int count) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += kPlanThreads) Shared<uint32_t>(args.room.keys)[i] = ~0u;
        ptx::sync_threads();
    }

    // What is dealt: chains of tile pieces, stream pieces in a kernel without tiles, or beside those
    enum Dealt { kChains, kAlone, kBeside };
    // What a unit with such a key adds to the work of its bin
    TILE_DEVICE int work_of(uint32_t key, Dealt what) const {
        if (what == kChains) return cost_of(key) * args.step_cost;
        return (cost_of(key) * kUnit + args.item_cost) * (what == kBeside ? args.together : 1);
    }
    // Sorted pieces, of `each` units, to the first `count` bins. Beside tiles, loads are not in their order yet.
    TILE_DEVICE void deal(int units, int each, int count, Dealt what) const {
        const Shared<int> counts(args.room.counts), work(args.room.work), next(args.room.next);
        const Shared<uint32_t> keys(args.room.keys);
        const Global<int> placed{args.placed};
        const auto after = [&](Load load, uint32_t key) {
            if (what != kBeside) return load + (Load(what == kChains ? cost_of(key) : work_of(key, what)) << kBinBits);
            // Times are compared as multiples of 1 / (warps · (warps + joiners)).
            const Load free = load >> kBinBits & ((1 << kAfterBits) - 1), warps = args.warps;
            const Load all = args.warps + args.joiners, now = Load(int(work[bin_of(load)]) + work_of(key, what));
            const Load done = args.in_turn          ? free * warps + now
                              : now <= warps * free ? now * all
                                                    : free * warps * all + (now - warps * free) * warps;
            return done << (kBinBits + kAfterBits) | (load & ((Load(1) << (kBinBits + kAfterBits)) - 1));
        };
        Bins{args, count}.deal(
            units, what == kBeside, [&](int i) { return uint32_t(keys[i / each]); }, after,
            [&](int i, int bin) {
                const uint32_t key = keys[i / each];
                int turn = counts[bin];
                placed[i] = bin | turn << kBinBits;
                turn++;
                if (what == kChains)
#pragma unroll 1
                    for (int at = next[piece_of(key)]; at >= 0; at = next[at]) turn++;
                counts[bin] = turn;
                work[bin] = work[bin] + work_of(key, what);
            });
    }
    // The most that one of the first bins has
    TILE_DEVICE int most_of(int of) const {
        int most = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < of; i += kPlanThreads) most = larger(most, Shared<int>(args.room.counts)[i]);
        return largest_of(most);
    }

    // ---- tiles ------------------------------------------------------------------------------------------------------
    struct TilePiece {
        PlanNode node;
        int part, pass;
        Span span;
    };
    TILE_DEVICE TilePiece tile_piece(int n) const {
        const PlanNode node = cuts.node_of(n, node_count, true);
        const int k = n - node.tile_unit, part = k / node.passes, begin = node.begin + part * node.piece;
        return {node, part, k % node.passes, {larger(begin, node.start), smaller(begin + node.piece, node.stop)}};
    }
    static TILE_DEVICE int tile_steps(Span span) { return ceil_div(span.end - span.begin, kTileTokens); }

    // Chains of pieces that go on from each other go to one block each, in every head.
    TILE_DEVICE void deal_tiles() {
        const Shared<int> next(args.room.next);
        const Shared<uint32_t> keys(args.room.keys);
        const int filled = power_of_two(32, tiles), n = threadIdx.x;
#pragma unroll 1
        for (int i = n; i < tiles; i += kPlanThreads) next[i] = -1;
        clear_keys(filled);
#pragma unroll 1
        for (int i = n; i < node_count; i += kPlanThreads) {
            const PlanNode node = Shared<PlanNode>(args.room.nodes)[i];
            if (node.joins < 0) continue;
            const int from = PlanNode(Shared<PlanNode>(args.room.nodes)[node.above]).tile_unit + node.joins;
#pragma unroll 1
            for (int k = 0; k < node.passes; k++) next[from + k] = node.tile_unit + k;
        }
        ptx::sync_threads();
        int roots = 0;
#pragma unroll 1
        for (int i = n; i < tiles; i += kPlanThreads) {
            const TilePiece piece = tile_piece(i);
            if (piece.node.joins >= 0 && piece.part == 0) continue;
            int cost = 0;
#pragma unroll 1
            for (int at = i; at >= 0; at = next[at]) cost += tile_steps(tile_piece(at).span);
            keys[i] = key_of(cost, i);
            roots++;
        }
        roots = int(scan(roots).all);
        sort_keys(args.room.keys, filled);
        deal(roots * args.heads, args.heads, args.blocks, kChains);
        rounds = most_of(args.blocks);
        tell(kRounds, rounds);
        chains = roots;
    }

    TILE_DEVICE void write_tiles() {
        const Shared<int> next(args.room.next), counts(args.room.counts), work(args.room.work);
        const Global<int> used{args.used + args.bins}, placed{args.placed};
        const Global<DecodeItem> items{args.tile_items};
        const int n = threadIdx.x, box = args.page_size % 64 == 0 ? 64 : args.page_size % 32 == 0 ? 32 : 16;
#pragma unroll 1
        for (int i = n; i < chains * args.heads; i += kPlanThreads) {
            const int where = placed[i], bin = where & ((1 << kBinBits) - 1);
            int turn = where >> kBinBits;
#pragma unroll 1
            for (int at = piece_of(Shared<uint32_t>(args.room.keys)[i / args.heads]); at >= 0; at = next[at], turn++) {
                const TilePiece piece = tile_piece(at);
                const int row = piece.pass * args.tile_rows;
                const int rows = smaller(args.tile_rows, piece.node.sequences * args.rows_each - row);
                const int from = piece.span.begin & ~(kTileTokens - 1), of = piece.node.first;
                const int pages[4] = {page_of(of, from), page_of(of, from + box), page_of(of, from + 2 * box),
                                      page_of(of, from + 3 * box)};
                write_item(args.tile_items, int64_t(turn) * args.blocks + bin, 1, i % args.heads, of, row, rows,
                           piece.span, (piece.node.state + piece.part) << 16, kAllSee | (next[at] >= 0 ? kGoesOn : 0),
                           pages);
            }
        }
#pragma unroll 1
        for (int b = n; b < args.blocks; b += kPlanThreads) {
            const int count = counts[b];
#pragma unroll 1
            for (int turn = count; turn < int(used[b]); turn++) items[int64_t(turn) * args.blocks + b] = DecodeItem{};
            used[b] = count;
        }
        ptx::sync_threads();
        // What streams goes beside them: by when a block is done with its streams, and when its tiles are.
        const Shared<Load> loads(args.room.loads);
#pragma unroll 1
        for (int i = n; i < args.bins; i += kPlanThreads) {
            const Load after = int(work[i]), done = args.in_turn ? after * args.warps : 0;
            loads[i] = done << (kBinBits + kAfterBits) | after << kBinBits | Load(i);
            counts[i] = 0;
            work[i] = 0;
        }
        ptx::sync_threads();
    }

    // ---- streams ----------------------------------------------------------------------------------------------------
    struct StreamPiece {
        int sequence, row, rows, state, fold, kind;
        Span span;
    };
    TILE_DEVICE StreamPiece stream_piece(int n) const {
        if (n < cuts.node_pieces(node_count)) {
            const PlanNode node = cuts.node_of(n, node_count, false);
            const int k = n - node.unit, part = k / node.passes, begin = node.begin + part * node.piece;
            const int row = k % node.passes * args.pass_rows;
            return {node.first, row, smaller(args.pass_rows, node.sequences * args.rows_each - row), node.state + part, 0,
                    kAllSee, {larger(begin, node.start), smaller(begin + node.piece, node.stop)}};
        }
        const PlanRange range = cuts.range_of(n);
        const RangeCut of(args, range.start, range.stop);
        const int k = n - range.unit, part = k / args.passes;
        const int row = k % args.passes * args.pass_rows, begin = of.begin + (part << of.size_bits);
        const int stop = range.whole ? range.stop : smaller(begin + (1 << of.size_bits), range.stop);
        return {range.sequence, row, smaller(args.pass_rows, args.rows_each - row), range.state + part,
                range.whole ? 1 << (of.size_bits - args.chunk_bits) : 0, kOwn, {larger(begin, range.start), stop}};
    }

    // True if units are dealt in turn
    TILE_DEVICE bool deal_streams() {
        const Shared<uint32_t> keys(args.room.keys);
        const int units = pieces * args.groups;
        tell(kSlots, ceil_div(units, args.bins));
        if (pieces > kMostKeys) return true;
        const int filled = power_of_two(32, pieces);
        clear_keys(filled);
#pragma unroll 1
        for (int i = threadIdx.x; i < pieces; i += kPlanThreads) {
            const Span span = stream_piece(i).span;
            keys[i] = key_of(larger(0, ceil_div(span.end - (span.begin & ~15), 16)), i);
        }
        sort_keys(args.room.keys, filled);
        if (!args.tile_rounds && cost_of(keys[0]) == cost_of(keys[pieces - 1])) return true;
        deal(units, args.groups, args.bins, args.tile_rounds ? kBeside : kAlone);
        const int most = most_of(args.bins);
        if (most <= args.slots) tell(kSlots, most);
        return most > args.slots;
    }

    TILE_DEVICE int64_t item_at(int bin, int turn) const {
        const int64_t slot = int64_t(bin % args.blocks) * args.slots + turn;
        return args.tile_rounds ? slot * args.together : slot * args.warps + bin / args.blocks;
    }
    TILE_DEVICE void write_streams(bool in_turn) {
        const Global<int> used{args.used}, placed{args.placed};
        const Global<DecodeItem> items{args.items};
        const int units = pieces * args.groups, n = threadIdx.x;
#pragma unroll 1
        for (int i = n; i < units; i += kPlanThreads) {
            int bin = i % args.bins, turn = i / args.bins, piece = i / args.groups;
            if (pieces <= kMostKeys) piece = piece_of(Shared<uint32_t>(args.room.keys)[piece]);
            if (!in_turn) {
                const int where = placed[i];
                bin = where & ((1 << kBinBits) - 1), turn = where >> kBinBits;
            }
            const StreamPiece of = stream_piece(piece);
            const StateSplit split = Shared<StateSplit>(args.room.split)[of.sequence + of.row / args.rows_each];
            const int words[4] = {split.first, split.before, split.grows_from, split.piece};
            write_item(args.items, item_at(bin, turn), args.together, i % args.groups * args.together, of.sequence,
                       of.row, of.rows, of.span, of.state << 16 | of.fold, of.kind, words);
        }
#pragma unroll 1
        for (int b = n; b < args.bins; b += kPlanThreads) {
            const int count = in_turn ? units / args.bins + (b < units % args.bins) : int(Shared<int>(args.room.counts)[b]);
#pragma unroll 1
            for (int turn = count; turn < int(used[b]); turn++)
#pragma unroll 1
                for (int w = 0; w < args.together; w++) items[item_at(b, turn) + w] = DecodeItem{};
            used[b] = count;
        }
    }

    // ---- items ------------------------------------------------------------------------------------------------------
    // The page of a token, −1 if the sequence has none there
    TILE_DEVICE int page_of(int sequence, int token) const {
        const int length = Shared<int>(args.room.length)[sequence], number = token / args.page_size;
        if (number >= ceil_div(length, args.page_size)) return -1;
        return Global<const int>{args.table}[int64_t(int(Shared<int>(args.room.place)[sequence])) * args.width + number];
    }
    // Writes the items of `count` neighbouring heads from `head` on: rows [row, row + rows) from the first row of `first`
    // on, over tokens of that sequence. words: DecodeItem's from first_state on.
    TILE_DEVICE void write_item(DecodeItem* items, int64_t at, int count, int head, int first, int row, int rows,
                                Span span, int state_fold, int kind, const int (&words)[4]) const {
        const Global<Vector16> to{reinterpret_cast<Vector16*>(items + at)};
        const auto put = [&](int quarter, int a, int b, int c, int d, int step) {
#pragma unroll 1
            for (int w = 0; w < count; w++, d += step)
                to[4 * w + quarter] = Vector16{{uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d)}};
        };
        const int ahead = row / args.rows_each, sequence = first + ahead;
        const int caller = Shared<int>(args.room.caller)[sequence];
        put(0, sequence, row - ahead * args.rows_each, rows, (caller << 12) + head, 1);
        put(1, Shared<int>(args.room.place)[first], span.begin, span.end, state_fold, 0);
        // All pages stand in the table: none is looked for elsewhere.
        const int begin = span.begin >> args.chunk_bits << args.chunk_bits, last = span.end - 1;
        const int page = last < span.begin ? -1 : page_of(first, begin);
        put(2, page, kNoEnd, words[0], words[1], 0);
        const int second = smaller(begin + (1 << args.chunk_bits) - 16, last);
        put(3, words[2], words[3], kind, args.chunk_bits == 4 || page < 0 ? page : page_of(first, second), 0);
    }
};

extern "C" __global__ void __launch_bounds__(kPlanThreads) decode_plan(const __grid_constant__ PlanArgs args) {
    Planner(args).run();
}
