// forward: attention on Hopper, in a persistent launch: one block per multiprocessor, which takes one tile of query
// rows after another from a counter.
//
// Of the first four warps one loads Q, K and V by TMA, one plans tiles and one stores O; of FP8 inputs, the last four
// warps transpose V (producers.cuh). Each consumer warpgroup owns 64 query rows. While its softmax works on key block
// n, the tensor cores run its O += P V of the block before; the last P V of a tile runs together with the next tile's
// first Q Kᵀ. Key blocks come from the last visible one down, and only blocks that some row does not see whole are
// masked.
//
// Constants:
// Element, Out: of the inputs and of O. kColumns: the head dimension of Q and K; kHeadDim: the same, padded.
// kValueColumns: that of V and O; kValueDim: the same, padded, or as many of its columns as one tile makes (kSlices).
// kTileQ, kTileKv: query rows of a tile, keys of a block. kStagesQ, kStagesK, kStagesV: stages in shared memory;
// kParts: in which a block of K comes, a stage each.
// kStagesRaw: of V before it is transposed. kPack: query heads of a KV head that stand in a tile as neighbouring rows.
// kPageSize: tokens per page of K and V, 0 if they are not paged. kTma: rows begin at multiples of 16 bytes, as TMA
// wants. kQInRegisters: consumers keep Q in registers. kExact: the standard softmax instead of the lazy one. kPingPong:
// the warpgroups take turns at the tensor cores. Rule: what is done to scores before the softmax (common/scores.cuh).
// Function: the user's functions (common/functions.cuh). kUnit: keys per unit of the lists that say what tiles visit
// (work.cuh: TileLists), 0 if tiles visit neighbouring blocks. kSlabs: a unit may be hidden from some of a tile's rows
// by sixteens. kLengths: blocks of rows or keys have lengths.
#include "prefill/closing.cuh"
#include "prefill/producers.cuh"
#include "tile/lazy.cuh"

constexpr int kStepDepth = warpgroup::kDepth<Element>;  // depth of one step of a product
constexpr int kLift = lift_of<Element>(), kWitness = witness_of<Element>();
// K stays until the softmax is done if S may have to be computed again, or if its stage also tells which keys it holds.
constexpr bool kHoldsK = !kExact || kListed;

// ---- consumers ------------------------------------------------------------------------------------------------------
struct Consumer : Scoring<Consumer> {
    const ForwardArgs& args;
    const Function& function;
    const uint32_t group;  // number of this consumer warpgroup
    Turn<kStagesQ> q_turn;
    Turn<kStagesK> k_turn;
    int n;  // the key block
    float acc_s[kTileKv / 2];
    const Pipes pipes;
    float scale_log2;
    Turn<kStagesO> o_turn;  // FP8, where O has a place of its own
    Turn<kStagesV> v_turn;
    int begin;                 // the last block of the tile: blocks come in descending order
    int full_begin, full_end;  // every row of this warpgroup sees the blocks [full_begin, full_end) whole
    float acc_o[kValueDim / 2];
    uint32_t rP[kTileKv / kStepDepth][4];
    uint32_t rQ[kHeadDim / kStepDepth][4];  // kQInRegisters
    warp::RowState state;
    float correction[2];

    TILE_DEVICE Consumer(const ForwardArgs& a, const Function& f, uint32_t g)
        // Through shared memory the scale comes into an ordinary register; from a uniform register every multiply-add
        // would have to fetch it. A score function gives natural logits.
        : args(a), function(f), group(g),
          scale_log2(Function::kScore ? kLog2e : Rule::kChanges ? 1.0f : float(shared_scale()[warp::lane()])) {}

    // Loaders of lists that keep more have taken the registers that sides need.
    static constexpr bool kBySide = kSided && !(kListed && kManyLoads);
    TILE_DEVICE WorkTile tile() const { return tile_of_stage()[q_turn.stage]; }
    TILE_DEVICE int warp_row() const { return group * 64 + ptx::just_in_time(threadIdx.x) / 32 % 4 * 16; }
    TILE_DEVICE int key_of(int box) const {
        if constexpr (!kListed) return n * kTileKv + box * kBoxRows;
        const int unit = units_of_stage()[k_turn.stage * kBoxes + box];
        if (kSlabs && unit >> (kUnitBits + warp_row() / kSlab) & 1) return kFar;
        return (unit & kUnitMask) * kBoxRows;
    }
    TILE_DEVICE int there_of(int box) const {
        return kLengths ? int(there_of_stage()[k_turn.stage * kBoxes + box]) : kBoxRows;
    }

