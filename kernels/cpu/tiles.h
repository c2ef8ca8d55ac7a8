/* Products of bfloat16 matrices in the CPU's tile registers (AMX): 16 rows of 64 bytes each. */
#pragma once
#include "numbers.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

/* Linux gives tile registers to processes that ask. Asking again changes nothing. */
static inline int may_use_tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  static int answer; /* 1: no, 2: yes */
  if (!answer) answer = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? 2 : 1;
  return answer == 2;
}

/* 0, 1: scores of 16 keys with n rows; 2: queries of n rows; 3, 4: keys or values; 5: weights of n rows; 6, 7: sums. */
INLINE void shape_tiles(int64_t n) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) {
    shape.bytes[tile] = (uint16_t)(tile <= 2 ? 4 * n : 64);
    shape.rows[tile] = (uint8_t)(tile >= 5 ? n : 16);
  }
  _tile_loadconfig(&shape);
}

/* to[i][j] = from[j][i] */
INLINE void transpose16(__m512i to[16], const __m512i from[16]) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) { /* quarters: lane q of b[4 k + i] is row 4 q + i, columns 4 k … 4 k + 3 */
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[8 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    to[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
    to[8 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
    to[4 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
    to[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
  }
}
#else
#define HAS_TILES 0
#endif
