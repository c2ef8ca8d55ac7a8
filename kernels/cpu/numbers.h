/* Types, rounding and vectors of 16 floats, in plain C that compilers turn into whatever the CPU has. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16 };

typedef uint16_t bf16;
typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef bf16 halves __attribute__((vector_size(32)));

INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

INLINE float load(const void *x, int64_t i, int type) {
  return type == BFLOAT16 ? widen(((const bf16 *)x)[i]) : ((const float *)x)[i];
}

/* `type` is a constant wherever it is passed, so nothing is left of the question. */
INLINE const void *at(const void *x, int64_t i, int type) {
  return (const char *)x + i * (type == BFLOAT16 ? 2 : 4);
}

INLINE floats all(float x) { return x - (floats){0}; }

/* Lane by lane: mask ? a : b, for masks as comparisons give them. */
INLINE floats pick(ints mask, floats a, floats b) { return (floats)((mask & (ints)a) | (~mask & (ints)b)); }

INLINE floats larger(floats a, floats b) {
#ifdef __AVX512F__
  return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return pick(a > b, a, b);
#endif
}

/* The same order of additions for every row, wherever it is computed. */
INLINE float sum(floats x) {
  float half[8], quarter[4];
  for (int i = 0; i < 8; i++) half[i] = x[i] + x[i + 8];
  for (int i = 0; i < 4; i++) quarter[i] = half[i] + half[i + 4];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

INLINE float largest(floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < 16; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

/* e^x to within two units in the last place; 0 where that would be below the normal numbers, also at -infinity. */
INLINE floats exponential(floats x) {
#ifdef __AVX512F__ /* the first operand is dropped where the second is no number */
  floats clipped = (floats)_mm512_min_ps((__m512)all(128.0f), _mm512_max_ps((__m512)all(-87.3f), (__m512)x));
  floats n = (floats)_mm512_roundscale_ps((__m512)(clipped * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  floats clipped = pick(x > 88.0f, all(88.0f), pick(x < -87.3f, all(-87.3f), x));
  floats shifted = clipped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: leaves no room for fractions */
  floats n = shifted - 12582912.0f;
#endif
  floats r = clipped - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts */
  floats y = r * (1.0f / 720) + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
#ifdef __AVX512F__
  /* to compute what is too small would take the CPU a hundred times as long */
  __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-87.3f), _CMP_NLT_UQ);
  return (floats)_mm512_maskz_scalef_ps(is_normal, (__m512)y, (__m512)n);
#else
  floats power = (floats)(((ints)shifted - (ints)all(12582912.0f) + 127) << 23);
  return pick(x < -87.3f, all(0.0f), y * power);
#endif
}

INLINE floats widen16(halves x) { return (floats)(__builtin_convertvector(x, words) << 16); }

/* To nearest, ties to even; what is not a number stays none. */
INLINE halves narrow16(floats x) {
#ifdef __AVX512BF16__
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
  words bits = (words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  words no_number = (words)(x != x);
  return __builtin_convertvector((no_number & 0x7fc0) | (~no_number & rounded), halves);
#endif
}

INLINE floats round16(floats x, int type) { return type == BFLOAT16 ? widen16(narrow16(x)) : x; }

/* Elements i … i + 15 of a row, or up to its end, with zeros behind it. */
INLINE floats load16(const void *x, int64_t i, int64_t size, int type) {
  if (type == BFLOAT16) {
    halves y = {0};
    if (size - i >= 16)
      memcpy(&y, (const bf16 *)x + i, 32);
    else
      memcpy(&y, (const bf16 *)x + i, (size_t)(size - i) * 2);
    return widen16(y);
  }
  floats y = {0};
  if (size - i >= 16)
    memcpy(&y, (const float *)x + i, 64);
  else
    memcpy(&y, (const float *)x + i, (size_t)(size - i) * 4);
  return y;
}

INLINE void store16(void *x, int64_t i, int64_t size, floats value, int type) {
  if (type == BFLOAT16) {
    halves y = narrow16(value);
    if (size - i >= 16)
      memcpy((bf16 *)x + i, &y, 32);
    else
      memcpy((bf16 *)x + i, &y, (size_t)(size - i) * 2);
  } else if (size - i >= 16) {
    memcpy((float *)x + i, &value, 64);
  } else {
    memcpy((float *)x + i, &value, (size_t)(size - i) * 4);
  }
}
