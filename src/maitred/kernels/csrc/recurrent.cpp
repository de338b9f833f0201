#include "recurrent.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace maitred {

int64_t RecurrentOp::scratch_floats() const {
  const int64_t of_token = 2 * int64_t{key_dim} + 2 * group() * (padded_value() + 1);
  return (kRecurrentRun * of_token + group() * matrix_floats() + 15) / 16 * 16;
}

void StateSlots::check(const StepRows& rows) const {
  if (num_slots == 0) return;
  if (rows.states == nullptr) throw std::invalid_argument("a step without states, for a model with recurrent layers");
  for (int row = 0; row < rows.num_rows; ++row) {
    const StateRow& state = rows.states[row];
    const int num_tokens = rows.first_tokens[row + 1] - rows.first_tokens[row];
    const int num_drafts = num_tokens - state.num_certain;
    if (state.slot < 0 || state.slot >= num_slots || state.num_certain < 0 || num_drafts < 0 ||
        num_drafts > num_pending || state.num_replayed < 0 || state.num_replayed > num_pending)
      throw std::invalid_argument("row " + std::to_string(row) + " of a step has state slot " +
                                  std::to_string(state.slot) + " of " + std::to_string(num_slots) + ", " +
                                  std::to_string(num_drafts) + " drafts and " + std::to_string(state.num_replayed) +
                                  " of the step before; " + std::to_string(num_pending) + " are the most");
  }
  for (int i = 0; i < rows.num_saves; ++i) {
    const StateSave& save = rows.saves[i];
    if (save.row < 0 || save.row >= rows.num_rows || save.slot < 0 || save.slot >= num_slots || save.num_tokens < 0 ||
        save.num_tokens > rows.states[save.row].num_certain || (i > 0 && save.row < rows.saves[i - 1].row) ||
        (i > 0 && save.row == rows.saves[i - 1].row && save.num_tokens < rows.saves[i - 1].num_tokens))
      throw std::invalid_argument("a step saves the state of row " + std::to_string(save.row) + " after " +
                                  std::to_string(save.num_tokens) + " tokens to slot " + std::to_string(save.slot) +
                                  " of " + std::to_string(num_slots));
  }
}

void StateSlots::copy(const std::vector<std::pair<int, int>>& pairs, ThreadPool& threads) const {
  for (const auto& [source, target] : pairs)
    if (std::min(source, target) < 0 || std::max(source, target) >= num_slots)
      throw std::invalid_argument("a copy of state slot " + std::to_string(source) + " to " + std::to_string(target) +
                                  " of " + std::to_string(num_slots));
  threads.run([&](const Worker& worker) {  // each its part of every copy, so that copies of copies come right
    for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer) {
      const int64_t stride = layers[static_cast<size_t>(layer)].stride;
      const int64_t first = stride * worker.index / worker.count, end = stride * (worker.index + 1) / worker.count;
      for (const auto& [source, target] : pairs)
        std::memcpy(slot(layer, target) + first, slot(layer, source) + first,
                    static_cast<size_t>(end - first) * sizeof(float));
    }
  });
}

void add_recurrent(Program& program, const RecurrentOp& op, const StateSlots& slots, const Rows& source,
                   const Rows& target) {
  const RecurrentKernels& kernels = recurrent_kernels(program.isa());
  const int64_t stride = op.scratch_floats();
  float* const scratch =
      static_cast<float*>(program.add_own_bytes(program.num_threads() * stride * static_cast<int64_t>(sizeof(float))));
  program.add(
      "recurrence", 1, [=, &kernels, &slots](const StepRows& step, WorkCounter* counters, const Worker& worker) {
        for (int i = counters->take(); i < step.num_rows * op.key_heads; i = counters->take()) {
          const int row = i / op.key_heads, first = step.first_tokens[row];
          const StateRow& state = step.states[row];
          const auto before = [](const StateSave& save, int other) { return save.row < other; };
          const StateSave* const saves_end = step.saves + step.num_saves;
          kernels.run({&op, slots.slot(op.layer, state.slot), source.row(first), source.stride, target.row(first),
                       target.stride, step.first_tokens[row + 1] - first, state.num_certain, state.num_replayed,
                       step.positions[first] == 0, i % op.key_heads, scratch + worker.index * stride, &slots,
                       std::lower_bound(step.saves, saves_end, row, before),
                       std::lower_bound(step.saves, saves_end, row + 1, before)});
        }
        return true;
      });
}

void add_open(Program& program, const Rows& gate, const Rows& values) {
  const RecurrentKernels& kernels = recurrent_kernels(program.isa());
  program.add("output gate", 1, [=, &kernels](const StepRows& step, WorkCounter* counters, const Worker&) {
    for (int t = counters->take(); t < step.num_tokens; t = counters->take())
      kernels.open(gate.row(t), values.row(t), static_cast<int>(values.width));
    return true;
  });
}

const RecurrentKernels& recurrent_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512 || isa == Isa::amx) return recurrent_kernels_avx512();
  if (isa == Isa::avx2) return recurrent_kernels_avx2();
#elif defined(__aarch64__)
  if (isa == Isa::neon) return recurrent_kernels_neon();
#endif
  (void)isa;
  return recurrent_kernels_plain();
}

}  // namespace maitred
