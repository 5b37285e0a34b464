// The parts of decode_small.cu: rounds of chunks and how they arrive, what the warps of a block do with them together,
// and how the blocks of a cluster merge their states.
#pragma once
#include "decode/merge.cuh"
#include "decode/small_args.cuh"
#include "decode/stream.cuh"

static_assert(kFormat == Format::bits16 && !kNormalised && kBlocks == 1, "16-bit pages, up to eight rows");
static_assert(!kTree && !kSelected && kWholeBoxes && kTiles == 1, "chunks of sixteen tokens in one page");
static_assert(!Rule::kChunked, "sequences are read from their first token on");
static_assert(kHeadRows <= kRows && kRound % kWarps == 0, "every warp has its chunks of a round");
constexpr int kMine = kRound / kWarps;                        // chunks of a round per warp
constexpr int kOwnTiles = (kOutTiles + kWarps - 1) / kWarps;  // tiles of sixteen channels of O per warp
constexpr int kSlice = kHeadRows * kValueDim / kCluster;      // values of a state per block that merges
// The only block of its cluster has nobody to send to: it stores its states itself, and its warps arrive at the barrier
// of the states when they have no more.
constexpr bool kAlone = kCluster == 1;
static_assert(kHeadRows * kValueDim % (4 * kCluster) == 0 && kDepth * kMine <= 32, "vectors; a page per lane");

// Shared memory, in this order: the ring, a chunk's K and then its V; the scores of two rounds, lane by lane; the
// block's slice of all states; their MaxSums; barriers of the ring, per stage one for the keys of each warp and one for
// all values; the barrier of the states.
constexpr int kAtScores = kDepth * kRound * kStageBytes, kScoreBytes = 32 * 16;
constexpr int kAtStates = kAtScores + 2 * kRound * kScoreBytes;
constexpr int kAtMaxSums = kAtStates + kMostStates * kSlice * 4;
constexpr int kAtFull = kAtMaxSums + kMostStates * kHeadRows * 8;
constexpr int kAtLanded = kAtFull + kDepth * (kWarps + 1) * 8;
constexpr int kSmallBytes = kAtLanded + 8;
TILE_DEVICE uint32_t keys_in(int stage, int chunk) { return (stage * kRound + chunk) * kStageBytes; }
TILE_DEVICE uint32_t values_in(int stage, int chunk) {
    return keys_in(stage, chunk) + KeyRows::kPlaceBytes;
}
TILE_DEVICE uint32_t keys_barrier(int stage, int rank) { return kAtFull + (stage * (kWarps + 1) + rank) * 8; }
TILE_DEVICE uint32_t values_barrier(int stage) { return keys_barrier(stage, kWarps); }
// By one thread, whose addresses are then uniform: threads that do one each take turns.
TILE_DEVICE void init_barriers(uint32_t window) {
    ptx::mbarrier_init(window + kAtLanded, kAlone ? kWarps : 1);
    if constexpr (kTma)
#pragma unroll
        for (int n = 0; n < kDepth * (kWarps + 1); n++)
            ptx::mbarrier_init(window + kAtFull + 8 * n, n % (kWarps + 1) == kWarps ? kWarps : 1);
    ptx::fence_mbarrier_init();
}

// Up to kRound chunks of one piece, which the warps of a block compute together
struct Round {
    int first;   // token
    int chunks;  // that exist; none, or less, past the end of the block's part
    int state;   // the piece's number, and that of its state
    bool begins, ends;  // its piece
};

// The block's part of a sequence and KV head: every kCluster-th piece
struct Share {
    const SmallSequence& of;
    const int block, length;
    int states, rounds;  // states of the sequence; rounds of this block
    TILE_DEVICE Share(const SmallSequence& sequence, int rank, int tokens)
        : of(sequence), block(rank), length(tokens), rounds(0) {
        const int piece = of.piece.divisor, all = of.piece.quotient(length + piece - 1);
        states = all > 0 ? all : 1;
        const int mine = (all - block + kCluster - 1) / kCluster;
        if (all <= block) return;
        const bool last = block + (mine - 1) * kCluster == all - 1;  // the sequence's last piece is this block's
        const int tokens_of_last = last ? length - (all - 1) * piece : piece;
        rounds = (mine - 1) * int(of.rounds.divisor) + (tokens_of_last + kRound * kChunk - 1) / (kRound * kChunk);
    }
    TILE_DEVICE Round round(int n) const {
        const int piece = of.rounds.quotient(n), within = n - piece * int(of.rounds.divisor);
        const int state = block + piece * kCluster, tokens = of.piece.divisor, begin = state * tokens;
        const int stop = begin + tokens < length ? begin + tokens : length;
        const int first = begin + within * kRound * kChunk, left = (stop - first + kChunk - 1) / kChunk;
        return {first, left < kRound ? left : kRound, state, within == 0, left <= kRound};
    }
};

