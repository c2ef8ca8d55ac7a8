/* See write_qkv.py, whose roundings these are. */
#include "numbers.h"
#include "team.h"

typedef struct {
  void *qkv, *pages;
  const int64_t *slots;
  const void *cos, *sin, *w; /* w: NULL without a norm */
  int64_t num_heads, num_kv_heads, size, num_rotated, block_size, cos_token, sin_token;
  float eps;
} Write;

INLINE void norm_head(void *x, const void *w, int64_t size, float eps, int type, int w_type) {
  floats squares = {0};
  for (int64_t i = 0; i < size; i += 16) {
    floats value = load16(x, i, size, type);
    squares += value * value;
  }
  floats scale = all(1.0f / sqrtf(sum(squares) / (float)size + eps));
  for (int64_t i = 0; i < size; i += 16) {
    floats value = round16(load16(x, i, size, type) * scale, w_type);
    store16(x, i, size, value * load16(w, i, size, w_type), type);
  }
}

INLINE void rotate_head(void *x, const void *cos, const void *sin, int64_t half, int type) {
  void *high = (void *)at(x, half, type);
  const void *high_cos = at(cos, half, type), *high_sin = at(sin, half, type);
  for (int64_t i = 0; i < half; i += 16) {
    floats a = load16(x, i, half, type), b = load16(high, i, half, type);
    floats first = round16(a * load16(cos, i, half, type), type);
    floats second = round16(b * load16(high_cos, i, half, type), type);
    store16(x, i, half, first + b * load16(sin, i, half, type), type);
    store16(high, i, half, second + a * load16(high_sin, i, half, type), type);
  }
}

INLINE void make_finite(void *x, int64_t size, int type) {
  floats most = all(type == BFLOAT16 ? 3.3895314e38f : 3.4028235e38f);
  for (int64_t i = 0; i < size; i += 16) {
    floats value = load16(x, i, size, type);
    ints is_small = (value <= most) & (value >= -most);
    floats bounded = pick(value == value, pick(value > most, most, -most), all(0.0f));
    store16(x, i, size, pick(is_small, value, bounded), type);
  }
}

INLINE void write_tokens(const Write *a, int64_t first, int64_t last, int type, int w_type) {
  int64_t size = a->size, kv = a->num_kv_heads, rotated = a->num_heads + kv;
  for (int64_t token = first; token < last; token++) {
    int64_t block = a->slots[token] / a->block_size, offset = a->slots[token] % a->block_size;
    const void *cos = at(a->cos, token * a->cos_token, type), *sin = at(a->sin, token * a->sin_token, type);
    for (int64_t head = 0; head < rotated + kv; head++) {
      void *x = (void *)at(a->qkv, (token * (rotated + kv) + head) * size, type);
      if (head < rotated) {
        if (a->w) norm_head(x, at(a->w, head * size, w_type), size, a->eps, type, w_type);
        rotate_head(x, cos, sin, a->num_rotated / 2, type);
      }
      int64_t row = head - a->num_heads; /* of the block's keys, then values */
      if (row >= 0) {
        make_finite(x, size, type);
        memcpy((void *)at(a->pages, ((block * 2 * kv + row) * a->block_size + offset) * size, type), x,
               (size_t)size * (type == BFLOAT16 ? 2 : 4));
      }
    }
  }
}

static void write_float32(const void *args, int64_t first, int64_t last) {
  write_tokens(args, first, last, FLOAT32, FLOAT32);
}

static void write_bfloat16(const void *args, int64_t first, int64_t last) {
  write_tokens(args, first, last, BFLOAT16, BFLOAT16);
}

static void write_bfloat16_wide(const void *args, int64_t first, int64_t last) {
  write_tokens(args, first, last, BFLOAT16, FLOAT32);
}

void pagedray_write_qkv(void *qkv, void *pages, const int64_t *slots, const void *cos, const void *sin, const void *w,
                        int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t size,
                        int64_t num_rotated, int64_t block_size, int64_t cos_token, int64_t sin_token, float eps,
                        int type, int w_type, int64_t num_threads) {
  Write args = {qkv,  pages,       slots,      cos,       sin,       w,  num_heads, num_kv_heads,
                size, num_rotated, block_size, cos_token, sin_token, eps};
  int64_t tokens_at_once = 1 + 8192 / ((num_heads + 2 * num_kv_heads) * size);
  share(type == FLOAT32 ? write_float32 : w_type == FLOAT32 ? write_bfloat16_wide : write_bfloat16, &args, num_tokens,
        tokens_at_once, num_threads);
}