    // Waits for the next tile and its Q; false if there is none. The WorkTile stays in shared memory: in registers it
    // would take room from the products.
    TILE_DEVICE bool next_tile() {
        pipes.q.wait(q_turn);
        const WorkTile tile = tile_of_stage()[q_turn.stage];
        if (tile.row < 0) return false;
        if constexpr (kTma && !kExact) clear_beyond(tile);
        begin = tile.begin;
        n = tile.end - 1;
        if constexpr (kListed) {
            full_begin = 0;
            full_end = tile.whole / kBoxes;
        } else {
            const Span full = full_blocks<kTileKv, kPack>(args, tile, tile.row + group * 64);
            full_begin = full.begin;
            full_end = full.end;
        }
        if constexpr (kFp8 && !Rule::kChanges && !Function::kScore)
            scale_log2 = args.scores.scale_log2 * tile.descale_qk;
        if constexpr (kQInRegisters)
#pragma unroll
            for (int step = 0; step < kHeadDim / kStepDepth; step++)
                warp::load_a(rQ[step], q_panel(q_turn.stage, step / 4), warp_row(), step % 4);
        return true;
    }

    // Zeroes the rows of Q past the sequence's end, which are another's where sequences are packed: a warp's rows move
    // their references together, and what lies behind a sequence must not change its bits. Without TMA the loader
    // writes zeros there, and the standard softmax takes every row by itself.
    TILE_DEVICE void clear_beyond(const WorkTile& tile) const {
        const int first = group * 64, there = tile.seqlen_q * kPack - tile.row;
        if (!args.list || there >= first + 64) return;
        const Shared<Vector16> rows(q_turn.stage * kQStage);
        for (int i = (there > first ? there : first) * 8 + threadIdx.x % 128; i < (first + 64) * 8; i += 128)
            for (int panel = 0; panel < kPanels; panel++) rows[panel * kTileQ * 8 + i] = Vector16{};
        ptx::fence_async_proxy();
        ptx::barrier_sync(kGroupBarrier + group, 128);
    }

    TILE_DEVICE void my_turn() const {
        if constexpr (kPingPong) ptx::barrier_sync(kTurnBarrier + group, 256);
    }
    TILE_DEVICE void your_turn() const {
        if constexpr (kPingPong) ptx::barrier_arrive(kTurnBarrier + (group + 1 == kConsumers ? 0 : group + 1), 256);
    }

