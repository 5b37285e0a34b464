// decode32: decode.cu over float32 pages, with products that keep what float32 has of digits (stream32.cuh).
//
// Constants: as in decode.cu, without Operand; kStoredAs is bits32.
#include "tile/quant.cuh"
constexpr Format kFormat = static_cast<Format>(kStoredAs);
#include "decode/stream32.cuh"
#include "decode/warps.cuh"
static_assert(!kSelected || !kTree, "a mask of query tokens counts on the key of each of them");

extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    decode32(const __grid_constant__ TensorMap mK, const __grid_constant__ TensorMap mV,
             const __grid_constant__ DecodeArgs args) {
    Loader::init(args, mK, mV);
    ptx::sync_threads();
    const int rank = ptx::uniform(threadIdx.x / 32);
    stream<Stream32>(args, mK, mV, rank);
    if (args.merge_rows) merge_all(args, {rank, kWarps});
}
