/* Loops over torch's own team of OpenMP threads. A second team would have to share the cores with the first, whose
 * threads spin for a while after each of torch's operators. */
#pragma once
#include <stdint.h>

/* Libgomp's and libomp's entry point for a parallel region: calls work(loop) on each of num_threads threads. */
typedef void (*Team)(void (*work)(void *), void *loop, unsigned num_threads, unsigned flags);

extern Team team;

typedef struct {
  void (*work)(const void *args, int64_t first, int64_t last);
  const void *args;
  int64_t num_items, step;
  int64_t next;
} Loop;

static void take_turns(void *pointer) {
  Loop *loop = pointer;
  for (;;) {
    int64_t first = __atomic_fetch_add(&loop->next, loop->step, __ATOMIC_RELAXED);
    if (first >= loop->num_items) return;
    int64_t last = first + loop->step;
    loop->work(loop->args, first, last < loop->num_items ? last : loop->num_items);
  }
}

/* work(args, first, last) for all items, `step` at a time in any order; on this thread alone where that is all. */
static inline void share(void (*work)(const void *, int64_t, int64_t), const void *args, int64_t num_items,
                         int64_t step, int64_t num_threads) {
  int64_t turns = (num_items + step - 1) / step;
  if (num_threads > turns) num_threads = turns;
  if (num_threads <= 1) {
    work(args, 0, num_items);
    return;
  }
  Loop loop = {work, args, num_items, step, 0};
  team(take_turns, &loop, (unsigned)num_threads, 0);
}
