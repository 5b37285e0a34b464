// Wrong on purpose: one error here, one inside a template.
template <int N>
__device__ int twice(int x) {
  return x * N + not_there<N>(x);
}

extern "C" __global__ void broken(int* y) {
  y[0] = missing_name;
  y[1] = twice<2>(1);
}
