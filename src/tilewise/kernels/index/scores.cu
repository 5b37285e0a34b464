// index_scores: what query tokens of an indexer find of keys, Σ_h w_h · relu(q_h · k), in float32.
//
// A block has 256 keys of a sequence and meets the query tokens of a tile one after another. Keys are the A operand of
// mma.sync and stay in registers, heads are the columns: so a lane has scores of two keys in every product, and their
// sum over the heads stays with it until the four lanes of a key meet. Queries come by cp.async, all heads of a token
// to a stage of a ring.
//
// Which channel of a row is which of a product's is the same for both operands, and nobody else asks. A lane takes
// eight neighbours, 16 bytes, for its share of two steps of depth: so keys come from memory to registers at once, and
// queries from shared memory by 16 bytes per lane.
//
// Items are blocks of keys under tiles. How many there are follows from the tiles, which may be others in each replay
// of a graph: so each block counts them, and takes those that are a grid apart.
#include "decode/plan_block.cuh"
#include "index/args.cuh"
#include "tile/mma.cuh"

// Constants: Element; kHeads and kChannels: heads and dim, rounded up to multiples of 16 and of 32; kStages;
// kPlanThreads
constexpr int kThreads = kPlanThreads, kWarps = kThreads / 32, kSixteens = 2, kWarpKeys = 16 * kSixteens;
constexpr int kKeys = kWarps * kWarpKeys;
constexpr int kEights = kChannels / 8, kPairs = kChannels / 32;  // chunks of a row; pairs of steps of depth
constexpr int kQueryBytes = kHeads * kChannels * 2, kStageBytes = kQueryBytes + kHeads * 4;
// Which tile an item is of, behind what scan() keeps of each warp; stages
constexpr int kAtTile = 8 * kWarps, kAtStages = kAtTile + 16;
static_assert(kHeads % 16 == 0 && kChannels % 32 == 0 && kStages >= 2);
TILE_DEVICE int stage_at(int stage) { return kAtStages + stage * kStageBytes; }

// Chunk `eight` of a head's query. Eight lanes load four chunks of two neighbouring heads, which are all banks once.
TILE_DEVICE int place_of(int head, int eight) {
    return head * kEights + (eight ^ (kEights % 8 ? 0 : (head & 1) * 4));
}

struct Queries {
    const IndexScoresArgs& args;
    const ScoreTile& tile;

    // Asks for token n of the tile, if there is one: a group of copies either way, so that groups can be counted
    TILE_DEVICE void ask(int n, int stage) const {
        if (n < tile.rows) {
            const int64_t row = tile.row + n;
            const auto* q = static_cast<const Element*>(args.q) + row * args.heads * args.dim;
            const uint32_t to = ptx::shared_address(stage_at(stage));
            constexpr unsigned kAll = kHeads * kEights;
            const unsigned thread = ptx::just_in_time(threadIdx.x);  // addresses take no registers meanwhile
#pragma unroll
            for (unsigned first = 0; first < kAll; first += kThreads) {
                const unsigned i = first + thread;
                if (kAll % kThreads && i >= kAll) break;
                const int head = i / kEights, eight = i % kEights;
                const bool there = head < args.heads && eight * 8 < args.dim;
                ptx::copy_async_16(to + place_of(head, eight) * 16, q + (there ? head * args.dim + eight * 8 : 0),
                                   there ? 16 : 0);
            }
            if (thread < kHeads / 4)
                ptx::copy_async_16(to + kQueryBytes + thread * 16, args.weights + row * kHeads + thread * 4, 16);
        }
        ptx::copy_async_commit();
    }
};

// Keys of a lane: rows g and g + 8 of each sixteen, its eight channels of every 32
struct KeyRows {
    uint32_t word[kSixteens][2][kPairs][4];

    TILE_DEVICE KeyRows(const IndexScoresArgs& args, int sequence, int first, int end) {
        const int t = warp::lane() % 4;
#pragma unroll
        for (int i = 0; i < kSixteens * 2; i++) {
            const int key = first + i / 2 * 16 + warp::fragment_row(i % 2);
            const int64_t row = key < end ? args.table.row(sequence, key) : 0;
            const Global<const Element> g{static_cast<const Element*>(args.keys) + row * args.dim};
#pragma unroll
            for (int c = 0; c < kPairs; c++) {
                const int channel = 32 * c + 8 * t;
                Vector16 x{};
                if (key < end && channel < args.dim) x = (g + channel).template as<const Vector16>()[0];
#pragma unroll
                for (int w = 0; w < 4; w++) word[i / 2][i % 2][c][w] = x.word[w];
            }
        }
    }
    // The A operand of step `step` of a pair of them
    TILE_DEVICE void operand(uint32_t (&a)[4], int m, int c, int step) const {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = word[m][i % 2][c][2 * step + i / 2];
    }
};

