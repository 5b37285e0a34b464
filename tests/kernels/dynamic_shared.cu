// Reverses kThreads values through dynamic shared memory, the last of which lie at its far end.
extern "C" __global__ void __launch_bounds__(kThreads) reverse(float* y, const float* x) {
  extern __shared__ char shared[];
  float* tail = reinterpret_cast<float*>(shared + kSharedBytes) - kThreads;
  tail[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tail[kThreads - 1 - threadIdx.x];
}
