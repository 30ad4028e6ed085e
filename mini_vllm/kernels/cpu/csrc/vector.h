// Sixteen float lanes and pairs of bfloat16: the two things that every kernel here is written with.
//
// The lanes are GCC's and Clang's vector extension: `a * b + c` on them is one AVX-512 instruction where the processor
// has it, two of AVX2, four of SSE or NEON. So a kernel is written once, and only what no compiler finds by itself (a
// fused multiply-add, the bfloat16 dot product) is spelled out for the processors that have it.
//
// What always holds: no function here depends on how many rows or lanes around it are in use. A result that is a chain
// of `dot` calls in a fixed order is therefore the same to the bit in every batch; every kernel rests on that.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace mini_vllm {

constexpr int LANES = 16;

using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));

constexpr float INFINITE = std::numeric_limits<float>::infinity();

inline Floats broadcast(float value) { return Floats{} + value; }

inline Floats load(const float* from) {
  Floats lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void store(float* to, Floats lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// Past the caches, for what is too much for them; `to` is a multiple of 64. Others see it after `order_stores`.
inline void store_past_caches(float* to, Floats lanes) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)lanes);
#else
  store(to, lanes);
#endif
}

inline void order_stores() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

// Where one of them is NaN, the result is b.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

inline Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// a * b + c: with one rounding on x86 processors that can, with two elsewhere; the same in every kernel of a build.
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 a2[2], b2[2], c2[2];
  std::memcpy(a2, &a, sizeof a);
  std::memcpy(b2, &b, sizeof b);
  std::memcpy(c2, &c, sizeof c);
  for (int half = 0; half < 2; half++) c2[half] = _mm256_fmadd_ps(a2[half], b2[half], c2[half]);
  std::memcpy(&c, c2, sizeof c);
  return c;
#else
  return a * b + c;
#endif
}

inline bool any(Ints mask) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < LANES; i++) found |= mask[i];
  return found != 0;
#endif
}

inline float horizontal_max(Floats lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)lanes);
#else
  float best = lanes[0];
  for (int i = 1; i < LANES; i++) best = lanes[i] > best ? lanes[i] : best;
  return best;
#endif
}

// The order of the additions is fixed (halves, quarters, ...), so the sum has the same bits everywhere.
inline float horizontal_sum(Floats lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)lanes);
#else
  float values[LANES];
  store(values, lanes);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) values[i] += values[i + width];
  return values[0];
#endif
}

// exp(x) to within 2 units in the last place. x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) is a polynomial (the
// coefficients of the Cephes library), and 2^n is put together from its exponent bits. Below -87.34 the result is exactly
// 0, and above 88.37 it stays what it is there.
inline Floats exp(Floats x) {
  const Floats lowest = broadcast(-87.3365f), highest = broadcast(88.3762f);
  const Ints underflows = x < lowest;
  x = max(lowest, min(highest, x));
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = fused_multiply_add(x, broadcast(1.44269504f), shifter) - shifter;
  Floats r = fused_multiply_add(n, broadcast(-0.693359375f), x);
  r = fused_multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fused_multiply_add(p, r, broadcast(coefficient));
  p = fused_multiply_add(p, r * r, r + 1.0f);
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Floats result = p * (Floats)exponent;
  return underflows ? Floats{} : result;
}

// 2^x for -126 <= x <= 126, to within 2 units in the last place. x = n + r with |r| <= 1/2; 2^r is a polynomial that is
// exactly 1 at r = 0 (the best of degree 5 in relative error), and n is added to its exponent bits.
inline Floats exp2_within_range(Floats x) {
  const Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the lowest bits
  const Floats r = x - (shifted - 12582912.0f);
  Floats p = broadcast(1.3264727e-3f);
  for (float coefficient : {9.671513e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.93147e-1f, 1.0f})
    p = fused_multiply_add(p, r, broadcast(coefficient));
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

// 2^x for x <= 0: the exponential of a softmax, where every x has the maximum taken off. Below -126 the result stays
// 2^-126, so what must be 0 is made so by the caller.
inline Floats exp2_of_negative(Floats x) { return exp2_within_range(max(broadcast(-126.0f), x)); }

// 1 / x for 1 <= x < 2^121, to within 1 unit in the last place: an estimate and one step of Newton's method where the
// processor has one, since a division holds it up.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats estimate = (Floats)_mm512_rcp14_ps((__m512)x);
  const Floats error = (Floats)_mm512_fnmadd_ps((__m512)x, (__m512)estimate, (__m512)broadcast(1.0f));
  return fused_multiply_add(error, estimate, estimate);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + exp(-x)). Below -83 it stays 2^-120, which times x is still nothing for any x of a model.
