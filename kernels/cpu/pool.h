// The threads that all CPU kernels of a process share.
//
// A kernel calls `for_each`, which returns when every item is done. Between two calls the workers spin for SPIN_MICROSECONDS, so that
// the kernels of a step follow one another without a wake-up, and then park. The caller takes items too, and waits for no worker that
// comes late. It does wait for the item that a worker has begun: where the system has taken the CPU from that worker, the caller
// yields its own. Which thread computes an item must not change its result.

#ifndef JAXSERVE_KERNELS_CPU_POOL_H_
#define JAXSERVE_KERNELS_CPU_POOL_H_

#include <cstdint>

namespace jaxserve {

using Item = void (*)(void* context, int64_t index);

// Runs item(context, i) for i in [0, count). Where another thread is inside already, the caller computes all items alone.
void for_each(int64_t count, Item item, void* context);

// The same with a lambda of the index.
template <typename F>
void for_each(int64_t count, F& f) {
  for_each(count, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &f);
}

// Threads that compute, the caller included. Takes effect at the next `for_each`.
void set_num_threads(int num_threads);
int num_threads();

}  // namespace jaxserve

#endif
