// wgmma for every width: d (64 × N, float) = a b [+ d], with a from shared memory (ss) or registers (rs). Included by
// ptx.cuh.
//
// PTX numbers its operands, so each width needs its own text. The macros below build the register lists four at a time.
#pragma once

namespace ptx {

template <class T, int N> struct Wgmma;  // the instruction of one element type and width

#define TILE_NAMES_4 "%0,%1,%2,%3"
#define TILE_REGS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define TILE_NAMES_8 TILE_NAMES_4 ",%4,%5,%6,%7"
#define TILE_REGS_8 TILE_REGS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define TILE_NAMES_12 TILE_NAMES_8 ",%8,%9,%10,%11"
#define TILE_REGS_12 TILE_REGS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define TILE_NAMES_16 TILE_NAMES_12 ",%12,%13,%14,%15"
#define TILE_REGS_16 TILE_REGS_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define TILE_NAMES_20 TILE_NAMES_16 ",%16,%17,%18,%19"
#define TILE_REGS_20 TILE_REGS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define TILE_NAMES_24 TILE_NAMES_20 ",%20,%21,%22,%23"
#define TILE_REGS_24 TILE_REGS_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define TILE_NAMES_28 TILE_NAMES_24 ",%24,%25,%26,%27"
#define TILE_REGS_28 TILE_REGS_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define TILE_NAMES_32 TILE_NAMES_28 ",%28,%29,%30,%31"
#define TILE_REGS_32 TILE_REGS_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TILE_NAMES_36 TILE_NAMES_32 ",%32,%33,%34,%35"
#define TILE_REGS_36 TILE_REGS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define TILE_NAMES_40 TILE_NAMES_36 ",%36,%37,%38,%39"
#define TILE_REGS_40 TILE_REGS_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define TILE_NAMES_44 TILE_NAMES_40 ",%40,%41,%42,%43"
#define TILE_REGS_44 TILE_REGS_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define TILE_NAMES_48 TILE_NAMES_44 ",%44,%45,%46,%47"
#define TILE_REGS_48 TILE_REGS_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define TILE_NAMES_52 TILE_NAMES_48 ",%48,%49,%50,%51"
#define TILE_REGS_52 TILE_REGS_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define TILE_NAMES_56 TILE_NAMES_52 ",%52,%53,%54,%55"
#define TILE_REGS_56 TILE_REGS_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define TILE_NAMES_60 TILE_NAMES_56 ",%56,%57,%58,%59"
#define TILE_REGS_60 TILE_REGS_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define TILE_NAMES_64 TILE_NAMES_60 ",%60,%61,%62,%63"
#define TILE_REGS_64 TILE_REGS_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TILE_NAMES_68 TILE_NAMES_64 ",%64,%65,%66,%67"
#define TILE_REGS_68 TILE_REGS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define TILE_NAMES_72 TILE_NAMES_68 ",%68,%69,%70,%71"
#define TILE_REGS_72 TILE_REGS_68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define TILE_NAMES_76 TILE_NAMES_72 ",%72,%73,%74,%75"
#define TILE_REGS_76 TILE_REGS_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define TILE_NAMES_80 TILE_NAMES_76 ",%76,%77,%78,%79"
#define TILE_REGS_80 TILE_REGS_76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define TILE_NAMES_84 TILE_NAMES_80 ",%80,%81,%82,%83"
#define TILE_REGS_84 TILE_REGS_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define TILE_NAMES_88 TILE_NAMES_84 ",%84,%85,%86,%87"
#define TILE_REGS_88 TILE_REGS_84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define TILE_NAMES_92 TILE_NAMES_88 ",%88,%89,%90,%91"
#define TILE_REGS_92 TILE_REGS_88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define TILE_NAMES_96 TILE_NAMES_92 ",%92,%93,%94,%95"
#define TILE_REGS_96 TILE_REGS_92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define TILE_NAMES_100 TILE_NAMES_96 ",%96,%97,%98,%99"
#define TILE_REGS_100 TILE_REGS_96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define TILE_NAMES_104 TILE_NAMES_100 ",%100,%101,%102,%103"
#define TILE_REGS_104 TILE_REGS_100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define TILE_NAMES_108 TILE_NAMES_104 ",%104,%105,%106,%107"
#define TILE_REGS_108 TILE_REGS_104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define TILE_NAMES_112 TILE_NAMES_108 ",%108,%109,%110,%111"
#define TILE_REGS_112 TILE_REGS_108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define TILE_NAMES_116 TILE_NAMES_112 ",%112,%113,%114,%115"
#define TILE_REGS_116 TILE_REGS_112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define TILE_NAMES_120 TILE_NAMES_116 ",%116,%117,%118,%119"
#define TILE_REGS_120 TILE_REGS_116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define TILE_NAMES_124 TILE_NAMES_120 ",%120,%121,%122,%123"
#define TILE_REGS_124 TILE_REGS_120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define TILE_NAMES_128 TILE_NAMES_124 ",%124,%125,%126,%127"
#define TILE_REGS_128 TILE_REGS_124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// R: registers of d per thread, N / 2; R1, R2, … are the numbers of the operands that follow them.
#define TILE_WGMMA(T, PTX_T, N, R, R1, R2, R3, R4, R5, R6)                                                             \
    template <> struct Wgmma<T, N> {                                                                                   \
        template <bool kAMnMajor, bool kBMnMajor>                                                                      \
        static TILE_DEVICE void ss(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) {                           \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #R2 ", 0; "                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_T "." PTX_T                             \
                         " {" TILE_NAMES_##R "}, %" #R ", %" #R1 ", p, 1, 1, %" #R3 ", %" #R4 ";}"                     \
                         : TILE_REGS_##R                                                                               \
                         : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kAMnMajor)), "n"(int(kBMnMajor)));            \
        }                                                                                                              \
        template <bool kBMnMajor>                                                                                      \
        static TILE_DEVICE void rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) {               \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #R5 ", 0; "                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_T "." PTX_T                             \
                         " {" TILE_NAMES_##R "}, {%" #R ",%" #R1 ",%" #R2 ",%" #R3 "}, %" #R4 ", p, 1, 1, %" #R6 ";}"  \
                         : TILE_REGS_##R                                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),                                                 \
                           "l"(b), "r"(int(accumulate)), "n"(int(kBMnMajor)));                                         \
        }                                                                                                              \
    };
