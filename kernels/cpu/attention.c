/* Attention over pages, see compiled_attention.py.
 *
 * A task is some queries of one sequence with the heads of one key head: rows that read the same keys. It goes over
 * their positions in blocks of KEYS, at multiples of it, and in parts of PART: within a part, maxima and sums run on;
 * parts are then joined in order. A long sequence with one query has its parts computed by several threads. So what a
 * row goes through depends on its own position alone, not on the rows and threads beside it.
 */
#include <float.h>

#include "numbers.h"
#include "team.h"
#include "tiles.h"

enum { KEYS = 32, PART = 256, ROWS = 64, LARGEST = 256 };

typedef struct {
  int32_t sequence, first_token, num_queries, first_position;
  int32_t low, end;         /* positions that some of its queries see */
  int32_t part, num_parts; /* units of a split sequence follow each other */
} Unit;

typedef struct {
  const void *qkv, *pages;
  void *y;
  const int32_t *tables;
  const Unit *units;
  float *partial;    /* per unit and key head: the rows' sums, then their maxima and totals */
  int32_t *num_done; /* parts, per first unit of a sequence and key head; zeros before and after */
  int64_t max_blocks, num_heads, num_kv_heads, size, block_size, window;
  float scale, softcap;
} Attention;

/* What a task keeps of up to ROWS rows. Numbers of a row are padded to whole vectors. */
typedef struct {
  _Alignas(64) char q[ROWS * LARGEST * 4];
  _Alignas(64) float sums[ROWS * LARGEST];  /* of values, by weights relative to most */
  _Alignas(64) float total[ROWS * LARGEST]; /* of the parts before */
  _Alignas(64) char values[KEYS * LARGEST * 4];
  _Alignas(64) char keys[KEYS * LARGEST * 4];
  float most[ROWS], weight[ROWS];
  float total_most[ROWS], total_weight[ROWS];
  floats weights[ROWS];                            /* sums of weights, lane by lane */
  floats scores[KEYS], tile_most[ROWS / 16], tile_weight[ROWS / 16]; /* one lane a row, as the next two */
  ints position[ROWS / 16], low[ROWS / 16];
  int64_t tile_rows; /* that the tiles are shaped for; 0: none */
} Scratch;

static const float zeros[LARGEST];

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRS 1 /* products of pairs of bfloat16, summed in float32 */
#else
#define PAIRS 0
#endif

INLINE void multiply(float *x, float by, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] *= by;
}

/* cap * tanh(x / cap), by tanh(x) = 1 - 2 / (e^2x + 1). */
INLINE floats soften(floats x, float cap) { return cap * (1.0f - 2.0f / (exponential(x * (2.0f / cap)) + 1.0f)); }

/* A row of bfloat16 into the cache. */
INLINE void fetch(const void *row, int64_t size) {
  for (int64_t i = 0; i < size * 2; i += 64) __builtin_prefetch((const char *)row + i, 0, 3);
}

INLINE int64_t padded(int64_t size) { return (size + 31) / 32 * 32; }

#ifdef __AVX512F__
/* Sums of 16 vectors, in order. */
INLINE floats sums_of(const __m512 *a) {
  __m512 b[8], c[4], d[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
    c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
  return (floats)_mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
}
#endif

/* Products of one row with 16 keys. */
INLINE floats scores_float32(const float *q, const void *const *keys, int64_t size) {
#ifdef __AVX512F__
  __m512 s[16];
#pragma GCC unroll 16
  for (int j = 0; j < 16; j++) s[j] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    __m512 x = _mm512_load_ps(q + i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) s[j] = _mm512_fmadd_ps(x, _mm512_loadu_ps((const float *)keys[j] + i), s[j]);
  }
  if (i < size) {
    __mmask16 rest = (__mmask16)((1u << (size - i)) - 1);
    __m512 x = _mm512_load_ps(q + i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++)
      s[j] = _mm512_fmadd_ps(x, _mm512_maskz_loadu_ps(rest, (const float *)keys[j] + i), s[j]);
  }
  return sums_of(s);
#else
  floats s = {0};
  for (int j = 0; j < 16; j++) {
    const float *key = keys[j];
    floats lanes = {0};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
      for (int lane = 0; lane < 16; lane++) lanes[lane] += q[i + lane] * key[i + lane];
    for (int lane = 0; i < size; i++, lane++) lanes[lane] += q[i] * key[i];
    s[j] = sum(lanes);
  }
  return s;
#endif
}

