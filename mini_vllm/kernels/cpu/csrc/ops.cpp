// The kernels as PyTorch operators, `torch.ops.mini_vllm_cpu.*`: checks, memory, and which thread does what.
//
// The work is shared out with at::parallel_for, so that the kernels and PyTorch use one pool of threads. Registered
// operators release Python's lock while they run.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "decoder_op.h"
#include "sampler.h"
#include "screen.h"

namespace mini_vllm {
namespace {

// ---- linear ------------------------------------------------------------------------------------------------------

void pack_linear(const Tensor& weight, const Tensor& packed) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be [outputs, inputs] and contiguous");
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  TORCH_CHECK(inputs % 2 == 0, "an even number of inputs is needed, got ", inputs);
  check_like(packed, weight, "packed");
  TORCH_CHECK(packed.numel() == num_panels(outputs) * inputs * PANEL, "packed has another size");
  with_element_of(weight, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    at::parallel_for(0, num_panels(outputs), 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; panel++)
        pack_panel(data_of<Element>(weight), outputs, inputs, panel, data_of<Element>(packed));
    });
  });
}

Tensor linear_op(const Tensor& x, const Tensor& packed, int64_t outputs, const OptionalTensor& bias,
                 const OptionalTensor& residual, bool float32_output) {
  check_rows(x, "x");
  TORCH_CHECK(x.dim() == 2 && x.size(1) == packed.size(1), "x must be [rows, ", packed.size(1), "], got ", x.sizes());
  check_like(packed, x, "weight");
  if (bias) check_like(*bias, x, "bias");
  TORCH_CHECK(packed.size(0) == num_panels(outputs), "the weight has ", packed.size(0), " panels, not those of ", outputs);
  TORCH_CHECK(!bias || bias->numel() == outputs, "bias must be [", outputs, "]");
  if (residual) check_like(*residual, x, "residual");
  TORCH_CHECK(!residual || (residual->size(0) == x.size(0) && residual->size(1) == outputs), "residual has another shape");
  Tensor y = at::empty({x.size(0), outputs}, float32_output ? x.options().dtype(at::kFloat) : x.options());
  with_element_of(x, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    const int64_t width = x.size(1);
    const PackedRows<Element> rows{scratch_memory<Element>(x.size(0) * PackedRows<Element>::padded(width)), x.size(0), width};
    for_each_row(rows.rows, width, [&](int64_t row) { rows.put(row, data_of<Element>(x) + row * x.stride(0)); });
    std::vector<Ahead> ahead = one_a_thread(rows.data);
    const auto run = [&](auto* to) {
      using Output = std::remove_pointer_t<decltype(to)>;
      multiply_together(rows, matrix_of<Element>(packed, outputs, bias),
                        StoreRows<Element, Output>{data_of<Element>(bias), data_of<Element>(residual), to, outputs}, ahead);
    };
    if (float32_output) run(data_of<float>(y));
    else run(data_of<Element>(y));
  });
  return y;
}

// A matrix of bytes for `best_outputs`, packed as `linear` wants it.
void pack_bytes(const Tensor& codes, const Tensor& packed) {
  TORCH_CHECK(codes.dim() == 2 && codes.is_contiguous() && codes.scalar_type() == at::kChar, "codes must be [outputs, inputs] int8");
  const int64_t outputs = codes.size(0), inputs = codes.size(1);
  TORCH_CHECK(inputs % Step<int8_t>::WIDTH == 0 && inputs <= MOST_BYTES, "the inputs must be a multiple of ",
              Step<int8_t>::WIDTH, " up to ", MOST_BYTES, ", got ", inputs);
  check_like(packed, codes, "packed");
  TORCH_CHECK(packed.numel() == num_panels(outputs) * inputs * PANEL, "packed has another size");
  at::parallel_for(0, num_panels(outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++)
      pack_panel(data_of<int8_t>(codes), outputs, inputs, panel, data_of<int8_t>(packed));
  });
}

