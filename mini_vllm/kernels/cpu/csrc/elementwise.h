// What happens to each token by itself between two products: norm, rotary embedding, gate. A function is one row.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace mini_vllm {

// y = x / sqrt(mean(x^2) + eps) * weight. As in the reference, the quotient is rounded before the weight is multiplied.
// `place(i)` is where elements i, i + 1, ... of y go, sixteen at a time.
template <class Element, class Place>
void rms_norm_row(const Element* x, const Element* weight, float eps, int64_t width, const Place& place) {
  Floats squares{};
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats lanes = load_some(x + i, int(std::min<int64_t>(LANES, width - i)));
    squares = fused_multiply_add(lanes, lanes, squares);
  }
  const float factor = 1.0f / std::sqrt(horizontal_sum(squares) / float(width) + eps);
  for (int64_t i = 0; i < width; i += LANES) {
    const int count = int(std::min<int64_t>(LANES, width - i));
    const Floats rounded = rounded_to<Element>(load_some(x + i, count) * factor);
    store_some(place(i), rounded * load_some(weight + i, count), count);
  }
}

// Turns the pairs (x[i], x[i + half]) of one head by their angles, in place:  (a, b) -> (a cos - b sin, b cos + a sin).
template <class Element>
void rotate_head(Element* x, const Element* cos, const Element* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += LANES) {
    const int count = int(std::min<int64_t>(LANES, half - i));
    const Floats a = load_some(x + i, count), b = load_some(x + half + i, count);
    const Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
    store_some(x + i, a * c - b * s, count);
    store_some(x + half + i, b * c + a * s, count);
  }
}

// silu(gate) * up, with silu(g) = g sigmoid(g).
template <class Element>
inline Floats gated(Floats gate, Floats up) {
  return gate * sigmoid<Element>(gate) * up;
}

// [gate | up] -> silu(gate) * up.
template <class Element>
void silu_and_mul_row(const Element* gate_up, int64_t width, Element* y) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int count = int(std::min<int64_t>(LANES, width - i));
    const Floats gate = load_some(gate_up + i, count), up = load_some(gate_up + width + i, count);
    store_some(y + i, gated<Element>(gate, up), count);
  }
}

// Activations that PyTorch computes otherwise at the end of a tensor than in its middle. All are made of the sigmoid:
// GELU's approximation 0.5 x (1 + tanh(z)), z = sqrt(2 / pi) (x + 0.044715 x^3), is x sigmoid(2 z).
enum class Activation : int64_t { SILU, GELU_TANH, SIGMOID };

template <class Element>
inline Floats activated(Activation kind, Floats x) {
  if (kind == Activation::SIGMOID) return sigmoid<Element>(x);
  if (kind == Activation::SILU) return x * sigmoid<Element>(x);
  return x * sigmoid<Element>(1.59576912f * (x + 0.044715f * x * x * x));
}

template <class Element>
void activate_row(Activation kind, const Element* x, int64_t width, Element* y) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int count = int(std::min<int64_t>(LANES, width - i));
    store_some(y + i, activated<Element>(kind, load_some(x + i, count)), count);
  }
}

}  // namespace mini_vllm
