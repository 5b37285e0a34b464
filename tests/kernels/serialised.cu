// An accumulator touched while its wgmma is in flight: ptxas takes the overlap away and says so.
extern "C" __global__ void __launch_bounds__(128) serialised(float* y, unsigned long long a, unsigned long long b) {
  float c[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; i++) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "l"(a), "l"(b));
    c[0] *= 2.0f;
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = c[i];
}
