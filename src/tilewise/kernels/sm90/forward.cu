// forward: attention on Hopper. One block a multiprocessor stays and takes tile after tile of query rows from a counter.
//
// Of the first four warps one loads Q, K and V by TMA, one plans tiles and one stores O. Each consumer warpgroup owns 64 query rows:
// while its softmax works on key block n, the tensor cores run its O += P V of the block before, and a tile's last P V runs with the
// next tile's first Q Kᵀ. Key blocks come from the last visible one down; only those at the edges of what a row sees are masked.
//
// Constants: Element; kColumns: the head dimension, kHeadDim: the same padded; kTileQ, kTileKv; kStagesQ, kStagesK, kStagesV;
// kPack query heads of a KV head stand in a tile as neighbouring rows; kPageSize: of paged K and V, 0 if they are not;
// kTma: rows lie on 16 bytes, so that TMA can bring them; kQInRegisters; kExact: the standard softmax; kPingPong: the warpgroups take
// turns at the tensor cores; kSoftcap, kAlibi, kScaled: what is done to scores first.
#include "sm90/work.cuh"
#include "tile/hopper.cuh"
#include "tile/lazy.cuh"

constexpr int kConsumers = kTileQ / 64, kThreads = 128 * (kConsumers + 1);
constexpr int kLoaders = kTma ? 32 : 64;  // threads: the first warp, or the first two
// Registers a thread, moved from the producers to the consumers. More than the launch came with and taking them never returns: the
// launch has 64 K for all threads, in eights for each.
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kTma ? 40 : 56;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kTma ? 232 : 224;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * (65536 / kThreads / 8 * 8), "a deadlock");
constexpr int kPanels = (kHeadDim + kPanel - 1) / kPanel;
constexpr int kQBytes = tile_bytes<kTileQ, kPanels * kPanel>(), kKvBytes = tile_bytes<kTileKv, kPanels * kPanel>();
// Rows that one copy brings of K or V: the tile's, or as many as neither crosses a page nor leaves the tile.
constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int kPage = kPageSize ? kPageSize : 1;
constexpr int kBoxRows = kPageSize ? common_divisor(kPageSize, kTileKv) : kTileKv, kBoxes = kTileKv / kBoxRows;
constexpr bool kScored = kSoftcap || kAlibi || kScaled;  // scores are turned into base-2 logits before the softmax
constexpr int kTurnBarrier = 1, kGroupBarrier = 5, kLoaderBarrier = 9;  // named barriers: of each consumer; of the loaders

// Where the next Q has a stage of its own, O goes out through the stage of the Q it came from, and stores itself.
constexpr bool kStaged = kStagesQ > 1;

// Shared memory, from the start: tiles of data on 1024 bytes, as the swizzle wants, then barriers, then descriptions of tiles: of
// those whose Q is here, stage by stage, and of the one planned.
constexpr int kAtK = kStagesQ * kQBytes, kAtV = kAtK + kStagesK * kKvBytes, kAtBarriers = kAtV + kStagesV * kKvBytes;
constexpr int kBarrierBytes = 2 * 8 * (kStagesQ + kStagesK + kStagesV + 1) + 8 * kStagesQ;
constexpr int kAtScale = kAtBarriers + kBarrierBytes, kAtTiles = (kAtScale + 128 + 63) / 64 * 64;

struct Pipes {
    Ring<kStagesQ> q;
    Ring<kStagesK> k;
    Ring<kStagesV> v;
    Ring<1> plans;
    uint32_t o_full;  // a barrier a stage of Q: O is in its place
    TILE_DEVICE Pipes()
        : q(ptx::shared_address(uint32_t(kAtBarriers))),
          k(q.full + q.kBytes),
          v(k.full + k.kBytes),
          plans(v.full + v.kBytes),
          o_full(plans.full + plans.kBytes) {}
    TILE_DEVICE void init() const {
        q.init(kStaged ? 1 : 4 * kConsumers);
        k.init(4 * kConsumers);
        v.init(4 * kConsumers);
        plans.init(kLoaders / 32);
        for (int stage = 0; stage < kStagesQ; stage++) ptx::mbarrier_init(o_full + 8 * stage, 4 * kConsumers);
        ptx::fence_mbarrier_init();
    }
};
TILE_DEVICE Shared<float> shared_scale() { return Shared<float>(kAtScale); }
TILE_DEVICE Shared<WorkTile> tile_of_stage() { return Shared<WorkTile>(kAtTiles); }
TILE_DEVICE Shared<WorkTile> planned() { return Shared<WorkTile>(kAtTiles + kStagesQ * uint32_t(sizeof(WorkTile))); }

