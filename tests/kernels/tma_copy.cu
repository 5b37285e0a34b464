// One box of a two-dimensional tensor by TMA into shared memory, and its raw bytes out: shows the swizzle and what is
// filled in past the tensor's edge.
struct alignas(64) Map {
  char bytes[128];
};

extern "C" __global__ void __launch_bounds__(128)
    tma_copy(const __grid_constant__ Map map, unsigned* out, int x, int y) {
    extern __shared__ __align__(1024) char shared[];
    unsigned box = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    unsigned barrier = box + kBoxBytes;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(kBoxBytes) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
            "[%2];" ::"r"(box),
            "l"(&map), "r"(barrier), "r"(x), "r"(y)
            : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier)
                     : "memory");
    for (int i = threadIdx.x; i < kBoxBytes / 4; i += 128) out[i] = reinterpret_cast<unsigned*>(shared)[i];
}
