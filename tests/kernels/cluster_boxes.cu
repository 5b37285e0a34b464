// Two blocks of a cluster, each of which asks twice for one of two boxes that come to both: what each has in the end,
// lap by lap, and how many of its threads counted themselves.
#include "tile/hopper.cuh"

extern "C" __global__ void __launch_bounds__(128)
    cluster_boxes(const __grid_constant__ TensorMap map, uint32_t* out, uint32_t* counts) {
    const int rank = blockIdx.x % 2, thread = threadIdx.x;
    const uint32_t full = ptx::shared_address(2 * kBoxBytes), read = full + 8;
    if (thread == 0) {
        ptx::mbarrier_init(full, 1);
        ptx::mbarrier_init(read, 1);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    for (int lap = 0; lap < 2; lap++) {
        if (thread == 0) {
            if (lap > 0) ptx::mbarrier_wait(read, 0);  // the other block has read what comes from here
            ptx::mbarrier_arrive_expect(full, 2 * kBoxBytes);
            const uint32_t to = ptx::shared_address(rank * kBoxBytes);
            ptx::tma_load_for(3, to, &map, full, 0, kBoxRows * (2 * lap + rank), 0, 0);
        }
        while (ptx::barrier_count(1, 128, ptx::mbarrier_test(full, lap)) < 128) {}
        for (int n = thread; n < 2 * kBoxBytes / 4; n += 128)
            Global<uint32_t>{out}[(2 * blockIdx.x + lap) * (2 * kBoxBytes / 4) + n] = Shared<uint32_t>(0)[n];
        ptx::sync_threads();
        if (thread == 0 && lap == 0) ptx::mbarrier_arrive_in(ptx::address_in(read, 1 - rank));
    }
    const int third = ptx::barrier_count(1, 128, thread % 3 == rank);
    if (thread == 0) Global<uint32_t>{counts}[blockIdx.x] = third;
    ptx::cluster_arrive();
    ptx::cluster_wait();
}
