// The operator `decoder_layers`: checks and memory.
#pragma once

#include <ATen/ops/empty.h>

#include <array>

#include "share_out.h"
#include "tensors.h"

namespace mini_vllm {

// `weights` holds six tensors a layer: input norm, post-attention norm, and the packed qkv, output, gate_up and down;
// `biases` the last four's.
struct LayerTensors {
  at::TensorList weights;
  const c10::List<OptionalTensor>& biases;
  double eps;
  at::TensorList key_caches, value_caches;
  at::IntArrayRef windows;

  int64_t count() const { return int64_t(windows.size()); }
  int64_t num_blocks() const {
    int64_t fewest = key_caches[0].size(0);
    for (at::TensorList list : {key_caches, value_caches})
      for (const Tensor& cache : list) fewest = std::min(fewest, cache.size(0));
    return fewest;
  }
};

inline void check_layers(const LayerTensors& tensors, const Tensor& hidden) {
  const int64_t layers = tensors.count();
  TORCH_CHECK(layers > 0, "there must be layers");
  TORCH_CHECK(int64_t(tensors.weights.size()) == 6 * layers && int64_t(tensors.biases.size()) == 4 * layers,
              "six weights and four biases a layer");
  TORCH_CHECK(int64_t(tensors.key_caches.size()) == layers && int64_t(tensors.value_caches.size()) == layers, "one cache a layer");
  for (at::TensorList list : {tensors.weights, tensors.key_caches, tensors.value_caches})
    for (const Tensor& tensor : list) check_like(tensor, hidden, "a weight or cache");
}

// Layer `index`, its sizes checked. `widths`: outputs of qkv, output, gate_up and down.
template <class Element>
DecoderLayer<Element> layer_of(const LayerTensors& tensors, int64_t index, const AttentionArguments<Element>& a,
                               const std::array<int64_t, 4>& widths, const Tensor& hidden) {
  const auto w = tensors.weights.slice(6 * index, 6);
  const int64_t width = hidden.size(1), attended_width = a.num_heads * a.head_dim;
  const std::array<int64_t, 4> inputs{width, attended_width, width, widths[2] / 2};
  for (int64_t i : {0, 1}) TORCH_CHECK(w[i].numel() == width, "a norm of a layer must be [", width, "]");
  const auto matrix = [&](int64_t i) {
    const Tensor& packed = w[2 + i];
    const OptionalTensor bias = tensors.biases.get(4 * index + i);
    if (bias) check_like(*bias, hidden, "bias");
    TORCH_CHECK(packed.size(0) == num_panels(widths[i]) && packed.size(1) == inputs[i], "a weight of a layer has another size");
    TORCH_CHECK(!bias || bias->numel() == widths[i], "a bias of a layer has another size");
    return matrix_of<Element>(packed, widths[i], bias);
  };
  const Tensor &keys = tensors.key_caches[index], &values = tensors.value_caches[index];
  for (const Tensor* cache : {&keys, &values})
    TORCH_CHECK(cache->size(1) == a.num_kv_heads && cache->size(2) == a.layout.size(), "the cache has another layout");
  return {data_of<Element>(w[0]), data_of<Element>(w[1]), float(tensors.eps), matrix(0), matrix(1), matrix(2), matrix(3),
          data_of<Element>(keys), data_of<Element>(values), tensors.windows[index]};
}

// What is known of a step's tokens and sequences.
struct StepTensors {
  Tensor hidden, cos, sin, slot_mapping;             // of each token
  Tensor block_tables, query_starts, context_lens;   // of each sequence

  int64_t tokens() const { return hidden.size(0); }
  int64_t sequences() const { return context_lens.size(0); }
};

inline void check_angles(const StepTensors& step, int64_t head_dim) {
  for (const Tensor* angles : {&step.cos, &step.sin}) {
    check_like(*angles, step.hidden, "cos and sin");
    TORCH_CHECK(angles->numel() == step.tokens() * head_dim / 2, "cos and sin must be [tokens, 1, head_dim / 2]");
  }
}

// The sizes of a model's layers.
struct DecoderSizes {
  int64_t num_heads, num_kv_heads, head_dim, width, inner_width, block_size;
  float scale, softcap;
  bool only_last_tokens;