// How the chunks of rounds come: warp w brings chunks w, w + kWarps, … of each round
struct SmallLoader {
    const DecodeArgs& args;
    const TensorMap &mK, &mV;
    const SmallSequence& of;
    const uint32_t window;
    const int rank, lane, block, kv_head;
    const PageTable table;
    int pages;    // lane n: the page of the warp's chunk 32 · held + n
    int further;  // of those after them
    int held;

    TILE_DEVICE SmallLoader(const DecodeArgs& a, const TensorMap& k, const TensorMap& v, const SmallSequence& sequence,
                            int number, int head, int warp, int cluster_block)
        : args(a), mK(k), mV(v), of(sequence), window(ptx::uniform(ptx::shared_address(0u))), rank(warp),
          lane(warp::lane()), block(cluster_block), kv_head(head),
          table(page_table(a, number, head, sequence.tail_from)), held(0) {
        pages = look_up(0);
    }
    // A sequence's length may not be known yet: pages beyond it are any that may be read.
    TILE_DEVICE int look_up(int first) const {
        const int n = first + lane, round = n / kMine, piece = of.rounds.quotient(round);
        const int chunk = (round - piece * int(of.rounds.divisor)) * kRound + rank + n % kMine * kWarps;
        const int number = ((block + piece * kCluster) * int(of.piece.divisor) + chunk * kChunk) / kPageSize;
        const int last = of.tail_from + args.tail_pages - 1;
        return table.page(number < last ? number : last);
    }
    TILE_DEVICE int page_of(int n) {
        if (n / 32 != held) {
            pages = further;
            further = look_up(32 * ++held + 32);
        }
        return ptx::shuffle(pages, n % 32);
    }