using QPanel = SharedTile<Element, kTileQ, kPanel, Layout::swizzled>;
using KPanel = SharedTile<Element, kTileKv, kPanel, Layout::swizzled>;
TILE_DEVICE QPanel q_panel(uint32_t stage, int panel) { return QPanel(stage * kQBytes + panel * kTileQ * kPanelRowBytes); }
TILE_DEVICE KPanel k_panel(uint32_t stage, int panel) { return KPanel(kAtK + stage * kKvBytes + panel * kTileKv * kPanelRowBytes); }

// ---- planner: one thread works out tile after tile, none before it is wanted: who is late must not sit on work -----------------------
TILE_DEVICE void plan(const ForwardArgs& args) {
    const Pipes pipes;
    Turn<1> turn;
    for (int number = blockIdx.x;; number = gridDim.x + ptx::atomic_add(args.counter, 1), turn.next()) {
        const WorkTile tile = work_tile<kTileQ, kTileKv, kPack>(args, number);
        planned()[0] = tile;
        ptx::mbarrier_arrive(pipes.plans.full_at(turn));
        if (tile.row < 0) break;
        ptx::mbarrier_wait(pipes.plans.empty, turn.lap);  // until the loader wants the next
    }
    // The last block to finish leaves the counter as it found it, for the next launch.
    if (ptx::atomic_add(args.counter + 1, 1) == int(gridDim.x) - 1) {
        const Global<int> counter{args.counter};
        counter[0] = 0;
        counter[1] = 0;
    }
}

// ---- loader: brings Q, K and V, by TMA if it can ----------------------------------------------------------------------------------
struct Loader {
    const ForwardArgs& args;
    const Pipes pipes;
    Turn<kStagesQ> q_turn;
    Turn<kStagesK> k_turn;
    Turn<kStagesV> v_turn;

    static TILE_DEVICE void meet() {
        if constexpr (kTma) ptx::sync_warp();
        else ptx::barrier_sync(kLoaderBarrier, kLoaders);
    }
    struct Block {  // key block n of a tile
        int n, kv_head, sequence, k_start, seqlen_k;
    };
    TILE_DEVICE int batch_of(int sequence) const { return args.list ? 0 : sequence; }

    // Without TMA: element by element into the places where TMA would have put them. at(row) is the row, null for zeros.
    template <int kRows, class At> TILE_DEVICE void copy(uint32_t to, At at) {
        for (int row = threadIdx.x / 32; row < kRows; row += kLoaders / 32) {
            const Global<const Element> g{at(row)};
#pragma unroll 2
            for (int column = threadIdx.x % 32; column < kPanels * kPanel; column += 32) {
                const SharedTile<Element, kRows, kPanel, Layout::swizzled> panel(to + column / kPanel * kRows * kPanelRowBytes);
                panel.element(row, column % kPanel) = g.base && column < kColumns ? Element(g[column]) : from_float<Element>(0.0f);
            }
        }
        ptx::fence_async_proxy();
        meet();
    }

    TILE_DEVICE void load_q(const TensorMap& map, const WorkTile& tile) {
        const uint32_t barrier = pipes.q.full_at(q_turn), to = q_turn.stage * kQBytes;
        if constexpr (kTma) {
            if (threadIdx.x == 0) {
                ptx::mbarrier_arrive_expect(barrier, kQBytes);
                for (int panel = 0; panel < kPanels; panel++)
                    ptx::tma_load(ptx::shared_address(to + panel * kTileQ * kPanelRowBytes), &map, barrier, panel * kPanel, 0,
                                  tile.q_start + tile.row / kPack, tile.head, batch_of(tile.sequence));
            }
        } else {
            const Element* q = static_cast<const Element*>(args.q) + batch_of(tile.sequence) * args.q_strides.batch;
            copy<kTileQ>(to, [&](int row) {
                const int token = (tile.row + row) / kPack, head = tile.head * kPack + (tile.row + row) % kPack;
                return token < tile.seqlen_q ? q + (tile.q_start + token) * args.q_strides.row + head * args.q_strides.head : nullptr;
            });
            if (threadIdx.x == 0) ptx::mbarrier_arrive(barrier);
        }
    }