// Σ over heads of weighted scores, of this lane's keys and heads
TILE_DEVICE void add_heads(float (&sum)[kSixteens][2], const KeyRows& keys, int stage) {
    const Shared<Vector16> sQ(stage_at(stage));
    const Shared<float> sWeights(stage_at(stage) + kQueryBytes);
    const int lane = ptx::just_in_time(warp::lane()), g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int head = 0; head < kHeads; head += 16) {
        float acc[kSixteens][2][4];
#pragma unroll
        for (int m = 0; m < kSixteens; m++)
#pragma unroll
            for (int j = 0; j < 2; j++) warp::zero(acc[m][j]);
        // S = K Qᵀ
#pragma unroll
        for (int c = 0; c < kPairs; c++) {
            Vector16 b[2];
#pragma unroll
            for (int j = 0; j < 2; j++) b[j] = sQ[place_of(head + 8 * j + g, 4 * c + t)];
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int m = 0; m < kSixteens; m++) {
                    uint32_t a[4];
                    keys.operand(a, m, c, step);
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        ptx::mma_16x8x16<Element>(acc[m][j], a, b[j].word[2 * step], b[j].word[2 * step + 1]);
                }
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float weight = sWeights[head + 8 * j + 2 * t + i];
#pragma unroll
                for (int m = 0; m < kSixteens; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        sum[m][h] = ptx::mad(weight, fmaxf(acc[m][j][2 * h + i], 0.0f), sum[m][h]);
            }
    }
}

// The scores of keys [first, first + kKeys) under a tile
TILE_DEVICE void score(const IndexScoresArgs& args, const ScoreTile& tile, int first) {
    const int from = first > tile.place ? first - tile.place : 0;  // tokens before it see none of these keys
    const Queries queries{args, tile};
#pragma unroll
    for (int n = 0; n < kStages - 1; n++) queries.ask(from + n, n);
    const int its = first + threadIdx.x / 32 * kWarpKeys;  // the first key of this warp
    const KeyRows keys(args, tile.sequence, its, tile.place + tile.rows);
    int stage = 0;
#pragma unroll 1
    for (int n = from; n < tile.rows; n++) {
        ptx::copy_async_wait<kStages - 2>();
        ptx::sync_threads();  // token n is there for all, and nobody needs the one before it
        queries.ask(n + kStages - 1, stage ? stage - 1 : kStages - 1);
        float sum[kSixteens][2] = {};
        add_heads(sum, keys, stage);
        // Lane t of four gets key 8t + g: each keeps a half of what it has, and gives the other away.
        const int lane = ptx::just_in_time(warp::lane()), g = lane / 4, t = lane % 4;
        float half[kSixteens];
#pragma unroll
        for (int m = 0; m < kSixteens; m++)
            half[m] = (t & 1 ? sum[m][1] : sum[m][0]) + ptx::shuffle_xor(t & 1 ? sum[m][0] : sum[m][1], 1);
        const float score = (t & 2 ? half[1] : half[0]) + ptx::shuffle_xor(t & 2 ? half[0] : half[1], 2);
        const int key = its + 8 * t + g;
        if (key <= tile.place + n) Global<float>{args.scores}[(tile.kept + n) * args.width + key] = score;
        stage = stage + 1 < kStages ? stage + 1 : 0;
    }
}

// Grid: any number of blocks
extern "C" __global__ void __launch_bounds__(kThreads, 2) index_scores(const __grid_constant__ IndexScoresArgs args) {
    const Shared<int> sTile(kAtTile);
    const Global<const ScoreTile> tiles{args.tiles};
    int item = blockIdx.x, before = 0;  // items of the tiles before these
#pragma unroll 1
    for (int first = 0; first < args.count; first += kThreads) {
        const int n = first + threadIdx.x;
        int blocks = 0;
        if (n < args.count) {
            const ScoreTile tile = tiles[n];
            blocks = tile.rows ? (tile.place + tile.rows + kKeys - 1) / kKeys : 0;
        }
        const Scanned items = scan(blocks);
        const int mine = before + int(items.before);
        before += int(items.all);
#pragma unroll 1
        for (; item < before; item += gridDim.x) {
            if (mine <= item && item < mine + blocks) {  // all know by now which tile the item before was of
                sTile[0] = n;
                sTile[1] = item - mine;
            }
            ptx::sync_threads();  // and no longer need its stages
            const ScoreTile tile = tiles[sTile[0]];
            const int block = sTile[1];
            score(args, tile, block * kKeys);
        }
    }
}