    // Requests the chunks of round n of the share into `stage`, which all warps are done with
    TILE_DEVICE void request(const Share& share, int n, int stage) {
        const Round round = share.round(n);
        int page[kMine], live = 0;
#pragma unroll
        for (int j = 0; j < kMine; j++) {
            page[j] = page_of(n * kMine + j);
            live += rank + j * kWarps < round.chunks;
        }
        if constexpr (kTma) {
            if (!ptx::elect_leader()) return;
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const uint32_t full = window + (p ? values_barrier(stage) : keys_barrier(stage, rank));
                ptx::mbarrier_arrive_expect(full, live * (p ? ValueRows::kChunkBytes : KeyRows::kChunkBytes));
#pragma unroll
                for (int j = 0; j < kMine; j++) {
                    if (j >= live) break;
                    const int chunk = rank + j * kWarps, token = (round.first + chunk * kChunk) % kPageSize;
                    const uint32_t to = window + (p ? values_in(stage, chunk) : keys_in(stage, chunk));
                    ptx::tma_load(to, p ? &mV : &mK, full, 0, token, 0, kv_head, page[j]);
                }
            }
        } else {
#pragma unroll
            for (int p = 0; p < 2; p++) {
#pragma unroll
                for (int j = 0; j < kMine; j++)
                    if (j < live) copy_part(p ? args.v : args.k, page[j], round.first, rank + j * kWarps, stage, p,
                                            share.length);
                ptx::copy_async_commit();  // an empty group too: waiting counts groups
            }
        }
    }
    // A copy of all lanes brings one panel of kCopyRows neighbouring rows. Tokens past the end become zeros and are not
    // read.
    template <class Of>
    TILE_DEVICE void copy_chunk(const Paged& part, int page, int first, int chunk, int stage, bool values,
                                int length) const {
        const int r = lane / Of::kPanelUnits, c = lane % Of::kPanelUnits, token = first + chunk * kChunk + r;
        const uint32_t place = window + (values ? values_in(stage, chunk) : keys_in(stage, chunk)) +
                               Of::place_of(r, c, 0);
        const uint8_t* from = static_cast<const uint8_t*>(part.base) + int64_t(page) * part.page +
                              token % kPageSize * part.token + kv_head * part.head + 16 * c;
#pragma unroll
        for (int row = 0; row < kChunk; row += Of::kCopyRows) {
            if (Of::kPanelUnits * kBox < 32 && r >= kBox) continue;
            // The swizzle of `row` leaves alone what that of r turns: kCopyRows is a power of two.
            const int turn = Of::kPanelBytes == 128 ? row % 8 : Of::kPanelBytes == 64 ? row / 2 % 4 : 0;
            const uint32_t to = (place ^ (turn * 16)) + row * Of::kPanelBytes;
#pragma unroll
            for (int panel = 0; panel < Of::kBytes / Of::kPanelBytes; panel++)
                ptx::copy_async_16(to + panel * (kBox * Of::kPanelBytes), from + panel * Of::kPanelBytes,
                                   token + row < length ? 16 : 0);
            from += Of::kCopyRows * part.token;
        }
    }
    TILE_DEVICE void copy_part(const Paged& part, int page, int first, int chunk, int stage, bool values,
                               int length) const {
        if constexpr (kOneDim) copy_chunk<KeyRows>(part, page, first, chunk, stage, values, length);
        else if (values) copy_chunk<ValueRows>(part, page, first, chunk, stage, true, length);
        else copy_chunk<KeyRows>(part, page, first, chunk, stage, false, length);
    }
    // Waits for this warp's own keys of a round: the first round of a block, or a later one
    TILE_DEVICE void wait_keys(Turn<kDepth> turn, bool first) const {
        if constexpr (kTma) {
            ptx::mbarrier_wait(window + keys_barrier(turn.stage, rank), turn.lap);
        } else {
            if (first) ptx::copy_async_wait<2 * kDepth - 1>();
            else if constexpr (kDepth > 1) ptx::copy_async_wait<2 * kDepth - 3>();
            ptx::sync_warp();
        }
    }
    // Waits for the values of all warps
    TILE_DEVICE void wait_values(Turn<kDepth> turn) const {
        if constexpr (kTma) {
            ptx::mbarrier_wait(window + values_barrier(turn.stage), turn.lap);
        } else {
            ptx::copy_async_wait<2 * kDepth - 2>();
            ptx::sync_threads();
        }
    }
    // Zeroes the values of a chunk that arrived by TMA past the end: memory there may hold anything, and 0 · NaN is NaN
    TILE_DEVICE void clear_past_end(Turn<kDepth> turn, int chunk, int tokens) const {
        if constexpr (kTma) {
            ptx::mbarrier_wait(window + values_barrier(turn.stage), turn.lap);
#pragma unroll 1
            for (int n = lane + tokens * ValueRows::kUnits; n < kChunk * ValueRows::kUnits; n += 32) {
                const uint32_t place = ValueRows::place_of(n / ValueRows::kUnits, n % ValueRows::kUnits, 0);
                Shared<Vector16>(values_in(turn.stage, chunk) + place)[0] = Vector16{};
            }
            ptx::fence_async_proxy();  // before TMA writes there again
        }
    }
};

// What a warp computes of a piece: the scores of its chunks, then, from the scores of all warps, the weights of all
// tokens, and its own channels of O. Each value comes about by the same operations as in stream.cuh, in the same order.
struct SmallStream : Stream {
    const uint32_t window;
    const int rank;
    TILE_DEVICE SmallStream(const DecodeArgs& a, uint32_t address, int warp)
        : Stream(a, address, 0), window(address), rank(warp) {}

    static TILE_DEVICE uint32_t scores_of(int n, int chunk) {
        return kAtScores + (n % 2 * kRound + chunk) * kScoreBytes;
    }
    TILE_DEVICE void put_scores(int n, int chunk, const ScoreTiles& s) const {
        Shared<Vector16>(scores_of(n, chunk))[lane] =
            Vector16{{as_bits(s[0][0][0]), as_bits(s[0][0][1]), as_bits(s[0][0][2]), as_bits(s[0][0][3])}};
    }
    TILE_DEVICE void take_scores(int n, int chunk, ScoreTiles& s) const {
        const Vector16 four = Shared<Vector16>(scores_of(n, chunk))[lane];
#pragma unroll
        for (int j = 0; j < 4; j++) s[0][0][j] = as_float(four.word[j]);
    }

