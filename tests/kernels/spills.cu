// Spills on purpose: 96 live values, and a launch bound that leaves 32 registers for them.
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* y, const float* x) {
  float r[96];
#pragma unroll
  for (int i = 0; i < 96; i++) r[i] = x[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; i++) y[threadIdx.x + 1024 * i] = r[i] - 2 * r[95 - i];
}
