// kinds: which blocks of queries and keys a mask function leaves, as the bits of a block schedule. A block of threads
// takes a row of blocks, and each of its threads a block of keys.
// Constants: Function.
#include "prefill/kinds.cuh"

struct KindsArgs {
    uint32_t *kept, *whole;  // (sequences, heads, q_blocks, words): of which something, and everything is seen
    int heads, q_blocks, words, seqlen_q, seqlen_k, block_q, block_k;
};
constexpr int kThreads = kKindThreads;

extern "C" __global__ void __launch_bounds__(kThreads) kinds(const __grid_constant__ KindsArgs args,
                                                             const __grid_constant__ Function function) {
    const int sequence = blockIdx.y / args.heads, head = blockIdx.y - sequence * args.heads, row = blockIdx.x;
    const int q0 = row * args.block_q, q1 = (q0 + args.block_q < args.seqlen_q ? q0 + args.block_q : args.seqlen_q) - 1;
    const int64_t first = (int64_t(blockIdx.y) * args.q_blocks + row) * args.words;
    for (int base = 0; base < args.words; base += kThreads / 32) {
        const int word = base + threadIdx.x / 32;
        const int k0 = (word * 32 + threadIdx.x % 32) * args.block_k, end = k0 + args.block_k;
        const Rectangle of{{double(sequence), double(sequence)}, {double(head), double(head)},
                           q0, q1, k0, (end < args.seqlen_k ? end : args.seqlen_k) - 1};
        const bool there = k0 < args.seqlen_k;
        const Kind kind = kind_of(function, of, there, 0);
        const uint32_t kept = ptx::ballot(there && kind != kNone), whole = ptx::ballot(there && kind == kAll);
        if (threadIdx.x % 32 == 0 && word < args.words) {
            Global<uint32_t>{args.kept}[first + word] = kept;
            Global<uint32_t>{args.whole}[first + word] = whole;
        }
    }
}
