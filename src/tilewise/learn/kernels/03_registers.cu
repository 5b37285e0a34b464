// registers: one block per tile of query rows; tiles of Q, K, V and S in shared memory, O, m and l in registers.
//
// The lecture's kernel. A square of kSide × kSide threads: x runs over rows, y over keys (for S) and over columns (for
// O), so that a thread keeps kTile / kSide rows by kHeadDim / kSide columns of O in registers, and O is written to
// global memory once. S goes through shared memory because a row of it is made by all the threads y and needed by all
// of them. m and l of a row are computed by each thread that has a piece of the row: more work, but no exchange.
// Consecutive threads are in different rows, so global accesses are not coalesced; that is a later rung's idea. The
// rows of the tiles lie kHeadDim + 1 elements apart, so that the threads x read different banks.
// float. Constants: kHeadDim, kTile (rows and keys of a tile), kSide.
#include "learn/kernels/scalar.cuh"

extern "C" __global__ void __launch_bounds__(kSide * kSide) registers(const AttentionArgs args) {
    constexpr int kRows = kTile / kSide, kColumns = kHeadDim / kSide, kPitch = kHeadDim + 1, kPitchS = kTile + 1;
    Shared<float> sQ(0), sK(kTile * kPitch * 4), sV(2 * kTile * kPitch * 4), sS(3 * kTile * kPitch * 4);
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide, row0 = blockIdx.x * kTile;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);

    for (int i = x; i < kTile; i += kSide)
        for (int d = y; d < kHeadDim; d += kSide)
            sQ[i * kPitch + d] = row0 + i < args.seqlen_q ? head.gQ[(row0 + i) * args.q_strides.row + d] : 0.0f;

    float acc_o[kRows][kColumns] = {}, row_max[kRows], row_sum[kRows] = {};
    int seen[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        row_max[r] = -INFINITY;
        seen[r] = keys_seen(args, row0 + x + r * kSide);
    }

    // The last row sees the most keys; a block's trip count is the same for all its threads, as barriers want it.
    const int end = keys_seen(args, row0 + kTile < args.seqlen_q ? row0 + kTile - 1 : args.seqlen_q - 1);
    for (int key0 = 0; key0 < end; key0 += kTile) {
        for (int j = x; j < kTile; j += kSide)
            for (int d = y; d < kHeadDim; d += kSide) {
                const bool valid = key0 + j < args.seqlen_k;
                sK[j * kPitch + d] = valid ? head.gK[(key0 + j) * args.k_strides.row + d] : 0.0f;
                sV[j * kPitch + d] = valid ? head.gV[(key0 + j) * args.v_strides.row + d] : 0.0f;
            }
        ptx::sync_threads();

        // S = Q Kᵀ · scale
        float s[kRows][kRows] = {};
        for (int d = 0; d < kHeadDim; d++)
#pragma unroll
            for (int c = 0; c < kRows; c++) {
                const float k = sK[(y + c * kSide) * kPitch + d];
#pragma unroll
                for (int r = 0; r < kRows; r++) s[r][c] = ptx::mad(sQ[(x + r * kSide) * kPitch + d], k, s[r][c]);
            }
#pragma unroll
        for (int r = 0; r < kRows; r++)
#pragma unroll
            for (int c = 0; c < kRows; c++) {
                const int j = y + c * kSide;
                s[r][c] = key0 + j < seen[r] ? s[r][c] * args.scale_log2 : -INFINITY;
                sS[(x + r * kSide) * kPitchS + j] = s[r][c];
            }
        ptx::sync_threads();

        // m = max(m_old, max S)
        float correction[kRows];
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const float old_max = row_max[r];
            for (int j = 0; j < kTile; j++) row_max[r] = fmaxf(row_max[r], sS[(x + r * kSide) * kPitchS + j]);
            correction[r] = ptx::exp2(old_max - finite_max(row_max[r]));
        }
        ptx::sync_threads();  // all threads have read S, which becomes P

        // P = exp(S − m), each thread its own scores
#pragma unroll
        for (int r = 0; r < kRows; r++)
#pragma unroll
            for (int c = 0; c < kRows; c++)
                sS[(x + r * kSide) * kPitchS + y + c * kSide] = ptx::exp2(s[r][c] - finite_max(row_max[r]));
        ptx::sync_threads();

        // O = O · exp(m_old − m) + P V, l likewise
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            row_sum[r] *= correction[r];
#pragma unroll
            for (int c = 0; c < kColumns; c++) acc_o[r][c] *= correction[r];
        }
        for (int j = 0; j < kTile; j++)
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const float p = sS[(x + r * kSide) * kPitchS + j];
                row_sum[r] += p;
#pragma unroll
                for (int c = 0; c < kColumns; c++)
                    acc_o[r][c] = ptx::mad(p, sV[j * kPitch + y + c * kSide], acc_o[r][c]);
            }
        ptx::sync_threads();  // before the next tile overwrites this one
    }

#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const int row = row0 + x + r * kSide;
        if (row >= args.seqlen_q) continue;
        const float inverse = row_sum[r] > 0.0f ? 1.0f / row_sum[r] : 0.0f;
#pragma unroll
        for (int c = 0; c < kColumns; c++) head.gO[row * args.o_strides.row + y + c * kSide] = acc_o[r][c] * inverse;
        if (y == 0) head.gLse[row] = (row_max[r] + ptx::log2(row_sum[r])) * kLn2;
    }
}
