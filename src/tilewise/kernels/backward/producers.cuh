// The producers of the Hopper backward: one loads tiles, and one per consumer adds its dQ to the sum. They do next to
// nothing per step, and by one thread where they can: what they issue, the consumers beside them do not.
#pragma once
#include "backward/layout.cuh"

// A thread; a warp where rows may be another sequence's or there are lists, of which the first lane asks TMA
constexpr bool kLoadingWarp = kPacked || kListed;
struct Loader {
    const BackwardArgs& args;
    const Pipes pipes;
    Turn<1> raw;

    TILE_DEVICE explicit Loader(const BackwardArgs& a) : args(a) {}

    // Copies go to one barrier: the ring's, if all rows are the sequence's own. Else to another, and the ring's is told
    // when the others are zero: their weights are 0, and 0 · NaN would still be NaN. besides(barrier) copies `extra`
    // bytes more.
    template <int kRows, int kColumns, int kRingStages, class Besides>
    TILE_DEVICE void tile(const Ring<kRingStages>& ring, Turn<kRingStages> turn, const TensorMap& map, uint32_t at,
                          int row, int head, int rows, int extra, Besides besides) {
        const bool cut = kPacked && rows < kRows;
        if (!kLoadingWarp || threadIdx.x == 0) {
            ring.wait_free(turn);
            const uint32_t barrier = cut ? pipes.raw.full : ring.full_at(turn);
            ptx::mbarrier_arrive_expect(barrier, kRows * kColumns * 2 + (cut ? 0 : extra));
            const int batch = kPacked ? 0 : Work(shared_work()[0]).batch;
            load_tile<kRows, kColumns>(ptx::shared_address(at), &map, barrier, row, head, batch);
            if (!cut) besides(barrier);
        }
        if constexpr (kPacked) ptx::sync_warp();
        if (!cut) return;
        pipes.raw.wait(raw);
        raw.next();
        for (int i = rows * 8 + threadIdx.x; i < kRows * 8; i += 32)  // 16 bytes; rows are swizzled within themselves
#pragma unroll 1
            for (int panel = 0; panel < kColumns / kPanel; panel++)
                Shared<Vector16>(at + panel * kRows * kPanelRowBytes)[i] = Vector16{};
        ptx::fence_async_proxy();
        ptx::sync_warp();
        if (threadIdx.x > 0) return;
        ptx::mbarrier_arrive_expect(ring.full_at(turn), extra);
        besides(ring.full_at(turn));
    }
    // Q (0) or dO (1) of a step. stats: of the query tile. With one come the bits of a tile that is seen in part.
    template <int kWhich, int kRingStages>
    TILE_DEVICE void rows(const Ring<kRingStages>& ring, Turn<kRingStages> place, Turn<kStages> turn,
                          const TensorMap& map, const Step& step, const float* stats) {
        constexpr int kColumns = kWhich == 0 ? kHeadDim : kValueDim;
        const Work work = shared_work()[0];
        const int row = step.tile * kTileQ;
        const int at = kWhich == 0 ? kAtQ + place.stage * kQBytes : kAtDo + place.stage * kDoBytes;
        const bool part = kListed && kWhich == (kSerial ? 1 : 0) && step.bits >= 0;
        const auto besides = [&](uint32_t barrier) {
            ptx::bulk_load(ptx::shared_address(kAtStats + (2 * turn.stage + kWhich) * kStatBytes),
                           stats + kWhich * kTileQ, kStatBytes, barrier);
            if (part)
                ptx::bulk_load(ptx::shared_address(kAtSeen + turn.stage % kSightStages * kSightBytes),
                               args.lists.bits + int64_t(step.bits) * (2 * kTileKv), kSightBytes, barrier);
        };
        tile<kTileQ, kColumns>(ring, place, map, at, kPacked ? work.tile.q_start + row : row, step.head,
                               work.tile.seqlen_q - row, kStatBytes + (part ? kSightBytes : 0), besides);
    }
    template <int kColumns> TILE_DEVICE void keys(const Ring<1>& ring, const TensorMap& map, int at) {
        const Work work = shared_work()[0];
        tile<kTileKv, kColumns>(ring, Turn<1>{}, map, at, work.tile.k_start + work.tile.key, work.kv_head,
                                work.tile.seqlen_k - work.tile.key, 0, [](uint32_t) {});
    }
    TILE_DEVICE void run(const TensorMap& mQ, const TensorMap& mK, const TensorMap& mV, const TensorMap& mDo) {
        Turn<kStages> turn;
        keys<kHeadDim>(pipes.k, mK, kAtK);
        ptx::wait_for_prerequisites();  // −LSE and −delta are there
        bool first = true;              // V comes between the first Q and the first dO
        const auto load = [&](const Step& step, const float* stats) {
            rows<0>(pipes.q, turn, turn, mQ, step, stats);
            if (first) keys<kValueDim>(pipes.v, mV, kAtV);
            first = false;
            rows<1>(pipes.d_o, of_do(turn), turn, mDo, step, stats);
        };
        if constexpr (kListed) {
            for (int n = 0; n < Work(shared_work()[0]).steps; n++, turn.next()) {
                pipes.steps.wait(turn);
                const Step step = shared_steps()[n % kSteps];
                const int64_t number = Work(shared_work()[0]).number(args, step.head, step.tile);
                load(step, args.stats + number * (2 * kTileQ));
                ptx::sync_warp();
                pipes.steps.release(turn);
            }
        } else {
            for (int g = 0; g < args.group; g++) {
                const Work work = shared_work()[0];
                const int head = work.head(args, g);
                const float* const stats = args.stats + work.number(args, head, 0) * (2 * kTileQ);
                for (Walk walk; walk.more(); walk.next(), turn.next())
                    load(Step{walk.tile, head, -1, 0}, stats + walk.tile * (2 * kTileQ));
            }
        }
        if (first) keys<kValueDim>(pipes.v, mV, kAtV);
    }
};