    // Issues S = Q Kᵀ when K is there and it is this warpgroup's turn
    TILE_DEVICE void issue_qk() {
        if constexpr (kParts > 1) return issue_parts();
        pipes.k.wait(k_turn);
        my_turn();
        ptx::wgmma_fence();
        const uint64_t k = further(k_major(ptx::shared_address(uint32_t(kAtK))), k_turn.stage * kKBytes);
        if constexpr (kQInRegisters) {
            warpgroup::mma_qk<Element, kTileKv, kHeadDim>(acc_s, rQ, k);
        } else {
            const uint64_t q = k_major(ptx::shared_address(group * 64 * kPanelRowBytes));
            warpgroup::mma_qk<Element, kTileKv, kHeadDim, kTileQ>(acc_s, further(q, q_turn.stage * kQStage), k);
        }
        ptx::wgmma_commit();
    }
    // The same where K comes in parts, part i in stage i. Each is given back when its product is done and the next
    // one's runs; the last stays, as a whole block would.
    TILE_DEVICE void issue_parts() {
        // Descriptors made before the loop would hold registers in it.
        const uint64_t q = k_major(ptx::shared_address(ptx::just_in_time(group * 64 * kPanelRowBytes)));
        const uint64_t k = k_major(ptx::shared_address(ptx::just_in_time(kAtK)));
#pragma unroll
        for (uint32_t part = 0; part < kParts; part++) {
            pipes.k.wait({part, k_turn.lap});
            if (part == 0) my_turn();
            ptx::wgmma_fence();
            warpgroup::mma_qk<Element, kTileKv, kHeadDim / kParts, kTileQ>(
                acc_s, further(q, part * kPartPanels * kTileQ * kPanelRowBytes), further(k, part * kKBytes), part > 0);
            ptx::wgmma_commit();
            if (part > 0) {
                ptx::wgmma_wait<1>();
                pipes.k.release({part - 1, k_turn.lap});
            }
        }
        k_turn.stage = kParts - 1;
    }
    // Issues O += P V. The fence comes after the wait: otherwise ptxas cannot tell that the registers are not touched
    // in between.
    TILE_DEVICE void issue_pv() {
        pipes.v.wait(v_turn);
        ptx::wgmma_fence();
        const uint32_t at = ptx::shared_address(uint32_t(kAtV));
        const uint64_t v = kFp8 ? k_major(at) : mn_major<kTileKv>(at);
        warpgroup::mma_pv<Element, kTileKv, kValueDim>(acc_o, rP, further(v, v_turn.stage * kVBytes));
        ptx::wgmma_commit();
    }
    TILE_DEVICE void release_k() {
        if constexpr (kListed) ptx::sync_warp();  // all lanes have read which keys it holds
        pipes.k.release(k_turn);
        k_turn.next();
    }
    TILE_DEVICE void release_v() {
        pipes.v.release(v_turn);
        v_turn.next();
    }

    TILE_DEVICE bool cut() const { return n >= full_end || n < full_begin; }

    // S once more, by mma.sync and for this warp alone, from Q and K that are still in shared memory
    TILE_DEVICE void again(float (&s)[kTileKv / 2]) {
        warp::zero(s);
        const int lane = ptx::just_in_time(warp::lane());
#pragma unroll 1  // it runs rarely, and must not take registers from the steps that always run
        for (int step = 0; step < kHeadDim / kStepDepth; step++) {
            uint32_t a[4];
            warp::load_a(a, q_panel(q_turn.stage, step / 4), warp_row(), step % 4, lane);
            warp::mma_abt_step(s, a, k_panel(k_turn.stage, step / 4), step % 4, lane);
        }
        ptx::sync_warp();  // all lanes have read K, which one of them gives back
        score<false, false>(s);
    }

    // A step computes S of block n and adds the block before it to O: S = Q Kᵀ and O += P V are issued together, and
    // the softmax of S runs while P V does.
    template <bool kMasked, bool kInside = false> TILE_DEVICE void begin_step() {
        issue_qk();
        issue_pv();
        your_turn();
        uint32_t bits[2];
        if constexpr (kMasked && Function::kMask) see(bits);
        if constexpr (kInside && Function::kTouches) touch();
        ptx::wgmma_wait<1>();
        if constexpr (!kHoldsK) release_k();
        if constexpr (kMasked || !kBySide) score<kMasked, kInside>(acc_s);
        if constexpr (kMasked && Function::kMask) hide(acc_s, bits);
        else if constexpr (kMasked) mask(acc_s);
    }
    template <bool kMasked> TILE_DEVICE void end_step(bool moved) {
        if constexpr (kHoldsK && !(kMasked && kLengths)) release_k();
        ptx::wgmma_wait<0>();
        release_v();
        if constexpr (kMasked && kLengths) {
            clear_missing();
            release_k();
        }
        warp::to_operand<Element>(rP, acc_s);
        if (moved) warp::scale_rows(acc_o, correction);
        n--;
    }
    TILE_DEVICE void masked_steps(int until) {
        while (n >= until) {
            begin_step<true>();
            warp::online_softmax<kLift>(acc_s, correction, state, scale_log2);
            end_step<true>(true);
        }
    }
    // lazy_softmax, with the scores made as the block lies
    template <bool kInside> TILE_DEVICE bool sided_softmax(float (&sum)[2], const Sides& sides) {
        exponentiate_by_side<kInside>(acc_s, sum, sides, state, scale_log2);
        return ptx::any(!(fmaxf(sum[0], sum[1]) <= float(kWitness)));
    }
    // Blocks that every row sees whole. What is rarely needed stands outside of the inner loop, which keeps that loop
    // short.
    template <bool kInside> TILE_DEVICE void full_steps(int until) {
        Sides sides;
        if constexpr (kBySide) find_sides(sides);
        while (n >= until) {
            float sum[2];
            bool moved = false;
#pragma unroll 1
            for (; n >= until;) {
                begin_step<false, kInside>();
                if constexpr (kExact) {
                    if constexpr (kBySide) score_by_side<kInside>(acc_s, sides);
                    end_step<false>(warp::standing_softmax<kLift>(acc_s, correction, state, scale_log2));
                } else {
                    if constexpr (kBySide) moved = sided_softmax<kInside>(sum, sides);
                    else moved = warp::lazy_softmax<kWitness>(acc_s, sum, state, scale_log2);
                    if (moved) break;
                    warp::add_sums(state, sum);
                    end_step<false>(false);
                }
            }
            if (!moved) break;
            warp::raise<kLift>(acc_s, sum, correction, state, scale_log2, [&](float (&s)[kTileKv / 2]) { again(s); });
            end_step<false>(true);
        }
    }

