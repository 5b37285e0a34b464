// Rows turned in place by their positions, a warp a row.
#include "tile/rotary.cuh"

extern "C" __global__ void __launch_bounds__(32)
    rotary(Element* rows, const float* cosines, const float* sines, const int* positions) {
    const int position = Global<const int>{positions}[blockIdx.x];
    const Global<const float> gCos{cosines + position * kPairs}, gSin{sines + position * kPairs};
    warp::rotate_row<kInterleaved, kPairs>(Global<Element>{rows + blockIdx.x * kHeadDim}, gCos, gSin);
}