    // The scores of this warp's chunks of round n. kFull, here and below: the round has kRound chunks, and the steps of
    // neighbouring chunks overlap, with no branch between them.
    template <bool kFull>
    TILE_DEVICE void score_round(const SmallLoader& loader, const Round& round, int n, Turn<kDepth> turn, int length) {
        loader.wait_keys(turn, n == 0);
#pragma unroll
        for (int j = 0; j < kMine; j++) {
            const int chunk = rank + j * kWarps, token = round.first + chunk * kChunk;
            if (!kFull && chunk >= round.chunks) break;
            ScoreTiles s;
            scores(s, keys_at + keys_in(turn.stage, chunk), 0);
            cap(s);
            if (!all_see(token)) {
                mask(s, token, {0, length});
                if (token + kChunk > length) loader.clear_past_end(turn, chunk, length - token);
            }
            put_scores(n, chunk, s);
        }
    }

    // The weights of round n against references that hold for all of it. False, and nothing is changed, if one has to
    // move.
    template <bool kFull> TILE_DEVICE bool weigh_round(uint32_t (&packed)[kRound][2], const Round& round, int n) {
        ScoreTiles s[kRound];
#pragma unroll
        for (int c = 0; c < kRound; c++)
            if (kFull || c < round.chunks) take_scores(n, c, s[c]);
        const float max_before[2] = {max[0][0], max[0][1]}, sum_before[2] = {sum[0][0], sum[0][1]};
        if (round.begins)  // a piece's first chunk moves the references of all rows that see one of its keys
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float f = last_factor(0, i);
                const float top = row_max(fmaxf(ptx::multiply(s[0][0][0][i], f), ptx::multiply(s[0][0][0][2 + i], f)));
                max[0][i] = top > max[0][i] ? top : max[0][i];
            }
        bool moves = false;
#pragma unroll
        for (int c = 0; c < kRound; c++) {
            if (!kFull && c >= round.chunks) continue;
            const Weights w = weigh(s[c], 0);
            moves |= too_large(w);
            sum[0][0] = w.sum[0][0], sum[0][1] = w.sum[0][1];
            packed[c][0] = w.packed[0][0][0][0], packed[c][1] = w.packed[0][0][0][1];
        }
        if (!ptx::any(moves)) return true;
        max[0][0] = max_before[0], max[0][1] = max_before[1];
        sum[0][0] = sum_before[0], sum[0][1] = sum_before[1];
        return false;
    }
    // O += Vᵀ Pᵀ for this warp's channels; packed: P of tokens g and g + 8, as in Stream::Weights
    TILE_DEVICE void add_own_values(const uint32_t (&packed)[2], int stage, int chunk) {
        const uint32_t b0 = ptx::transpose_matrix(packed[0]), b1 = ptx::transpose_matrix(packed[1]);
#pragma unroll
        for (int j = 0; j < kOwnTiles; j++) {
            const int tile = rank * kOwnTiles + j;
            if (kOutTiles % kWarps && tile >= kOutTiles) break;
            uint32_t f[4];
            ptx::ldmatrix_transposed(f, pair_at<ValueRows>(values_at + values_in(stage, chunk), tile, 0));
            ptx::mma_16x8x16<Operand>(acc_o[0][j], f, b0, b1);
        }
    }
    template <bool kFull>
    TILE_DEVICE void add_round(const SmallLoader& loader, const Round& round, int n, Turn<kDepth> turn) {
        uint32_t packed[kRound][2];
        const bool fast = weigh_round<kFull>(packed, round, n);
        loader.wait_values(turn);
        if (fast) {
#pragma unroll
            for (int c = 0; c < kRound; c++)
                if (kFull || c < round.chunks) add_own_values(packed[c], turn.stage, c);
            return;
        }
#pragma unroll 1
        for (int c = 0; c < round.chunks; c++) {  // one chunk after another, as in Stream::step
            ScoreTiles s;
            take_scores(n, c, s);
            Weights w = weigh(s, 0);
            if (ptx::any(too_large(w))) {
                raise_references(w, s, 0);
                w = weigh(s, 0);
            }
            sum[0][0] = w.sum[0][0], sum[0][1] = w.sum[0][1];
            add_own_values(w.packed[0][0][0], turn.stage, c);
        }
    }

    // Sends the finished piece to the blocks of the cluster: to each its slice, and all MaxSums
    TILE_DEVICE void send(int state) const {
#pragma unroll
        for (int j = 0; j < 4 * kOwnTiles; j++) {
            const int tile = rank * kOwnTiles + j / 4, row = lane % 4 * 2 + j % 2;
            const int at = row * kValueDim + quant::output_channel<kFormat>(tile, j % 4 / 2, lane), to = at / kSlice;
            if (row >= kHeadRows || (kOutTiles % kWarps && tile >= kOutTiles)) continue;
            if constexpr (kAlone)
                (Shared<float>(kAtStates))[state * kSlice + at] = acc_o[0][j / 4][j % 4];
            else
                ptx::store_async(ptx::address_in(window + kAtStates + (state * kSlice + at % kSlice) * 4, to),
                                 acc_o[0][j / 4][j % 4], ptx::address_in(window + kAtLanded, to));
        }
        if (rank != kWarps - 1) return;
#pragma unroll
        for (int first = 0; first < kHeadRows * kCluster; first += 32) {
            const int n = first + lane, row = n % kHeadRows, to = n / kHeadRows;
            const float m0 = ptx::shuffle(max[0][0], row / 2), m1 = ptx::shuffle(max[0][1], row / 2);
            const float l0 = ptx::shuffle(sum[0][0], row / 2), l1 = ptx::shuffle(sum[0][1], row / 2);
            if (to >= kCluster) continue;
            if constexpr (kAlone)
                (Shared<MaxSum>(kAtMaxSums))[state * kHeadRows + row] = MaxSum{row % 2 ? m1 : m0, row % 2 ? l1 : l0};
            else
                ptx::store_async(ptx::address_in(window + kAtMaxSums + (state * kHeadRows + row) * 8, to),
                                 row % 2 ? m1 : m0, row % 2 ? l1 : l0, ptx::address_in(window + kAtLanded, to));
        }
    }
};