// A thread: where there are lists, the steps to come
TILE_DEVICE void list_steps(const BackwardArgs& args) {
    const Pipes pipes;
    const Work work = shared_work()[0];
    Turn<kStages> turn;
    int n = 0;
    for (int g = 0; g < args.group; g++) {
        const int64_t row = list_row(args, work, g), width = args.lists.width;
        const Global<const int> counts = Global<const int>{args.lists.counts} + 2 * row;
        const int masked = counts[0], tiles = counts[1];
        for (int i = 0; i < tiles; i++, n++, turn.next()) {
            const int64_t at = row * width + (i < masked ? i : width - 1 - (i - masked));
            const int tile = Global<const int>{args.lists.tiles}[at];
            pipes.steps.wait_free(turn);
            const int bits = i < masked ? int(at) : -1, run = (i < masked ? masked : tiles) - i;
            shared_steps()[n % kSteps] = Step{tile, work.head(args, g), bits, run};
            ptx::mbarrier_arrive(pipes.steps.full_at(turn));
        }
    }
}

// Key tiles of the sequence that see query tile `tile_q` and add to it before this one: those behind it; by a warp
TILE_DEVICE int turn_of(const BackwardArgs& args, const Work& work, int head, int tile_q) {
    const KeyTile& tile = work.tile;
    if constexpr (kListed) {
        const int list = args.lists.list_of(kPacked ? 0 : tile.sequence, head);
        const Global<const uint32_t> visits =
            Global<const uint32_t>{args.lists.visits} +
            (int64_t(list) * args.q_tiles + tile.slot + tile_q) * args.lists.words;
        uint32_t before = 0;
#pragma unroll 1
        for (int word = work.kv_tile / 32 + threadIdx.x % 32; word < args.lists.words; word += 32)
            before += ptx::count_bits(visits[word] & (word > work.kv_tile / 32 ? ~0u : ~1u << work.kv_tile % 32));
        return ptx::reduce_add(before);
    }
    const int behind = last_key_tile<kTileQ, kTileKv>(args.scores, tile, tile_q) - work.kv_tile;
    if (kPacked && args.ends) {  // each ends where its keys do
        const Global<const KeyTile> list{reinterpret_cast<const KeyTile*>(args.list + kKeyListHeader)};
        const int own = listed_at<kTileKv>(args, tile.k_start, tile.sequence, work.kv_tile);
        uint32_t before = 0;
#pragma unroll 1
        for (int i = 1 + threadIdx.x % 32; i <= behind; i += 32)
            before += Global<const int>{&list.address(own - i)->end}[0] > tile_q;
        return ptx::reduce_add(before);
    }
    return behind;
}

