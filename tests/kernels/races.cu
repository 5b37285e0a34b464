// Accesses to shared memory by 128 threads that something orders, or with kRight = false nothing does.
#include "tile/memory.cuh"

constexpr int kAtBarrier = 1024, kBytes = 64;

struct Args {
    const float* x;
    float* y;
};

extern "C" __global__ void __launch_bounds__(128) races(const Args args) {
    const Shared<float> words(0);
    const Shared<uint16_t> halves(0);
    const uint32_t barrier = ptx::shared_address(uint32_t(kAtBarrier)), second = barrier + 8;
    const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
    float got = 0.0f;
    if (kCase >= 10) {  // with mbarriers
        if (thread == 0) {
            ptx::mbarrier_init(barrier, 1);
            ptx::mbarrier_init(second, 1);
            ptx::fence_mbarrier_init();
        }
        if (kRight || kCase != 10) ptx::sync_threads();
    }
    if constexpr (kCase == 0) {  // a store, and a load in another warp
        words[thread] = 1.0f;
        if (kRight) ptx::sync_threads();
        got = words[(thread + 32) % 128];
    } else if constexpr (kCase == 1) {  // the same between lanes of a warp
        words[thread] = 1.0f;
        if (kRight) ptx::sync_warp();
        else ptx::shuffle(got, 0);
        got = words[thread ^ 1];
    } else if constexpr (kCase == 2) {  // a load, and a store in another warp
        words[thread] = 1.0f;
        ptx::sync_threads();
        got = words[thread ^ 64];
        if (kRight) ptx::barrier_sync(1, 128);
        words[thread] = 2.0f;
    } else if constexpr (kCase == 3) {  // two stores
        if (thread == 0) words[0] = 1.0f;
        if (kRight) ptx::sync_threads();
        if (thread == 32) words[0] = 2.0f;
    } else if constexpr (kCase == 4) {  // halves of a word are of two threads, or of one
        halves[kRight ? thread : thread / 2] = uint16_t(thread);
    } else if constexpr (kCase == 5) {  // all clear the same bytes, or not
        words[lane] = kRight ? 0.0f : float(warp);
        ptx::sync_warp();
        got = words[lane ^ 1];
    } else if constexpr (kCase == 6) {  // who only arrives at a barrier knows nothing of those who come there
        words[thread] = 1.0f;
        if (warp < 2 || kRight) ptx::barrier_sync(1, 128);
        else ptx::barrier_arrive(1, 128);
        got = words[(thread + 64) % 128];
    } else if constexpr (kCase == 7) {  // cp.async is waited for by its own thread only
        ptx::copy_async_16(ptx::shared_address(uint32_t(16 * thread)), args.x + 4 * lane, 16);
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        if (kRight) ptx::sync_threads();
        got = words[4 * ((thread + 32) % 128)];
    } else if constexpr (kCase == 8) {  // the group before the last is done, the last is not
        for (int i = 0; i < 2 && warp == 0; i++) {
            ptx::copy_async_16(ptx::shared_address(uint32_t(512 * i + 16 * lane)), args.x, 16);
            ptx::copy_async_commit();
        }
        ptx::copy_async_wait<kRight ? 0 : 1>();
        if (warp == 0) got = words[4 * lane] + words[128 + 4 * lane];
    } else if constexpr (kCase == 9) {  // atomics order each other, and nothing else
        const Shared<int> count(0);
        if (thread == 0) count[0] = 0;
        if (kRight) ptx::sync_threads();
        if (thread) ptx::atomic_add_shared(count.address(), 1);
    } else if constexpr (kCase == 10) {  // a barrier that may not have been initialised
        if (warp == 1) ptx::mbarrier_wait(barrier, 0);
        else if (thread == 0) ptx::mbarrier_arrive(barrier);
    } else if constexpr (kCase == 11) {  // a copy is asked for while others read what was there
        words[thread] = 1.0f;
        ptx::fence_async_proxy();
        ptx::sync_threads();
        got = words[thread];
        if (kRight) ptx::sync_threads();
        if (thread == 0) {
            ptx::mbarrier_arrive_expect(barrier, kBytes);
            ptx::bulk_load(words.address(), args.x, kBytes, barrier);
        }
        ptx::mbarrier_wait(barrier, 0);
    } else if constexpr (kCase == 12) {  // one warp waits for a copy, and another reads it
        if (thread == 0) {
            ptx::mbarrier_arrive_expect(barrier, kBytes);
            ptx::bulk_load(words.address(), args.x, kBytes, barrier);
        }
        if (kRight || warp == 0) ptx::mbarrier_wait(barrier, 0);
        else ptx::sync_warp();
        if (warp < 2) got = words[thread % 16];
    } else if constexpr (kCase == 13) {  // one lane arrives for its warp, which has read
        for (int turn = 0; turn < 2; turn++) {
            if (warp == 1) {
                if (turn) ptx::mbarrier_wait(second, 0);
                words[lane] = float(turn);
                ptx::sync_warp();
                if (lane == 0) ptx::mbarrier_arrive(barrier);
            } else if (warp == 0) {
                ptx::mbarrier_wait(barrier, turn);
                got += words[lane];
                if (kRight) ptx::sync_warp();
                else ptx::any(got > 0.0f);
                if (lane == 0) ptx::mbarrier_arrive(second);
            }
        }
    } else if constexpr (kCase == 14) {  // bytes that are still being added to global memory
        if (warp == 0) {
            words[lane] = 1.0f;
            ptx::fence_async_proxy();
            ptx::sync_warp();
            if (lane == 0) {
                ptx::bulk_add(args.y, words.address(), kBytes);
                ptx::bulk_commit();
                if (kRight) ptx::bulk_wait_read<0>();
                words[0] = 2.0f;
            }
        }
        return;
    }
    Global<float>{args.y}[thread] = got;
}