/* sums += weights * values of KEYS positions. */
INLINE void add_values_float32(float *sums, const floats *weights, const void *const *values, int64_t size) {
  const float *w = (const float *)weights;
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    floats even, odd = {0};
    memcpy(&even, sums + i, 64);
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j += 2) {
      floats a, b;
      memcpy(&a, (const float *)values[j] + i, 64);
      memcpy(&b, (const float *)values[j + 1] + i, 64);
      even += w[j] * a;
      odd += w[j + 1] * b;
    }
    even += odd;
    memcpy(sums + i, &even, 64);
  }
  for (; i < size; i++)
    for (int j = 0; j < KEYS; j++) sums[i] += w[j] * ((const float *)values[j])[i];
}

#if PAIRS
INLINE __m512i load_pairs(const void *x, int64_t i, int64_t size) {
  const bf16 *from = (const bf16 *)x + i;
  if (size - i >= 32) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16((__mmask32)((1ull << (size - i)) - 1), from);
}

INLINE floats scores_pairs(const bf16 *q, const void *const *keys, int64_t size) {
  __m512 s[16];
#pragma GCC unroll 16
  for (int j = 0; j < 16; j++) s[j] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    __m512bh x = (__m512bh)_mm512_load_si512(q + i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++)
      s[j] = _mm512_dpbf16_ps(s[j], x, (__m512bh)_mm512_loadu_si512((const bf16 *)keys[j] + i));
  }
  if (i < size) {
    __m512bh x = (__m512bh)_mm512_load_si512(q + i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) s[j] = _mm512_dpbf16_ps(s[j], x, (__m512bh)load_pairs(keys[j], i, size));
  }
  return sums_of(s);
}

/* Two positions' values side by side: [size / 16, KEYS / 2] vectors of 16 pairs, in an order that restore() undoes. */
INLINE void pair_values(__m512i *pairs, const void *const *values, int64_t size) {
  for (int64_t i = 0; i < size; i += 32, pairs += KEYS)
    for (int j = 0; j < KEYS / 2; j++) {
      __m512i a = load_pairs(values[2 * j], i, size), b = load_pairs(values[2 * j + 1], i, size);
      pairs[j] = _mm512_unpacklo_epi16(a, b);
      pairs[KEYS / 2 + j] = _mm512_unpackhi_epi16(a, b);
    }
}

INLINE void add_values_pairs(float *sums, const floats *weights, const __m512i *pairs, int64_t size) {
  _Alignas(64) int32_t w[16];
  _mm512_store_si512(w, (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]));
  for (int64_t i = 0; i < size; i += 32, pairs += KEYS) {
    __m512 even[2] = {_mm512_load_ps(sums + i), _mm512_load_ps(sums + i + 16)};
    __m512 odd[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 8
    for (int j = 0; j < KEYS / 2; j += 2) {
      __m512bh a = (__m512bh)_mm512_set1_epi32(w[j]), b = (__m512bh)_mm512_set1_epi32(w[j + 1]);
      even[0] = _mm512_dpbf16_ps(even[0], a, (__m512bh)pairs[j]);
      even[1] = _mm512_dpbf16_ps(even[1], a, (__m512bh)pairs[KEYS / 2 + j]);
      odd[0] = _mm512_dpbf16_ps(odd[0], b, (__m512bh)pairs[j + 1]);
      odd[1] = _mm512_dpbf16_ps(odd[1], b, (__m512bh)pairs[KEYS / 2 + j + 1]);
    }
    _mm512_store_ps(sums + i, _mm512_add_ps(even[0], odd[0]));
    _mm512_store_ps(sums + i + 16, _mm512_add_ps(even[1], odd[1]));
  }
}
#endif

#if HAS_TILES
/* Queries as the second factor: [rows / 16, width / 32, 16, 16], each entry a pair of a row's elements. */
INLINE void pair_queries(__m512i *to, const bf16 *const *q, int64_t num_rows, int64_t size) {
  for (int64_t tile = 0; tile < num_rows; tile += 16)
    for (int64_t i = 0; i < size; i += 32, to += 16) {
      __m512i rows[16];
      for (int64_t row = 0; row < 16; row++)
        rows[row] = tile + row < num_rows ? load_pairs(q[tile + row], i, size) : _mm512_setzero_si512();
      transpose16(to, rows);
    }
}