// A consumer's dQ, from shared memory onto the sum: by a thread, or by a warp's first lane where all find its turn
constexpr bool kAddingWarp = kListed || (kPacked && kInTurn);
TILE_DEVICE void add_dq(const BackwardArgs& args, int consumer) {
    constexpr int kTileFloats = kTileQ * kHeadDim;
    const Pipes pipes;
    const Ring<1> ring = pipes.dq(consumer);
    const bool adds = !kAddingWarp || threadIdx.x % 32 == 0;
    Turn<1> turn;
    ptx::wait_for_prerequisites();  // zeros are there
    // In turn: one waits before there is something to add, and hands on after its place in shared memory is free again,
    // so that the consumer waits for neither. number: of the query tile; mine: how many have added to it before
    const auto add = [&](int64_t number, int mine, int round) {
        int* const turns = args.turns + number * kConsumers + consumer;
        if (kInTurn && round == 0)
            while (ptx::load_acquire(turns) < mine) ptx::spin();
        if constexpr (!kListed) ring.wait(turn);
        const int64_t first = number * kTileFloats + consumer * (kDqShare * kTileQ) + round * (kDqColumns * kTileQ);
        ptx::bulk_add(args.dq_sum + first,
                      ptx::shared_address(uint32_t(kAtDq + consumer * kDqBytes)), Share::columns(round) * kTileQ * 4);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ptx::mbarrier_arrive(ring.empty);
        if (kInTurn && round == kDqRounds - 1) {
            ptx::bulk_wait<0>();
            ptx::fence_device();
            ptx::atomic_add(turns, 1);
        }
    };
    if constexpr (kAddingWarp) {
        const int heads = kListed ? 1 : args.group;
        const int tiles = kListed ? Work(shared_work()[0]).steps : Work(shared_work()[0]).tiles();
        for (int g = 0; g < heads; g++)
            for (int i = 0; i < tiles; i++)
                for (int round = 0; round < kDqRounds; round++, turn.next()) {
                    if constexpr (kListed) {  // then the step was written
                        ring.wait(turn);
                        ptx::sync_warp();  // the first lane gives the place back; a slow one would wait a lap
                    }
                    const Step step = step_at(args, g, i, i);
                    const int mine = kInTurn ? turn_of(args, shared_work()[0], step.head, step.tile) : 0;
                    if (adds) add(Work(shared_work()[0]).number(args, step.head, step.tile), mine, round);
                    ptx::sync_warp();
                }
    } else {
        for (int g = 0; g < args.group; g++) {
            const Work work = shared_work()[0];
            const int head = work.head(args, g);
            const int64_t number = work.number(args, head, 0);
            for (Walk walk; walk.more(); walk.next()) {
                const int mine = kInTurn ? turn_of(args, shared_work()[0], head, walk.tile) : 0;
                for (int round = 0; round < kDqRounds; round++, turn.next()) add(number + walk.tile, mine, round);
            }
        }
    }
    if (adds) ptx::bulk_wait<0>();
}