// Values, their outputs, and whether they were found: see screen.h. If not, values and outputs are undefined.
std::tuple<Tensor, Tensor, bool> best_outputs_op(const Tensor& x, const Tensor& packed, int64_t outputs, const Tensor& codes,
                                                 const Tensor& scales, const Tensor& norms, const Tensor& zeros, double error, double lost,
                                                 const Tensor& left, const Tensor& right) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) == packed.size(1), "x must be [rows, ", packed.size(1), "]");
  check_like(packed, x, "weight");
  TORCH_CHECK(packed.size(0) == num_panels(outputs), "the weight has ", packed.size(0), " panels, not those of ", outputs);
  TORCH_CHECK(codes.scalar_type() == at::kChar && codes.sizes() == packed.sizes() && codes.is_contiguous(), "codes must be ",
              packed.sizes(), " int8");
  for (const Tensor* numbers : {&scales, &norms, &left, &right})
    TORCH_CHECK(numbers->scalar_type() == at::kFloat && numbers->is_contiguous(), "numbers must be float32 and contiguous");
  TORCH_CHECK(zeros.scalar_type() == at::kInt && zeros.is_contiguous(), "zeros must be int32");
  TORCH_CHECK(std::isfinite(error) && std::isfinite(lost), "error and lost must be numbers");
  TORCH_CHECK(left.dim() == 2 && right.dim() == 2 && left.size(0) == left.size(1) && right.size(0) == right.size(1) &&
                  left.size(0) * right.size(0) == x.size(1),
              "left and right must be square and make up the width of x");
  for (const Tensor* numbers : {&scales, &norms, &zeros})
    TORCH_CHECK(numbers->numel() == num_panels(outputs) * PANEL, "there must be a number for each output of all panels");
  const int64_t rows = x.size(0);
  Tensor values = at::empty({rows}, scales.options()), places = at::empty({rows}, x.options().dtype(at::kLong));
  const Screen screen{{data_of<int8_t>(codes), outputs, codes.size(1), nullptr}, data_of<float>(scales), data_of<float>(norms),
                      data_of<int32_t>(zeros), float(error), float(lost),
                      {data_of<float>(left), data_of<float>(right), left.size(0), right.size(0)}};
  std::vector<Candidate> best(rows);
  bool is_found = false;
  with_element_of(x, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    is_found = best_outputs(data_of<Element>(x), rows, matrix_of<Element>(packed, outputs, {}), screen,
                            best.data());
  });
  for (int64_t row = 0; row < rows; row++)
    data_of<float>(values)[row] = best[row].value, data_of<int64_t>(places)[row] = best[row].token_id;
  return {values, places, is_found};
}

bool multiplies_bytes() { return MULTIPLIES_BYTES; }

// ---- element by element ------------------------------------------------------------------------------------------

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_rows(x, "x");
  check_like(weight, x, "weight");
  const int64_t width = x.size(-1);
  TORCH_CHECK(weight.numel() == width, "weight must be [", width, "], got ", weight.sizes());
  const Tensor rows = x.is_contiguous() || x.dim() == 2 ? x : x.contiguous();
  const int64_t stride = rows.dim() == 2 ? rows.stride(0) : width;
  Tensor y = at::empty(x.sizes(), x.options());
  with_element_of(x, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    for_each_row(x.numel() / width, width, [&](int64_t row) {
      rms_norm_row(data_of<Element>(rows) + row * stride, data_of<Element>(weight), float(eps), width,
                   [&](int64_t i) { return data_of<Element>(y) + row * width + i; });
    });
  });
  return y;
}

