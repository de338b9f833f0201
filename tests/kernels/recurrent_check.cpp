// Recurrent layers of this build's instruction sets against plain C++: tokens, drafts, a snapshot, and drafts consumed.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "isa.h"
#include "recurrent.h"

using namespace maitred;

namespace {

constexpr int kTokens = 21, kCertain = 19, kSaved = 5;  // the last two are drafts

std::vector<float> random_values(std::mt19937& random, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  return values;
}

// Outputs of two steps, of which the second consumes a draft, and all that the slots hold then.
std::vector<float> run(const RecurrentKernels& kernels, int key_dim, int value_dim) {
  std::mt19937 random(7);
  RecurrentOp op{1, 2, key_dim, value_dim, 4, false, nullptr, nullptr, nullptr, nullptr, 1e-6f, 0};
  const std::vector<float> conv = random_values(random, 4 * op.channels()), norm = random_values(random, value_dim),
                           step_bias = random_values(random, 2), rate{-0.5f, -2.0f};
  op.conv = conv.data(), op.norm = norm.data(), op.step_bias = step_bias.data(), op.rate = rate.data();
  const int64_t slot = op.state_floats(2), width = op.input_width(), out_width = 2 * int64_t{value_dim};
  std::vector<float> states(static_cast<size_t>(2 * slot)), scratch(static_cast<size_t>(op.scratch_floats()));
  StateSlots slots;
  slots.layers = {{states.data(), slot}};
  slots.num_slots = 2, slots.num_pending = 2;
  std::vector<float> out(static_cast<size_t>(2 * kTokens * out_width));
  const StateSave save{0, kSaved, 1};
  for (int step = 0; step < 2; ++step) {
    const std::vector<float> inputs = random_values(random, kTokens * width);
    const StateSave* const saves = step == 0 ? &save : nullptr;
    kernels.run({&op, states.data(), inputs.data(), width, out.data() + step * kTokens * out_width, out_width, kTokens,
                 kCertain, step, step == 0, 0, scratch.data(), &slots, saves, saves + (step == 0)});
  }
  out.insert(out.end(), states.begin(), states.end());
  return out;
}

}  // namespace

int main() {
  int failures = 0;
  for (Isa isa : available_isas()) {
    for (const auto& [key_dim, value_dim] : {std::pair{7, 66}, {12, 20}, {128, 128}}) {
      const std::vector<float> want = run(recurrent_kernels_plain(), key_dim, value_dim);
      const std::vector<float> got = run(recurrent_kernels(isa), key_dim, value_dim);
      for (size_t i = 0; i < want.size(); ++i) {
        if (std::fabs(got[i] - want[i]) <= 1e-4f * (1.0f + std::fabs(want[i]))) continue;
        std::printf("recurrent: %s, keys of %d and values of %d: %g at %zu, plain has %g\n", isa_name(isa), key_dim,
                    value_dim, static_cast<double>(got[i]), i, static_cast<double>(want[i]));
        ++failures;
        break;
      }
    }
    std::printf("recurrent: %s checked\n", isa_name(isa));
  }
  return failures > 0;
}
