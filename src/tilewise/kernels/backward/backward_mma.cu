// backward_mma: dK, dV and dQ of attention by mma.sync, for cards without wgmma. A block owns kTileKv keys of a KV head
// and walks over the query tiles that see them.
//
// Everything is transposed: Sᵀ = K Qᵀ and dPᵀ = V dOᵀ have keys as rows, so that Pᵀ and dSᵀ are, as they come, the A
// operands of dV += Pᵀ dO and dK += dSᵀ Q. Warps go in pairs, kPairKeys keys each: one makes S, P and dV, the other dP,
// dS and dK, so that each holds one sum for all columns in registers, and every fragment of Q and dO that it reads
// serves all its keys. The pair's second warp reads P from shared memory, where it leaves dS in its place. dQ = dS K is
// over the keys of all: the warps of the block share it, one step later, and add it up in global memory.
//
// A step of the two, at whose end all warps meet. What is not a product on one side runs beside products on the other:
//   S, then P = exp S  |  dQ of the step before, dP
//   dV, dQ             |  dS = P dP, dK
//
// Constants: Element; kHeadDim, kColumns: padded, and as it is; kTileQ, kTileKv, kPairKeys; kDqEach, kDqAcross: parts
// of dQ per warp, and side by side; kStages: places for Q and dO, 1 or 2; kOwnInRegisters: a warp keeps its rows of K
// or V in registers; kNewCard: it has stmatrix and adds vectors; kInTurn: tiles of keys add to dQ in their order;
// kBlocksEach: thread blocks that a multiprocessor is to hold; Rule: what is done to scores; Function, Slope: a user's
// mask and score, and the score's derivative as a function like it; kPicked: a schedule, a mask or positions leave
// something out; kDropout: weights are dropped. Rows lie on 16 bytes.
//
// With dropout by the factors F, dV = (P ∘ F)ᵀ dO and dS = P ∘ (F ∘ dP − delta): the first warp of a pair draws, and
// tells the second by the sign of what it leaves of P.
#include "backward/mma_products.cuh"
#include "backward/mma_scoring.cuh"

constexpr int kAllBarrier = 1, kPairBarrier = 2;

// A step of a block: a query head of the group, and one of the tiles that see the keys. kPicked: of the 32 tiles around
// it, which are left, and which are left whole
struct Step {
    int head, i;
    uint32_t left, whole;
};

struct Worker {
    const BackwardArgs& args;
    const Picks& picks;
    const Function& function;
    const Slope& slope;
    const int kv_head, begin, tiles, first;
    const int warp, pair;
    float sum[kM][kHeadDim / 2];  // dV or dK
    Operand a[kM];                // Pᵀ or dSᵀ
    Own own;
    int64_t slot;                 // of the tile of queries of the step before
    int turn;                     // key tiles that add to its dQ before this one

    // Blocks of a full problem begin at different tiles: what they add to is then apart.
    TILE_DEVICE Worker(const BackwardArgs& args_, const Picks& picks_, const Function& function_, const Slope& slope_,
                       const KeyTile& tile, int kv_head_)
        : args(args_), picks(picks_), function(function_), slope(slope_), kv_head(kv_head_), begin(tile.begin),
          tiles(tile.end - tile.begin), first(turns_round(tile) ? tile.key / kTileKv % tiles : 0),
          warp(ptx::uniform(threadIdx.x / 32)), pair(warp % kPairs) {
#pragma unroll
        for (int m = 0; m < kM; m++) warp::zero(sum[m]);
    }
    static TILE_DEVICE bool turns_round(const KeyTile& tile) {
        return !kInTurn && !kPicked && tile.begin == 0 && tile.end > 0;
    }
    TILE_DEVICE int tile_of(const Step& at) const {
        const int t = at.i + first;
        return begin + (t < tiles ? t : t - tiles);
    }
    TILE_DEVICE int head_of(const Step& at) const { return kv_head * args.group + at.head; }
    TILE_DEVICE bool is_step(const Step& at) const { return at.head < args.group; }

