// Wrong on purpose: C++ that is right, PTX that ptxas refuses.
__device__ void inner() {
  asm volatile("no_such_instruction.u32 0;");
}

extern "C" __global__ void bad_ptx(int* y) {
  y[0] = 1;
  inner();
}
