// Row by row work between the linears that is no part of them. One compiled form for all instruction sets: sums go over
// sixteen fixed lanes, so the compiler may use any vectors and the result is always the same.
#pragma once

#include <cstdint>

#include "linear.h"
#include "thread_pool.h"

namespace maitred {

constexpr int kRowsPerShare = 4;

// hidden[t] += scale * (part[t] / rms(part[t]) * weight), over num_rows rows of width values,
// strides in values. weight has the norm's offset added.
void norm_add_rows(const float* part, int64_t part_stride, float* hidden, int64_t hidden_stride, const float* weight,
                   int64_t width, int num_rows, float eps, float scale, WorkCounter& counter);

// target[t] = source[t] / rms(source[t]) * weight, likewise; weight null: target[t] = source[t]. Both may be one.
void norm_rows(const float* source, int64_t source_stride, float* target, int64_t target_stride, const float* weight,
               int64_t width, int num_rows, float eps, WorkCounter& counter);

// target[t] = act(gate[t]) * up[t]
void gate_rows(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* target,
               int64_t target_stride, int64_t width, int num_rows, GateAct act, WorkCounter& counter);

// row[i] *= scale
void scale_row(float* row, int64_t width, float scale);

}  // namespace maitred