    // ---- the walk ---------------------------------------------------------------------------------------------------
    TILE_DEVICE Step first_step() const {
        Step at{0, 0, 0, 0};
        return kPicked ? find(at) : at;
    }
    TILE_DEVICE Step next_step(Step at) const {
        at.i++;
        if constexpr (kPicked) return find(at);
        if (at.i == tiles) at.i = 0, at.head++;
        return at;
    }
    // The first step from `at` on whose tile is left; by a warp
    TILE_DEVICE Step find(Step at) const {
        while (is_step(at)) {
            if (at.i % 32 == 0) {
                const KeyTile tile = work()[0];
                const int i = at.i + warp::lane();
                const Kind kind = i < tiles ? kind_of_tile(head_of(at), begin + i, tile.key) : kNone;
                at.left = ptx::ballot(kind != kNone);
                at.whole = ptx::ballot(kind == kAll);
            }
            if (at.left >> at.i % 32 & 1) return at;
            at.i++;
            if (at.i >= tiles) at.i = 0, at.head++;
        }
        return at;
    }
    // What is left of query tile t and the tile of keys from `key` on
    TILE_DEVICE Kind kind_of_tile(int head, int t, int key) const {
        const KeyTile tile = work()[0];
        const int q0 = t * kTileQ, q1 = q0 + kTileQ < tile.seqlen_q ? q0 + kTileQ : tile.seqlen_q;
        const int k1 = key + kTileKv < tile.seqlen_k ? key + kTileKv : tile.seqlen_k;
        const Kind kind = kind_of(picks, function, tile.sequence, head, q0, q1 - 1, key, k1 - 1);
        return kind == kAll && args.positions ? kSome : kind;
    }
    TILE_DEVICE bool is_whole(const Step& at, const KeyTile& tile) const {
        const int t = tile_of(at);
        return t >= tile.whole_begin && t < tile.whole_end && (!kPicked || at.whole >> at.i % 32 & 1);
    }
    // Key tiles of the sequence that add to dQ of this step's queries before this one does, those behind it; by a warp
    TILE_DEVICE int turn_of(const Step& at) const {
        const KeyTile tile = work()[0];
        const int own = tile.key / kTileKv, t = tile_of(at);
        const int behind = last_key_tile<kTileQ, kTileKv>(args.scores, tile, t) - own;
        if (!kPicked && !args.ends) return behind;
        const Global<const KeyTile> list{reinterpret_cast<const KeyTile*>(args.list + kKeyListHeader)};
        const int listed = args.ends ? listed_at<kTileKv>(args, tile.k_start, tile.sequence, own) : 0;
        int before = 0;
        for (int j = 1; j <= behind; j += 32) {
            const int other = j + warp::lane();
            bool adds = other <= behind;
            if (adds && args.ends) adds = Global<const int>{&list.address(listed - other)->end}[0] > t;
            if (kPicked && adds) adds = kind_of_tile(head_of(at), t, (own + other) * kTileKv) != kNone;
            before += ptx::count_bits(ptx::ballot(adds));
        }
        return before;
    }
    TILE_DEVICE int first_key() const { return pair * kPairKeys; }

    // Asks for Q, dO and what is known of their rows
    TILE_DEVICE void load(const Step& at, int stage) const {
        const KeyTile tile = work()[0];
        const int t = tile_of(at), row = t * kTileQ, head = head_of(at);
        const auto rows = [&](int to, const void* base, const Strides& strides) {
            const auto from = static_cast<const Element*>(base);
            load_rows<kTileQ>(TileQ(to + stage * TileQ::kBytes),
                              row_at(args, from, strides, tile.sequence, tile.q_start + row, head), strides.row,
                              tile.seqlen_q - row);
        };
        rows(kAtQ, args.q, args.q_strides);
        rows(kAtDo, args.d_o, args.do_strides);
        if (threadIdx.x < kTileQ / 2)
            ptx::copy_async_16(ptx::shared_address(kAtStats + 2 * stage * kStatBytes + threadIdx.x * 16),
                               args.stats + (slot_of(args, tile, head, t) * (2 * kTileQ) + threadIdx.x * 4), 16);
    }

