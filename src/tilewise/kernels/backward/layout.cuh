// Where everything lies in the shared memory of the Hopper backward, the pipes between its roles, and the block's work.
// backward.cu says what the constants mean.
#pragma once
#include "backward/arguments.cuh"
#include "tile/hopper.cuh"
#include "tile/tiles.cuh"

// Where dK and dV of 64 keys are more than a warpgroup's registers, both consumers work on the same 64: wide.cuh.
constexpr int kConsumers = 2, kTileKv = kWide ? 64 : 64 * kConsumers, kThreads = 128 * (kConsumers + 1);
constexpr int kKBytes = kTileKv * kHeadDim * 2, kVBytes = kTileKv * kValueDim * 2;
constexpr int kQBytes = kTileQ * kHeadDim * 2, kDoBytes = kTileQ * kValueDim * 2, kDsBytes = kTileKv * kTileQ * 2;
constexpr int kStatBytes = kTileQ * 4;
using Share = DqShare<kHeadDim, kDqColumns>;  // of dQ
constexpr int kDqShare = Share::kColumns, kDqRounds = Share::kRounds, kDqBytes = kTileQ * kDqColumns * 4;
static_assert(kTileQ == 64, "a product's rows");
static_assert(kPanel % kDqColumns == 0 && kPanel % Share::columns(kDqRounds - 1) == 0, "no round lies in two panels");
// Does dK go out by way of dQ's place? Otherwise of K's, when nobody reads that any more.
constexpr bool kDkByDq = !kWide && kDqBytes >= 64 * kHeadDim * 2;
// Does one accumulator serve S and dP one after the other? Then dS is made of P as rounded to 16 bits.
constexpr bool kSerial = !kWide && kHeadDim > 128;
static_assert(!kSerial || !Rule::kChanges, "scores that are more than scaled find no registers");
// Registers per thread, moved from the producers to the consumers. Of the consumers' 240, dK and dV take 128, S 32, dP
// or dQ 32, P 16, dS 16 at 128 columns. P's are free before dQ is issued, which makes it possible. With 192 and 128
// columns dK and dV take 160, S, dP and dQ 32, P and dS 16.
constexpr int kProducerRegisters = kWide ? 40 : 24, kConsumerRegisters = kWide ? 232 : 240;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8),
              "taking more than others gave back would wait for ever");
// Named barriers: one per consumer from these numbers on
constexpr int kStoreBarrier = 2, kTurnBarrier = 5;
constexpr int kEndBarrier = 7;  // and this one for all of them

constexpr int kAtK = 0, kAtV = kKBytes, kAtQ = kKBytes + kVBytes, kAtDo = kAtQ + kStages * kQBytes;
constexpr int kAtDs = kAtDo + kDoStages * kDoBytes, kAtP = kAtDs + kDsStages * kDsBytes;
// Where P goes through shared memory: itself, and what dP is multiplied with where that is another
constexpr int kAtFactor = kAtP + (kWide ? kDsBytes : 0);
constexpr int kAtDq = kAtFactor + (kWide && !Rule::kLinear ? kDsBytes : 0);
// Which queries see each key: spans of them, or bits of a step. Those come with Q, per stage, or where there is no room
// with dO's only one
constexpr int kSightBytes = kTileKv * 8, kSightStages = kListed && !kSerial ? kStages : 1;
static_assert(!kListed || !kSerial || kDoStages == 1, "bits come and go with dO");
constexpr int kAtStats = kAtDq + kConsumers * kDqBytes, kAtSeen = kAtStats + 2 * kStages * kStatBytes;
constexpr int kAtWork = kAtSeen + kSightStages * kSightBytes, kAtBarriers = kAtWork + 128;
constexpr int kAtScale = kAtBarriers + 16 * (2 * kStages + kDoStages + kDsStages + 6), kAtSteps = kAtScale + 16;
constexpr int kSharedBytes = kAtSteps + 128;

// The stage of dO: there may be one alone
static_assert(kDoStages == kStages || (kDoStages == 1 && kStages == 2), "how of_do counts");
TILE_DEVICE Turn<kDoStages> of_do(Turn<kStages> turn) {
    constexpr bool kAlike = kDoStages == kStages;
    return {kAlike ? turn.stage : 0, kAlike ? turn.lap : turn.stage};
}