    // A block of K or V into the ring's next stage
    template <int kStages>
    TILE_DEVICE void load_kv(const TensorMap& map, const void* base, const Strides& strides, const Ring<kStages>& ring,
                             Turn<kStages>& turn, uint32_t at, const Block& block) {
        ring.wait_free(turn);
        meet();  // else a lane that still looks at the barrier may find it two phases on
        const uint32_t barrier = ring.full_at(turn), to = at + turn.stage * kKvBytes;
        if constexpr (kTma && kPageSize > 0) {
            // Boxes that lie wholly past the end are not asked for: their pages may be any number.
            const int left = block.seqlen_k - block.n * kTileKv, needed = (left + kBoxRows - 1) / kBoxRows;
            const int boxes = needed < kBoxes ? needed : kBoxes;
            if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(barrier, boxes * kPanels * kBoxRows * kPanelRowBytes);
            ptx::sync_warp();
            const Global<const int> pages{args.page_table + block.sequence * args.page_table_stride};
#pragma unroll 1
            for (int box = threadIdx.x; box < boxes; box += 32) {
                const int token = block.n * kTileKv + box * kBoxRows, page = pages[token / kPage];
#pragma unroll 1
                for (int panel = 0; panel < kPanels; panel++)
                    ptx::tma_load(ptx::shared_address(to + (panel * kTileKv + box * kBoxRows) * kPanelRowBytes), &map, barrier,
                                  panel * kPanel, token % kPage, block.kv_head, page);
            }
        } else if constexpr (kTma) {
            if (threadIdx.x == 0) {
                ptx::mbarrier_arrive_expect(barrier, kKvBytes);
                load_tile<kTileKv, kPanels * kPanel>(ptx::shared_address(to), &map, barrier, block.k_start + block.n * kTileKv, block.kv_head,
                                                     batch_of(block.sequence));
            }
        } else {
            const Element* first = static_cast<const Element*>(base) + block.kv_head * strides.head;
            const Global<const int> pages{args.page_table + block.sequence * args.page_table_stride};
            copy<kTileKv>(to, [&](int row) -> const Element* {
                const int key = block.n * kTileKv + row;
                if (key >= block.seqlen_k) return nullptr;
                if (kPageSize > 0) return first + pages[key / kPage] * strides.batch + key % kPage * strides.row;
                return first + batch_of(block.sequence) * strides.batch + (block.k_start + key) * strides.row;
            });
            if (threadIdx.x == 0) ptx::mbarrier_arrive(barrier);
        }
        turn.next();
    }

    TILE_DEVICE void run(const TensorMap& mQ, const TensorMap& mK, const TensorMap& mV) {
        Block before{-1};  // whose V is still to be brought: K(n) goes ahead of V(n − 1), as they are needed
        auto load_v = [&] {
            if (before.n >= 0) load_kv(mV, args.v, args.v_strides, pipes.v, v_turn, kAtV, before);
            before.n = -1;
        };
        for (Turn<1> turn;; turn.next()) {
            if (kStagesQ == 1) load_v();  // Q's only stage is not free before it came
            pipes.plans.wait(turn);
            const WorkTile tile = planned()[0];
            pipes.q.wait_free(q_turn);
            meet();
            // The tile's description goes to the stage of its Q, where its consumers look: a lane copies 16 bytes.
            const Shared<Vector16> words(kAtTiles);
            constexpr int kVectors = sizeof(WorkTile) / 16;
            if (threadIdx.x < kVectors) words[q_turn.stage * kVectors + threadIdx.x] = Vector16(words[kStagesQ * kVectors + threadIdx.x]);
            meet();
            if (tile.row < 0) break;
            load_q(mQ, tile);
            q_turn.next();
            for (int n = tile.end - 1; n >= tile.begin; n--) {
                const Block block{n, tile.kv_head, tile.sequence, tile.k_start, tile.seqlen_k};
                load_kv(mK, args.k, args.k_strides, pipes.k, k_turn, kAtK, block);
                load_v();
                before = block;
                // The last two blocks of a tile take about as long as planning the next.
                if (n == (tile.end - tile.begin > 1 ? tile.begin + 1 : tile.begin)) pipes.plans.release(turn);
            }
        }
        load_v();
        if (threadIdx.x == 0) ptx::mbarrier_arrive(pipes.q.full_at(q_turn));  // the tile that says: no more
    }
};

