// A step of decoder layers shared out among threads.
//
// Few rows: all threads compute every piece together (`run_together`), for the weights are what costs time, and each thread
// reads its part of them. Many rows: each thread takes sequences of its own through all layers. It waits for nobody and
// shares no line of a cache. It rests on the block manager's rule that no sequence reads a block which another one writes in
// the same step.
//
// A thread with sequences of its own and rows enough takes them in two halves, and does the attention of one half task by
// task between the panels of the other's products. Products ask for the keys of the next task meanwhile, which are in the
// second-level cache when it begins: the multipliers and the memory are busy at the same time.
//
//   first half    | products 1 |            | products 2 |            | products 3 |
//     attention                |  .  .  .  .|            |  .  .  .  .|
//   second half                | products 1 |            | products 2 |               "products 2": behind the attention
//     attention   |            |            |  .  .  .  .|            |  .  .  .  .|   of layer 1 to before that of layer 2
//
// Cores are not alike at all times: a neighbour on the same host takes some of one's time. So a thread that is done takes
// half of the sequences of one that is not, at the next beginning of a layer. Who computes a row changes no bit of it.
#pragma once

#include <mutex>
#include <thread>

#include "decoder.h"

namespace mini_vllm {

constexpr int64_t MIN_PART_ROWS = 14;   // below so many a thread would wait for the weights
constexpr int64_t MIN_HALVED_ROWS = 32; // below so many two halves do not pay for reading the weights twice

// Where a stretch of running sums ends that begins at `first` and should end at `wanted`: at the nearest sum behind `first`.
inline int64_t nearest(const std::vector<int64_t>& sums, int64_t wanted, int64_t first) {
  int64_t last = std::lower_bound(sums.begin(), sums.end(), wanted) - sums.begin();
  if (last > first + 1 && wanted - sums[last - 1] < sums[last] - wanted) last--;
  return last;
}

// Cuts a part into `count` of which none costs over an eighth more than their average; where that cannot be, it stays one.
template <class Element>
std::vector<Part> cut(const DecoderStep<Element>& step, Part part, int64_t count) {
  std::vector<int64_t> sums{0};
  for (int64_t i = part.first; i < part.last; i++) sums.push_back(sums.back() + step.cost_of(i));
  std::vector<Part> parts;
  for (int64_t i = 0, first = 0; i < count; i++) {
    const int64_t last = nearest(sums, sums.back() * (i + 1) / count, first);
    if (last <= first || (sums[last] - sums[first]) * count > sums.back() + sums.back() / 8) return {part};
    parts.push_back({part.first + first, part.first + last});
    first = last;
  }
  return parts;
}

// The attention of one group, done between the panels of another one's products.
template <class Element>
class PendingAttention final : public Between {
 public:
  // `layer`: whose weights the products read; `rows`: of the other group. `ahead`: of the thread that does both.
  PendingAttention(const Group<Element>& group, const DecoderLayer<Element>& layer, int64_t rows, Ahead& ahead)
      : group_(group), ahead_(ahead) {
    int64_t all = 0;
    for (const AttentionTask& task : group.tasks()) all += cost(task);
    const int64_t work = rows * layer.weights() / PANEL;
    cost_of_work_ = double(all) / double(work);
    // A step of a product has up to MAX_ROWS rows and Step::WIDTH inputs, and asks for one line or two.
    const int64_t steps = work / (MAX_ROWS * Step<Element>::WIDTH);
    two_lines_ = layer.bytes() + 2 * int64_t(group.keys().offsets.size()) * STRETCH > steps * LINE;
    ask();
  }

  void operator()(int64_t work) override {
    due_ += cost_of_work_ * double(work);
    while (next_ < int64_t(group_.tasks().size()) && due_ > 0) run();
  }
  // What is left of it when the products are done.
  void finish() {
    while (next_ < int64_t(group_.tasks().size())) run();
  }

 private:
  static int64_t cost(const AttentionTask& task) { return task.tokens * task.heads * task.keys; }

  void ask() {
    const bool is_over = next_ == int64_t(group_.tasks().size());
    const auto& a = group_.attention();
    ahead_.cache(is_over ? CacheAhead{} : group_.keys().ahead(a.key_cache, a.value_cache, next_, next_ + 1, false), two_lines_);
  }

  void run() {
    thread_local AttentionScratch<Element> scratch;
    const AttentionTask& task = group_.tasks()[next_++];
    attend(group_.attention(), task, nullptr, scratch);
    due_ -= double(cost(task));
    ask();
  }

  const Group<Element>& group_;
  Ahead& ahead_;
  int64_t next_ = 0;
  double cost_of_work_, due_ = 0;
  bool two_lines_;
};

// Sequences that are to go through the layers from `layer` on.
struct Work {
  Part part;
  int64_t layer;
};

// What there is to do, and how many threads have nothing to do.
class WorkList {
 public:
  explicit WorkList(const std::vector<Part>& parts) : unfinished_(int64_t(parts.size())) {
    for (const Part& part : parts) waiting_.push_back({part, 0});
  }
  // Whether a thread waits for work. A hint: another one may have given it some by now.
  bool is_wanted() const { return wanted_.load(std::memory_order_relaxed) > 0; }

