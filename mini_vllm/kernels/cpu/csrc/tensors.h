// PyTorch's tensors on their way into the kernels: checks, and where their elements lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "linear.h"

namespace mini_vllm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class Element>
Element* data_of(const Tensor& tensor) {
  return static_cast<Element*>(tensor.data_ptr());
}

template <class Element>
Element* data_of(const OptionalTensor& tensor) {
  return tensor ? data_of<Element>(*tensor) : nullptr;
}

// Calls `body` with a null pointer to the tensor's element type.
template <class Body>
inline void with_element_of(const Tensor& tensor, Body body) {
  if (tensor.scalar_type() == at::kFloat) return body(static_cast<float*>(nullptr));
  TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "float32 or bfloat16 is needed, got ", tensor.scalar_type());
  body(static_cast<bfloat16*>(nullptr));
}

inline void check_like(const Tensor& tensor, const Tensor& first, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == first.scalar_type(), name, " must be ", first.scalar_type());
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_rows(const Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.dim() >= 1 && tensor.stride(-1) == 1, name, ": elements of a row must lie side by side");
}

template <class Element>
Matrix<Element> matrix_of(const Tensor& packed, int64_t outputs, const OptionalTensor& bias) {
  return {data_of<Element>(packed), outputs, packed.size(1), data_of<Element>(bias)};
}

// Where the tokens and sequences of a step stand, and where their keys and values live.
struct StepPlaces {
  const Tensor &block_tables, &query_starts, &context_lens, &slot_mapping;

  int64_t sequences() const { return context_lens.size(0); }
};

inline void check_sequence(const StepPlaces& step, int64_t index, int64_t block_size, int64_t blocks) {
  const int32_t* starts = data_of<int32_t>(step.query_starts) + index;
  const int64_t count = starts[1] - starts[0], keys = data_of<int32_t>(step.context_lens)[index];
  const int64_t width = step.block_tables.size(1);
  TORCH_CHECK(count > 0 && count <= keys, "sequence ", index, " has ", count, " tokens in a context of ", keys);
  TORCH_CHECK(keys <= width * block_size, "sequence ", index, " has ", keys, " keys, its table has room for ", width * block_size);
  const int32_t* table = data_of<int32_t>(step.block_tables) + index * width;
  for (int64_t i = 0; i * block_size < keys; i++)
    TORCH_CHECK(table[i] >= 0 && table[i] < blocks, "sequence ", index, " has block ", table[i], ", there are ", blocks);
}

// That nothing outside of a cache of `blocks` blocks is read or written.
inline void check_step(const StepPlaces& step, int64_t tokens, int64_t block_size, int64_t blocks) {
  const int64_t sequences = step.sequences();
  for (const Tensor* tensor : {&step.block_tables, &step.query_starts, &step.context_lens})
    TORCH_CHECK(tensor->scalar_type() == at::kInt && tensor->is_contiguous(), "tables, starts and lengths must be int32");
  TORCH_CHECK(step.slot_mapping.scalar_type() == at::kLong && step.slot_mapping.is_contiguous(), "slot_mapping must be int64");
  TORCH_CHECK(step.slot_mapping.size(0) == tokens, "slot_mapping must have ", tokens, " entries, got ", step.slot_mapping.size(0));
  TORCH_CHECK(step.block_tables.dim() == 2 && step.block_tables.size(0) == sequences, "there must be a table for each of ",
              sequences, " sequences, got ", step.block_tables.sizes());
  const int32_t* starts = data_of<int32_t>(step.query_starts);
  TORCH_CHECK(step.query_starts.size(0) == sequences + 1 && starts[0] == 0 && starts[sequences] == tokens,
              "query_starts must go from 0 to the ", tokens, " tokens in ", sequences, " sequences");
  for (int64_t i = 0; i < sequences; i++) check_sequence(step, i, block_size, blocks);
  for (int64_t i = 0; i < tokens; i++) {
    const int64_t slot = data_of<int64_t>(step.slot_mapping)[i];
    TORCH_CHECK(slot >= 0 && slot < blocks * block_size, "slot ", slot, " lies outside of ", blocks * block_size);
  }
}

}  // namespace mini_vllm
