// A run of decoder layers in the way of Llama, start to end in one call.
//
//   hidden -> norm -> qkv -> rotary -> attention -> output + hidden -> norm -> gate, up -> SiLU * -> down + -> hidden
//
// A step of one token is some three hundred of these pieces, and calling each from Python takes longer than what most of
// them do. Together they also know what comes next, and ask the memory for it (ahead.h); a norm lays its rows down as the
// product reads them, and gate and up meet before either is written.
//
// Exactness: every piece rounds where it would round if it were called by itself, so the bits are the same. (A residual is
// added before the product is rounded, as `linear` does.)
#pragma once

#include "elementwise.h"
#include "parallel.h"

namespace mini_vllm {

template <class Element>
struct DecoderLayer {
  const Element *input_norm, *post_attention_norm;
  float eps;
  Matrix<Element> qkv, output, gate_up, down;
  Element *keys, *values;  // the cache
  int64_t window;

  int64_t weights() const { return qkv.inputs * qkv.outputs + output.inputs * output.outputs + 3 * down.inputs * down.outputs; }
};

// Sequences [first, last) of a step.
struct Part {
  int64_t first, last;
};

constexpr int64_t MIN_PART_ROWS = 16;  // below so many a thread would wait for the weights

// A step cut into one part a thread, alike in cost within an eighth; where that cannot be, one part for all threads. A
// thread that has sequences of its own waits for nobody and shares no line of a cache, but it reads all weights by itself,
// so it needs enough rows to be busy meanwhile. It rests on the block manager's rule that no sequence reads a block which
// another one writes in the same step. A token costs `token_cost` plus the keys that it sees.
inline std::vector<Part> parts_of(const int32_t* query_starts, const int32_t* context_lens, int64_t sequences,
                                  int64_t token_cost, int64_t threads) {
  const std::vector<Part> whole{{0, sequences}};
  if (threads == 1 || query_starts[sequences] < threads * MIN_PART_ROWS) return whole;
  std::vector<int64_t> costs{0};
  for (int64_t i = 0; i < sequences; i++)
    costs.push_back(costs.back() + (query_starts[i + 1] - query_starts[i]) * (token_cost + context_lens[i]));
  std::vector<Part> parts;
  for (int64_t i = 0, first = 0; i < threads; i++) {
    const int64_t wanted = costs.back() * (i + 1) / threads;
    int64_t last = std::lower_bound(costs.begin(), costs.end(), wanted) - costs.begin();
    if (last > first + 1 && wanted - costs[last - 1] < costs[last] - wanted) last--;
    if (last <= first || (costs[last] - costs[first]) * threads > costs.back() + costs.back() / 8) return whole;
    parts.push_back({first, last});
    first = last;
  }
  return parts;
}

// silu(gate) * up, laid down as the next product reads it. Panels come in pairs: one of gates, one of ups.
template <class Element>
struct StoreGated {
  static constexpr int PANELS = 2;
  const Element* bias;  // [2 * width] or null: gates, then ups
  const PackedRows<Element>& inner;

  void operator()(const float (*sums)[MAX_ROWS][PANEL], int64_t row, int count, int64_t panel) const {
    constexpr int WIDTH = Step<Element>::WIDTH;
    const int64_t width = inner.inputs, block = inner.block_of(row), begin = inner.start(block);
    Element* to = inner.data + begin * width + panel * PANEL * count;
    for (int r = 0; r < count; r++) {
      Element values[PANEL];
      for (int half = 0; half < PANEL; half += LANES) {
        Element rounded[2][LANES];
        for (int i = 0; i < 2; i++) {
          Floats sum = load(sums[i][r] + half);
          if (bias) sum += load(bias + i * width + panel * PANEL + half);
          store(rounded[i], sum);
        }
        store(values + half, gated(load(rounded[0]), load(rounded[1])));
      }
      for (int k = 0; k < PANEL; k += WIDTH)
        std::memcpy(to + k * count + r * WIDTH, values + k, sizeof(Element) * WIDTH);
    }
  }
};

// Where intermediate results lie; the same memory in every layer.
template <class Element>
struct DecoderMemory {
  Element *hidden, *middle;       // [tokens, hidden]
  Element *qkv, *attended;        // [tokens, heads of all kinds * head_dim], [tokens, num_heads * head_dim]
  Element *rows, *inner;          // packed: the input of the next product, and of the last one
};

// For each thread, where the keys of its tasks lie in a layer's cache, nothing of blocks behind the window. What is used
// first is asked for last: if the cache cannot hold all of it, what goes is what was wanted last.
template <class Element>
std::vector<std::vector<int64_t>> cache_offsets(const AttentionArguments<Element>& a, const AttentionPlan& plan, int64_t window) {
  const int64_t block_size = a.layout.block_size, bytes = a.layout.size() * int64_t(sizeof(Element));  // of one head
  std::vector<std::vector<int64_t>> offsets(plan.queues.size());
  for (size_t thread = 0; thread < offsets.size(); thread++) {
    for (const AttentionTask& task : plan.queues[thread]) {
      if (!task.is_last) continue;
      const int32_t* table = a.block_tables + task.sequence * a.table_width;
      const int64_t oldest = window > 0 ? std::max<int64_t>(0, task.keys - window) : 0;
      for (int64_t block = oldest / block_size; block * block_size < task.keys; block++)
        for (int64_t byte = 0; byte < bytes; byte += STRETCH)
          offsets[thread].push_back((table[block] * a.num_kv_heads + task.kv_head) * bytes + byte);
    }
    std::reverse(offsets[thread].begin(), offsets[thread].end());
  }
  return offsets;
}

template <class Element>
class Decoder {
 public:
  Decoder(DecoderMemory<Element> memory, int64_t tokens, AttentionArguments<Element> attention, const AttentionPlan& plan,
          const Element* cos, const Element* sin, const std::vector<std::vector<int64_t>>& cache_offsets)
      : m_(memory), tokens_(tokens), a_(attention), plan_(plan), cos_(cos), sin_(sin), cache_offsets_(cache_offsets),
        ahead_(plan.queues.size(), Ahead(memory.hidden)) {}