  void give(Work work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(work);
    unfinished_++;
    count();
  }
  // Waits for work; false once all of it is done.
  bool take(Work& work) {
    for (bool is_idle = false;; std::this_thread::yield()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      const bool is_found = !waiting_.empty(), is_over = unfinished_ == 0;
      if (is_found) {
        work = waiting_.back();
        waiting_.pop_back();
      }
      idle_ += int64_t(!is_found && !is_over) - int64_t(is_idle);
      is_idle = !is_found && !is_over;
      count();
      if (!is_idle) return is_found;
    }
  }
  // Counts a work as finished when it goes, also where the work has thrown: the others would wait for it.
  struct Finish {
    WorkList& list;
    ~Finish() {
      const std::lock_guard<std::mutex> lock(list.mutex_);
      list.unfinished_--;
    }
  };

 private:
  void count() { wanted_.store(idle_ - int64_t(waiting_.size()), std::memory_order_relaxed); }

  std::mutex mutex_;
  std::vector<Work> waiting_;
  int64_t unfinished_, idle_ = 0;
  std::atomic<int64_t> wanted_{0};
};

template <class Element>
class SharedStep {
 public:
  explicit SharedStep(const DecoderStep<Element>& step)
      : step_(step), layers_(step.layers), count_(int64_t(step.layers.size())) {}

  void run() {
    const int64_t threads = at::get_num_threads();
    const Part whole{0, step_.sequences};
    std::vector<Part> parts{whole};
    if (step_.tokens_of(0, step_.sequences) >= threads * MIN_PART_ROWS) parts = cut(step_, whole, threads);
    if (int64_t(parts.size()) < threads) return run_together(whole, threads);
    WorkList list(parts);
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      for (Work work; list.take(work);) {
        const WorkList::Finish finish{list};
        run_alone(work, list);
      }
    });
  }

 private:
  // All threads, one piece after the other.
  void run_together(Part part, int64_t threads) {
    Group<Element> group(step_, part, threads);
    for (int64_t i = 0; i < count_; i++) run_layer(group, i);
  }

  void run_layer(Group<Element>& group, int64_t i) {
    const DecoderLayer<Element>* next = i + 1 < count_ ? &layers_[i + 1] : nullptr;
    group.before_attention(layers_[i], {&layers_[i].output});
    group.attend(layers_[i]);
    if (next) group.look_ahead(*next);
    group.after_attention(layers_[i], {next ? &next->qkv : nullptr});
  }

  // One thread. Where another one has nothing to do, it gives half of its sequences away.
  void run_alone(Work work, WorkList& list) {
    while (work.layer < count_) {
      const std::vector<Part> halves = halves_of(work.part);
      if (halves.size() == 2 && list.is_wanted()) {
        list.give({halves[1], work.layer});
        work.part = halves[0];
      } else {
        work.layer = advance(work, halves, list);
      }
    }
  }

  // A part in two, or itself where that would be uneven or too little.
  std::vector<Part> halves_of(Part part) const {
    if (step_.tokens_of(part.first, part.last) < MIN_PART_ROWS) return {part};
    return cut(step_, part, 2);
  }

  // Takes a part on to the end, or until it has something to give to a thread that has nothing to do; returns the layer that
  // comes next.
  int64_t advance(Work work, const std::vector<Part>& halves, const WorkList& list) {
    if (halves.size() == 2 && step_.tokens_of(work.part.first, work.part.last) >= MIN_HALVED_ROWS) {
      Group<Element> one(step_, halves[0], 1), two(step_, halves[1], 1);
      if (each_has_one_task(one) && each_has_one_task(two)) return advance_in_turns(one, two, work.layer, list);
    }
    Group<Element> group(step_, work.part, 1);
    int64_t layer = work.layer;
    do run_layer(group, layer++);
    while (layer < count_ && !(halves.size() == 2 && list.is_wanted()));
    return layer;
  }

  // Whether every sequence writes and reads its keys in one task, so that nothing must be written ahead of all tasks.
  static bool each_has_one_task(const Group<Element>& group) {
    const auto& tasks = group.tasks();
    return std::all_of(tasks.begin(), tasks.end(), [](const AttentionTask& task) { return task.writes; });
  }

  // See the picture at the beginning.
  int64_t advance_in_turns(Group<Element>& one, Group<Element>& two, const int64_t from, const WorkList& list) {
    one.before_attention(layers_[from], {&layers_[from].qkv});
    for (int64_t i = from;; i++) {
      const DecoderLayer<Element>& layer = layers_[i];
      {
        PendingAttention<Element> attention(one, layer, two.tokens(), two.ahead());
        if (i > from) two.after_attention(layers_[i - 1], {&layer.qkv}, &attention);
        two.before_attention(layer, {&layer.output}, &attention);
        attention.finish();
      }
      const bool is_end = i + 1 == count_ || list.is_wanted();
      const DecoderLayer<Element>& next = layers_[is_end ? i : i + 1];
      {
        PendingAttention<Element> attention(two, layer, one.tokens(), one.ahead());
        one.after_attention(layer, {is_end ? &layer.output : &next.qkv}, &attention);
        if (!is_end) one.before_attention(next, {&layer.output}, &attention);
        attention.finish();
      }
      if (is_end) {
        two.after_attention(layer, {});
        return i + 1;
      }
    }
  }

  const DecoderStep<Element>& step_;
  const std::vector<DecoderLayer<Element>>& layers_;
  const int64_t count_;
};

}  // namespace mini_vllm
