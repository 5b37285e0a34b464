// Divisions by multiplication, as kernels make them.
#include "prefill/ragged.cu"

extern "C" __global__ void divide(Divisor divisor, const int* numbers, int* quotients, int count) {
    const Divisor made = divisor_of(divisor.divisor);
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int n = Global<const int>{numbers}[i];
        Global<int>{quotients}[i] = divisor.quotient(n);
        Global<int>{quotients}[count + i] = made.quotient(n);
    }
}
