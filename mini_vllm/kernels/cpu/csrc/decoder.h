// Decoder layers in the way of Llama, for a group of sequences of a step.
//
//   hidden -> norm -> qkv -> rotary -> attention -> output + hidden -> norm -> gate, up -> SiLU * -> down + -> hidden
//
// A step of one token is some three hundred of these pieces, and calling each from Python takes longer than what most of
// them do. Together they also know what comes next, and ask the memory for it (ahead.h); a norm lays its rows down as the
// product reads them, and gate and up meet before either is written. Many rows go through the pieces in windows, so that
// what one piece writes is still in the caches when the next one reads it. Which groups there are, and who computes them,
// is decided in share_out.h.
//
// Exactness: every piece rounds where it would round if it were called by itself, so the bits are the same. (A residual is
// added before the product is rounded, as `linear` does.)
#pragma once

#include "elementwise.h"
#include "parallel.h"

namespace mini_vllm {

// Of rows, for each thread: so many go through several pieces at a time. Threads share a window by panels (Share in linear.h).
constexpr int64_t WINDOW_BLOCKS = CHUNK_BLOCKS / 2;

template <class Element>
struct DecoderLayer {
  const Element *input_norm, *post_attention_norm;
  float eps;
  Matrix<Element> qkv, output, gate_up, down;
  Element *keys, *values;  // the cache
  int64_t window;

  int64_t weights() const { return qkv.inputs * qkv.outputs + output.inputs * output.outputs + 3 * down.inputs * down.outputs; }
  int64_t bytes() const { return qkv.bytes() + output.bytes() + gate_up.bytes() + down.bytes(); }
};

// Where intermediate results lie; the same memory in every layer.
template <class Element>
struct DecoderMemory {
  Element *hidden, *middle;       // [tokens, hidden]
  Element *qkv, *attended;        // [tokens, heads of all kinds * head_dim], [tokens, num_heads * head_dim]
  Element *rows, *inner;          // packed: the input of the next product, and of the last one
};

// A step of some layers: what all groups of sequences share.
template <class Element>
struct DecoderStep {
  std::vector<DecoderLayer<Element>> layers;
  DecoderMemory<Element> memory;
  AttentionArguments<Element> attention;  // of all tokens; caches and window are the layer's
  const int32_t *query_starts, *context_lens;
  int64_t sequences;
  const Element *cos, *sin;               // [tokens, head_dim / 2]
  bool only_last_tokens;                  // what is read behind the last layer: the last token of each sequence
  int64_t token_cost;                     // beside this, a token costs one for each key that it sees

  int64_t hidden_width() const { return layers[0].qkv.inputs; }
  int64_t attended_width() const { return attention.num_heads * attention.head_dim; }
  int64_t tokens_of(int64_t first, int64_t last) const { return query_starts[last] - query_starts[first]; }
  int64_t cost_of(int64_t sequence) const {
    return tokens_of(sequence, sequence + 1) * (token_cost + context_lens[sequence]);
  }
  // The largest window of a layer; 0: some layer sees all keys.
  int64_t widest_window() const {
    int64_t widest = 0;
    for (const auto& layer : layers) {
      if (layer.window == 0) return 0;
      widest = std::max(widest, layer.window);
    }
    return widest;
  }
};

// Sequences [first, last) of a step.
struct Part {
  int64_t first, last;
};

// silu(gate) * up, laid down as the next product reads it. Panels come in pairs: one of gates, one of ups.
template <class Element>
struct StoreGated {
  static constexpr int PANELS = 2;
  const Element* bias;  // [2 * width] or null: gates, then ups
  const PackedRows<Element>& inner;

  void operator()(const float (*sums)[MAX_ROWS][PANEL], int64_t row, int count, int64_t panel) const {
    for (int r = 0; r < count; r++) {
      const auto to = inner.row(row + r);
      for (int half = 0; half < PANEL; half += LANES) {
        const int64_t column = panel * PANEL + half;
        Floats rounded[2];
        for (int i = 0; i < 2; i++) {
          Floats sum = load(sums[i][r] + half);
          if (bias) sum += load(bias + i * inner.inputs + column);
          rounded[i] = rounded_to<Element>(sum);
        }
        store(to(column), gated<Element>(rounded[0], rounded[1]));
      }
    }
  }
};

// For each of a thread's tasks, where its keys lie in a layer's cache, in stretches; nothing of blocks behind the window.
struct TaskKeys {
  std::vector<int64_t> offsets;    // bytes from the beginning of the cache
  std::vector<int64_t> starts{0};  // task i has offsets [starts[i], starts[i + 1])