void rotate(const Tensor& heads, const Tensor& cos, const Tensor& sin) {
  check_rows(heads, "heads");
  check_like(cos, heads, "cos");
  check_like(sin, heads, "sin");
  const int64_t half = cos.size(-1), count = heads.size(1);
  TORCH_CHECK(heads.dim() == 3 && heads.size(2) == 2 * half, "heads must be [tokens, heads, ", 2 * half, "]");
  with_element_of(heads, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    for_each_row(heads.size(0), 2 * half * count, [&](int64_t token) {
      for (int64_t head = 0; head < count; head++)
        rotate_head(data_of<Element>(heads) + token * heads.stride(0) + head * heads.stride(1),
                    data_of<Element>(cos) + token * half, data_of<Element>(sin) + token * half, half);
    });
  });
}

Tensor silu_and_mul(const Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.is_contiguous(), "gate_up must be [rows, 2 * width] and contiguous");
  const int64_t width = gate_up.size(1) / 2;
  Tensor y = at::empty({gate_up.size(0), width}, gate_up.options());
  with_element_of(gate_up, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    for_each_row(gate_up.size(0), width, [&](int64_t row) {
      silu_and_mul_row(data_of<Element>(gate_up) + row * 2 * width, width, data_of<Element>(y) + row * width);
    });
  });
  return y;
}

Tensor activate(const Tensor& x, int64_t kind) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "x must be [rows, width], a row's elements side by side");
  const int64_t width = x.size(1), stride = x.stride(0);
  Tensor y = at::empty(x.sizes(), x.options());
  with_element_of(x, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    for_each_row(x.size(0), width, [&](int64_t row) {
      activate_row(Activation(kind), data_of<Element>(x) + row * stride, width, data_of<Element>(y) + row * width);
    });
  });
  return y;
}

// ---- attention ---------------------------------------------------------------------------------------------------

AttentionPlan plan_of(const Tensor& query_starts, const Tensor& context_lens, int64_t num_heads, int64_t num_kv_heads) {
  TORCH_CHECK(num_heads % num_kv_heads == 0, "num_kv_heads must divide num_heads");
  return AttentionPlan(data_of<int32_t>(query_starts), data_of<int32_t>(context_lens), context_lens.size(0), num_kv_heads,
                       num_heads / num_kv_heads, at::get_num_threads());
}

Tensor paged_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& block_tables, const Tensor& query_starts,
                       const Tensor& context_lens, const Tensor& slot_mapping, int64_t block_size, double scale,
                       double softcap, int64_t window) {
  const int64_t num_heads = query.size(1), num_kv_heads = key.size(1), head_dim = query.size(2);
  for (const Tensor* tensor : {&query, &key, &value})
    TORCH_CHECK(tensor->dim() == 3 && tensor->size(2) == head_dim && tensor->stride(2) == 1 && tensor->stride(1) == head_dim,
                "query, key and value must be [tokens, heads, ", head_dim, "], a token's heads side by side");
  check_like(key_cache, query, "key_cache");
  check_like(value_cache, query, "value_cache");
  check_step({block_tables, query_starts, context_lens, slot_mapping}, query.size(0), block_size,
             std::min(key_cache.size(0), value_cache.size(0)));
  TORCH_CHECK(scale > 0, "scale must be positive");  // the largest score is looked for before it is scaled
  Tensor output = at::empty({query.size(0), num_heads, head_dim}, query.options());
  with_element_of(query, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    const BlockLayout<Element> layout{block_size, (head_dim + LANES - 1) / LANES * LANES};
    TORCH_CHECK(key_cache.size(1) == num_kv_heads && key_cache.size(2) == layout.size(), "the cache has another layout");
    attend_together(
        AttentionArguments<Element>{
            data_of<Element>(query), data_of<Element>(key), data_of<Element>(value), query.stride(0), key.stride(0),
            value.stride(0), data_of<Element>(key_cache), data_of<Element>(value_cache), data_of<int32_t>(block_tables),
            data_of<int64_t>(slot_mapping), data_of<Element>(output), block_tables.size(1), num_heads, num_kv_heads, head_dim,
            layout, float(scale), float(softcap), window},
        plan_of(query_starts, context_lens, num_heads, num_kv_heads));
  });
  return output;
}

