// Sixteen lanes, of floats, of pairs of bfloat16 or of four bytes: what every kernel here is written with.
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
#include <iterator>
#include <limits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace mini_vllm {

constexpr int LANES = 16;

using bfloat16 = uint16_t;  // the upper half of a float

using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));

constexpr float INFINITE = std::numeric_limits<float>::infinity();

inline Floats broadcast(float value) { return Floats{} + value; }

// What lies at `from`, which need not be aligned.
template <class Value>
inline Value read_as(const void* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Floats load(const float* from) { return read_as<Floats>(from); }

inline void store(float* to, Floats lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline Ints load(const int32_t* from) { return read_as<Ints>(from); }

inline void store(int32_t* to, Ints lanes) { std::memcpy(to, &lanes, sizeof lanes); }

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

// To the nearest integer, ties to even, for |x| < 2^22.
inline Floats nearest_integer(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_roundscale_ps((__m512)x, 0);
#else
  return x + 12582912.0f - 12582912.0f;  // 1.5 * 2^23: the sum has no room for a fraction
#endif
}

// x * 2^n for an integer n from -126 to 127, and x between 1/2 and 2.
inline Floats times_power_of_two(Floats x, Floats n) {
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  const Floats product = (Floats)((Ints)x + ((Ints)(n + 12582912.0f) << 23));  // n is in the sum's last bits, x's exponent
  return x == x ? product : x;                                                 // begins at bit 23; NaN stays NaN
#endif
}

// exp(x) to within 2 units in the last place. x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) is a polynomial (the
// coefficients of the Cephes library). Below -87.34 the result is exactly 0, and above 88.37 it stays what it is there.
inline Floats exp(Floats x) {
  const Floats lowest = broadcast(-87.3365f), highest = broadcast(88.3762f);
  const Ints underflows = x < lowest;
  x = max(lowest, min(highest, x));
  const Floats n = nearest_integer(x * 1.44269504f);
  Floats r = fused_multiply_add(n, broadcast(-0.693359375f), x);
  r = fused_multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fused_multiply_add(p, r, broadcast(coefficient));
  p = fused_multiply_add(p, r * r, r + 1.0f);
  const Floats result = times_power_of_two(p, n);
  return underflows ? Floats{} : result;
}

// How exact a function must be whose result is stored as `Element`.
template <class Element>
struct Precision;
template <>
struct Precision<float> {
  // Of 2^r for |r| <= 1/2: 1 and what follows, the best polynomials in relative error that are exactly 1 at 0.
  static constexpr float POWERS[] = {1.0f, 6.93147e-1f, 2.4022242e-1f, 5.5507336e-2f, 9.671513e-3f, 1.3264727e-3f};  // 9e-8
};
template <>
struct Precision<bfloat16> {  // whose own rounding moves a number by up to 2e-3 to 4e-3
  static constexpr float POWERS[] = {1.0f, 6.9328293e-1f, 2.4221096e-1f, 5.500892e-2f};  // 1.1e-4
};

// 2^x for x <= 127, as exactly as Element needs. x = n + r with |r| <= 1/2, and 2^r is a polynomial. Below -126 the result
// is 2^-126 or less; where it must be 0, the caller makes it so.
template <class Element>
inline Floats exp2(Floats x) {
#if !defined(__AVX512F__)
  x = max(broadcast(-126.0f), x);  // NaN stays NaN
#endif
  constexpr auto& powers = Precision<Element>::POWERS;
  constexpr int degree = int(std::size(powers)) - 1;
  const Floats n = nearest_integer(x), r = x - n;
  Floats p = broadcast(powers[degree]);
#pragma GCC unroll 5
  for (int i = degree - 1; i >= 0; i--) p = fused_multiply_add(p, r, broadcast(powers[i]));
  return times_power_of_two(p, n);
}

// 1 / x for 1 <= x < 2^121, to within 1 unit in the last place of a float: an estimate and one step of Newton's method
// where the processor has one, since a division holds it up. For bfloat16 the estimate will do, it is within 2^-14.
template <class Element>
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats estimate = (Floats)_mm512_rcp14_ps((__m512)x);
  if constexpr (sizeof(Element) < sizeof(float)) return estimate;
  const Floats error = (Floats)_mm512_fnmadd_ps((__m512)x, (__m512)estimate, (__m512)broadcast(1.0f));
  return fused_multiply_add(error, estimate, estimate);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + exp(-x)). Below -83 it stays 2^-120, which times x is still nothing for any x of a model.
template <class Element>
inline Floats sigmoid(Floats x) {
  return reciprocal<Element>(1.0f + exp2<Element>(min(broadcast(120.0f), x * -1.44269504f)));  // min: NaN stays NaN
}

// tanh(x) = 1 - 2 / (exp(2x) + 1); for large x the quotient is too small to count.
inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// ---- bfloat16 and floats ------------------------------------------------------------------------------------------

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

// Copies `count` elements, WIDTH at the most. As many are the rule, and then it is one load and one store instead of a call.
template <int64_t WIDTH, class Element>
inline void copy_up_to(Element* to, const Element* from, int64_t count) {
  if (count >= WIDTH) std::memcpy(to, from, sizeof(Element) * WIDTH);
  else std::memcpy(to, from, sizeof(Element) * count);
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
// float a step is one element; for bfloat16 it is a pair, and for bytes it is four, because that is what the processor's
// dot products take:
//
//   float      lane j holds w[k][j]
//   bfloat16   lane j holds w[2k][j] in its lower and w[2k + 1][j] in its upper half
//   int8       lane j holds w[4k][j], ..., w[4k + 3][j]; they are multiplied by bytes without a sign (Step<int8_t>)

template <class Element>
struct Step;

template <>
struct Step<float> {
  static constexpr int WIDTH = 1;  // elements of the inner dimension in one step
  using Packed = Floats;
  using Sums = Floats;
  using Sum = float;
  static Packed load_packed(const float* from) { return load(from); }
  static Packed spread(const float* from) { return broadcast(*from); }
  static Packed first_only(Packed lanes) { return lanes; }
  static Floats dot(Packed a, Packed b, Floats sum) { return fused_multiply_add(a, b, sum); }
};

template <>
struct Step<bfloat16> {
  static constexpr int WIDTH = 2;
  using Packed = Words;
  using Sums = Floats;
  using Sum = float;
  static Packed load_packed(const bfloat16* from) { return read_as<Packed>(from); }
  // One pair to all lanes.
  static Packed spread(const bfloat16* from) { return Packed{} + read_as<uint32_t>(from); }
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

// Whole numbers, exact: a row's elements count from 0 to 255 (their bits are kept in an int8_t), the matrix's from -128 to
// 127. So many of their products fit in 31 bits:
constexpr int64_t MOST_BYTES = 1 << 16;

#if defined(__AVX512VNNI__)
constexpr bool MULTIPLIES_BYTES = true;  // the processor does so itself, twice as many at once as bfloat16
#else
constexpr bool MULTIPLIES_BYTES = false;
#endif

template <>
struct Step<int8_t> {
  static constexpr int WIDTH = 4;
  using Packed = Ints;
  using Sums = Ints;
  using Sum = int32_t;
  static Packed load_packed(const int8_t* from) { return read_as<Packed>(from); }
  static Packed spread(const int8_t* from) { return Packed{} + read_as<int32_t>(from); }  // four
  static Ints dot(Packed a, Packed b, Ints sum) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 0xff) * (b << (24 - shift) >> 24);
    return sum;
#endif
  }
};

}  // namespace mini_vllm
