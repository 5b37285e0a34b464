// What every attention kernel of the ladder is given, by value; tilewise.learn.ladder.AttentionArgs is its mirror in
// Python.
#pragma once
#include "common/args.cuh"
#include "tile/keys.cuh"

struct AttentionArgs {
    const void* q;
    const void* k;
    const void* v;
    void* o;
    float* lse;  // (batch, heads_q, seqlen_q), natural log
    Strides q_strides, k_strides, v_strides, o_strides;
    int batch, seqlen_q, seqlen_k, heads_q, heads_kv, causal;
    float scale_log2;  // the softmax scale times log2 e: scores are exponentiated in base 2
    int reserved;
};

// One head of one sequence.
template <class T> struct Head {
    Global<const T> gQ, gK, gV;
    Global<T> gO;
    Global<float> gLse;
    TILE_DEVICE Head(const AttentionArgs& a, int batch, int head)
        : gQ{static_cast<const T*>(a.q) + batch * a.q_strides.batch + head * a.q_strides.head},
          gK{static_cast<const T*>(a.k) + batch * a.k_strides.batch +
             head / (a.heads_q / a.heads_kv) * a.k_strides.head},
          gV{static_cast<const T*>(a.v) + batch * a.v_strides.batch +
             head / (a.heads_q / a.heads_kv) * a.v_strides.head},
          gO{static_cast<T*>(a.o) + batch * a.o_strides.batch + head * a.o_strides.head},
          gLse{a.lse + (int64_t(batch) * a.heads_q + head) * a.seqlen_q} {}
};

// How many keys a row sees, from the first key on; may be 0 or less
TILE_DEVICE int keys_seen(const AttentionArgs& a, int row) {
    return keys_up_to(position_of(row, a.seqlen_q, a.seqlen_k), a.causal, a.seqlen_k);
}