  template <class Element>
  TaskKeys(const AttentionArguments<Element>& a, const std::vector<AttentionTask>& tasks, int64_t window) {
    const int64_t block_size = a.layout.block_size, bytes = a.layout.size() * int64_t(sizeof(Element));  // of one head
    for (const AttentionTask& task : tasks) {
      const int32_t* table = a.block_tables + task.sequence * a.table_width;
      const int64_t oldest = window > 0 ? std::max<int64_t>(0, task.keys - window) : 0;
      if (task.is_last)
        for (int64_t block = oldest / block_size; block * block_size < task.keys; block++)
          for (int64_t byte = 0; byte < task.heads * bytes; byte += STRETCH)
            offsets.push_back((table[block] * a.num_kv_heads + task.first_head) * bytes + byte);
      starts.push_back(int64_t(offsets.size()));
    }
  }
  CacheAhead ahead(const void* keys, const void* values, int64_t first, int64_t last, bool backwards) const {
    return {offsets.data() + starts[first], starts[last] - starts[first], static_cast<const char*>(keys),
            static_cast<const char*>(values), backwards};
  }
};

// A group of sequences on its way through the layers, computed by some threads together or by one.
template <class Element>
class Group {
 public:
  Group(const DecoderStep<Element>& step, Part part, int64_t threads)
      : first_(step.query_starts[part.first]), tokens_(step.tokens_of(part.first, part.last)), m_(memory_of(step)),
        a_(attention_of(step, part)), plan_(plan_of(step, part, threads)), cos_(step.cos + first_ * a_.head_dim / 2),
        sin_(step.sin + first_ * a_.head_dim / 2), ahead_(threads, Ahead(m_.hidden)) {
    for (const auto& queue : plan_.queues) keys_.emplace_back(a_, queue, step.widest_window());
    if (!step.only_last_tokens || tokens_ == part.last - part.first) return;
    short_layer_ = &step.layers.back();
    for (int64_t i = part.first; i < part.last; i++) last_tokens_.push_back(step.query_starts[i + 1] - 1 - first_);
  }

  // Norm, product and rotary embedding. `after`: the matrix that these threads multiply by next.
  void before_attention(const DecoderLayer<Element>& layer, After<Element> after, Between* between = nullptr) {
    const int64_t width = layer.qkv.inputs, half = a_.head_dim / 2, turned = a_.num_heads + a_.num_kv_heads;
    for_each_window([&](int64_t first, int64_t count, bool is_last) {
      Element* qkv = m_.qkv + first * a_.query_stride;
      const PackedRows<Element> rows{m_.rows, count, width};
      normalize(m_.hidden + first * width, layer.input_norm, layer.eps, rows);
      multiply_together(rows, layer.qkv, StoreRows<Element, Element>{layer.qkv.bias, nullptr, qkv, layer.qkv.outputs}, ahead_,
                        is_last ? after : After<Element>{&layer.qkv}, between);
      for_each_row(count, turned * a_.head_dim, [&](int64_t row) {
        const int64_t angles = (first + row) * half;
        for (int64_t head = 0; head < turned; head++)
          rotate_head(qkv + row * a_.query_stride + head * a_.head_dim, cos_ + angles, sin_ + angles, half);
      });
    });
    a_.key_cache = layer.keys, a_.value_cache = layer.values, a_.window = layer.window;
  }

  // All of a layer's attention, between `before_attention` and `after_attention`.
  void attend(const DecoderLayer<Element>& layer) {
    if (&layer == short_layer_) attend_together(a_, plan_.last_tasks());
    else attend_together(a_, plan_);
  }

  // Everything behind attention.
  void after_attention(const DecoderLayer<Element>& layer, After<Element> after, Between* between = nullptr) {
    const int64_t attended = layer.output.inputs, width = layer.qkv.inputs;
    if (&layer == short_layer_) keep_last_tokens(width, attended);
    for_each_window([&](int64_t first, int64_t count, bool is_last) {
      const PackedRows<Element> outputs{m_.rows, count, attended}, rows{m_.rows, count, width};
      const PackedRows<Element> inner{m_.inner, count, layer.down.inputs};
      Element *hidden = m_.hidden + first * width, *middle = m_.middle;
      const auto add_to = [&](Element* residual, const Matrix<Element>& matrix, Element* sum) {
        return StoreRows<Element, Element>{matrix.bias, residual, sum, width};
      };
      for_each_row(count, attended, [&](int64_t row) { outputs.put(row, m_.attended + (first + row) * attended); });
      multiply_together(outputs, layer.output, add_to(hidden, layer.output, middle), ahead_, {&layer.gate_up, 2}, between);
      normalize(middle, layer.post_attention_norm, layer.eps, rows);
      multiply_together(rows, layer.gate_up, StoreGated<Element>{layer.gate_up.bias, inner}, ahead_, {&layer.down}, between);
      multiply_together(inner, layer.down, add_to(middle, layer.down, hidden), ahead_,
                        is_last ? after : After<Element>{&layer.output}, between);
    });
    if (&layer == short_layer_) put_back_last_tokens(width);
  }

