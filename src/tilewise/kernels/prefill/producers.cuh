// The roles of the Hopper forward that move data: the planner, the loader of Q, K and V, the transposers of V and the
// storer of O.
#pragma once
#include "prefill/layout.cuh"
#include "tile/mma.cuh"

// ---- planner --------------------------------------------------------------------------------------------------------
// One thread finds tile after tile. It takes none before the loader wants it: a block that is late must not hold tiles
// that another could compute.
TILE_DEVICE void plan(const ForwardArgs& args) {
    const Pipes pipes;
    Turn<1> turn;
    for (int number = blockIdx.x;; number = gridDim.x + ptx::atomic_add(&args.counter->handed_out, 1), turn.next()) {
        WorkTile tile = work_tile<kTileQ, kTileKv, kPack, kListed, kSlices>(args, number);
        if (kListed && tile.row >= 0) find_listed<kBoxRows, kBoxes>(args.lists, tile);
        if (kFp8 && tile.row >= 0) {
            tile.descale_qk = descale_of(args.descale_q, tile) * descale_of(args.descale_k, tile);
            tile.descale_v = descale_of(args.descale_v, tile);
        }
        planned()[0] = tile;
        ptx::mbarrier_arrive(pipes.plans.full_at(turn));
        if (tile.row < 0) break;
        ptx::mbarrier_wait(pipes.plans.empty, turn.lap);  // until the loader wants the next tile
    }
    // The last block to finish sets the counter back to zero for the next launch.
    if (ptx::atomic_add(&args.counter->blocks_done, 1) == int(gridDim.x) - 1)
        Global<TileCounter>{args.counter}[0] = TileCounter{0, 0};
}

// ---- loader of Q, K and V, by TMA if kTma ---------------------------------------------------------------------------
struct Loader {
    const ForwardArgs& args;
    const Pipes pipes;
    Turn<kStagesQ> q_turn;
    Turn<kStagesK> k_turn;
    Turn<kStagesLoaded> v_turn;

    static TILE_DEVICE void sync() {
        if constexpr (kTma) ptx::sync_warp();
        else ptx::barrier_sync(kLoaderBarrier, kLoaders);
    }
    struct Block : TileValues {  // block n of the keys that a tile visits
        int n, kv_head, sequence, k_start, seqlen_k;
        int unit, boxes, valid;  // listed: this lane's unit, how many units the block has, and rows up to the last key
        TILE_DEVICE int key() const { return (unit & kUnitMask) * kBoxRows; }
    };
    TILE_DEVICE int batch_of(int sequence) const { return args.list ? 0 : sequence; }

    // Without TMA: copies element by element to the places where TMA would write. at(row): the row's address, null for
    // a row of zeros; columns: of them that are there
    template <int kRows, int kWidth, class At> TILE_DEVICE void copy(uint32_t to, int columns, At at) {
        for (int row = threadIdx.x / 32; row < kRows; row += kLoaders / 32) {
            const Global<const Element> g{at(row)};
#pragma unroll 2
            for (int column = threadIdx.x % 32; column < kWidth; column += 32) {
                const Panel<kRows> panel(to + column / kPanelColumns * kRows * kPanelRowBytes);
                const bool there = g.base && column < columns;
                panel.element(row, column % kPanelColumns) = there ? Element(g[column]) : Element{};
            }
        }
        ptx::fence_async_proxy();
        sync();
    }

    TILE_DEVICE void load_q(const TensorMap& map, const WorkTile& tile) {
        const uint32_t barrier = pipes.q.full_at(q_turn), to = q_turn.stage * kQStage;
        if constexpr (kTma) {
            if (threadIdx.x == 0) {
                ptx::mbarrier_arrive_expect(barrier, kQBytes);
                for (int panel = 0; panel < kPanels; panel++)
                    ptx::tma_load(ptx::shared_address(to + panel * kTileQ * kPanelRowBytes), &map, barrier,
                                  panel * kPanelColumns, 0, tile.q_start + tile.row / kPack, tile.head,
                                  batch_of(tile.sequence));
            }
        } else {
            const Element* q = static_cast<const Element*>(args.q) + batch_of(tile.sequence) * args.q_strides.batch;
            copy<kTileQ, kPanels * kPanelColumns>(to, kColumns, [&](int row) {
                const int token = (tile.row + row) / kPack, head = tile.head * kPack + (tile.row + row) % kPack;
                const int64_t at = (tile.q_start + token) * args.q_strides.row + head * args.q_strides.head;
                return token < tile.seqlen_q ? q + at : nullptr;
            });
            if (threadIdx.x == 0) ptx::mbarrier_arrive(barrier);
        }
    }