    // This warp's parts of dQ of the step before, onto its sum
    TILE_DEVICE void add_dq(const TileDs& ds) const {
        int* turns = kInTurn ? args.turns + slot * kWarps + warp : nullptr;
        float* sum = args.dq_sum + slot * (kTileQ * kHeadDim);
#pragma unroll 1
        for (int part = warp * kDqEach; part < (warp + 1) * kDqEach; part++) {
            float dq[kDqM][kDqSize];
            multiply_dq(dq, ds, part);
            if constexpr (kInTurn) {
                while (ptx::load_acquire(turns) != turn) ptx::spin();
                ptx::sync_warp();
            }
#pragma unroll
            for (int m = 0; m < kDqM; m++)
#pragma unroll
                for (int n = 0; n < kDqSize / 4; n++) {
                    float* to = sum + dq_place(part, m, n);
                    if constexpr (kNewCard) ptx::add_to(to, warp::four(&dq[m][4 * n]));
                    else
#pragma unroll
                        for (int i = 0; i < 4; i++) ptx::add_to(to + i * kDqApart, dq[m][4 * n + i]);
                }
        }
        if constexpr (kInTurn) {
            ptx::fence_device();
            ptx::sync_warp();
            if (warp::lane() == 0) ptx::atomic_add(turns, 1);
        }
    }

    // ---- the two of a pair ------------------------------------------------------------------------------------------
    // One step's P and dV. Where scores are changed, the other gets P times their derivative.
    TILE_DEVICE void weigh(const Step& at, int stage, const TileDs& ds, bool more_dq, const TileDs& before_ds) {
        Fragments s;
#pragma unroll
        for (int m = 0; m < kM; m++) warp::zero(s[m]);
        own.multiply(s, TileKv(kAtK), first_key(), TileQ(kAtQ + stage * TileQ::kBytes));
        const KeyTile tile = work()[0];
        const int query = tile_of(at) * kTileQ, key = tile.key + first_key();
        const Scoring scoring{args, picks, function, slope, tile, query, head_of(at), key};
        if (is_whole(at, tile)) scoring.weigh<false>(s, a, stage, ds, first_key());
        else scoring.weigh<true>(s, a, stage, ds, first_key());
        ptx::barrier_arrive(kPairBarrier + pair, 64);
        warp::mma_pv(sum, a, TileQ(kAtDo + stage * TileQ::kBytes));
        if (more_dq) add_dq(before_ds);
    }
    static TILE_DEVICE float weight(float p) { return kDropout ? fabsf(p) : p; }
    // Values 2i and 2i + 1 of dP become F ∘ dP − delta; p has the sign of those that are dropped
    TILE_DEVICE void drop(float (&dp)[kTileQ / 2], int stage, int i, const Two& p) const {
        const Shared<Two> less(kAtStats + (2 * stage + 1) * kStatBytes);
        const Two delta = less[i / 2 * 4 + warp::fragment_column() / 2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float& x = dp[2 * i + j];
            x = int(as_bits(p.of[j])) < 0 ? delta.of[j] : ptx::mad(x, args.dropout.factor, delta.of[j]);
        }
    }
    // One step's dS and dK
    TILE_DEVICE void differ(int stage, const TileDs& ds, bool more_dq, const TileDs& before_ds) {
        if (more_dq) add_dq(before_ds);
        Fragments dp;
        if constexpr (kDropout)
#pragma unroll
            for (int m = 0; m < kM; m++) warp::zero(dp[m]);
        else fill(dp, stage, 1);
        own.multiply(dp, TileKv(kAtV), first_key(), TileQ(kAtDo + stage * TileQ::kBytes));
        ptx::barrier_sync(kPairBarrier + pair, 64);
#pragma unroll
        for (int m = 0; m < kM; m++) {
#pragma unroll
            for (int k = 0; k < kTileQ / kDepth; k++) take(a[m][k], ds, first_key() + 16 * m, k);
#pragma unroll
            for (int i = 0; i < kTileQ / 4; i++) {
                const Two p = two_of(a[m], i);
                if constexpr (kDropout) drop(dp[m], stage, i, p);
                set_two(a[m], i, weight(p.of[0]) * dp[m][2 * i], weight(p.of[1]) * dp[m][2 * i + 1]);
            }
#pragma unroll
            for (int k = 0; k < kTileQ / kDepth; k++) put(ds, first_key() + 16 * m, k, a[m][k]);
        }
        warp::mma_pv(sum, a, TileQ(kAtQ + stage * TileQ::kBytes));
    }

