// What the compiler makes of the Hopper forward's arguments, for their mirrors in Python; and its divisions by
// multiplication.
#include <cstddef>
#include "prefill/ragged.cu"

#define PLACE(Type, name) int(offsetof(Type, name)), int(sizeof(Type::name))

extern "C" __global__ void layout(int* out) {
    const int facts[] = {
        int(sizeof(ForwardArgs)),
        int(sizeof(RaggedArgs)),
        int(sizeof(Divisor)),
        kTileWords,
        kListHeader,
        kBuckets,
        kFar,
        PLACE(ForwardArgs, q),
        PLACE(ForwardArgs, k),
        PLACE(ForwardArgs, v),
        PLACE(ForwardArgs, o),
        PLACE(ForwardArgs, lse),
        PLACE(ForwardArgs, page_table),
        PLACE(ForwardArgs, list),
        PLACE(ForwardArgs, counter),
        PLACE(ForwardArgs, q_strides),
        PLACE(ForwardArgs, k_strides),
        PLACE(ForwardArgs, v_strides),
        PLACE(ForwardArgs, o_strides),
        PLACE(ForwardArgs, lse_batch),
        PLACE(ForwardArgs, lse_head),
        PLACE(ForwardArgs, page_table_stride),
        PLACE(ForwardArgs, scores),
        PLACE(ForwardArgs, descale_q),
        PLACE(ForwardArgs, descale_k),
        PLACE(ForwardArgs, descale_v),
        PLACE(ForwardArgs, seqlen_q),
        PLACE(ForwardArgs, seqlen_k),
        PLACE(ForwardArgs, tiles),
        PLACE(ForwardArgs, q_tiles),
        PLACE(ForwardArgs, tile_heads),
        PLACE(ForwardArgs, tile_heads_per_kv),
        PLACE(ForwardArgs, together),
        PLACE(ForwardArgs, tiles_together),
        PLACE(RaggedArgs, starts_q),
        PLACE(RaggedArgs, starts_k),
        PLACE(RaggedArgs, list),
        PLACE(RaggedArgs, buckets),
        PLACE(RaggedArgs, sequences),
        PLACE(RaggedArgs, total_q),
        PLACE(RaggedArgs, total_k),
        PLACE(RaggedArgs, longest_k),
        PLACE(RaggedArgs, capacity),
        PLACE(RaggedArgs, reserved),
        PLACE(Divisor, divisor),
        PLACE(Divisor, multiplier),
        PLACE(Divisor, shift),
        PLACE(Descale, values),
        PLACE(Descale, batch),
    };
    for (int i = 0; i < int(sizeof facts / 4); i++) Global<int>{out}[i] = facts[i];
}

// quotients[i] of numbers[i] by Python's Divisor and by the kernel's own
extern "C" __global__ void divide(Divisor divisor, const int* numbers, int* quotients, int count) {
    const Divisor made = divisor_of(divisor.divisor);
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int n = Global<const int>{numbers}[i];
        Global<int>{quotients}[i] = divisor.quotient(n);
        Global<int>{quotients}[count + i] = made.quotient(n);
    }
}