/* x op x in the other lanes of its row, four lanes to a key. */
#define ACROSS_KEYS(op, x, lanes)                                                                   \
  if (lanes == 4) {                                                                                 \
    x = op(x, (floats)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e));                            \
    x = op(x, (floats)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xb1));                            \
  }

INLINE floats added(floats a, floats b) { return a + b; }

/* Scores of KEYS positions with `lanes` rows to their weights, as the first factor: pairs of positions of each row.
 * Returns what the rows' sums must be multiplied by. Sums go over every fourth key first, however many lanes. */
INLINE floats weigh(const Attention *a, Scratch *s, int64_t tile, int64_t first, int is_masked,
                    const void *const *next_keys, const void *const *next_values, __m512i weights[16], int lanes) {
  const int per_vector = 16 / lanes, num_vectors = KEYS / per_vector;
  const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  floats most = s->tile_most[tile], sums[4] = {{0}, {0}, {0}, {0}};
  for (int v = 0; v < num_vectors; v++) {
    floats x = s->scores[v] * a->scale;
    if (a->softcap > 0.0f) x = soften(x, a->softcap);
    if (is_masked) {
      ints at = lane / lanes + (int32_t)(first + v * per_vector);
      x = pick((at <= s->position[tile]) & (at >= s->low[tile]), x, all(-INFINITY));
    }
    s->scores[v] = x;
    most = larger(most, x);
    for (int j = v * per_vector; next_keys && j < (v + 1) * per_vector; j++) fetch(next_keys[j], a->size);
  }
  ACROSS_KEYS(larger, most, lanes)
#pragma GCC unroll 4
  for (int v = 0; v < num_vectors; v++) {
    s->scores[v] = exponential(s->scores[v] - most);
    sums[lanes == 4 ? 0 : v % 4] += s->scores[v];
    for (int j = v * per_vector; next_values && j < (v + 1) * per_vector; j++) fetch(next_values[j], a->size);
  }
  floats sum = lanes == 4 ? sums[0] : (sums[0] + sums[2]) + (sums[1] + sums[3]);
  ACROSS_KEYS(added, sum, lanes)
  __m512i pairs[16];
  for (int v = 0; v < num_vectors; v += 2)
    pairs[v / 2] = (__m512i)_mm512_cvtne2ps_pbh((__m512)s->scores[v + 1], (__m512)s->scores[v]);
  if (lanes == 4) { /* pairs: [8 keys, 4 rows] each */
    __m512i order = _mm512_set_epi16(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0, 60, 56, 52, 48, 44, 40,
                                     36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
    for (int row = 0; row < 4; row++) {
      __m512i which = _mm512_add_epi16(order, _mm512_set1_epi16((short)row));
      __m512i low = _mm512_permutex2var_epi16(pairs[0], which, pairs[1]);
      __m512i high = _mm512_permutex2var_epi16(pairs[2], which, pairs[3]);
      weights[row] = _mm512_mask_blend_epi32(0xff00, low, high);
    }
  } else { /* [2 keys, 16 rows] each */
    __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                     4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int i = 0; i < 16; i++) pairs[i] = _mm512_permutexvar_epi16(order, pairs[i]);
    transpose16(weights, pairs);
  }
  floats shrink = exponential(s->tile_most[tile] - most);
  s->tile_most[tile] = most;
  s->tile_weight[tile] = s->tile_weight[tile] * shrink + sum;
  return shrink;
}