inline Floats sigmoid(Floats x) {
  const Floats power = max(broadcast(-126.0f), x * -1.44269504f);  // the usual NaN stays what it is
  return reciprocal(1.0f + exp2_within_range(min(broadcast(120.0f), power)));
}

// tanh(x) = 1 - 2 / (exp(2x) + 1); for large x the quotient is too small to count.
inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// ---- bfloat16: the upper half of a float -------------------------------------------------------------------------

using bfloat16 = uint16_t;

inline float widen(bfloat16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// To nearest, ties to even; NaN stays NaN.
inline Words rounded_bits(Floats lanes) {
  const Words bits = (Words)lanes;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return lanes != lanes ? (Words{} + 0x7fc0) : rounded;
}

using Halves = uint16_t __attribute__((vector_size(32)));

inline Halves narrow(Floats lanes) {
#if defined(__AVX512BF16__)
  // Flushes denormals to zero, which the generic way does not; so it is used by all kernels or by none of them.
  return (Halves)_mm512_cvtneps_pbh((__m512)lanes);
#else
  return __builtin_convertvector(rounded_bits(lanes), Halves);
#endif
}

inline Floats load(const bfloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(bfloat16* to, Floats lanes) {
  const Halves halves = narrow(lanes);
  std::memcpy(to, &halves, sizeof halves);
}

// What is left of a number once it was stored as `Element`.
template <class Element>
inline Floats rounded_to(Floats lanes) {
  Element stored[LANES];
  store(stored, lanes);
  return load(stored);
}

template <>
inline Floats rounded_to<bfloat16>(Floats lanes) {
  return (Floats)(__builtin_convertvector(narrow(lanes), Words) << 16);
}

// The first `count` lanes only; the rest read as 0 and is not written.
template <class Element>
inline Floats load_some(const Element* from, int count) {
  if (count == LANES) return load(from);
  Element padded[LANES] = {};
  std::memcpy(padded, from, sizeof(Element) * count);
  return load(padded);
}

template <class Element>
inline void store_some(Element* to, Floats lanes, int count) {
  if (count == LANES) return store(to, lanes);
  Element padded[LANES];
  store(padded, lanes);
  std::memcpy(to, padded, sizeof(Element) * count);
}

// ---- the inner product step --------------------------------------------------------------------------------------
//
// A matrix that is multiplied by is kept so that one step of the inner dimension lies side by side for 16 outputs. For
// float a step is one element; for bfloat16 it is a pair, because that is what the processor's dot product takes:
//
//   float      lane j holds w[k][j]
//   bfloat16   lane j holds w[2k][j] in its lower and w[2k + 1][j] in its upper half

template <class Element>
struct Step;

template <>
struct Step<float> {
  static constexpr int WIDTH = 1;  // elements of the inner dimension in one step
  using Packed = Floats;
  static Packed load_packed(const float* from) { return load(from); }
  static Packed spread(const float* from) { return broadcast(*from); }
  static Packed first_only(Packed lanes) { return lanes; }
  static Floats dot(Packed a, Packed b, Floats sum) { return fused_multiply_add(a, b, sum); }
};

template <>
struct Step<bfloat16> {
  static constexpr int WIDTH = 2;
  using Packed = Words;
  static Packed load_packed(const bfloat16* from) {
    Packed lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
  }
  // One pair to all lanes.
  static Packed spread(const bfloat16* from) {
    uint32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return Packed{} + pair;
  }
  // The first of each pair, and zero beside it.
  static Packed first_only(Packed lanes) { return lanes & 0xffffu; }
  static Floats dot(Packed a, Packed b, Floats sum) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fused_multiply_add((Floats)(a & 0xffff0000u), (Floats)(b & 0xffff0000u), sum);
    return fused_multiply_add((Floats)(a << 16), (Floats)(b << 16), sum);
#endif
  }
};

}  // namespace mini_vllm