    // The softmax of a tile's first block, once its S is there: all products but kRunning have to be done
    template <int kRunning> TILE_DEVICE void first_softmax() {
        uint32_t bits[2];
        if (Function::kMask && cut()) see(bits);
        ptx::wgmma_wait<kRunning>();
        if constexpr (!kListed) release_k();
        state = warp::RowState();
        if constexpr (Function::kScore) state.max[0] = state.max[1] = kNoReference;
        score<true, false>(acc_s);
        if (cut()) {
            if constexpr (Function::kMask) hide(acc_s, bits);
            else mask(acc_s);
        }
        warp::online_softmax<kLift>(acc_s, correction, state, scale_log2);
        if constexpr (kListed && !kLengths) release_k();
    }
    TILE_DEVICE void first_operand() {
        warp::to_operand<Element>(rP, acc_s);
        warp::zero(acc_o);
        if constexpr (!kFp8) {
            const WorkTile tile = tile_of_stage()[q_turn.stage];
            const int valid = kListed ? tile.valid : tile.seqlen_k - n * kTileKv;
            if (valid < kTileKv) clear_tail(valid);
        }
        if constexpr (kLengths) {
            clear_missing();
            release_k();
        }
        n--;
    }
    // Starts a tile with nothing else running: the first tile, or every tile if shared memory has room for one Q only
    TILE_DEVICE bool start() {
        if (!next_tile()) return false;
        issue_qk();
        your_turn();
        first_softmax<0>();
        first_operand();
        return true;
    }
    // The last P V of a tile, with nothing else running
    TILE_DEVICE void end(uint32_t stage, const WorkTile& tile) {
        issue_pv();
        ptx::wgmma_wait<0>();
        release_v();
        finish(stage, tile, state);
    }
    // Zeroes the rows of V past the sequence's end: memory there may hold anything, and 0 · NaN is NaN. All warpgroups
    // write the same zeros, and each waits for its own only.
    TILE_DEVICE void clear_tail(int valid) const {
        pipes.v.wait(v_turn);
        clear_rows(valid, kTileKv);
        ptx::fence_async_proxy();
        ptx::barrier_sync(kGroupBarrier + group, 128);
    }
    TILE_DEVICE void clear_rows(int from, int to) const {
        for (int panel = 0; panel < kValuePanels; panel++) {
            const Shared<Vector16> rows(kAtV + v_turn.stage * kVBytes + panel * kTileKv * kPanelRowBytes);
            for (int i = from * 8 + threadIdx.x % 128; i < to * 8; i += 128) rows[i] = Vector16{};
        }
    }
    // The same for the rows of a block's boxes that blocks of keys are too short for; transposers do it for FP8
    TILE_DEVICE void clear_missing() const {
        if constexpr (kFp8) return;
        pipes.v.wait(v_turn);
#pragma unroll 1
        for (int box = 0; box < kBoxes; box++) {
            const int there = there_of(box);
            if (there < kBoxRows) clear_rows(box * kBoxRows + (there > 0 ? there : 0), (box + 1) * kBoxRows);
        }
        ptx::fence_async_proxy();
        ptx::barrier_sync(kGroupBarrier + group, 128);
    }