/* One block of positions for the tiles of rows that see any of it. The next block comes into the cache meanwhile. */
INLINE void attend_tiles(const Attention *a, const Unit *unit, int64_t num_rows, int64_t first,
                         const void *const *keys, const void *const *values, const void *const *next_keys,
                         const void *const *next_values, Scratch *s) {
  int64_t size = a->size, width = padded(size);
  const void *half[2];
  int64_t stride[2];
  for (int i = 0; i < 2; i++) {
    int64_t at = first + 16 * i;
    half[i] = keys[16 * i], stride[i] = size * 2;
    if (a->block_size % 16 || size % 32 || at < unit->low || at + 16 > unit->end) { /* not 16 whole rows in a row */
      half[i] = s->keys + i * 16 * width * 2, stride[i] = width * 2;
      for (int j = 0; j < 16; j++)
        for (int64_t k = 0; k < size; k += 32)
          _mm512_store_si512(s->keys + ((i * 16 + j) * width + k) * 2, load_pairs(keys[16 * i + j], k, size));
    }
  }
  pair_values((__m512i *)s->values, values, size);
  for (int64_t tile = 0; tile * 16 < num_rows; tile++) {
    int64_t last_row = num_rows - tile * 16 < 16 ? num_rows - tile * 16 - 1 : 15;
    if (s->position[tile][last_row] < first || s->low[tile][0] >= first + KEYS) continue;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < width; i += 32) {
      _tile_loadd(2, s->q + (tile * width + i) * 32, 64);
      _tile_loadd(3, (const bf16 *)half[0] + i, stride[0]);
      _tile_dpbf16ps(0, 3, 2);
      _tile_loadd(4, (const bf16 *)half[1] + i, stride[1]);
      _tile_dpbf16ps(1, 4, 2);
    }
    int lanes = s->tile_rows <= 4 ? 4 : 16;
    _tile_stored(0, s->scores, lanes * 4);
    _tile_stored(1, s->scores + lanes, lanes * 4);
    __m512i weights[16];
    int is_masked = s->position[tile][0] < first + KEYS - 1 || s->low[tile][last_row] > first;
    const void *const *then_keys = tile ? NULL : next_keys, *const *then_values = tile ? NULL : next_values;
    floats shrink = lanes == 4 ? weigh(a, s, tile, first, is_masked, then_keys, then_values, weights, 4)
                               : weigh(a, s, tile, first, is_masked, then_keys, then_values, weights, 16);
    float *sums = s->sums + tile * 16 * width;
    if (_mm512_cmpneq_ps_mask((__m512)shrink, _mm512_set1_ps(1.0f)))
      for (int64_t row = 0; row <= last_row; row++) multiply(sums + row * width, shrink[row], width);
    _tile_loadd(5, weights, 64);
    const __m512i *pairs = (const __m512i *)s->values;
    for (int64_t i = 0; i < width; i += 32, pairs += KEYS) {
      _tile_loadd(6, sums + i, width * 4);
      _tile_loadd(3, pairs, 64);
      _tile_dpbf16ps(6, 5, 3);
      _tile_loadd(7, sums + i + 16, width * 4);
      _tile_loadd(4, pairs + KEYS / 2, 64);
      _tile_dpbf16ps(7, 5, 4);
      _tile_stored(6, sums + i, width * 4);
      _tile_stored(7, sums + i + 16, width * 4);
    }
  }
}
#endif

INLINE void widen_rows(float *to, const void **rows, int64_t size) {
  for (int j = 0; j < KEYS; j++, to += LARGEST) {
    for (int64_t i = 0; i < size; i++) to[i] = widen(((const bf16 *)rows[j])[i]);
    rows[j] = to;
  }
}

/* Where the keys of positions first … first + KEYS - 1 lie; zeros for those outside low … end - 1, which may be stale
 * and no numbers. Values lie `to_values` elements further on. */
INLINE void find(const Attention *a, const Unit *unit, int64_t kv_head, int64_t first, const void **keys,
                 const void **values, int type) {
  const int32_t *table = a->tables + unit->sequence * a->max_blocks;
  int64_t block = first / a->block_size, offset = first % a->block_size;
  int64_t to_values = a->num_kv_heads * a->block_size * a->size;
  const void *page = NULL;
  for (int j = 0; j < KEYS; j++) {
    int64_t position = first + j;
    if (position < unit->low || position >= unit->end) {
      keys[j] = values[j] = zeros;
      page = NULL;
    } else {
      if (!page)
        page = at(a->pages, (table[block] * 2 * a->num_kv_heads + kv_head) * a->block_size * a->size, type);
      keys[j] = at(page, offset * a->size, type);
      values[j] = at(page, offset * a->size + to_values, type);
    }
    if (++offset == a->block_size) offset = 0, block++, page = NULL;
  }
}

