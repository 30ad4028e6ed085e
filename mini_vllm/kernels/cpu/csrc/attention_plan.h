// Attention of a step cut into tasks, and who begins with which.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mini_vllm {

constexpr int TASK_ROWS = 48;  // rows that share one pass over the keys
constexpr int MANY_SEQUENCES = 4;  // for each thread: so many can be shared out evenly without cutting them by heads

// Queries [first_token, first_token + tokens) of a sequence, and the key heads [first_head, first_head + heads) with all the
// query heads that share them.
struct AttentionTask {
  int64_t sequence, first_head, heads, first_token, tokens;
  int64_t keys;  // that its last query sees
  // It writes the keys and values of its tokens: they are all that the sequence has in this step, and the block manager
  // never lets a sequence read a block that another one writes in the same step.
  bool writes;
  bool is_last;  // of the tasks of this sequence and head, the one that sees most
};

// What there is to do in a step, the same in every layer: for each thread the tasks that it begins with, long ones first,
// and the tokens whose keys and values must be there before the first task begins.
//
// Each thread has tasks of its own because it asks for their keys ahead (ahead.h): cores need not share a cache. One that
// is done early takes from the others. Who computes a task changes no bit of it.
struct AttentionPlan {
  std::vector<std::vector<AttentionTask>> queues;  // one a thread
  std::vector<int64_t> early_tokens;

  AttentionPlan(const int32_t* query_starts, const int32_t* context_lens, int64_t sequences, int64_t num_kv_heads,
                int64_t group, int64_t threads)
      : queues(threads) {
    const int64_t task_tokens = std::max<int64_t>(1, TASK_ROWS / group);
    // A block's heads lie side by side, and memory gives long stretches faster. So few tokens see them all at once, if there
    // are tasks enough for all threads.
    const bool has_many = threads == 1 || sequences >= MANY_SEQUENCES * threads;
    std::vector<AttentionTask> tasks;
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
      const int64_t begin = query_starts[sequence], end = query_starts[sequence + 1];
      const bool writes = end - begin <= task_tokens;
      for (int64_t last = end; last > begin; last -= task_tokens) {
        const int64_t first = std::max(begin, last - task_tokens), keys = context_lens[sequence] - (end - last);
        const bool is_small = has_many && (last - first) * group * num_kv_heads <= TASK_ROWS;
        const int64_t heads = is_small ? num_kv_heads : 1;
        for (int64_t head = 0; head < num_kv_heads; head += heads)
          tasks.push_back({sequence, head, heads, first, last - first, keys, writes, last == end});
      }
      for (int64_t token = begin; token < end && !writes; token++) early_tokens.push_back(token);
    }
    const auto cost = [](const AttentionTask& task) { return task.keys * task.tokens * task.heads; };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const auto& one, const auto& other) { return cost(one) > cost(other); });
    std::vector<int64_t> costs(threads);
    for (const AttentionTask& task : tasks) {
      const auto least = std::min_element(costs.begin(), costs.end());
      *least += cost(task);
      queues[least - costs.begin()].push_back(task);
    }
  }

  // For a layer behind which only the last token of each sequence is read. All keys and values must be written still.
  AttentionPlan last_tasks() const {
    AttentionPlan plan = *this;
    for (auto& queue : plan.queues)
      queue.erase(std::remove_if(queue.begin(), queue.end(), [](const auto& task) { return !task.is_last; }), queue.end());
    return plan;
  }
};

}  // namespace mini_vllm