// A store to another block of the cluster over what its threads read
extern "C" __global__ void __launch_bounds__(32) races_in_cluster(const Args args) {
    const Shared<float> words(0);
    const uint32_t barrier = ptx::shared_address(uint32_t(kAtBarrier));
    const int rank = int(blockIdx.x) % 2, lane = int(threadIdx.x);
    words[lane] = 1.0f;
    if (lane == 0) {
        ptx::mbarrier_init(barrier, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect(barrier, 4);
    }
    ptx::sync_warp();
    float got = kRight ? words[lane ^ 1] : 0.0f;
    ptx::cluster_arrive();
    if (!kRight) got = words[lane ^ 1];
    ptx::cluster_wait();
    if (lane == 0)
        ptx::store_async(ptx::address_in(words.address(), rank ^ 1), 2.0f, ptx::address_in(barrier, rank ^ 1));
    ptx::mbarrier_wait(barrier, 0);
    got += words[0];
    Global<float>{args.y}[32 * blockIdx.x + lane] = got;
}

// wgmma reads its operands until somebody waits for it
extern "C" __global__ void __launch_bounds__(128) races_of_wgmma(const Args args) {
    const Shared<uint32_t> words(0);
    for (int i = threadIdx.x; i < 1024; i += 128) words[i] = 0x3f803f80;
    ptx::fence_async_proxy();
    ptx::sync_threads();
    float d[4] = {};
    const uint64_t at = ptx::shared_address(0u) >> 4, layout = uint64_t(8) << 16 | uint64_t(16) << 32;
    ptx::wgmma_fence();
    ptx::Wgmma<bf16, 8>::ss<false, false>(d, at | layout, (at + 128) | layout, true);
    ptx::wgmma_commit();
    if (kRight) ptx::wgmma_wait<0>();
    ptx::sync_threads();
    words[threadIdx.x] = 0;
    if (!kRight) ptx::wgmma_wait<0>();
    Global<float>{args.y}[threadIdx.x] = d[0];
}