/* One block of positions for all rows that see any of it. */
INLINE void attend_block(const Attention *a, const Unit *unit, int64_t first_row, int64_t num_rows, int64_t first,
                         const void **keys, const void **values, Scratch *s, int type) {
  int64_t group = a->num_heads / a->num_kv_heads, size = a->size, width = padded(size);
#if PAIRS
  if (type == BFLOAT16) pair_values((__m512i *)s->values, values, size);
#else
  if (type == BFLOAT16) {
    widen_rows((float *)s->keys, keys, size);
    widen_rows((float *)s->values, values, size);
  }
#endif
  const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t row = 0; row < num_rows; row++) {
    int64_t position = unit->first_position + (first_row + row) / group;
    int64_t low = position - a->window + 1 > unit->low ? position - a->window + 1 : unit->low;
    if (position < first || low >= first + KEYS) continue;
    floats p[2];
    for (int half = 0; half < 2; half++) {
#if PAIRS
      if (type == BFLOAT16)
        p[half] = scores_pairs((const bf16 *)s->q + row * width, keys + 16 * half, size);
      else
#endif
        p[half] = scores_float32((const float *)s->q + row * width, keys + 16 * half, size);
      p[half] *= a->scale;
      if (a->softcap > 0.0f) p[half] = soften(p[half], a->softcap);
    }
    if (position < first + KEYS - 1 || low > first || unit->end < first + KEYS)
      for (int half = 0; half < 2; half++) {
        ints at = lane + (int32_t)(first + 16 * half);
        ints seen = (at <= (int32_t)position) & (at >= (int32_t)low);
        p[half] = pick(seen, p[half], all(-INFINITY));
      }
    float most = largest(larger(p[0], p[1]));
    if (most > s->most[row]) {
      float shrink = exponential(all(s->most[row] - most))[0];
      s->most[row] = most;
      s->weights[row] *= shrink;
      multiply(s->sums + row * width, shrink, width);
    }
    p[0] = exponential(p[0] - s->most[row]);
    p[1] = exponential(p[1] - s->most[row]);
    s->weights[row] += p[0] + p[1];
#if PAIRS
    if (type == BFLOAT16)
      add_values_pairs(s->sums + row * width, p, (const __m512i *)s->values, size);
    else
#endif
      add_values_float32(s->sums + row * width, p, values, size);
  }
}

/* total += part, each relative to its own maximum. */
INLINE void join(float *total, float *total_most, float *total_weight, const float *part, float most, float weight,
                 int64_t width) {
  floats gaps = {*total_most > most ? 0.0f : *total_most - most, *total_most > most ? most - *total_most : 0.0f};
  floats factors = exponential(gaps);
  for (int64_t i = 0; i < width; i++) total[i] = total[i] * factors[0] + part[i] * factors[1];
  *total_weight = *total_weight * factors[0] + weight * factors[1];
  *total_most = *total_most > most ? *total_most : most;
}

INLINE void write_row(const Attention *a, const Unit *unit, int64_t kv_head, int64_t row, const float *sums,
                      float weight, int type) {
  int64_t group = a->num_heads / a->num_kv_heads, token = unit->first_token + row / group;
  void *y = (void *)at(a->y, (token * a->num_heads + kv_head * group + row % group) * a->size, type);
  float scale = 1.0f / weight;
#if PAIRS
  if (type == BFLOAT16) { /* unpacking has put fours of elements 0 … 15 and 16 … 31 alternately in two vectors */
    __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t i = 0; i < a->size; i += 32) {
      __m512 even = _mm512_loadu_ps(sums + i), odd = _mm512_loadu_ps(sums + i + 16);
      store16(y, i, a->size, (floats)_mm512_permutex2var_ps(even, low, odd) * scale, type);
      if (i + 16 < a->size) store16(y, i + 16, a->size, (floats)_mm512_permutex2var_ps(even, high, odd) * scale, type);
    }
    return;
  }
#endif
  for (int64_t i = 0; i < a->size; i += 16) {
    floats value;
    memcpy(&value, sums + i, 64);
    store16(y, i, a->size, value * scale, type);
  }
}