// ---- storer: a warp writes out the O that consumers left in shared memory ----------------------------------------------------------
TILE_DEVICE void store_tiles(const ForwardArgs& args, const TensorMap& mO) {
    const Pipes pipes;
    for (Turn<kStagesQ> turn;; turn.next()) {
        pipes.q.wait(turn);
        const WorkTile tile = tile_of_stage()[turn.stage];
        if (tile.row < 0) return;
        ptx::mbarrier_wait(pipes.o_full + 8 * turn.stage, turn.lap);
        if (kTma && (!args.list || tile.row + kTileQ <= tile.seqlen_q * kPack)) {
            if (warp::lane() == 0) {
                for (int panel = 0; panel < kPanels; panel++)
                    ptx::tma_store(&mO, ptx::shared_address(turn.stage * kQBytes + panel * kTileQ * kPanelRowBytes), panel * kPanel, 0,
                                   tile.q_start + tile.row / kPack, tile.head, args.list ? 0 : tile.sequence);
                ptx::bulk_commit();
                ptx::bulk_wait_read<0>();
            }
        } else {  // rows past the end of a packed sequence are another's
            const Global<Element> o{static_cast<Element*>(args.o) + tile.sequence * args.o_strides.batch};
#pragma unroll 1
            for (int row = 0; row < kTileQ && tile.row + row < tile.seqlen_q * kPack; row++) {
                const int token = (tile.row + row) / kPack, head = tile.head * kPack + (tile.row + row) % kPack;
                const Global<Element> to = o + ((tile.q_start + token) * args.o_strides.row + head * args.o_strides.head);
                if constexpr (kTma) {
#pragma unroll 1
                    for (int chunk = warp::lane(); chunk * 8 < kColumns; chunk += 32)
                        (to + chunk * 8).template as<Vector16>()[0] = Vector16(q_panel(turn.stage, chunk / 8).chunk(row, chunk % 8));
                } else {
#pragma unroll 1
                    for (int column = warp::lane(); column < kColumns; column += 32)
                        to[column] = Element(q_panel(turn.stage, column / kPanel).element(row, column % kPanel));
                }
            }
        }
        ptx::sync_warp();
        pipes.q.release(turn);
    }
}

// ---- consumers ----------------------------------------------------------------------------------------------------------
struct Consumer {
    const ForwardArgs& args;
    const Pipes pipes;
    const uint32_t group;  // of the consumers
    const float scale_log2;
    Turn<kStagesQ> q_turn;
    Turn<kStagesK> k_turn;
    Turn<kStagesV> v_turn;
    int n, begin;          // the key block at hand, and the tile's last
    int full_begin, full_end;  // blocks that every row of this warpgroup sees whole
    float acc_o[kHeadDim / 2], acc_s[kTileKv / 2];
    uint32_t rP[kTileKv / 16][4];
    uint32_t rQ[kHeadDim / 16][4];  // if it stays in registers
    warp::RowState state;
    float correction[2];

    TILE_DEVICE Consumer(const ForwardArgs& a, uint32_t g)
        // By way of shared memory the scale comes into an ordinary register: from a uniform one every multiply-add pays for fetching it.
        : args(a), group(g), scale_log2(kScored ? 1.0f : float(shared_scale()[warp::lane()])) {}

    TILE_DEVICE int warp_row() const { return group * 64 + ptx::just_in_time(threadIdx.x) / 32 % 4 * 16; }
    TILE_DEVICE int row_of(const WorkTile& tile, int h) const { return tile.row + warp_row() + warp::fragment_row(h); }
    static TILE_DEVICE int head_of(const WorkTile& tile, int row) { return tile.head * kPack + row % kPack; }

