// copy_pages: copies whole pages of all layers and components of K and V in one launch, for copy on write.
#include "tile/memory.cuh"

constexpr int kThreads = 256;
constexpr int kMaxParts = 6;  // codes, scale and zero of K and V

struct CopyPart {  // (layers, pages, page size, heads, row): strides in units of `unit` bytes; rows are dense
    void* base;
    int64_t layer, page, token, head;
    int unit, row;
};
struct CopyArgs {
    const int64_t* pages;  // (2, count): from, to; no page is in both
    CopyPart part[kMaxParts];
    int count, layers, page_size, heads;
};

template <class Unit>
TILE_DEVICE void copy_page(const CopyPart& p, int layer, int64_t from, int64_t to, int tokens, int heads) {
    const Global<Unit> gLayer{static_cast<Unit*>(p.base) + layer * p.layer};
    const int units = tokens * heads * p.row;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < units; i += gridDim.x * kThreads) {
        // In the order of memory, in which tokens or heads may be the outer dimension
        const int outer = i / p.row / (p.token > p.head ? heads : tokens);
        const int inner = i / p.row % (p.token > p.head ? heads : tokens);
        const int token = p.token > p.head ? outer : inner, head = p.token > p.head ? inner : outer;
        const int64_t at = token * p.token + head * p.head + i % p.row;
        gLayer[to * p.page + at] = Unit(gLayer[from * p.page + at]);
    }
}

// The grid: (blocks per page, parts · layers, pages)
extern "C" __global__ void __launch_bounds__(kThreads) copy_pages(const __grid_constant__ CopyArgs a) {
    const CopyPart& p = a.part[blockIdx.y / a.layers];
    const int layer = blockIdx.y % a.layers;
    const Global<const int64_t> gPages{a.pages};
    const int64_t from = gPages[blockIdx.z], to = gPages[a.count + int64_t(blockIdx.z)];
    if (p.unit == 16) copy_page<Vector16>(p, layer, from, to, a.page_size, a.heads);
    else if (p.unit == 4) copy_page<uint32_t>(p, layer, from, to, a.page_size, a.heads);
    else if (p.unit == 2) copy_page<uint16_t>(p, layer, from, to, a.page_size, a.heads);
    else copy_page<uint8_t>(p, layer, from, to, a.page_size, a.heads);
}