/* The queries as the kernels want them, and nothing seen yet. */
INLINE void begin_rows(const Attention *a, const Unit *unit, int64_t kv_head, int64_t first_row, int64_t num_rows,
                       Scratch *s, int type, int tiles) {
  int64_t size = a->size, width = padded(size), group = a->num_heads / a->num_kv_heads;
  int64_t num_all = a->num_heads + 2 * a->num_kv_heads, bytes = type == BFLOAT16 && PAIRS ? 2 : 4;
  const void *rows[ROWS];
  for (int64_t row = 0; row < num_rows; row++) {
    int64_t query = (first_row + row) / group, head = kv_head * group + (first_row + row) % group;
    rows[row] = at(a->qkv, ((unit->first_token + query) * num_all + head) * size, type);
  }
#if HAS_TILES
  if (tiles) {
    int64_t n = num_rows < 16 ? num_rows : 16, lanes = n <= 4 ? 4 : 16;
    if (n != s->tile_rows) shape_tiles(s->tile_rows = n);
    pair_queries((__m512i *)s->q, (const bf16 *const *)rows, num_rows, size);
    for (int64_t row = 0; row < (num_rows + lanes - 1) / lanes * lanes; row++) /* rows that only pad are like the last */
      for (int64_t lane = row % 16; lane < (lanes == 4 ? 16 : row % 16 + 1); lane += lanes) {
        int64_t position = unit->first_position + (first_row + (row < num_rows ? row : num_rows - 1)) / group;
        s->position[row / 16][lane] = (int32_t)position;
        s->low[row / 16][lane] = (int32_t)(position - a->window + 1 > 0 ? position - a->window + 1 : 0);
      }
    return;
  }
#endif
  for (int64_t row = 0; row < num_rows; row++) {
    char *to = s->q + row * width * bytes;
    memset(to, 0, (size_t)(width * bytes));
    if (type == BFLOAT16 && !PAIRS)
      for (int64_t i = 0; i < size; i++) ((float *)to)[i] = load(rows[row], i, type);
    else
      memcpy(to, rows[row], (size_t)(size * bytes));
  }
}

INLINE void attend_part(const Attention *a, const Unit *unit, int64_t kv_head, int64_t first_row, int64_t num_rows,
                        int64_t from, int64_t to, const Unit *next_unit, int64_t next_kv_head, Scratch *s, int type,
                        int tiles) {
  int64_t width = padded(a->size);
  const void *keys[2][KEYS], *values[2][KEYS];
  memset(s->sums, 0, (size_t)((num_rows + 15) / 16 * 16 * width) * 4);
  for (int64_t row = 0; row < num_rows; row++) s->weights[row] = all(0.0f), s->most[row] = -FLT_MAX;
  for (int tile = 0; tile < ROWS / 16; tile++) s->tile_weight[tile] = all(0.0f), s->tile_most[tile] = all(-FLT_MAX);
  int now = 0;
  find(a, unit, kv_head, from / KEYS * KEYS, keys[0], values[0], type);
  for (int64_t first = from / KEYS * KEYS; first < to; first += KEYS, now = !now) {
    int has_next = 1; /* whose keys and values are read ahead */
    if (first + KEYS < to)
      find(a, unit, kv_head, first + KEYS, keys[!now], values[!now], type);
    else if (next_unit)
      find(a, next_unit, next_kv_head, next_unit->low / KEYS * KEYS, keys[!now], values[!now], type);
    else
      has_next = 0;
#if HAS_TILES
    if (tiles) {
      attend_tiles(a, unit, num_rows, first, keys[now], values[now], has_next ? keys[!now] : NULL,
                   has_next ? values[!now] : NULL, s);
      continue;
    }
#endif
    attend_block(a, unit, first_row, num_rows, first, keys[now], values[now], s, type);
  }
  for (int64_t row = 0; row < num_rows; row++) {
    if (tiles)
      s->most[row] = s->tile_most[row / 16][row % 16], s->weight[row] = s->tile_weight[row / 16][row % 16];
    else
      s->weight[row] = sum(s->weights[row]);
  }
}

INLINE void attend_rows(const Attention *a, const Unit *unit, int64_t unit_index, int64_t kv_head, int64_t first_row,
                        int64_t num_rows, const Unit *next_unit, int64_t next_kv_head, Scratch *s, int type,
                        int tiles) {
  int64_t width = padded(a->size), group = a->num_heads / a->num_kv_heads;
  begin_rows(a, unit, kv_head, first_row, num_rows, s, type, tiles);
  int is_one = unit->low / PART == (unit->end - 1) / PART;
  for (int64_t from = unit->low; from < unit->end;) {
    int64_t to = (from / PART + 1) * PART;
    if (to > unit->end) to = unit->end;
    attend_part(a, unit, kv_head, first_row, num_rows, from, to, next_unit, next_kv_head, s, type, tiles);
    for (int64_t row = 0; row < num_rows && !is_one; row++) {
      float *total = s->total + row * width;
      if (from == unit->low) {
        memcpy(total, s->sums + row * width, (size_t)width * 4);
        s->total_weight[row] = s->weight[row], s->total_most[row] = s->most[row];
      } else {
        join(total, s->total_most + row, s->total_weight + row, s->sums + row * width, s->most[row], s->weight[row],
             width);
      }
    }
    from = to;
  }
  const float *sums = is_one ? s->sums : s->total, *weight = is_one ? s->weight : s->total_weight;
  for (int64_t row = 0; row < num_rows; row++) {
    if (unit->num_parts == 1) {
      write_row(a, unit, kv_head, first_row + row, sums + row * width, weight[row], type);
    } else {
      float *to = a->partial + ((unit_index * a->num_kv_heads + kv_head) * group + first_row + row) * (width + 2);
      memcpy(to, sums + row * width, (size_t)width * 4);
      to[width] = s->most[row], to[width + 1] = weight[row];
    }
  }
}

