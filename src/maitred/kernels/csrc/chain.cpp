#include "chain.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace maitred {
namespace {

// Rows that go on, and the step that they make: the last sampled token of each.
struct NextStep {
  std::vector<int> rows;  // of the chain
  std::vector<int32_t> token_ids, positions, block_tables, first_blocks, counting;

  StepRows step() const {
    StepRows step{};
    step.num_tokens = step.num_rows = step.num_logits = static_cast<int>(rows.size());
    step.token_ids = token_ids.data();
    step.positions = positions.data();
    step.first_tokens = step.logits_tokens = counting.data();
    step.block_tables = block_tables.data();
    step.first_blocks = first_blocks.data();
    return step;
  }

  void clear() {
    rows.clear();
    token_ids.clear();
    positions.clear();
    block_tables.clear();
    first_blocks.assign(1, 0);
    counting.assign(1, 0);
  }

  void add(const StepRows& first, int row, int32_t token_id, int position) {
    rows.push_back(row);
    token_ids.push_back(token_id);
    positions.push_back(position);
    block_tables.insert(block_tables.end(), first.block_tables + first.first_blocks[row],
                        first.block_tables + first.first_blocks[row + 1]);
    first_blocks.push_back(static_cast<int32_t>(block_tables.size()));
    counting.push_back(static_cast<int32_t>(rows.size()));
  }
};

SampleRow sample_row(const ChainRows& rows, int row, int index, float* logits) {
  const double* settings = rows.settings + 4 * row;
  const uint64_t* sequence = rows.sequences + 3 * row;
  SampleRow made{};
  made.logits = logits;
  made.temperature = settings[0];
  made.top_k = static_cast<int64_t>(settings[1]);
  made.top_p = settings[2];
  made.min_p = settings[3];
  if (made.temperature > 0.0)
    made.share = uniform(sequence[0], sequence[1], sequence[2] + static_cast<uint64_t>(index));
  made.num_top = -1;
  return made;
}

// Writes down what was sampled; whether the row goes on.
bool takes(const ChainRows& rows, int row, int index, const SampleRow& sample) {
  const bool failed = sample.fault != SampleFault::none;
  rows.faults[row] = static_cast<int32_t>(sample.fault);
  rows.num_sampled[row] = index + (failed ? 0 : 1);
  if (failed) return false;
  rows.tokens[row * rows.width + index] = rows.vocabulary == nullptr ? sample.token : rows.vocabulary[sample.token];
  return index + 1 < rows.num_tokens[row];
}

void feed(const Feedback& feedback, size_t from, size_t to) {
  const float* state = feedback.from.row(static_cast<int64_t>(from));
  std::copy(state, state + feedback.from.width, feedback.to.row(static_cast<int64_t>(to)));
}

void check(const ChainRows& rows, int num_rows) {
  for (int row = 0; row < num_rows; ++row)
    if (rows.num_tokens[row] < 1 || rows.num_tokens[row] > rows.width)
      throw std::invalid_argument("row " + std::to_string(row) + " of a chain wants " +
                                  std::to_string(rows.num_tokens[row]) + " tokens of 1 to " +
                                  std::to_string(rows.width));
}

}  // namespace

void run_chain(Program& program, Sampler& sampler, const Rows& logits, StepRows first, const ChainRows& rows,
               const Feedback* feedback) {
  check(rows, first.num_rows);
  std::vector<int32_t> last_tokens;
  std::vector<int> going;  // rows of the chain that are in the step
  for (int row = 0; row < first.num_rows; ++row) {
    going.push_back(row);
    last_tokens.push_back(first.first_tokens[row + 1] - 1);
  }
  first.num_logits = first.num_rows;
  first.logits_tokens = last_tokens.data();
  std::vector<SampleRow> samples;
  NextStep next;
  StepRows step = first;
  for (int index = 0; !going.empty(); ++index) {
    program.run(step, feedback != nullptr && index > 0);
    samples.clear();
    for (int row : going) {
      samples.push_back(sample_row(rows, row, index, logits.row(static_cast<int64_t>(samples.size()))));
    }
    sampler.sample(samples.data(), static_cast<int>(samples.size()), logits.width);
    next.clear();
    for (size_t i = 0; i < going.size(); ++i) {
      const int row = going[i];
      if (!takes(rows, row, index, samples[i])) continue;
      if (feedback != nullptr) feed(*feedback, i, next.rows.size());
      next.add(first, row, rows.tokens[row * rows.width + index], first.positions[last_tokens[row]] + index + 1);
    }
    going = next.rows;
    step = next.step();
  }
}

}  // namespace maitred