// ---- sampler -----------------------------------------------------------------------------------------------------

void check_logits(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_contiguous(),
              "logits must be [rows, vocabulary] float32 and contiguous");
}

std::tuple<Tensor, Tensor> best_tokens(const Tensor& logits) {
  check_logits(logits);
  Tensor values = at::empty({logits.size(0)}, logits.options());
  Tensor token_ids = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const Candidate best = best_of(data_of<float>(logits) + row * logits.size(1), logits.size(1));
      data_of<float>(values)[row] = best.value;
      data_of<int64_t>(token_ids)[row] = best.token_id;
    }
  });
  return {values, token_ids};
}

// The entries of one draw in lists that are sorted by draw.
Pairs pairs_of(const OptionalTensor& draws, const OptionalTensor& token_ids, const OptionalTensor& values, int64_t draw) {
  if (!draws) return {};
  const int64_t* first = data_of<int64_t>(*draws);
  const auto range = std::equal_range(first, first + draws->numel(), draw);
  return {data_of<int64_t>(token_ids), data_of<float>(values), range.first - first, range.second - first};
}

// `numbers` [6, W]: temperature, top_p, min_p, repetition, presence and frequency penalty.
// `integers` [5, W]: row of the logits, top_k, seed, sample index, position.
std::tuple<Tensor, Tensor> draw_tokens(const Tensor& logits, const Tensor& numbers, const Tensor& integers,
                                       const OptionalTensor& grammar_mask, const OptionalTensor& allowed_draws,
                                       const OptionalTensor& allowed_token_ids, const OptionalTensor& forbidden_draws,
                                       const OptionalTensor& forbidden_token_ids, const OptionalTensor& bias_draws,
                                       const OptionalTensor& bias_token_ids, const OptionalTensor& bias_values,
                                       const OptionalTensor& history_draws, const OptionalTensor& prompt,
                                       const OptionalTensor& output) {
  check_logits(logits);
  const int64_t draws = integers.size(1), vocab_size = logits.size(1);
  Tensor token_ids = at::empty({draws}, logits.options().dtype(at::kLong));
  Tensor has_no_token = at::empty({draws}, logits.options().dtype(at::kBool));
  const auto number = [&](int64_t field, int64_t draw) { return data_of<float>(numbers)[field * draws + draw]; };
  const auto integer = [&](int64_t field, int64_t draw) { return data_of<int64_t>(integers)[field * draws + draw]; };
  at::parallel_for(0, draws, 1, [&](int64_t begin, int64_t end) {
    thread_local SamplerScratch scratch;
    for (int64_t i = begin; i < end; i++) {
      DrawArguments a{};
      a.row = data_of<float>(logits) + integer(0, i) * vocab_size;
      a.vocab_size = vocab_size;
      a.temperature = number(0, i), a.top_p = number(1, i), a.min_p = number(2, i);
      a.repetition = number(3, i), a.presence = number(4, i), a.frequency = number(5, i);
      a.top_k = integer(1, i);
      a.key = noise_key(integer(2, i), integer(3, i), integer(4, i));
      a.allowed = pairs_of(allowed_draws, allowed_token_ids, {}, i);
      a.forbidden = pairs_of(forbidden_draws, forbidden_token_ids, {}, i);
      a.bias = pairs_of(bias_draws, bias_token_ids, bias_values, i);
      if (grammar_mask) a.grammar_mask = data_of<int32_t>(*grammar_mask) + i * grammar_mask->size(1);
      const Pairs place = pairs_of(history_draws, {}, {}, i);
      if (place.begin < place.end) {
        a.has_penalties = true;
        a.prompt_size = prompt->size(1), a.output_size = output->size(1);
        a.prompt = data_of<int64_t>(*prompt) + place.begin * a.prompt_size;
        a.output = data_of<int64_t>(*output) + place.begin * a.output_size;
      }
      const Drawn drawn = draw(a, scratch);
      data_of<int64_t>(token_ids)[i] = drawn.token_id;
      data_of<bool>(has_no_token)[i] = drawn.has_no_token;
    }
  });
  return {token_ids, has_no_token};
}

