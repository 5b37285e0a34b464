// TMA boxes and wgmma through descriptors, raw: what lands in shared memory, what the operands' layouts mean.
#include "tile/memory.cuh"

// One box into shared memory and its bytes out. kRank 2, 3 or 4.
extern "C" __global__ void __launch_bounds__(32)
    tma_box(const __grid_constant__ TensorMap map, uint32_t* out, int c0, int c1, int c2, int c3) {
    Shared<uint32_t> sBox(0);
    const uint32_t barrier = ptx::shared_address(uint32_t(kBoxBytes));
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect(barrier, kBoxBytes);
        if (kRank == 2) ptx::tma_load(sBox.address(), &map, barrier, c0, c1);
        else if (kRank == 3) ptx::tma_load(sBox.address(), &map, barrier, c0, c1, c2);
        else ptx::tma_load(sBox.address(), &map, barrier, c0, c1, c2, c3);
    }
    ptx::sync_warp();
    ptx::mbarrier_wait(barrier, 0);
    Global<uint32_t> gOut{out};
    for (int i = threadIdx.x; i < kBoxBytes / 4; i += 32) gOut[i] = sBox[i];
}

// d (64 × kN) = a b through descriptors whose offsets the host chooses; shared memory is given word for word.
extern "C" __global__ void __launch_bounds__(128)
    wgmma_once(const uint32_t* memory, float* out, uint64_t a_desc, uint64_t b_desc) {
    Shared<uint32_t> sWords(0);
    Global<const uint32_t> gMemory{memory};
    Global<float> gOut{out};
    for (int i = threadIdx.x; i < kWords; i += 128) sWords[i] = gMemory[i];
    ptx::fence_async_proxy();
    ptx::sync_threads();
    const uint64_t base = ptx::shared_address(0u) >> 4;
    uint32_t a[4];
    for (int i = 0; i < 4; i++) a[i] = gMemory[threadIdx.x * 4 + i];
    float d[kN / 2];
    for (int i = 0; i < kN / 2; i++) d[i] = 1.0f;
    ptx::wgmma_fence();
    if (kFromRegisters) ptx::Wgmma<Element, kN>::template rs<kBMnMajor>(d, a, b_desc + base, kAccumulate);
    else ptx::Wgmma<Element, kN>::template ss<kAMnMajor, kBMnMajor>(d, a_desc + base, b_desc + base, kAccumulate);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < kN / 2; i++) gOut[threadIdx.x * (kN / 2) + i] = d[i];
}

// A box out of one tensor and into another, through shared memory: what lies outside either is not touched.
extern "C" __global__ void __launch_bounds__(32)
    tma_roundtrip(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, int c0, int c1, int c2,
                  int c3) {
    Shared<uint32_t> sBox(0);
    const uint32_t barrier = ptx::shared_address(uint32_t(kBoxBytes));
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect(barrier, kBoxBytes);
        ptx::tma_load(sBox.address(), &from, barrier, c0, c1, c2, c3);
        ptx::mbarrier_wait(barrier, 0);
        ptx::tma_store(&to, sBox.address(), c0, c1, c2, c3);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
    }
}
