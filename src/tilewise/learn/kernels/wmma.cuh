// wmma: 16 × 16 matrix products of a warp, d += a b, on fragments whose layout over the lanes is not specified.
//
// On a card this wraps nvcuda::wmma. emulator/wmma.h has the same with a layout of its own, so that a kernel that
// relies on where an element lies is found out. half and bf16 take 16 values of k at a time, float (as tf32) 8.
#pragma once
#include "tile/memory.cuh"
#ifdef TILEWISE_EMULATOR
#include "emulator/wmma.h"
#else
#include <mma.h>

namespace wmma {
namespace nv = nvcuda::wmma;

template <class T> struct Traits {
    using Type = T;
    static constexpr int kDepth = 16;
};
template <> struct Traits<float> {
    using Type = nv::precision::tf32;
    static constexpr int kDepth = 8;
};
template <class T> constexpr int kDepth = Traits<T>::kDepth;

// a (16 × k) by rows, b (k × 16) by rows or, transposed, by columns: b = Kᵀ is K's rows read as they lie.
template <class T> struct A {
    nv::fragment<nv::matrix_a, 16, 16, kDepth<T>, typename Traits<T>::Type, nv::row_major> f;
};
template <class T> struct B {
    nv::fragment<nv::matrix_b, 16, 16, kDepth<T>, typename Traits<T>::Type, nv::row_major> f;
};
template <class T> struct BTransposed {
    nv::fragment<nv::matrix_b, 16, 16, kDepth<T>, typename Traits<T>::Type, nv::col_major> f;
};
template <class T> struct Accumulator {
    nv::fragment<nv::accumulator, 16, 16, kDepth<T>, float> f;
};

template <class F> TILE_DEVICE void round_to_tf32(F&) {}
template <class Use, class Layout>
TILE_DEVICE void round_to_tf32(nv::fragment<Use, 16, 16, 8, nv::precision::tf32, Layout>& f) {
#pragma unroll
    for (int i = 0; i < f.num_elements; i++) f.x[i] = as_float(ptx::to_tf32(f.x[i]));
}

// From element `at` of a shared tile whose rows lie `pitch` elements apart (a multiple of 16 bytes; `at` of 32 bytes).
template <class Fragment, class T> TILE_DEVICE void load(Fragment& fragment, Shared<T> tile, int at, int pitch) {
    nv::load_matrix_sync(fragment.f, tile.base + at, pitch);
    round_to_tf32(fragment.f);
}
template <class T> TILE_DEVICE void load(Accumulator<T>& acc, Shared<float> tile, int at, int pitch) {
    nv::load_matrix_sync(acc.f, tile.base + at, pitch, nv::mem_row_major);
}
template <class T> TILE_DEVICE void store(Shared<float> tile, int at, int pitch, const Accumulator<T>& acc) {
    nv::store_matrix_sync(tile.base + at, acc.f, pitch, nv::mem_row_major);
}
template <class T> TILE_DEVICE void zero(Accumulator<T>& acc) { nv::fill_fragment(acc.f, 0.0f); }
template <class T, class Fragment> TILE_DEVICE void mma(Accumulator<T>& d, const A<T>& a, const Fragment& b) {
    nv::mma_sync(d.f, a.f, b.f, d.f);
}

}  // namespace wmma
#endif
