// Work for several threads: PyTorch's own pool, so that the kernels and PyTorch share the cores.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace mini_vllm {

// Memory of one thread for what a kernel lays out anew at each call. It grows to the largest request and stays, since
// asking the system for some hundred kilobytes at each call costs more than a small product does.
template <class Element>
Element* scratch_memory(int64_t count) {
  thread_local std::vector<Element> memory;
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

constexpr int64_t ROW_ELEMENTS = 8192;  // below so many elements a second thread costs more than it brings

// body(row) for each row, where a row is some `width` elements.
template <class Body>
void for_each_row(int64_t rows, int64_t width, Body body) {
  at::parallel_for(0, rows, std::max<int64_t>(1, ROW_ELEMENTS / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) body(row);
  });
}

// What comes after a product: the matrix, and how many of its panels are multiplied together. Null: nothing.
template <class Element>
struct After {
  const Matrix<Element>* matrix = nullptr;
  int64_t together = 1;
};

// finish(x W^T), shared out.
template <class Element, class Finish>
void multiply_together(const PackedRows<Element>& x, const Matrix<Element>& w, const Finish& finish, std::vector<Ahead>& ahead,
                       After<Element> after = {}, Between* between = nullptr) {
  const int64_t threads = int64_t(ahead.size()), panels = w.panels() / Finish::PANELS;
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++) {
      const Share share(x.blocks(), panels, thread, threads);
      std::pair<Range, Range> following;
      if (after.matrix) {
        const Share next(x.blocks(), after.matrix->panels() / after.together, thread, threads);
        following = after.matrix->ranges(next.first, after.together);
      }
      multiply(x, w, share.first_block, share.last_block, share.first, share.last, finish, ahead[thread], following, between);
    }
    order_stores();
  });
}

// One `Ahead` for each thread.
inline std::vector<Ahead> one_a_thread(const void* readable) {
  return std::vector<Ahead>(at::get_num_threads(), Ahead(readable));
}

template <class Element>
void attend_together(const AttentionArguments<Element>& a, const AttentionPlan& plan) {
  for_each_row(int64_t(plan.early_tokens.size()), 2 * a.num_kv_heads * a.head_dim, [&](int64_t i) {
    write_token(a, plan.early_tokens[i], 0, a.num_kv_heads);
  });
  struct alignas(LINE) Cursor {
    std::atomic<size_t> next{0};
  };
  const int64_t threads = int64_t(plan.queues.size());
  std::vector<Cursor> cursors(threads);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    thread_local AttentionScratch<Element> scratch;
    // A thread takes its next task before it does this one, so that it can ask for the keys.
    for (int64_t thread = begin; thread < end; thread++)
      for (int64_t queue = thread; queue < thread + threads; queue++) {  // its own, then what others have left
        const std::vector<AttentionTask>& tasks = plan.queues[queue % threads];
        std::atomic<size_t>& next = cursors[queue % threads].next;
        for (size_t i = next++, following; i < tasks.size(); i = following) {
          following = next++;
          attend(a, tasks[i], following < tasks.size() ? &tasks[following] : nullptr, scratch);
        }
      }
  });
}

}  // namespace mini_vllm