// Merges the block's slice of all states, which have landed: four columns of a row per thread
TILE_DEVICE void merge_slice(const DecodeArgs& args, const DecodeItem& item, int block, int states) {
    for (int n = threadIdx.x; n < kSlice / 4; n += 32 * kWarps) {
        const int at = block * kSlice + 4 * n, row = at / kValueDim, column = at % kValueDim;
        if (row >= item.rows) return;
        using State = RowState4<1>;
        constexpr int kAtOnce = 8;  // as registers allow
        const auto take = [&](State& of, int state) {
            const Shared<float> ml(kAtMaxSums + (state * kHeadRows + row) * 8);
            const Vector16 four = Shared<Vector16>(kAtStates + (state * kSlice + 4 * n) * 4)[0];
            of.max = ml[0], of.sum = ml[1];
#pragma unroll
            for (int c = 0; c < 4; c++) of.x[0][c] = as_float(four.word[c]);
        };
        State all;
        if (states == 1)
            take(all, 0);
        else
            fold_accumulators(all, states, [&](State& run, int begin, int end) {
                run.clear();
#pragma unroll 1
                for (int first = begin; first < end; first += kAtOnce) {
                    State next[kAtOnce];  // all are loaded before the first is used
#pragma unroll
                    for (int k = 0; k < kAtOnce; k++)
                        if (first + k < end) take(next[k], first + k);
#pragma unroll
                    for (int k = 0; k < kAtOnce; k++)
                        if (first + k < end) run.fold(next[k]);
                }
            });
        const DecodeRow of = row_of(args, item, row);
        const RowEnd end = end_row(args, of.head, all.max, all.sum);
        if (column == 0) store_lse(args, of, item.caller(), end.lse);
        store_4(output_row(args, of, item.caller()) + column, all.x[0], end.factor);
    }
}
