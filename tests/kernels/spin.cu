// Busy for about `cycles` on one thread: a launch that returns before it is done did not wait for it.
extern "C" __global__ void spin(int* done, int cycles) {
  long long start = clock64();
  while (clock64() - start < cycles) {
  }
  *done = 1;
}