struct Pipes {
    Ring<kStages> q;        // with −LSE
    Ring<kDoStages> d_o;    // with −delta
    Ring<kStages> steps;    // where there are lists
    Ring<1> k, v;
    Ring<kDsStages> ds;  // to all consumers, from all of them or from one
    Ring<1> p;           // where it goes through shared memory: from one consumer to both
    Ring<1> raw;         // rows of which some are another sequence's, until those are zero
    uint32_t dq_at;      // a ring of dQ for each consumer
    TILE_DEVICE Pipes()
        : q(ptx::shared_address(uint32_t(kAtBarriers))),
          d_o(q.full + q.kBytes),
          steps(d_o.full + d_o.kBytes),
          k(steps.full + steps.kBytes),
          v(k.full + k.kBytes),
          ds(v.full + v.kBytes),
          p(ds.full + ds.kBytes),
          raw(p.full + p.kBytes),
          dq_at(raw.full + raw.kBytes) {}
    TILE_DEVICE Ring<1> dq(int consumer) const { return Ring<1>(dq_at + consumer * Ring<1>::kBytes); }
    TILE_DEVICE void init() const {
        q.init(4 * kConsumers);
        d_o.init(4 * kConsumers);
        steps.init(1);
        k.init(1);
        v.init(1);
        ds.init(4 * kConsumers, kWide ? 4 : 4 * kConsumers);
        p.init(4 * kConsumers, 4);
        raw.init(1);
        for (int g = 0; g < kConsumers; g++) dq(g).init(1, 4);
        ptx::fence_mbarrier_init();
    }
};

// Scores that do not follow S in a line, in turn: three loops would take more registers than there are
constexpr bool kAllMasked = kMasks && !kListed && kInTurn && !Rule::kLinear;

// What the block works on. Everyone reads it from shared memory where it is needed: registers are scarce.
struct alignas(64) Work {
    KeyTile tile;
    // The query tiles in the order in which everyone visits them, for each query head. Those that need a mask come
    // first, the ones before the whole ones and the ones behind them; but these come last where blocks add in turn, so
    // that all go the same way. Blocks that see everything begin at different tiles: what they add to is then apart.
    Span parts[3];
    int kv_head, batch;  // batch: of the tensors, 0 if packed
    int kv_tile;         // number of the tile in its sequence
    int in_round;        // and among those of the round that have lists
    int steps;           // of all query heads of the group together

    TILE_DEVICE int tiles() const { return tile.end - tile.begin; }
    // Up to which step of a query head tiles need a mask, and then are whole
    TILE_DEVICE int masked() const {
        if constexpr (kAllMasked) return tiles();
        return kInTurn ? tile.whole_begin - tile.begin : tiles() - whole();
    }
    TILE_DEVICE int masked_and_whole() const { return masked() + whole(); }
    TILE_DEVICE int whole() const { return tile.whole_end - tile.whole_begin; }
    TILE_DEVICE bool needs_mask(int i) const { return i < masked() || i >= masked_and_whole(); }
    // The query tile of step i for a query head
    TILE_DEVICE int at(int i) const {
        if constexpr (kMasks && kInTurn) return tile.begin + i;
        const int first = parts[0].end - parts[0].begin, second = parts[1].end - parts[1].begin;
        if (i < first) return parts[0].begin + i;
        return i < first + second ? parts[1].begin + i - first : parts[2].begin + i - first - second;
    }
    TILE_DEVICE void order() {
        if constexpr (kMasks) {
            parts[0] = {tile.begin, tile.whole_begin};
            parts[kInTurn ? 2 : 1] = {tile.whole_end, tile.end};
            parts[kInTurn ? 1 : 2] = {tile.whole_begin, tile.whole_end};
        } else {
            const int start = kInTurn || tile.end == 0 ? 0 : kv_tile % tile.end;
            parts[0] = {start, tile.end};
            parts[1] = {0, start};
        }
    }
    TILE_DEVICE int head(const BackwardArgs& args, int g) const { return kv_head * args.group + g; }
    // The place of a query tile among those of all heads
    TILE_DEVICE int64_t number(const BackwardArgs& args, int of_head, int tile_q) const {
        const int before = kPacked ? of_head : batch * args.heads + of_head;
        return int64_t(before) * args.q_tiles + tile.slot + tile_q;
    }
};
static_assert(sizeof(Work) <= 128, "its place");

// A query tile of a query head, and which bits tell what it sees of the keys, without lists just 0; −1 if it sees all.
// Where there are lists a warp writes the steps to come, and those that others may still read stay: the loader is at
// most four ahead of whoever adds dQ, and that warp two ahead of the loader.
struct alignas(16) Step {
    int tile, head, bits;
    int run;  // how many from here on are seen in part, or are not, as this one
};
constexpr int kSteps = 8;

