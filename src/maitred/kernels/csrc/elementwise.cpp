#include "elementwise.h"

#include <algorithm>
#include <cmath>

#include "vec_plain.h"
#include "vector_math.h"

namespace maitred {
namespace {

constexpr int kLanes = 16;

// Of part(value) for each of a row's values.
template <typename Part>
float sum_of(const float* row, int64_t width, const Part& part) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += part(row[i + lane]);
  for (int lane = 0; i < width; ++i, ++lane) lanes[lane] += part(row[i]);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

float inverse_rms(const float* row, int64_t width, float eps) {
  const float squares = sum_of(row, width, [](float x) { return x * x; });
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

// Calls body(t) for each row that this thread takes.
template <typename Body>
void each_row(int num_rows, WorkCounter& counter, const Body& body) {
  const int num_shares = (num_rows + kRowsPerShare - 1) / kRowsPerShare;
  for (int share = counter.take(); share < num_shares; share = counter.take()) {
    const int end = std::min(num_rows, (share + 1) * kRowsPerShare);
    for (int t = share * kRowsPerShare; t < end; ++t) body(t);
  }
}

}  // namespace

void norm_add_rows(const float* part, int64_t part_stride, float* hidden, int64_t hidden_stride, const float* weight,
                   int64_t width, int num_rows, float eps, float scale, WorkCounter& counter) {
  each_row(num_rows, counter, [=](int t) {
    const float* x = part + t * part_stride;
    float* y = hidden + t * hidden_stride;
    const float inverse = inverse_rms(x, width, eps);
    for (int64_t i = 0; i < width; ++i) y[i] += scale * (x[i] * inverse * weight[i]);
  });
}

void norm_rows(const float* source, int64_t source_stride, float* target, int64_t target_stride, const float* weight,
               int64_t width, int num_rows, float eps, WorkCounter& counter) {
  each_row(num_rows, counter, [=](int t) {
    const float* x = source + t * source_stride;
    float* y = target + t * target_stride;
    if (weight == nullptr) {
      std::copy(x, x + width, y);
      return;
    }
    const float inverse = inverse_rms(x, width, eps);
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * inverse * weight[i];
  });
}

void gate_rows(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* target,
               int64_t target_stride, int64_t width, int num_rows, GateAct act, WorkCounter& counter) {
  each_row(num_rows, counter, [=](int t) {
    const float *x = gate + t * gate_stride, *y = up + t * up_stride;
    float* to = target + t * target_stride;
    for (int64_t i = 0; i < width; ++i) {
      const Vec1 value{x[i]};
      const Vec1 opened = act == GateAct::silu ? silu(value) : act == GateAct::gelu ? gelu(value) : gelu_tanh(value);
      to[i] = opened.x * y[i];
    }
  });
}

void scale_row(float* row, int64_t width, float scale) {
  for (int64_t i = 0; i < width; ++i) row[i] *= scale;
}

}  // namespace maitred