// FP8: a product is 32 values deep, and both operands are always K-major, so the instruction takes no layout.
#define TILE_WGMMA_E4M3(N, R, R1, R2, R3, R4, R5)                                                                      \
    template <> struct Wgmma<e4m3, N> {                                                                                \
        template <bool kAMnMajor, bool kBMnMajor>                                                                      \
        static TILE_DEVICE void ss(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) {                           \
            static_assert(!kAMnMajor && !kBMnMajor, "FP8 operands are K-major");                                       \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #R2 ", 0; "                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"                                    \
                         " {" TILE_NAMES_##R "}, %" #R ", %" #R1 ", p, 1, 1;}"                                         \
                         : TILE_REGS_##R                                                                               \
                         : "l"(a), "l"(b), "r"(int(accumulate)));                                                      \
        }                                                                                                              \
        template <bool kBMnMajor>                                                                                      \
        static TILE_DEVICE void rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) {               \
            static_assert(!kBMnMajor, "FP8 operands are K-major");                                                     \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #R5 ", 0; "                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"                                    \
                         " {" TILE_NAMES_##R "}, {%" #R ",%" #R1 ",%" #R2 ",%" #R3 "}, %" #R4 ", p, 1, 1;}"            \
                         : TILE_REGS_##R                                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));                  \
        }                                                                                                              \
    };
#define TILE_WGMMA_WIDTH(N, R, R1, R2, R3, R4, R5, R6)        \
    TILE_WGMMA(bf16, "bf16", N, R, R1, R2, R3, R4, R5, R6)    \
    TILE_WGMMA(half, "f16", N, R, R1, R2, R3, R4, R5, R6)     \
    TILE_WGMMA_E4M3(N, R, R1, R2, R3, R4, R5)

TILE_WGMMA_WIDTH(8, 4, 5, 6, 7, 8, 9, 10)
TILE_WGMMA_WIDTH(16, 8, 9, 10, 11, 12, 13, 14)
TILE_WGMMA_WIDTH(24, 12, 13, 14, 15, 16, 17, 18)
TILE_WGMMA_WIDTH(32, 16, 17, 18, 19, 20, 21, 22)
TILE_WGMMA_WIDTH(40, 20, 21, 22, 23, 24, 25, 26)
TILE_WGMMA_WIDTH(48, 24, 25, 26, 27, 28, 29, 30)
TILE_WGMMA_WIDTH(56, 28, 29, 30, 31, 32, 33, 34)
TILE_WGMMA_WIDTH(64, 32, 33, 34, 35, 36, 37, 38)
TILE_WGMMA_WIDTH(72, 36, 37, 38, 39, 40, 41, 42)
TILE_WGMMA_WIDTH(80, 40, 41, 42, 43, 44, 45, 46)
TILE_WGMMA_WIDTH(88, 44, 45, 46, 47, 48, 49, 50)
TILE_WGMMA_WIDTH(96, 48, 49, 50, 51, 52, 53, 54)
TILE_WGMMA_WIDTH(104, 52, 53, 54, 55, 56, 57, 58)
TILE_WGMMA_WIDTH(112, 56, 57, 58, 59, 60, 61, 62)
TILE_WGMMA_WIDTH(120, 60, 61, 62, 63, 64, 65, 66)
TILE_WGMMA_WIDTH(128, 64, 65, 66, 67, 68, 69, 70)
TILE_WGMMA_WIDTH(136, 68, 69, 70, 71, 72, 73, 74)
TILE_WGMMA_WIDTH(144, 72, 73, 74, 75, 76, 77, 78)
TILE_WGMMA_WIDTH(152, 76, 77, 78, 79, 80, 81, 82)
TILE_WGMMA_WIDTH(160, 80, 81, 82, 83, 84, 85, 86)
TILE_WGMMA_WIDTH(168, 84, 85, 86, 87, 88, 89, 90)
TILE_WGMMA_WIDTH(176, 88, 89, 90, 91, 92, 93, 94)
TILE_WGMMA_WIDTH(184, 92, 93, 94, 95, 96, 97, 98)
TILE_WGMMA_WIDTH(192, 96, 97, 98, 99, 100, 101, 102)
TILE_WGMMA_WIDTH(200, 100, 101, 102, 103, 104, 105, 106)
TILE_WGMMA_WIDTH(208, 104, 105, 106, 107, 108, 109, 110)
TILE_WGMMA_WIDTH(216, 108, 109, 110, 111, 112, 113, 114)
TILE_WGMMA_WIDTH(224, 112, 113, 114, 115, 116, 117, 118)
TILE_WGMMA_WIDTH(232, 116, 117, 118, 119, 120, 121, 122)
TILE_WGMMA_WIDTH(240, 120, 121, 122, 123, 124, 125, 126)
TILE_WGMMA_WIDTH(248, 124, 125, 126, 127, 128, 129, 130)
TILE_WGMMA_WIDTH(256, 128, 129, 130, 131, 132, 133, 134)

}  // namespace ptx