    // Writes O / l and the LSE of a tile whose last P V is done. stage: where its Q was; of: its softmax state
    TILE_DEVICE void finish(uint32_t stage, const WorkTile& done, const warp::RowState& of) {
        const Closing closing = close_rows<!kStaged>(*this, done, of, acc_o);
        warp::scale_rows(acc_o, closing.inverse);
        if constexpr (kStaged) {
            const int row0 = warp_row(), lane = ptx::just_in_time(warp::lane());
            if constexpr (kFp8) pipes.o.wait_free(o_turn);
#pragma unroll
            for (int step = 0; step < kValueDim / 16; step++) {
                const float (&eight)[8] = reinterpret_cast<const float (&)[8]>(acc_o[8 * step]);
                uint32_t a[1][4];
                warp::to_operand<Out>(a, eight);
                warp::store_a(o_panel(stage, step / 4), row0, step % 4, a[0], lane);
            }
            ptx::fence_async_proxy();
            ptx::sync_warp();
            if (ptx::elect_one()) ptx::mbarrier_arrive(pipes.o.full + (kFp8 ? 0 : 8 * stage));
            if constexpr (kFp8) o_turn.next();
        } else if constexpr (kTma) {
            warp::store_rows<kValueColumns>(closing.rows, closing.exists, acc_o, TileValues(done).count());
        } else {
            store_elements<Out>(closing, acc_o, TileValues(done).count());
        }
    }

    TILE_DEVICE void run() {
        if (kPingPong && group == kConsumers - 1) ptx::barrier_arrive(kTurnBarrier, 256);
        if (!start()) return;
        for (;;) {
            masked_steps(full_end > begin ? full_end : begin);
            const int until = full_begin > begin ? full_begin : begin;
            if (Function::kScore && Function::kByRow && all_inside()) full_steps<true>(until);
            else full_steps<false>(until);
            masked_steps(begin);
            const Turn<kStagesQ> done = q_turn;
            q_turn.next();
            if constexpr (kStagesQ == 1) {
                const WorkTile tile = tile_of_stage()[done.stage];
                ptx::sync_warp();  // all lanes have read it
                pipes.q.release(done);
                end(done.stage, tile);
                if (!start()) return;
            } else {
                // Like a step, with the first block of the next tile as block n; then this tile's O is written.
                const warp::RowState done_state = state;
                if (!next_tile()) return end(done.stage, tile_of_stage()[done.stage]);
                issue_qk();
                issue_pv();
                your_turn();
                first_softmax<1>();
                ptx::wgmma_wait<0>();
                release_v();
                finish(done.stage, tile_of_stage()[done.stage], done_state);
                first_operand();
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksEach)
    forward(const __grid_constant__ TensorMap mQ, const __grid_constant__ TensorMap mK,
            const __grid_constant__ TensorMap mV, const __grid_constant__ TensorMap mO,
            const __grid_constant__ ForwardArgs args, const __grid_constant__ Function function) {
    if (threadIdx.x == 0) Pipes().init();
    if (threadIdx.x < 32) shared_scale()[threadIdx.x] = args.scores.scale_log2;
    ptx::sync_threads();
    const uint32_t role = ptx::uniform(threadIdx.x / 128);
    if (role == 0) {
        ptx::give_registers<kProducerRegisters>();
        const int warp = threadIdx.x / 32;
        if (warp < kLoaders / 32) Loader{args}.run(mQ, mK, mV);
        else if (warp == 2 && kStaged) store_tiles(args, mO);
        else if (threadIdx.x == 96) plan(args);
    } else if (kFp8 && role == kGroups - 1) {
        ptx::give_registers<kTransposerRegisters>();
        transpose_tiles();
    } else {
        ptx::take_registers<kConsumerRegisters>();
        Consumer(args, function, role - 1).run();
    }
}