  int64_t attended_width() const { return num_heads * head_dim; }
  int64_t qkv_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  // A token's products are so many multiplications in a layer, a key that it sees 2 * attended_width; and attention takes
  // about twice as long for a multiplication. So a token costs as much as seeing so many keys:
  int64_t token_cost() const {
    return width * (qkv_width() + attended_width() + 3 * inner_width) / (4 * attended_width());
  }
};

// `step` through all layers.
inline Tensor run_layers(const LayerTensors& tensors, const DecoderSizes& sizes, const StepTensors& step) {
  const int64_t tokens = step.tokens(), width = sizes.width, qkv_width = sizes.qkv_width();
  const auto memory = [&](int64_t columns) { return at::empty({tokens, columns}, step.hidden.options()); };
  const Tensor middle = memory(width), qkv = memory(qkv_width), attended = memory(sizes.attended_width());
  const Tensor rows = memory(std::max(width, sizes.attended_width()) + SEGMENT<bfloat16>), inner = memory(sizes.inner_width);
  Tensor result = step.hidden.clone(at::MemoryFormat::Contiguous);
  with_element_of(result, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    const BlockLayout<Element> layout{sizes.block_size, (sizes.head_dim + LANES - 1) / LANES * LANES};
    const Element *query = data_of<Element>(qkv), *key = query + sizes.attended_width();
    const AttentionArguments<Element> attention{
        query, key, key + sizes.num_kv_heads * sizes.head_dim, qkv_width, qkv_width, qkv_width, nullptr, nullptr,
        data_of<int32_t>(step.block_tables), data_of<int64_t>(step.slot_mapping), data_of<Element>(attended),
        step.block_tables.size(1), sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, layout, sizes.scale, sizes.softcap, 0};
    DecoderStep<Element> shared{
        {}, {data_of<Element>(result), data_of<Element>(middle), data_of<Element>(qkv), data_of<Element>(attended),
             data_of<Element>(rows), data_of<Element>(inner)},
        attention, data_of<int32_t>(step.query_starts), data_of<int32_t>(step.context_lens), step.sequences(),
        data_of<Element>(step.cos), data_of<Element>(step.sin), sizes.only_last_tokens, sizes.token_cost()};
    for (int64_t i = 0; i < tensors.count(); i++)
      shared.layers.push_back(layer_of(tensors, i, attention, {qkv_width, width, 2 * sizes.inner_width, width}, result));
    SharedStep<Element>(shared).run();
  });
  return result;
}

// All layers of a model, or a run of them. Layers are alike but for their windows. With `only_last_tokens`, rows of the result
// that are not the last of a sequence are undefined.
inline Tensor decoder_layers(const Tensor& hidden, at::TensorList weights, const c10::List<OptionalTensor>& biases, double eps,
                             int64_t num_heads, int64_t num_kv_heads, const Tensor& cos, const Tensor& sin,
                             at::TensorList key_caches, at::TensorList value_caches, const Tensor& block_tables,
                             const Tensor& query_starts, const Tensor& context_lens, const Tensor& slot_mapping,
                             int64_t block_size, double scale, double softcap, at::IntArrayRef windows, bool only_last_tokens) {
  const LayerTensors tensors{weights, biases, eps, key_caches, value_caches, windows};
  check_layers(tensors, hidden);
  TORCH_CHECK(num_heads % num_kv_heads == 0, "num_kv_heads must divide num_heads");
  const DecoderSizes sizes{num_heads, num_kv_heads, 2 * cos.size(-1), hidden.size(1), weights[5].size(1), block_size,
                           float(scale), float(softcap), only_last_tokens};
  TORCH_CHECK(sizes.inner_width % PANEL == 0, "the inner width must be a multiple of ", PANEL, ", got ", sizes.inner_width);
  const StepTensors step{hidden, cos, sin, slot_mapping, block_tables, query_starts, context_lens};
  check_step({block_tables, query_starts, context_lens, slot_mapping}, step.tokens(), block_size, tensors.num_blocks());
  check_angles(step, sizes.head_dim);
  TORCH_CHECK(scale > 0, "scale must be positive");
  return run_layers(tensors, sizes, step);
}

}  // namespace mini_vllm