  // `next` is the layer that follows, or null.
  void run(const DecoderLayer<Element>& layer, const DecoderLayer<Element>* next) {
    const int64_t width = layer.qkv.inputs;
    normalize(m_.hidden, layer.input_norm, layer.eps, width);
    multiply_together(packed(width), layer.qkv, StoreRows<Element, Element>{layer.qkv.bias, nullptr, m_.qkv, layer.qkv.outputs},
                      ahead_, {&layer.output});
    attend(layer);
    look_ahead(next);
    const int64_t attended = layer.output.inputs;
    const PackedRows<Element> rows = packed(attended);
    for_each_row(tokens_, attended, [&](int64_t row) { rows.put(row, m_.attended + row * attended); });
    multiply_together(rows, layer.output, StoreRows<Element, Element>{layer.output.bias, m_.hidden, m_.middle, width}, ahead_,
                      {&layer.gate_up, 2});
    normalize(m_.middle, layer.post_attention_norm, layer.eps, width);
    const PackedRows<Element> inner{m_.inner, tokens_, layer.down.inputs};
    multiply_together(packed(width), layer.gate_up, StoreGated<Element>{layer.gate_up.bias, inner}, ahead_, {&layer.down});
    multiply_together(inner, layer.down, StoreRows<Element, Element>{layer.down.bias, m_.middle, m_.hidden, width}, ahead_,
                      {next ? &next->qkv : nullptr});
  }

 private:
  PackedRows<Element> packed(int64_t inputs) const { return {m_.rows, tokens_, inputs}; }

  void normalize(const Element* x, const Element* weight, float eps, int64_t width) {
    const PackedRows<Element> rows = packed(width);
    for_each_row(tokens_, width, [&](int64_t row) {
      Element* normalized = scratch_memory<Element>(width);
      rms_norm_row(x + row * width, weight, eps, width, normalized);
      rows.put(row, normalized);
    });
  }

  void attend(const DecoderLayer<Element>& layer) {
    const int64_t half = a_.head_dim / 2, turned = a_.num_heads + a_.num_kv_heads;
    for_each_row(tokens_, turned * a_.head_dim, [&](int64_t token) {
      for (int64_t head = 0; head < turned; head++)
        rotate_head(m_.qkv + token * a_.query_stride + head * a_.head_dim, cos_ + token * half, sin_ + token * half, half);
    });
    a_.key_cache = layer.keys, a_.value_cache = layer.values, a_.window = layer.window;
    attend_together(a_, plan_);
  }

  // What is left of the last layer's list is let go: its attention is over.
  void look_ahead(const DecoderLayer<Element>* next) {
    if (!next) return;
    const int64_t weights = next->qkv.bytes() + next->output.bytes() + next->gate_up.bytes() + next->down.bytes();
    // A block of rows takes a line of weights in each step and there are two, so half the blocks are busy with weights.
    const int64_t threads = int64_t(ahead_.size()), blocks = packed(1).blocks();
    for (int64_t thread = 0; thread < threads; thread++) {
      const CacheAhead cache{&cache_offsets_[thread], reinterpret_cast<const char*>(next->keys),
                             reinterpret_cast<const char*>(next->values)};
      const int64_t wanted = weights + threads * int64_t(cache.size()) * STRETCH;
      ahead_[thread].cache(cache, blocks > 1 && wanted > weights * blocks / 2);
    }
  }

  DecoderMemory<Element> m_;
  int64_t tokens_;
  AttentionArguments<Element> a_;
  const AttentionPlan& plan_;
  const Element *cos_, *sin_;
  const std::vector<std::vector<int64_t>>& cache_offsets_;  // see above
  std::vector<Ahead> ahead_;
};

}  // namespace mini_vllm