    template <bool kWeighs> TILE_DEVICE void run(Step at) {
        Step ahead = next_step(at);
        own.take(TileKv(kWeighs ? kAtK : kAtV), first_key());
        int n = 0;
#pragma unroll 1
        for (bool more = true; more; n++) {
            more = is_step(ahead);
            const int stage = kStages == 2 ? n % 2 : 0;
            const TileDs ds(kAtDs + n % 2 * TileDs::kBytes), before_ds(kAtDs + (n + 1) % 2 * TileDs::kBytes);
            if constexpr (kStages == 2) {
                if (more) load(ahead, 1 - stage);
                ptx::copy_async_commit();
            }
            if constexpr (kWeighs) weigh(at, stage, ds, n > 0, before_ds);
            else differ(stage, ds, n > 0, before_ds);
            slot = slot_of(args, work()[0], head_of(at), tile_of(at));
            if constexpr (kInTurn) turn = turn_of(at);
            if constexpr (kStages == 1) {
                ptx::barrier_sync(kAllBarrier, kThreads);
                if (more) load(ahead, 0);
                ptx::copy_async_commit();
            }
            ptx::copy_async_wait<0>();
            ptx::barrier_sync(kAllBarrier, kThreads);
            at = ahead;
            if (more) ahead = next_step(ahead);
        }
        add_dq(TileDs(kAtDs + (n + 1) % 2 * TileDs::kBytes));
    }
};

// A warp's rows of dK or dV
TILE_DEVICE void store(const BackwardArgs& args, const KeyTile& tile, int kv_head, void* base, const Strides& strides,
                       float (&sum)[kM][kHeadDim / 2], int first_key, float factor) {
#pragma unroll
    for (int m = 0; m < kM; m++) {
        Global<Element> rows[2];
        bool exists[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int key = tile.key + first_key + 16 * m + warp::fragment_row(h);
            exists[h] = key < tile.seqlen_k;
            rows[h] = {row_at(args, static_cast<Element*>(base), strides, tile.sequence, tile.k_start + key, kv_head)};
        }
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; i++) sum[m][i] *= factor;
        store_gradient(rows, exists, sum[m], kColumns);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksEach)
    backward_mma(const __grid_constant__ BackwardArgs args, const __grid_constant__ Picks picks,
                 const __grid_constant__ Function function, const __grid_constant__ Slope slope) {
    int kv_head;
    const KeyTile tile = key_tile(args, blockIdx.x, kv_head);
    if (tile.sequence < 0) return;
    if (threadIdx.x == 0) work()[0] = tile;
    Worker worker(args, picks, function, slope, tile, kv_head);
    const bool weighs = worker.warp < kPairs;
    ptx::sync_threads();
    const Step at = worker.tiles > 0 ? worker.first_step() : Step{args.group, 0, 0, 0};
    if (worker.is_step(at)) {
        const auto keys = [&](int to, const void* base, const Strides& strides) {
            const auto from = static_cast<const Element*>(base);
            load_rows<kTileKv>(TileKv(to), row_at(args, from, strides, tile.sequence, tile.k_start + tile.key, kv_head),
                               strides.row, tile.seqlen_k - tile.key);
        };
        keys(kAtK, args.k, args.k_strides);
        keys(kAtV, args.v, args.v_strides);
        worker.load(at, 0);
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        ptx::sync_threads();
        if (weighs) worker.run<true>(at);
        else worker.run<false>(at);
    }
    const float kept = kDropout ? args.dropout.factor : 1.0f;
    if (weighs) store(args, work()[0], kv_head, args.dv, args.dv_strides, worker.sum, worker.first_key(), kept);
    else store(args, work()[0], kv_head, args.dk, args.dk_strides, worker.sum, worker.first_key(), args.scale);
}
