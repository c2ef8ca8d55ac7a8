/* See rms_norm.py, whose roundings these are. */
#include "numbers.h"
#include "team.h"

typedef struct {
  const void *x, *w;
  void *r, *y; /* r: NULL without a residual */
  int64_t num_groups, size, x_token, x_group, r_token, r_group;
  float eps;
} Norm;

INLINE void norm_rows(const Norm *a, int64_t first, int64_t last, int type, int w_type) {
  int64_t size = a->size;
  for (int64_t row = first; row < last; row++) {
    int64_t token = row / a->num_groups, group = row % a->num_groups;
    const void *x = at(a->x, token * a->x_token + group * a->x_group, type);
    const void *w = at(a->w, group * size, w_type);
    void *y = (void *)at(a->y, row * size, type);
    void *r = a->r ? (void *)at(a->r, token * a->r_token + group * a->r_group, type) : NULL;
    floats squares = {0};
    for (int64_t i = 0; i < size; i += 16) {
      floats value = load16(x, i, size, type);
      if (r) {
        value = round16(value + load16(r, i, size, type), type);
        store16(r, i, size, value, type);
      }
      squares += value * value;
    }
    floats scale = all(1.0f / sqrtf(sum(squares) / (float)size + a->eps));
    for (int64_t i = 0; i < size; i += 16) {
      floats value = round16(load16(r ? r : x, i, size, type) * scale, w_type);
      store16(y, i, size, value * load16(w, i, size, w_type), type);
    }
  }
}

static void norm_float32(const void *args, int64_t first, int64_t last) {
  norm_rows(args, first, last, FLOAT32, FLOAT32);
}

static void norm_bfloat16(const void *args, int64_t first, int64_t last) {
  norm_rows(args, first, last, BFLOAT16, BFLOAT16);
}

static void norm_bfloat16_wide(const void *args, int64_t first, int64_t last) {
  norm_rows(args, first, last, BFLOAT16, FLOAT32);
}

void pagedray_rms_norm(const void *x, void *r, const void *w, void *y, int64_t num_tokens, int64_t num_groups,
                       int64_t size, int64_t x_token, int64_t x_group, int64_t r_token, int64_t r_group, float eps,
                       int type, int w_type, int64_t num_threads) {
  Norm args = {x, w, r, y, num_groups, size, x_token, x_group, r_token, r_group, eps};
  int64_t rows_at_once = 1 + 8192 / size; /* less would not be worth a thread's start */
  share(type == FLOAT32 ? norm_float32 : w_type == FLOAT32 ? norm_bfloat16_wide : norm_bfloat16, &args,
        num_tokens * num_groups, rows_at_once, num_threads);
}
