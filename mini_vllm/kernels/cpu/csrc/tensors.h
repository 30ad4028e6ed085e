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

// Where a step's tokens stand and where their keys and values live, checked.
inline void check_step(const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens, const Tensor& slot_mapping) {
  for (const Tensor* tensor : {&block_tables, &query_starts, &context_lens})
    TORCH_CHECK(tensor->scalar_type() == at::kInt && tensor->is_contiguous(), "tables, starts and lengths must be int32");
  TORCH_CHECK(slot_mapping.scalar_type() == at::kLong && slot_mapping.is_contiguous(), "slot_mapping must be int64");
}

inline void check_tokens(int64_t tokens, const Tensor& query_starts, const Tensor& context_lens, const Tensor& slot_mapping) {
  const int64_t sequences = context_lens.size(0);
  TORCH_CHECK(query_starts.size(0) == sequences + 1 && data_of<int32_t>(query_starts)[sequences] == tokens,
              "query_starts must go from 0 to the ", tokens, " tokens in ", sequences, " sequences");
  TORCH_CHECK(slot_mapping.size(0) == tokens, "slot_mapping must have ", tokens, " entries, got ", slot_mapping.size(0));
}

}  // namespace mini_vllm
