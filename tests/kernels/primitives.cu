// One kernel a primitive: raw values in, raw values out, for the agreement of emulator and card. kPrimitive chooses.
#include "tile/memory.cuh"

constexpr int kLdmatrix = 0, kLdmatrixTransposed = 1, kMmaBf16 = 2, kMmaF16 = 3, kMmaTf32 = 4, kMmaS8 = 5, kShuffle = 6,
              kVote = 7, kCopyAsync = 8, kExp2 = 9, kStmatrix = 10, kDp4a = 11, kConvert = 12, kMmaE4m3 = 13, kFp8 = 14,
              kStmatrixTransposed = 15;

// One warp. in: 32 lanes × 16 words; out: 32 lanes × 4 words.
extern "C" __global__ void __launch_bounds__(32) primitive(const uint32_t* in, uint32_t* out) {
    const int lane = threadIdx.x;
    Global<const uint32_t> gIn{in};
    Global<uint32_t> gOut{out};
    Shared<uint32_t> sWords(0);
    uint32_t a[4], b[4], r[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4; i++) {
        a[i] = gIn[lane * 16 + i];
        b[i] = gIn[lane * 16 + 4 + i];
    }
    if (kPrimitive == kLdmatrix || kPrimitive == kLdmatrixTransposed) {
        for (int i = 0; i < 4; i++) sWords[lane * 4 + i] = a[i];
        ptx::sync_warp();
        const uint32_t row = sWords.address((lane * 5 % 32) * 4);  // rows in a scrambled order
        if (kPrimitive == kLdmatrix) ptx::ldmatrix(r, row);
        else ptx::ldmatrix_transposed(r, row);
    } else if (kPrimitive == kStmatrix || kPrimitive == kStmatrixTransposed) {
        if (kPrimitive == kStmatrix) ptx::stmatrix(sWords.address((lane * 5 % 32) * 4), a);
        else ptx::stmatrix_transposed(sWords.address((lane * 5 % 32) * 4), a);
        ptx::sync_warp();
        for (int i = 0; i < 4; i++) r[i] = sWords[lane * 4 + i];
    } else if (kPrimitive == kMmaBf16 || kPrimitive == kMmaF16 || kPrimitive == kMmaTf32 || kPrimitive == kMmaE4m3) {
        float d[4];
        for (int i = 0; i < 4; i++) d[i] = to_float(as_float(gIn[lane * 16 + 8 + i]));
        if (kPrimitive == kMmaBf16) ptx::mma_16x8x16<bf16>(d, a, b[0], b[1]);
        else if (kPrimitive == kMmaF16) ptx::mma_16x8x16<half>(d, a, b[0], b[1]);
        else if (kPrimitive == kMmaTf32) ptx::mma_16x8x8_tf32(d, a, b[0], b[1]);
        else ptx::mma_16x8x32_e4m3(d, a, b[0], b[1]);
        for (int i = 0; i < 4; i++) r[i] = as_bits(d[i]);
    } else if (kPrimitive == kMmaS8) {
        int d[4];
        for (int i = 0; i < 4; i++) d[i] = int(uint32_t(gIn[lane * 16 + 8 + i]) % 1000u);
        ptx::mma_16x8x32_s8(d, a, b[0], b[1]);
        for (int i = 0; i < 4; i++) r[i] = uint32_t(d[i]);
    } else if (kPrimitive == kShuffle) {
        r[0] = ptx::shuffle(a[0], 7);
        r[1] = ptx::shuffle_xor(a[1], 5);
        r[2] = as_bits(ptx::shuffle_xor(as_float(a[2]), 16));
        r[3] = ptx::shuffle(a[3], lane / 3);
    } else if (kPrimitive == kVote) {
        r[0] = ptx::ballot(a[0] & 1);
        r[1] = ptx::any(a[1] == 1234u);
        r[2] = ptx::all(a[2] != 1234u);
    } else if (kPrimitive == kCopyAsync) {
        ptx::copy_async_16(sWords.address(lane * 4), in + lane * 16, lane % 5 * 4 > 16 ? 16 : lane % 5 * 4);
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        ptx::sync_warp();
        for (int i = 0; i < 4; i++) r[i] = sWords[lane * 4 + i];
    } else if (kPrimitive == kExp2) {
        for (int i = 0; i < 4; i++) r[i] = as_bits(ptx::exp2(to_float(as_float(gIn[lane * 16 + 8 + i])) * 40.0f));
    } else if (kPrimitive == kDp4a) {
        for (int i = 0; i < 4; i++) r[i] = uint32_t(ptx::dp4a(int(a[i]), int(b[i]), int(lane)));
    } else if (kPrimitive == kConvert) {
        const float x = as_float(gIn[lane * 16 + 8]), y = as_float(gIn[lane * 16 + 9]);
        r[0] = pack<bf16>(x, y);
        r[1] = pack<half>(x, y);
        r[2] = ptx::to_tf32(x);
    } else if (kPrimitive == kFp8) {
        float x[4];
        for (int i = 0; i < 4; i++) x[i] = as_float(gIn[lane * 16 + 8 + i]);
        const float factor[3] = {1.0f, 400.0f, 0.01f};  // normal values, those beyond 448, subnormal ones
        for (int i = 0; i < 3; i++)
            r[i] = ptx::pack_e4m3(x[0] * factor[i], x[1] * factor[i], x[2] * factor[i], x[3] * factor[i]);
        r[3] = ptx::permute_bytes(a[0], a[1], a[2] & 0x7777u);
    }
    for (int i = 0; i < 4; i++) gOut[lane * 4 + i] = r[i];
}