  // Has the next products ask for the keys of layer `next`; of the last layer's nothing more, its attention is over.
  void look_ahead(const DecoderLayer<Element>& next) {
    // A block of rows takes a line of weights in each step and there are two, so half the blocks are busy with weights.
    const int64_t threads = int64_t(ahead_.size()), blocks = PackedRows<Element>{m_.rows, tokens_, 1}.blocks();
    for (int64_t thread = 0; thread < threads; thread++) {
      const CacheAhead cache = keys_[thread].ahead(next.keys, next.values, 0, int64_t(plan_.queues[thread].size()), true);
      const int64_t wanted = next.bytes() + threads * cache.stretches() * STRETCH;
      ahead_[thread].cache(cache, blocks > 1 && wanted > next.bytes() * blocks / 2);
    }
  }

  int64_t tokens() const { return tokens_; }
  // For a group that one thread computes: its tasks, where their keys lie, and what the thread asks the memory for.
  const AttentionArguments<Element>& attention() const { return a_; }
  const std::vector<AttentionTask>& tasks() const { return plan_.queues[0]; }
  const TaskKeys& keys() const { return keys_[0]; }
  Ahead& ahead() { return ahead_[0]; }

 private:
  DecoderMemory<Element> memory_of(const DecoderStep<Element>& step) const {
    const DecoderMemory<Element>& m = step.memory;
    const int64_t width = step.hidden_width(), attended = step.attended_width();
    return {m.hidden + first_ * width, m.middle + first_ * width, m.qkv + first_ * step.attention.query_stride,
            m.attended + first_ * attended, m.rows + first_ * PackedRows<Element>::padded(std::max(width, attended)),
            m.inner + first_ * step.layers[0].down.inputs};
  }

  AttentionArguments<Element> attention_of(const DecoderStep<Element>& step, Part part) const {
    AttentionArguments<Element> a = step.attention;
    a.query += first_ * a.query_stride, a.key += first_ * a.key_stride, a.value += first_ * a.value_stride;
    a.block_tables += part.first * a.table_width, a.slot_mapping += first_, a.output += first_ * step.attended_width();
    return a;
  }

  AttentionPlan plan_of(const DecoderStep<Element>& step, Part part, int64_t threads) const {
    std::vector<int32_t> starts;
    for (int64_t i = part.first; i <= part.last; i++) starts.push_back(step.query_starts[i] - int32_t(first_));
    return AttentionPlan(starts.data(), step.context_lens + part.first, part.last - part.first, step.attention.num_kv_heads,
                         step.attention.group(), threads);
  }

  // The rows in portions that go through several pieces while the caches hold them: body(first, count, is last).
  template <class Body>
  void for_each_window(Body body) const {
    const PackedRows<Element> all{m_.rows, tokens_, 1};
    const int64_t most = WINDOW_BLOCKS * int64_t(ahead_.size()), windows = (all.blocks() + most - 1) / most;
    const auto start = [&](int64_t window) { return all.start(all.blocks() * window / windows); };
    for (int64_t i = 0; i < windows; i++) body(start(i), start(i + 1) - start(i), i + 1 == windows);
  }

  // The rows of the last tokens move to the front, and only they go on. Row i is
  // at or before the i-th last token, and those rise, so none is written over that is still to be moved.
  void keep_last_tokens(int64_t width, int64_t attended) {
    tokens_ = int64_t(last_tokens_.size());
    for (int64_t i = 0; i < tokens_; i++) {
      std::memmove(m_.hidden + i * width, m_.hidden + last_tokens_[i] * width, width * sizeof(Element));
      std::memmove(m_.attended + i * attended, m_.attended + last_tokens_[i] * attended, attended * sizeof(Element));
    }
  }
  void put_back_last_tokens(int64_t width) {
    for (int64_t i = tokens_ - 1; i >= 0; i--)
      std::memmove(m_.hidden + last_tokens_[i] * width, m_.hidden + i * width, width * sizeof(Element));
  }

  void normalize(const Element* x, const Element* weight, float eps, const PackedRows<Element>& rows) {
    for_each_row(rows.rows, rows.inputs, [&](int64_t row) {
      rms_norm_row(x + row * rows.inputs, weight, eps, rows.inputs, rows.row(row));
    });
  }

  int64_t first_, tokens_;  // of the step's tokens
  const DecoderLayer<Element>* short_layer_ = nullptr;  // the one behind which only these rows go on
  std::vector<int64_t> last_tokens_;
  DecoderMemory<Element> m_;
  AttentionArguments<Element> a_;
  AttentionPlan plan_;
  const Element *cos_, *sin_;
  std::vector<TaskKeys> keys_;  // one a thread
  std::vector<Ahead> ahead_;    // one a thread
};

}  // namespace mini_vllm