/* The last thread that is done with a part of a sequence joins them all. */
INLINE void finish_parts(const Attention *a, const Unit *unit, int64_t unit_index, int64_t kv_head, int type) {
  int64_t width = padded(a->size), group = a->num_heads / a->num_kv_heads, first = unit_index - unit->part;
  int32_t *num_done = a->num_done + first * a->num_kv_heads + kv_head;
  if (__atomic_add_fetch(num_done, 1, __ATOMIC_ACQ_REL) < unit->num_parts) return;
  *num_done = 0;
  for (int64_t row = 0; row < group; row++) {
    float *total = a->partial + ((first * a->num_kv_heads + kv_head) * group + row) * (width + 2);
    for (int part = 1; part < unit->num_parts; part++) {
      const float *next = total + part * a->num_kv_heads * group * (width + 2);
      join(total, total + width, total + width + 1, next, next[width], next[width + 1], width);
    }
    write_row(a, unit, kv_head, row, total, total[width + 1], type);
  }
}

INLINE void attend_tasks(const Attention *a, int64_t first, int64_t last, int type, int tiles) {
  Scratch s;
  s.tile_rows = 0;
  memset(s.scores, 0, sizeof s.scores);
  int64_t group = a->num_heads / a->num_kv_heads;
  for (int64_t task = first; task < last; task++) {
    int64_t index = task / a->num_kv_heads, kv_head = task % a->num_kv_heads, next = task + 1;
    const Unit *unit = a->units + index, *next_unit = next < last ? a->units + next / a->num_kv_heads : NULL;
    int64_t num_rows = unit->num_queries * group;
    for (int64_t row = 0; row < num_rows; row += ROWS)
      attend_rows(a, unit, index, kv_head, row, num_rows - row < ROWS ? num_rows - row : ROWS, next_unit,
                  next % a->num_kv_heads, &s, type, tiles);
    if (unit->num_parts > 1) finish_parts(a, unit, index, kv_head, type);
  }
#if HAS_TILES
  if (tiles) _tile_release(); /* they would be saved at every switch of threads */
#endif
}

static void attend_float32(const void *args, int64_t first, int64_t last) {
  attend_tasks(args, first, last, FLOAT32, 0);
}

static void attend_bfloat16(const void *args, int64_t first, int64_t last) {
  attend_tasks(args, first, last, BFLOAT16, 0);
}

#if HAS_TILES
static void attend_bfloat16_tiles(const void *args, int64_t first, int64_t last) {
  attend_tasks(args, first, last, BFLOAT16, 1);
}
#endif

void pagedray_attention(const void *qkv, const void *pages, void *y, const int32_t *tables, const int32_t *units,
                        float *partial, int32_t *num_done, int64_t num_units, int64_t max_blocks, int64_t num_heads,
                        int64_t num_kv_heads, int64_t size, int64_t block_size, int64_t window, float scale,
                        float softcap, int type, int64_t num_threads) {
  Attention args = {qkv,        pages,     y,            tables, (const Unit *)units, partial, num_done,
                    max_blocks, num_heads, num_kv_heads, size,   block_size,          window,  scale,
                    softcap};
  void (*work)(const void *, int64_t, int64_t) = type == FLOAT32 ? attend_float32 : attend_bfloat16;
#if HAS_TILES
  if (type == BFLOAT16 && may_use_tiles()) work = attend_bfloat16_tiles;
#endif
  int64_t num_tasks = num_units * num_kv_heads, step = num_tasks / (8 * num_threads);
  share(work, &args, num_tasks, step < 1 ? 1 : step, num_threads);
}