    // Loads a block of V, or part `part` of one of K, into the ring's next stage
    template <bool kOfV, int kStages>
    TILE_DEVICE void load_kv(const TensorMap& map, const void* base, const Strides& strides, const Ring<kStages>& ring,
                             Turn<kStages>& turn, uint32_t at, const Block& block, int part = 0) {
        constexpr int kPanelsHere = kOfV ? kValuePanels : kPartPanels;
        constexpr int kStageBytes = kPanelsHere * kTileKv * kPanelRowBytes;
        const int first = kOfV ? block.first : part * kPartPanels * kPanelColumns;  // column
        ring.wait_free(turn);
        sync();  // or a lane still waiting on the barrier could find it two phases on
        const uint32_t barrier = ring.full_at(turn), to = at + turn.stage * kStageBytes;
        if (kFp8 && at == kAtRaw && threadIdx.x == 0)
            valid_rows()[turn.stage] = kListed ? block.valid : block.seqlen_k - block.n * kTileKv;
        if constexpr (kListed) tell_units(block, at, turn.stage);
        if constexpr (kTma && kListed) {
            // Units that are missing from the block are not requested: consumers mask them.
            if (threadIdx.x == 0)
                ptx::mbarrier_arrive_expect(barrier, block.boxes * kPanelsHere * kBoxRows * kPanelRowBytes);
            ptx::sync_warp();
            if (int(threadIdx.x) < block.boxes) {
                int row = block.k_start + block.key(), outer = batch_of(block.sequence);
                if constexpr (kPageSize > 0) {
                    outer = Global<const int>{args.page_table + block.sequence * args.page_table_stride}[
                        block.key() / kPage];
                    row = block.key() % kPage;
                }
#pragma unroll 1
                for (int panel = 0; panel < kPanelsHere; panel++)
                    ptx::tma_load(
                        ptx::shared_address(to + (panel * kTileKv + threadIdx.x * kBoxRows) * kPanelRowBytes), &map,
                        barrier, first + panel * kPanelColumns, row, block.kv_head, outer);
            }
        } else if constexpr (kTma && kPageSize > 0) {
            // Boxes wholly past the end are not requested: their page numbers may be anything.
            const int left = block.seqlen_k - block.n * kTileKv, needed = (left + kBoxRows - 1) / kBoxRows;
            const int boxes = needed < kBoxes ? needed : kBoxes;
            if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(barrier, boxes * kPanelsHere * kBoxRows * kPanelRowBytes);
            ptx::sync_warp();
            const Global<const int> pages{args.page_table + block.sequence * args.page_table_stride};
#pragma unroll 1
            for (int box = threadIdx.x; box < boxes; box += 32) {
                const int token = block.n * kTileKv + box * kBoxRows, page = pages[token / kPage];
#pragma unroll 1
                for (int panel = 0; panel < kPanelsHere; panel++)
                    ptx::tma_load(ptx::shared_address(to + (panel * kTileKv + box * kBoxRows) * kPanelRowBytes), &map,
                                  barrier, first + panel * kPanelColumns, token % kPage, block.kv_head, page);
            }
        } else if constexpr (kTma) {
            if (threadIdx.x == 0) {
                ptx::mbarrier_arrive_expect(barrier, kStageBytes);
                for (int panel = 0; panel < kPanelsHere; panel++)
                    ptx::tma_load(ptx::shared_address(to + panel * kTileKv * kPanelRowBytes), &map, barrier,
                                  first + panel * kPanelColumns, block.k_start + block.n * kTileKv, block.kv_head,
                                  batch_of(block.sequence));
            }
        } else {
            const Element* rows = static_cast<const Element*>(base) + block.kv_head * strides.head + first;
            const int columns = kOfV ? block.count() : kColumns - first;
            const Global<const int> pages{args.page_table + block.sequence * args.page_table_stride};
            copy<kTileKv, kPanelsHere * kPanelColumns>(to, columns, [&](int row) -> const Element* {
                int key = block.n * kTileKv + row;
                if constexpr (kListed) {
                    if (row / kBoxRows >= block.boxes) return nullptr;
                    key = (ptx::shuffle(block.unit, row / kBoxRows) & kUnitMask) * kBoxRows + row % kBoxRows;
                }
                if (key >= block.seqlen_k) return nullptr;
                if (kPageSize > 0) return rows + pages[key / kPage] * strides.batch + key % kPage * strides.row;
                return rows + batch_of(block.sequence) * strides.batch + (block.k_start + key) * strides.row;
            });
            if (threadIdx.x == 0) ptx::mbarrier_arrive(barrier);
        }
        turn.next();
    }