TILE_DEVICE Shared<Work> shared_work() { return Shared<Work>(kAtWork); }
TILE_DEVICE Shared<Step> shared_steps() { return Shared<Step>(kAtSteps); }
TILE_DEVICE Shared<Visible> shared_seen() { return Shared<Visible>(kAtSeen); }

// Block `number`: which keys, and who sees them. sequence is −1 if there is no such block.
TILE_DEVICE Work find_work(const BackwardArgs& args, int number) {
    Work work{};
    if constexpr (kPacked) {
        // All heads of the heaviest tile come first.
        work.in_round = number / args.kv_heads;
        const int entry = work.in_round + (kListed ? args.lists.first : 0);
        work.tile.sequence = -1;
        if (entry >= Global<const int>{args.list}[0]) return work;
        work.tile = Global<const KeyTile>{reinterpret_cast<const KeyTile*>(args.list + kKeyListHeader)}[entry];
        work.kv_head = number - work.in_round * args.kv_heads;
    } else {
        const Place place = place_of<kInTurn>(args, number, gridDim.x / args.kv_tiles);
        work.in_round = place.tile;
        const int kv_tile = work.in_round + (kListed ? args.lists.first : 0);
        work.batch = work.tile.sequence = place.head / args.kv_heads;
        work.kv_head = place.head - work.batch * args.kv_heads;
        work.tile.key = kv_tile * kTileKv;
        work.tile.seqlen_q = args.seqlen_q;
        work.tile.seqlen_k = args.seqlen_k;
        find_queries<kTileQ, kTileKv>(args.scores, work.tile, args.seqlen_q, args.seqlen_q);
    }
    work.kv_tile = work.tile.key / kTileKv;
    work.order();
    return work;
}

// The list of query head g of the group
TILE_DEVICE int64_t list_row(const BackwardArgs& args, const Work& work, int g) {
    return args.lists.row_of(kPacked ? 0 : work.tile.sequence, work.head(args, g), work.in_round);
}
// Step n of the block, for query head g the i-th; of consumers, who seldom ask
TILE_DEVICE Step step_at(const BackwardArgs& args, int g, int i, int n) {
    if constexpr (kListed) return shared_steps()[n % kSteps];
    const Work work = shared_work()[0];
    return {work.at(i), work.head(args, g), kMasks && work.needs_mask(i) ? 0 : -1, 0};
}
// Without lists: one query tile of a head after another, as Work::at has them; of producers, which have few registers
struct Walk {
    int tile = 0, end = 0, part = 0;
    TILE_DEVICE Walk() { find(); }
    TILE_DEVICE bool more() const { return tile < end; }
    TILE_DEVICE void next() {
        if (++tile == end) find();
    }

  private:
    TILE_DEVICE void find() {
        for (; tile == end && part < 3; part++) {
            const Span span = Shared<Span>(kAtWork + sizeof(KeyTile))[part];  // Work::parts
            tile = span.begin;
            end = span.end;
        }
    }
};

// The first warp finds the block's work.
TILE_DEVICE void share_work(const BackwardArgs& args) {
    Work work = find_work(args, blockIdx.x);
    work.steps = work.tiles() * args.group;
    if constexpr (kListed) {
        uint32_t steps = 0;
        if (work.tile.sequence >= 0)
            for (int g = threadIdx.x; g < args.group; g += 32)
                steps += Global<const int>{args.lists.counts}[2 * list_row(args, work, g) + 1];
        work.steps = ptx::reduce_add(steps);
    }
    if (ptx::elect_one()) shared_work()[0] = work;
}
// A warpgroup finds which queries see each of the 64 keys that it makes P of, while K is on its way. key0: the first
TILE_DEVICE void share_seen(const BackwardArgs& args, int group, int key0) {
    const int i = key0 + threadIdx.x % 128;
    if (threadIdx.x % 128 < 64) {
        const KeyTile tile = Work(shared_work()[0]).tile;
        const int key = tile.key + i;
        int end = tile.seqlen_q;
        if (kPacked && args.ends && key < tile.seqlen_k) {
            const int own = Global<const int>{args.ends}[tile.k_start + key] - tile.q_start;
            end = own < end ? own : end;
        }
        shared_seen()[i] = queries_of(args.scores, key, tile.seqlen_q, tile.seqlen_k, end);
    }
    ptx::barrier_sync(kStoreBarrier + group, 128);
}