    // The next tile, or false. Its Q is there; what it is stays in shared memory, so as not to take registers from the products.
    TILE_DEVICE bool next_tile() {
        pipes.q.wait(q_turn);
        const WorkTile tile = tile_of_stage()[q_turn.stage];
        if (tile.row < 0) return false;
        begin = tile.begin;
        n = tile.end - 1;
        const FullBlocks full = full_blocks<kTileKv, kPack>(args, tile, tile.row + group * 64);
        full_begin = full.begin;
        full_end = full.end;
        if constexpr (kQInRegisters)
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; step++) warp::load_a(rQ[step], q_panel(q_turn.stage, step / 4), warp_row(), step % 4);
        return true;
    }

    TILE_DEVICE void my_turn() const {
        if constexpr (kPingPong) ptx::barrier_sync(kTurnBarrier + group, 256);
    }
    TILE_DEVICE void your_turn() const {
        if constexpr (kPingPong) ptx::barrier_arrive(kTurnBarrier + (group + 1 == kConsumers ? 0 : group + 1), 256);
    }

    // S = Q Kᵀ, issued when K is there and it is this warpgroup's turn
    TILE_DEVICE void issue_qk() {
        pipes.k.wait(k_turn);
        my_turn();
        ptx::wgmma_fence();
        const uint64_t k = further(k_major(ptx::shared_address(uint32_t(kAtK))), k_turn.stage * kKvBytes);
        if constexpr (kQInRegisters) {
            warpgroup::mma_qk<Element, kTileKv, kHeadDim>(acc_s, rQ, k);
        } else {
            const uint64_t q = k_major(ptx::shared_address(group * 64 * kPanelRowBytes));
            warpgroup::mma_qk<Element, kTileKv, kHeadDim, kTileQ>(acc_s, further(q, q_turn.stage * kQBytes), k);
        }
        ptx::wgmma_commit();
    }
    // O += P V, issued. The fence is after the wait: without it ptxas cannot tell that nobody touches the registers meanwhile.
    TILE_DEVICE void issue_pv() {
        pipes.v.wait(v_turn);
        ptx::wgmma_fence();
        const uint64_t v = mn_major<kTileKv>(ptx::shared_address(uint32_t(kAtV)));
        warpgroup::mma_pv<Element, kTileKv, kHeadDim>(acc_o, rP, further(v, v_turn.stage * kKvBytes));
        ptx::wgmma_commit();
    }
    TILE_DEVICE void release_k() {
        pipes.k.release(k_turn);
        k_turn.next();
    }
    TILE_DEVICE void release_v() {
        pipes.v.release(v_turn);
        v_turn.next();
    }

    // tanh y of z = 2 y log2 e: 1 − 2 / (1 + e^2y), which near 0 is a difference of ones and loses y; there its series.
    static TILE_DEVICE float tanh_from_log2(float z) {
        const float y = z * (0.5f * kLn2), square = y * y;
        const float series = y * ptx::mad(square, ptx::mad(square, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
        return fabsf(y) < 0.1f ? series : 1.0f - 2.0f * ptx::reciprocal(1.0f + ptx::exp2(z));
    }
    // S into logits of base 2: soft-capped, with ALiBi's bias
    TILE_DEVICE void score(float (&s)[kTileKv / 2]) const {
        if constexpr (kScored) {
#pragma unroll
            for (int i = 0; i < kTileKv / 2; i++) {
                if constexpr (kSoftcap) s[i] = args.softcap_out * tanh_from_log2(s[i] * args.softcap_in);
                else s[i] *= args.scale_log2;
            }
        }
        if constexpr (kAlibi) {
            const WorkTile tile = tile_of_stage()[q_turn.stage];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = row_of(tile, h), position = row / kPack + tile.seqlen_k - tile.seqlen_q;
                const float slope = kLog2e * Global<const float>{args.slopes}[tile.sequence * args.slopes_batch + head_of(tile, row)];
                const float distance = float(position - n * kTileKv - warp::fragment_column());
#pragma unroll
                for (int j = 0; j < kTileKv / 4; j++) {  // j = 2 · eight + i
                    float& x = s[j / 2 * 4 + 2 * h + j % 2];
                    x = ptx::mad(-slope, fabsf(distance - float(j / 2 * 8 + j % 2)), x);
                }
            }
        }
    }
    // S = −inf where a row does not see the key
    TILE_DEVICE void mask() {
        const WorkTile tile = tile_of_stage()[q_turn.stage];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Keys seen = keys_of(args, tile, row_of(tile, h) / kPack);
            const int count = seen.last - seen.first + 1, before = n * kTileKv + warp::fragment_column() - seen.first;
            const uint32_t visible = count > 0 ? count : 0;
#pragma unroll
            for (int j = 0; j < kTileKv / 4; j++)
                if (uint32_t(before + j / 2 * 8 + j % 2) >= visible) acc_s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
        }
    }
    TILE_DEVICE bool cut() const { return n >= full_end || n < full_begin; }

    // S by mma.sync, for this warp alone, from the same Q and K that are still in shared memory
    TILE_DEVICE void again(float (&s)[kTileKv / 2]) {
        warp::zero(s);
        const int lane = ptx::just_in_time(warp::lane());
#pragma unroll 1  // it runs rarely, and must not take registers from what runs always
        for (int step = 0; step < kHeadDim / 16; step++) {
            uint32_t a[4];
            warp::load_a(a, q_panel(q_turn.stage, step / 4), warp_row(), step % 4, lane);
            warp::mma_abt_step(s, a, k_panel(k_turn.stage, step / 4), step % 4, lane);
        }
        score(s);
    }

    // A step is block n while the block before it goes into O: S = Q Kᵀ and O += P V run together, then P = softmax(S) under P V.
    TILE_DEVICE void begin_step() {
        issue_qk();
        issue_pv();
        your_turn();
        ptx::wgmma_wait<1>();
        if constexpr (kExact) release_k();
        score(acc_s);
    }
    TILE_DEVICE void end_step(bool moved) {
        if constexpr (!kExact) release_k();
        ptx::wgmma_wait<0>();
        release_v();
        warp::to_operand<Element>(rP, acc_s);
        if (moved) warp::scale_rows(acc_o, correction);
        n--;
    }
    TILE_DEVICE void masked_steps(int until) {
        while (n >= until) {
            begin_step();
            mask();
            warp::online_softmax(acc_s, correction, state, scale_log2);
            end_step(true);
        }
    }
    // Over blocks that every row sees whole. What is rarely needed stands outside of the loop, so that the loop is short.
    TILE_DEVICE void full_steps(int until) {
        while (n >= until) {
            float sum[2];
            bool moved = false;
#pragma unroll 1
            for (; n >= until;) {
                begin_step();
                if constexpr (kExact) {
                    end_step(warp::standing_softmax(acc_s, correction, state, scale_log2));
                } else {
                    moved = warp::lazy_softmax(acc_s, sum, state, scale_log2);
                    if (moved) break;
                    warp::add_sums(state, sum);
                    end_step(false);
                }
            }
            if (!moved) break;
            warp::raise(acc_s, sum, correction, state, scale_log2, [&](float (&s)[kTileKv / 2]) { again(s); });
            end_step(true);
        }
    }

    // A tile's first block, whose S is there: the state begins.
    TILE_DEVICE void first_softmax() {
        release_k();
        state = warp::RowState();
        score(acc_s);
        if (cut()) mask();
        warp::online_softmax(acc_s, correction, state, scale_log2);
    }
    TILE_DEVICE void first_operand() {
        warp::to_operand<Element>(rP, acc_s);
        warp::zero(acc_o);
        const int valid = WorkTile(tile_of_stage()[q_turn.stage]).seqlen_k - n * kTileKv;
        if (valid < kTileKv) clear_tail(valid);
        n--;
    }
    // A tile from nothing: the first, or every one where there is no room for the next Q beside this one's.
    TILE_DEVICE bool start() {
        if (!next_tile()) return false;
        issue_qk();
        your_turn();
        ptx::wgmma_wait<0>();
        first_softmax();
        first_operand();
        return true;
    }
    // The last P V of a tile alone
    TILE_DEVICE void end(uint32_t stage, const WorkTile& tile) {
        issue_pv();
        ptx::wgmma_wait<0>();
        release_v();
        finish(stage, tile, state);
    }
    // V's rows past the sequence's end may hold anything, and 0 · NaN is NaN. All warpgroups write the same zeros; each waits for
    // its own only.
    TILE_DEVICE void clear_tail(int valid) const {
        pipes.v.wait(v_turn);
        for (int panel = 0; panel < kPanels; panel++) {
            const Shared<Vector16> rows(kAtV + v_turn.stage * kKvBytes + panel * kTileKv * kPanelRowBytes);
            for (int i = valid * 8 + threadIdx.x % 128; i < kTileKv * 8; i += 128) rows[i] = Vector16{};
        }
        ptx::fence_async_proxy();
        ptx::barrier_sync(kGroupBarrier + group, 128);
    }

    // O / l and the LSE of a tile whose last P V is done; `stage` is where its Q was
    TILE_DEVICE void finish(uint32_t stage, const WorkTile& done, const warp::RowState& of) {
        float inverse[2];
        Global<Element> rows[2];
        bool exists[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = row_of(done, h), token = row / kPack, head = head_of(done, row);
            exists[h] = token < done.seqlen_q;
            float sum = warp::row_sum(of.sum[h]), max = of.max[h], weight = 1.0f;
            if (args.sinks && exists[h]) {
                const float sink = Global<const float>{args.sinks}[head] * kLog2e, top = fmaxf(max, sink);
                if (top != -INFINITY) {
                    weight = ptx::exp2(max - top);
                    sum = sum * weight + ptx::exp2(sink - top);
                    max = top;
                }
            }
            inverse[h] = sum == 0.0f ? 0.0f : weight * ptx::reciprocal(sum);
            if (args.lse && exists[h] && warp::lane() % 4 == 0)
                Global<float>{args.lse}[done.sequence * args.lse_batch + head * args.lse_head + done.q_start + token] =
                    sum == 0.0f ? -INFINITY : (max + ptx::log2(sum)) * kLn2;
            if constexpr (!kStaged)
                rows[h] = Global<Element>{static_cast<Element*>(args.o)} + (done.sequence * args.o_strides.batch +
                          (done.q_start + token) * args.o_strides.row + head * args.o_strides.head);
        }
        warp::scale_rows(acc_o, inverse);
        if constexpr (kStaged) {
            const int row0 = warp_row(), lane = ptx::just_in_time(warp::lane());
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; step++) {
                const float (&eight)[8] = reinterpret_cast<const float (&)[8]>(acc_o[8 * step]);
                uint32_t a[1][4];
                warp::to_operand<Element>(a, eight);
                warp::store_a(q_panel(stage, step / 4), row0, step % 4, a[0], lane);
            }
            ptx::fence_async_proxy();
            ptx::sync_warp();
            if (ptx::elect_one()) ptx::mbarrier_arrive(pipes.o_full + 8 * stage);
        } else if constexpr (kTma) {
            warp::store_rows<kColumns>(rows, exists, acc_o);
        } else {
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; i++) {
                const int column = i / 4 * 8 + warp::fragment_column() + i % 2;
                if (exists[i / 2 % 2] && column < kColumns) rows[i / 2 % 2][column] = from_float<Element>(acc_o[i]);
            }
        }
    }

    TILE_DEVICE void run() {
        if (kPingPong && group == kConsumers - 1) ptx::barrier_arrive(kTurnBarrier, 256);
        if (!start()) return;
        for (;;) {
            masked_steps(full_end > begin ? full_end : begin);
            full_steps(full_begin > begin ? full_begin : begin);
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
                // As a step, but that block n is the next tile's first; then this tile's O is written.
                const warp::RowState done_state = state;
                if (!next_tile()) return end(done.stage, tile_of_stage()[done.stage]);
                issue_qk();
                issue_pv();
                your_turn();
                ptx::wgmma_wait<1>();
                first_softmax();
                ptx::wgmma_wait<0>();
                release_v();
                finish(done.stage, tile_of_stage()[done.stage], done_state);
                first_operand();
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ TensorMap mQ, const __grid_constant__ TensorMap mK, const __grid_constant__ TensorMap mV,
            const __grid_constant__ TensorMap mO, const __grid_constant__ ForwardArgs args) {
    if (threadIdx.x == 0) Pipes().init();
    if (threadIdx.x < 32) shared_scale()[threadIdx.x] = args.scale_log2;
    ptx::sync_threads();
    const uint32_t role = ptx::uniform(threadIdx.x / 128);
    if (role == 0) {
        ptx::give_registers<kProducerRegisters>();
        const int warp = threadIdx.x / 32;
        if (warp < kLoaders / 32) Loader{args}.run(mQ, mK, mV);
        else if (warp == 2 && kStaged) store_tiles(args, mO);
        else if (threadIdx.x == 96) plan(args);
    } else {
        ptx::take_registers<kConsumerRegisters>();
        Consumer(args, role - 1).run();
    }
}