    // Where consumers, or of V the transposers, read which keys a listed block holds
    TILE_DEVICE void tell_units(const Block& block, uint32_t at, uint32_t stage) const {
        if (threadIdx.x < kBoxes) {
            if (at == kAtK) units_of_stage()[stage * kBoxes + threadIdx.x] = block.unit;
            if constexpr (kLengths) {
                const TileLists& lists = args.lists;
                const int of = lists.block_k.quotient(block.key()), inside = block.key() - of * lists.block_k.divisor;
                int there = 0;
                if (int(threadIdx.x) < block.boxes)
                    there = lists.lengths_k ? Global<const int>{lists.lengths_k}[
                        int64_t(block.sequence) * lists.lengths_k_batch + of] - inside : kBoxRows;
                if (at == kAtK) there_of_stage()[stage * kBoxes + threadIdx.x] = there;
                if (kFp8 && at == kAtRaw) there_of_raw()[stage * kBoxes + threadIdx.x] = there;
            }
        }
        sync();
    }

    TILE_DEVICE void run(const TensorMap& mQ, const TensorMap& mK, const TensorMap& mV) {
        // The block whose V is still to be loaded: K of a block is needed before V of the one before it
        Block before{TileValues(WorkTile{}), -1};
        auto load_v = [&] {
            if (before.n >= 0)
                load_kv<true>(mV, args.v, args.v_strides, pipes.loaded, v_turn, kFp8 ? kAtRaw : kAtV, before);
            before.n = -1;
        };
        for (Turn<1> turn;; turn.next()) {
            if (kStagesQ == 1) load_v();  // consumers free Q's only stage after this last V of the tile
            pipes.plans.wait(turn);
            const WorkTile tile = planned()[0];
            pipes.q.wait_free(q_turn);
            sync();
            // The WorkTile goes beside the stage of its Q, where consumers read it; each lane copies 16 bytes.
            const Shared<Vector16> words(kAtTiles);
            constexpr int kVectors = sizeof(WorkTile) / 16;
            if (threadIdx.x < kVectors)
                words[q_turn.stage * kVectors + threadIdx.x] = Vector16(words[kStagesQ * kVectors + threadIdx.x]);
            sync();
            if (tile.row < 0) break;
            load_q(mQ, tile);
            q_turn.next();
            // A listed block's units are read one block ahead: the loader must not wait for them.
            auto unit_of = [&](int n) {
                const int entry = n * kBoxes + int(threadIdx.x % 32);
                return unit_at(args.lists, tile.list, tile.whole, tile.units, entry);
            };
            int next = kListed ? unit_of(tile.end - 1) : 0;
            for (int n = tile.end - 1; n >= tile.begin; n--) {
                Block block{TileValues(tile), n, tile.kv_head, tile.sequence, tile.k_start, tile.seqlen_k, next};
                if constexpr (kListed) {
                    const int left = tile.units - n * kBoxes;
                    block.boxes = left < kBoxes ? left : kBoxes;
                    block.valid = n == tile.end - 1 ? tile.valid : kTileKv;
                    if (n > tile.begin) next = unit_of(n - 1);
                }
#pragma unroll 1
                for (int part = 0; part < kParts; part++)
                    load_kv<false>(mK, args.k, args.k_strides, pipes.k, k_turn, kAtK, block, part);
                load_v();
                before = block;
                // Loading the last blocks of a tile takes about as long as planning the next tile; for a listed one,
                // the planner reads three times what the last read pointed at.
                constexpr int kLast = kListed ? 3 : 1;
                if (n == (tile.end - tile.begin > kLast ? tile.begin + kLast : tile.end - 1)) pipes.plans.release(turn);
            }
        }
        load_v();
        if (threadIdx.x == 0) ptx::mbarrier_arrive(pipes.q.full_at(q_turn));  // the tile with row −1: no more tiles
        if constexpr (kFp8) {
            pipes.loaded.wait_free(v_turn);
            if (threadIdx.x == 0) {
                valid_rows()[v_turn.stage] = -1;
                ptx::mbarrier_arrive(pipes.loaded.full_at(v_turn));
            }
        }
    }
};