std::tuple<Tensor, Tensor, Tensor> logprobs(const Tensor& logits, const Tensor& rows, const Tensor& targets, int64_t k) {
  check_logits(logits);
  const int64_t count = rows.numel(), vocab_size = logits.size(1);
  Tensor values = at::empty({count}, logits.options());
  Tensor top_token_ids = at::empty({count, k}, logits.options().dtype(at::kLong)), top_values = at::empty({count, k}, logits.options());
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    thread_local SamplerScratch scratch;
    for (int64_t i = begin; i < end; i++)
      data_of<float>(values)[i] = logprobs_of(data_of<float>(logits) + data_of<int64_t>(rows)[i] * vocab_size, vocab_size,
                                              data_of<int64_t>(targets)[i], k, data_of<int64_t>(top_token_ids) + i * k,
                                              data_of<float>(top_values) + i * k, scratch);
  });
  return {values, top_token_ids, top_values};
}

}  // namespace

TORCH_LIBRARY(mini_vllm_cpu, library) {
  library.def("pack_linear(Tensor weight, Tensor(a!) packed) -> ()", &pack_linear);
  library.def(
      "linear(Tensor x, Tensor packed, int outputs, Tensor? bias, Tensor? residual, bool float32_output) -> Tensor",
      &linear_op);
  library.def("pack_bytes(Tensor codes, Tensor(a!) packed) -> ()", &pack_bytes);
  library.def(
      "best_outputs(Tensor x, Tensor packed, int outputs, Tensor codes, Tensor scales, Tensor norms, Tensor zeros, "
      "float error, float lost, Tensor left, Tensor right) -> (Tensor, Tensor, bool)",
      &best_outputs_op);
  library.def("multiplies_bytes() -> bool", &multiplies_bytes);
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", &rms_norm);
  library.def("rotate(Tensor(a!) heads, Tensor cos, Tensor sin) -> ()", &rotate);
  library.def("silu_and_mul(Tensor gate_up) -> Tensor", &silu_and_mul);
  library.def("activate(Tensor x, int kind) -> Tensor", &activate);
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor block_tables, Tensor query_starts, Tensor context_lens, Tensor slot_mapping, int block_size, "
      "float scale, float softcap, int window) -> Tensor",
      &paged_attention);
  library.def(
      "decoder_layers(Tensor hidden, Tensor[] weights, Tensor?[] biases, float eps, int num_heads, int num_kv_heads, "
      "Tensor cos, Tensor sin, Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_tables, "
      "Tensor query_starts, Tensor context_lens, Tensor slot_mapping, int block_size, float scale, float softcap, "
      "int[] windows, bool only_last_tokens) -> Tensor",
      &decoder_layers);
  library.def("best_tokens(Tensor logits) -> (Tensor, Tensor)", &best_tokens);
  library.def(
      "draw_tokens(Tensor logits, Tensor numbers, Tensor integers, Tensor? grammar_mask, Tensor? allowed_draws, "
      "Tensor? allowed_token_ids, Tensor? forbidden_draws, Tensor? forbidden_token_ids, Tensor? bias_draws, "
      "Tensor? bias_token_ids, Tensor? bias_values, Tensor? history_draws, Tensor? prompt, Tensor? output) "
      "-> (Tensor, Tensor)",
      &draw_tokens);
  library.def("logprobs(Tensor logits, Tensor rows, Tensor targets, int k) -> (Tensor, Tensor, Tensor)", &logprobs);
}

}  // namespace mini_vllm