// ---- transposers of V -----------------------------------------------------------------------------------------------
// wgmma takes FP8 operands only with the depth running fastest, which for V is the keys. A warpgroup transposes V, 32
// keys × 16 columns per warp and step. ldmatrix moves pairs of bytes: transposed, it gives a lane the columns 2u and 2u
// + 1 of keys 2c and 2c + 1, for c = lane % 4 and u = lane / 4. Together with the same of the keys eight further on, a
// lane has four bytes of a column: keys 2c, 2c + 1, 8 + 2c, 8 + 2c + 1, which is the order of keys in P (to_operand).
// Half of the lanes take the even column first and half the odd one, so that the eight rows that a matrix is stored to
// lie in different banks.
TILE_DEVICE void transpose_tiles() {
    const Pipes pipes;
    Turn<kStagesV> to_turn;
    for (Turn<kStagesBefore> turn;; turn.next(), to_turn.next()) {
        pipes.raw.wait(turn);
        const int valid = valid_rows()[turn.stage];
        if (valid < 0) return;
        pipes.v.wait_free(to_turn);
        ptx::sync_warp();  // or a lane still waiting on the barrier could find it two phases on
        const int lane = warp::lane(), which = lane / 8, row = lane % 8;
        const uint32_t even = lane < 16 ? 0x6420 : 0x7531, odd = even ^ 0x1111;
        // The column, a row of Vᵀ, whose address this lane gives to stmatrix
        const int column = 2 * row + ((row < 4) == (which % 2 == 0) ? 0 : 1);
        constexpr int kAcross = kValueDim / 16;
#pragma unroll 2
        for (int step = threadIdx.x / 32 % kTransposers; step < kTileKv / 32 * kAcross; step += kTransposers) {
            const int keys = step / kAcross, across = step % kAcross;
            const Panel<kTileKv> from(kAtRaw + turn.stage * kRawBytes + across / 8 * kTileKv * kPanelRowBytes);
            uint32_t r[4];
            ptx::ldmatrix_transposed(r, from.address(32 * keys + lane, across % 8));
            if (valid < kTileKv || kLengths) {  // memory that holds no keys may hold anything, and 0 · NaN is NaN
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const int first = 32 * keys + 8 * m, inside = lane % 4 * 2;
                    int left = valid - (first + inside);
                    if constexpr (kLengths) {
                        const int there = there_of_raw()[turn.stage * kBoxes + first / kBoxRows];
                        const int here = there - (first % kBoxRows + inside);
                        left = here < left ? here : left;
                    }
                    r[m] = left <= 0 ? 0u : left == 1 ? r[m] & 0xffffu : r[m];
                }
            }
            const uint32_t turned[4] = {ptx::permute_bytes(r[0], r[1], even), ptx::permute_bytes(r[0], r[1], odd),
                                        ptx::permute_bytes(r[2], r[3], even), ptx::permute_bytes(r[2], r[3], odd)};
            const TransposedPanel to(kAtV + to_turn.stage * kVBytes + keys / 4 * kValueDim * kPanelRowBytes);
            ptx::stmatrix(to.address(16 * across + column, keys % 4 * 2 + which / 2), turned);
        }
        ptx::fence_async_proxy();
        ptx::sync_warp();
        if (ptx::elect_one()) ptx::mbarrier_arrive(pipes.v.full_at(to_turn));
        pipes.raw.release(turn);
    }
}

// ---- storer: a warp writes out the O that consumers left in shared memory -------------------------------------------
TILE_DEVICE void store_tiles(const ForwardArgs& args, const TensorMap& mO) {
    const Pipes pipes;
    Turn<kStagesO> o_turn;
    for (Turn<kStagesQ> turn;; turn.next(), o_turn.next()) {
        pipes.q.wait(turn);
        const WorkTile tile = tile_of_stage()[turn.stage];
        if (tile.row < 0) return;
        pipes.o.wait(o_turn);
        if (kTma && (!args.list || tile.row + kTileQ <= tile.seqlen_q * kPack)) {
            if (warp::lane() == 0) {
                for (int panel = 0; panel < kOPanels; panel++)
                    ptx::tma_store(&mO, ptx::shared_address(o_panel(turn.stage, panel).offset),
                                   TileValues(tile).first + panel * kPanel, 0,
                                   tile.q_start + tile.row / kPack, tile.head, args.list ? 0 : tile.sequence);
                ptx::bulk_commit();
                ptx::bulk_wait_read<0>();
            }
        } else {  // TMA would overwrite the rows past the end, which belong to the next packed sequence
            const TileValues values(tile);
            const Global<Out> o{static_cast<Out*>(args.o) + tile.sequence * args.o_strides.batch + values.first};
            const int columns = values.count();
#pragma unroll 1
            for (int row = 0; row < kTileQ && tile.row + row < tile.seqlen_q * kPack; row++) {
                const int token = (tile.row + row) / kPack, head = tile.head * kPack + (tile.row + row) % kPack;
                const Global<Out> to = o + ((tile.q_start + token) * args.o_strides.row + head * args.o_strides.head);
                if constexpr (kTma) {
#pragma unroll 1
                    for (int chunk = warp::lane(); chunk * 8 < columns; chunk += 32) {
                        const OPanel panel = o_panel(turn.stage, chunk / 8);
                        (to + chunk * 8).template as<Vector16>()[0] = Vector16(panel.chunk(row, chunk % 8));
                    }
                } else {
#pragma unroll 1
                    for (int column = warp::lane(); column < columns; column += 32)
                        to[column] = Out(o_panel(turn.stage, column / kPanel).element(row, column % kPanel));
                }
            }
        }
        ptx::sync_warp();
        if constexpr (kFp8) pipes.o.release(o_turn);
        pipes.q.release(turn);
    }
}
